"""Repair and backfill of files: the files that contain rows of some offsets are replaced.

Rows do not contain the offsets of their records. So a file is replaced as a whole: all offsets of
its ranges are processed again, with those of every file that shares some of them. The end state
does not depend on what the files contained, so repeating a rewrite changes nothing: a crash or a
lost answer is settled by doing it again.

New files are written, and then replace the old names as a compaction's do, by the same
transactional id (:mod:`oncely.kinds.files.manifest`). After its ``init`` is compared, in this
order, on what the rewrite was decided:

1. The epochs of the positions: a reset makes files void, and reads their records again. A reset
   that comes later makes the new files void, too: none of them reaches over the start of a file
   that it replaces, and they have the epoch of the decision.
2. The dead letters that wait: their records have no rows. A replay that commits after this adds a
   file of its own, which is not replaced.
3. The files of the offsets: a compaction, another rewrite or a replay may have replaced or added
   some.
4. The dead letters again: a replay between 2 and 3 has a file in 3, and its record waits in 2.

In a replay of dead letters valid records become files, published in the replay's transaction. It
may extend schemas, and so may a concurrent run of the pipeline. Both write by the
publisher's transactional id, so only the instance that has initialised it last can commit: the
schemas that it has read are the newest until that commit. The other instance is fenced, and begins
its transaction again.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial

import numpy as np

from oncely.core.batch import Chunk, Reject, Rejection, Staged, StagedRowsGone
from oncely.core.change import FileGroup, Produce, Reprocessed, RewriteKind, Rewritten, replayed
from oncely.core.claim import NO_RECORDS, Counts, Entry, Fence, PositionMoved
from oncely.core.ranges import OffsetRange, TopicPartition, connected, normalize
from oncely.kafka.transaction import Message
from oncely.kinds.data_file import Receipt, read_receipt
from oncely.kinds.files.manifest import Contents, Replacing
from oncely.kinds.files.records import ManifestFile, is_mixed
from oncely.kinds.files.sink import FilesSink, ManifestLoad
from oncely.kinds.topic_publishing import (
    DeadLetterReader,
    DeadLetterTopic,
    ReplayOutput,
    TopicReplay,
    dead_letters,
    replaying,
)
from oncely.stores.topic.cluster import Cluster
from oncely.stores.topic.compare_and_set import compare_and_set
from oncely.stores.topic.records import RewriteRecord, View, encode

Spans = Mapping[TopicPartition, Sequence[OffsetRange]]
Waiting = Mapping[TopicPartition, frozenset[int]]


@dataclass
class FilesRewrites:
    """Rewrites of the table of a pipeline, see :class:`oncely.kinds.base.RewritesTogether`: a file
    is replaced as a whole.

    Attributes:
        sink: prepared.
    """

    sink: FilesSink
    _letters: Cluster = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._letters = Cluster(replaying(self.sink.pipeline_topics))

    def close(self) -> None:
        """Close the clients."""
        self._letters.close()
        self.sink.close()

    def entries(self) -> dict[TopicPartition, Entry]:
        """The present positions."""
        return self.sink.cluster.committed()

    def groups(self, wanted: Spans) -> list[FileGroup]:
        """The files that contain rows of these offsets, with all their offsets, in groups that are
        independent of each other. Offsets that were never committed are left out."""
        view, contents = self.sink.cluster.look(), self.sink.manifest.look()
        files = self._current(contents, view)
        known = _committed(files, view)
        inside = {
            tp: normalize(
                OffsetRange(max(a.start, b.start), min(a.end, b.end))
                for a in own
                for b in known.get(tp, ())
                if a.overlaps(b)
            )
            for tp, own in wanted.items()
        }
        return list(_groups(inside, files))

    def rewrite_together(
        self,
        kind: RewriteKind,
        group: FileGroup,
        entries: Mapping[TopicPartition, Entry],
        produce: Produce,
    ) -> Rewritten:
        """Write new files, and name them in place of the old ones, in one transaction."""
        with self._replacing.compared():
            pass  # a transaction that a killed rewrite has left open ends: it hides what is read
        since = self.sink.store.now()
        self.sink.begin_batch()
        output = _Output(self, group, entries, self._waiting(group.spans))
        output.stage(produce)
        self._publish_schemas(output)
        return self._publish(kind, output, since)

    def present(self, names: Sequence[str]) -> int:
        """The number of rows of files that the manifest names."""
        files = self.sink.manifest.look().files
        return sum(files[name].rows for name in names if name in files)

    def foreign(self, names: Sequence[str]) -> Mapping[str, str]:
        """The pipelines of those files that the manifest names as another one's."""
        files = self.sink.manifest.look().files
        there = (files[name] for name in names if name in files)
        return {one.path: one.pipeline for one in there if not self._is_ours(one)}

    def remove_unexpected(self, names: Sequence[str]) -> Rewritten:
        """Take names out of the manifest, if their files are still beyond the position."""
        replacing = self._replacing
        with replacing.compared() as (transaction, contents):
            view = self.sink.cluster.settled()
            gone = [contents.files[n] for n in names if n in contents.files]
            gone = [one for one in gone if self._is_ours(one) and _is_beyond(one, view)]
            if gone:
                messages = replacing.together((), [one.path for one in gone])
                topic = self.sink.topics.manifest
                replacing.commit(transaction, {topic: messages}, self.sink.store.now())
        return Rewritten(sum(one.rows for one in gone), 0, NO_RECORDS)

    # -- what is there -----------------------------------------------------------------------

    def _current(self, contents: Contents, view: View) -> list[ManifestFile]:
        """The pipeline's files that a reset has not made void, and that are not beyond the
        position."""
        return [
            one
            for one in contents.files.values()
            if self._is_ours(one) and not _is_void(one, view) and not _is_beyond(one, view)
        ]

    def _is_ours(self, file: ManifestFile) -> bool:
        return file.pipeline == self.sink.pipeline_topics.pipeline

    def _waiting(self, spans: Spans) -> Waiting:
        """The records of these offsets whose dead letters wait for a replay."""
        letters = DeadLetterTopic(self._letters, self.sink.rejects_topic)
        position = letters.position(certain=True)
        found: dict[TopicPartition, set[int]] = {tp: set() for tp in spans}
        if position is not None:
            with closing(
                DeadLetterReader(self._letters.pipeline_topics, position, letters.ends()).letters()
            ) as all_:
                for letter in all_:
                    tp, offset = letter.origin
                    if any(offset in one for one in spans.get(tp, ())):
                        found[tp].add(offset)
        return {tp: frozenset(own) for tp, own in found.items()}

    # -- publication -------------------------------------------------------------------------

    @property
    def _replacing(self) -> Replacing:
        sink = self.sink
        largest = self.sink.largest[sink.topics.manifest]
        return Replacing(sink.cluster, sink.manifest, sink.store, sink.max_staging_age, largest)

    def _publish_schemas(self, output: _Output) -> None:
        """Publish extended schemas first, by the publisher's id: readers of earlier files resolve
        them, too."""
        load, sink = output.load, self.sink
        if not load.grown(output.receipts):
            return
        sizes = [self.sink.largest[sink.topics.schema]]
        with compare_and_set(
            sink.cluster, sink.pipeline_topics.keys.publisher, load.ready, sizes
        ) as (
            transaction,
            _,
        ):
            if not output.agree():
                raise StagedRowsGone("schemas were extended meanwhile; the rewrite is repeated")
            transaction.begin()
            transaction.send(sink.topics.schema, load.grown(output.receipts))
            transaction.commit()
        sink.published(output.receipts)

    def _publish(self, kind: RewriteKind, output: _Output, since: datetime) -> Rewritten:
        sink, group, replacing = self.sink, output.group, self._replacing
        rejects = self.sink.largest[sink.rejects_topic]
        with replacing.compared([rejects]) as (transaction, contents):
            if stale := self._stale(output):  # nothing of it can be published any more
                sink.store.delete(one.path for one in output.made)
                raise PositionMoved(stale)
            gone = [contents.files[name] for name in group.names]
            messages: dict[str, Sequence[Message]] = {
                sink.topics.manifest: replacing.together(output.made, group.names),
                sink.rejects_topic: list(dead_letters(output.rejects, rejects, output.fence)),
                sink.pipeline_topics.ledger_topic: list(self._amendments(kind, output)),
            }
            replacing.commit(
                transaction, {topic: own for topic, own in messages.items() if own}, since
            )
        return Rewritten(sum(one.rows for one in gone), 0, output.counts)

    def _stale(self, output: _Output) -> str:
        """What has changed since the rewrite was decided; empty if nothing has. See the module."""
        spans, now = output.group.spans, self.entries()
        for tp in spans:
            if tp not in now or now[tp].epoch != output.entries[tp].epoch:
                return f"{tp} was taken over"
        before = self._waiting(spans)
        contents, view = self.sink.manifest.settled(), self.sink.cluster.settled()
        there = {one.path for one in self._current(contents, view) if _shares(one, spans)}
        if there != set(output.group.names):
            return "files of these offsets were replaced or added"
        if not (before == self._waiting(spans) == output.waiting):
            return "dead letters were replayed"
        return ""

    def _amendments(self, kind: RewriteKind, output: _Output) -> Iterator[Message]:
        """The amendments of the history; a repair changes nothing in it."""
        known = self.sink.cluster.settled().rewritten
        for tp, own in output.group.spans.items():
            epoch = output.entries[tp].epoch
            backfilled = known[tp].backfilled if tp in known else []
            if kind == "backfill":
                backfilled = [*backfilled, *((one.start, one.end, epoch) for one in own)]
            record = RewriteRecord(kind, own[0].start, own[-1].end, epoch, backfilled)
            yield Message(encode(record), self.sink.pipeline_topics.keys.rewritten_key(tp))


@dataclass
class _Output:
    """New files of a rewrite.

    Attributes:
        rewrites: the destination.
        group: what is rewritten.
        entries: the entries of the decision.
        waiting: the records that are left to their dead letters.
    """

    rewrites: FilesRewrites
    group: FileGroup
    entries: Mapping[TopicPartition, Entry]
    waiting: Waiting
    counts: Counts = NO_RECORDS
    rejects: list[Reject] = field(default_factory=list)
    staged: list[Staged] = field(default_factory=list)

    @property
    def fence(self) -> Fence:
        """The newest run that holds one of the positions."""
        epoch = max(self.entries[tp].epoch for tp in self.group.spans)
        return Fence(self.rewrites.sink.pipeline_topics.pipeline, epoch)

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of the staged files."""
        return [read_receipt(one.name) for one in self.staged if one.name]

    @cached_property
    def load(self) -> ManifestLoad:
        """The messages of the new files."""
        return self.rewrites.sink.load(self.fence)

    @property
    def made(self) -> list[ManifestFile]:
        """The entries of the new files."""
        return self.load.names(self.receipts)

    def agree(self) -> bool:
        """Merge the schemas of all files."""
        return all(self.rewrites.sink.agree(one) for one in self.staged if one.name)

    def stage(self, produce: Produce) -> None:
        """Write files that nobody names yet.

        Raises:
            StagedRowsGone: the schemas of files contradict each other; they are merged now.
        """
        for tp, piece in self._pieces():
            self._stage(produce(tp, piece, self.waiting[tp]))
        if not self.agree():
            raise StagedRowsGone("files have inferred other columns; the rewrite is repeated")

    def _stage(self, chunks: Iterable[Chunk]) -> None:
        task = self.rewrites.sink.staging(self.fence, 0, uuid.uuid4().int >> 96)
        try:
            for chunk in chunks:
                self._count(chunk, [*chunk.rejections, *task.add(chunk)])
            self.staged.append(task.finish())
        except BaseException:
            task.abandon()
            raise

    def _count(self, chunk: Chunk, refused: Sequence[Rejection]) -> None:
        self.rejects += chunk.letters(refused)
        bad = np.isin(chunk.row_record, [one.record for one in refused])
        for one in chunk.counts(chunk.row_record[~bad], refused).values():
            self.counts += one

    def _pieces(self) -> Iterator[tuple[TopicPartition, OffsetRange]]:
        """The offsets, cut where a file that is replaced starts; see the module."""
        files = self.rewrites.sink.manifest.look().files
        starts: dict[TopicPartition, set[int]] = defaultdict(set)
        for name in self.group.names:
            for tp, own in _ranges(files[name]) if name in files else ():
                starts[tp].add(own.start)
        for tp, spans in sorted(self.group.spans.items()):
            for one in spans:
                inside = sorted(at for at in starts[tp] if one.start < at < one.end)
                for start, end in zip([one.start, *inside], [*inside, one.end], strict=True):
                    yield tp, OffsetRange(start, end)


def _ranges(file: ManifestFile) -> Iterator[tuple[TopicPartition, OffsetRange]]:
    for one in file.ranges:
        yield TopicPartition(one.topic, one.partition), OffsetRange(one.start, one.end)


def _is_beyond(file: ManifestFile, view: View) -> bool:
    at = view.positions
    return any(tp not in at or own.start >= at[tp].position for tp, own in _ranges(file))


def _is_void(file: ManifestFile, view: View) -> bool:
    """True if a later reset has made the pipeline read the file's records again."""
    return any(
        epoch > file.epoch and at <= own.start
        for tp, own in _ranges(file)
        for epoch, at in view.resets.get(tp, {}).items()
    )


def _shares(file: ManifestFile, spans: Spans) -> bool:
    return any(own.overlaps(one) for tp, own in _ranges(file) for one in spans.get(tp, ()))


def _committed(
    files: Iterable[ManifestFile], view: View
) -> dict[TopicPartition, Sequence[OffsetRange]]:
    """The offsets that were committed: those of files, and those of the totals."""
    found: dict[TopicPartition, list[OffsetRange]] = defaultdict(list)
    for file in files:
        for tp, own in _ranges(file):
            found[tp].append(own)
    for tp, moved in view.positions.items():
        since = moved.start if moved.totals is None else moved.totals.since
        found[tp].append(OffsetRange(min(since, moved.position), moved.position))
    return {tp: normalize(own) for tp, own in found.items()}


def _groups(wanted: Spans, files: Sequence[ManifestFile]) -> Iterator[FileGroup]:
    """The components of offsets and files that share offsets, as far as they are wanted."""
    spans = [(tp, one) for tp, own in wanted.items() for one in own if not one.is_empty]
    nodes = [[span] for span in spans] + [list(_ranges(file)) for file in files]
    root = connected(nodes)
    chosen: dict[int, list[int]] = {root(node): [] for node in range(len(spans))}
    for node in range(len(nodes)):
        if root(node) in chosen:
            chosen[root(node)].append(node)
    for members in chosen.values():
        yield _group(
            [nodes[n] for n in members], [files[n - len(spans)] for n in members if n >= len(spans)]
        )


def _group(
    ranges: Iterable[Sequence[tuple[TopicPartition, OffsetRange]]], files: Sequence[ManifestFile]
) -> FileGroup:
    found: dict[TopicPartition, list[OffsetRange]] = defaultdict(list)
    for own in ranges:
        for tp, one in own:
            found[tp].append(one)
    mixed = [one.path for one in files if is_mixed(one)]
    problem = f"a Spark transform has mixed the records of {mixed[0]}" if mixed else ""
    names = tuple(one.path for one in files)
    return FileGroup({tp: normalize(own) for tp, own in found.items()}, names, problem)


_BATCH = -1
"""Output of a replay belongs to no batch."""


def replay_into_files(sink: FilesSink) -> TopicReplay:
    """A replay of a prepared sink, by the publisher's transactional id: see the module."""
    publisher, write = sink.pipeline_topics.keys.publisher, partial(_staged, sink)
    return TopicReplay(sink.ledger, sink.rejects_topic, publisher, write, sink.close)


def _staged(sink: FilesSink, judged: Reprocessed) -> ReplayOutput:
    """Write the rows into files that are not visible yet."""
    sink.begin_batch()
    view = sink.cluster.look().pipeline
    fence = Fence(sink.pipeline_topics.pipeline, 0 if view is None else view.epoch)
    task = sink.staging(fence, _BATCH, uuid.uuid4().int >> 96)
    staged, refused = task.of_replay(judged)
    named = [sink.topics.manifest, sink.topics.schema]
    load = sink.load(fence)  # no file of it is older than the begin of the batch
    failed = {one.record for one in refused}
    written = judged.chunk.row_record
    if judged.traceable:
        written = written[~np.isin(written, list(failed))]
    changes = partial(replayed, judged.chunk, judged.own(written, failed), failed, None)
    return ReplayOutput(
        named, refused, partial(_messages, sink, staged, fence), load.fresh, changes
    )


def _messages(sink: FilesSink, staged: Staged, fence: Fence) -> Mapping[str, Sequence[Message]]:
    """Extended schemas, and the files."""
    load = sink.load(fence)
    load.ready()
    receipts = [read_receipt(staged.name)] if staged.name else []
    if not sink.agree(staged):
        raise StagedRowsGone("schemas were extended meanwhile; the dead letters are repeated")
    found: dict[str, Sequence[Message]] = {}
    for topic, messages in load.messages(receipts, ()):
        found[topic] = [*found.get(topic, ()), *messages]
    return found
