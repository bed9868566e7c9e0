"""Repair and backfill of a Delta table: files that contain rows of some offsets are replaced.

In one commit of the table, on the handle on which it was decided: the files are removed, and files
of their other rows and of the rewritten records are added, with the ledger's document and the
amendment in the commit's metadata. The commit is refused if any version came in between, from any
writer, so epochs, positions, dead letters and files are those of the decision. Repeating a rewrite
changes nothing: a crash or a lost answer is settled by doing it again.

In an upsert the rows of these offsets are deleted, and those of the rewritten records are merged: a
key that has a newer row keeps it.

A file that the table names and the store does not have, or that was cut, is removed from the table,
too. One that has another size than the table names is replaced: readers read it by the named size.

Replays and discards of dead letters are here, too. In a replay, valid records become rows in the
commit that removes the dead letter. The file of dead letters is the token: a commit replaces it by
a file of those that still fail, and of those that were not processed yet. A file that the ledger
does not list any more was replayed, or voided by a reset, by another process.

In a discard, a file with chosen dead letters is replaced by a file in which these are without
content, in one commit of the table. As any other, the commit is refused unless it follows the
version of its decision: a replay at the same time comes before it, or finds the file replaced.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Chunk, Reject, Rejection, Staged
from oncely.core.change import (
    LockedDeadLetters,
    ReplayResult,
    Reprocessed,
    Rewrite,
    Rewritten,
    changed,
    replayed,
)
from oncely.core.claim import NO_RECORDS, Amendment, Counts, Entry, Fence, PositionMoved
from oncely.core.digest import digest_sum
from oncely.core.ranges import OffsetRange, TopicPartition, by_topic, from_tree, normalize
from oncely.errors import InvariantViolation, WrongInput
from oncely.kinds.delta.form import CLEARED, newest, prepare
from oncely.kinds.delta.ledger import Changes, State
from oncely.kinds.delta.sink import DeltaSink
from oncely.kinds.destination import Which
from oncely.kinds.rows import DELETED, row_digests
from oncely.kinds.staged_files import FilesTask
from oncely.kinds.tables import SOURCE_COLUMNS
from oncely.stores.delta import Merge, named_sizes, of_content
from oncely.stores.objects.store import NoSuchFile

_TOPIC, _PARTITION, _OFFSET = SOURCE_COLUMNS.names
_UNIQUE = 96
_PARQUET = b"PAR1"  # at both ends of a file
_READABLE = (
    "restore it from a backup; or remove it from the store, and a repair writes its records again"
)


@dataclass(frozen=True)
class DeltaRewrites:
    """Rewrites rows that contain their record's offset.

    Attributes:
        sink: prepared.
    """

    sink: DeltaSink

    def check(self) -> None:
        """Refuse a table whose rows can't be removed by replacing files.

        Raises:
            WrongInput: it is append-only, or has deletion vectors.
        """
        table = self.sink.tables.load()
        if table is None:
            return
        if table.metadata().configuration.get("delta.appendOnly") == "true":
            raise WrongInput(
                "delta.appendOnly is set, and a repair removes rows",
                key="sink.url",
                way_out="unset the property for the repair",
            )
        if "deletionVectors" in (table.protocol().writer_features or ()):
            raise WrongInput(
                "the table has deletion vectors, which a rewrite would lose",
                key="sink.url",
                way_out="purge and disable them for the repair (REORG TABLE … APPLY (PURGE))",
            )

    def entries(self) -> dict[TopicPartition, Entry]:
        """The present entries of the ledger."""
        return self.sink.ledger.positions(Fence(self.sink.pipeline, 0))

    def committed(self, partition: TopicPartition, within: OffsetRange) -> list[OffsetRange]:
        """The offsets of the totals, and of the commits that the table's log still contains."""
        state = self.sink.ledger.read()
        end = from_tree(state.document.positions).get(partition, 0)
        totals = from_tree(state.document.totals).get(partition)
        known = [] if totals is None else [OffsetRange(min(totals.since, end), end)]
        for commit in state.table.history() if state.table is not None else ():
            told = commit.get("oncely") or {}
            if told.get("pipeline") == self.sink.pipeline:
                ranges = (told.get("ranges") or {}).get(partition.topic, {})
                start, last = ranges.get(str(partition.partition), (0, 0))
                known.append(OffsetRange(min(start, end), min(last, end)))
        return [one for one in normalize(known) if one.overlaps(within)]

    def present(self, partition: TopicPartition, offsets: Sequence[OffsetRange]) -> tuple[int, int]:
        """The number of rows and of dead letters of some offsets."""
        found = self._found(self.sink.ledger.read(), partition, offsets)
        return found.rows.num_rows, len(found.letters)

    def rewrite(self, work: Rewrite) -> Rewritten:
        """Replace the files that contain rows of the offsets."""
        state = self._compared(work.partition, work.expected, work.upto)
        self.sink.begin_batch()
        found = self._found(state, work.partition, work.offsets)
        if found.unreadable and (left := self._left(work, found)):
            return self._leaving(work, left, found)
        if self._upserts:
            return self._merge(state, work, found)
        staged, letters, counts = self._stage(state, work, found)
        change = NO_RECORDS
        if work.kind == "backfill":
            change = changed(counts, self._there(found, counts))
        load = {**self.sink.load(staged), "gone": found.files}
        self._commit(state, work.kind, found, load, letters, change)
        return Rewritten(found.rows.num_rows, len(found.letters), counts)

    def remove_beyond(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange], expected: Entry
    ) -> Rewritten:
        """Remove rows and dead letters of records that are not committed."""
        state = self._compared(partition, expected, 0)
        if from_tree(state.document.positions)[partition] > offsets[0].start:
            raise PositionMoved(str(partition))
        self.sink.begin_batch()
        found = self._found(state, partition, offsets)
        if self._upserts:
            found.require_readable()
            self._drop(state, found)
            load, _ = self._merging(found, Chunk.of_nothing({partition: OffsetRange(0, 0)}))
        else:
            load = {**self.sink.load(self._kept(state, found.others())), "gone": found.files}
        self._commit(state, "repair", found, load, [], NO_RECORDS)
        return Rewritten(found.rows.num_rows, len(found.letters), NO_RECORDS)

    def end_refusal(self, refused: str) -> None:
        """Accept a table that a RESTORE has taken back."""
        self.sink.ledger.end_refusal(refused)

    # -- what is there -----------------------------------------------------------------------

    def _compared(self, partition: TopicPartition, expected: Entry, upto: int) -> State:
        """The ledger, if the position is held by the same run, and is not before the offsets.

        Raises:
            PositionMoved: it is not.
        """
        state = self.sink.ledger.read()
        position = from_tree(state.document.positions).get(partition, -1)
        held = state.document.epoch, state.document.run
        if held != (expected.epoch, expected.run or state.document.run) or position < upto:
            raise PositionMoved(str(partition))
        return state

    def _found(
        self, state: State, partition: TopicPartition, offsets: Sequence[OffsetRange]
    ) -> _Found:
        sizes = {one.path: one.bytes for one in self.sink.store.list()}
        resized = {p for p, size in named_sizes(state.table).items() if sizes.get(p, size) != size}
        found = _Found(partition, offsets, state.table.to_pyarrow_dataset().schema)
        for fragment in state.table.to_pyarrow_dataset().get_fragments():
            path = fragment.path
            if path not in sizes and "://" not in path:
                found.gone.append(path)
                continue
            try:
                self._take(found, fragment, path in resized)
            except NoSuchFile:
                found.gone.append(path)
            except (pa.ArrowException, OSError) as error:
                if self._was_cut(path):
                    found.gone.append(path)
                else:
                    found.unreadable[path] = " ".join(str(error).split())[:300]
        for path, _ in state.document.rejects:
            own = self.sink.ledger.letters(path)
            hit = [one for one in own if found.contains(one)]
            if hit:
                found.files_of_letters.append(path)
                found.letters += hit
                found.other_letters += [one for one in own if not found.contains(one)]
        return found

    def _take(self, found: _Found, fragment: Any, resized: bool) -> None:
        """Read a file, if it contains rows of the offsets, or has another size than the table
        names."""
        condition = _condition(found.partition, found.offsets)
        if resized:
            whole = of_content(fragment, self.sink.store.read(fragment.path))
            rows = found.resized[fragment.path] = whole.to_table(found.schema)
            found.take(fragment.path, rows, condition)
            return
        first, end = found.offsets[0].start, found.offsets[-1].end
        between = (pc.field(_OFFSET) >= first) & (pc.field(_OFFSET) < end)
        near_by = None if self._upserts else between  # a merge needs all files readable
        # By the offset alone: other writers may have stored texts as a type of their own.
        near = fragment.to_table(found.schema, list(SOURCE_COLUMNS.names), near_by)
        if near.filter(condition).num_rows:
            found.take(fragment.path, fragment.to_table(found.schema), condition)

    def _was_cut(self, path: str) -> bool:
        """True if a file does not begin and end as Parquet; otherwise its rows may be readable."""
        try:
            data = self.sink.store.read(path)
        except NoSuchFile:
            return True
        return not data[:4] == data[-4:] == _PARQUET

    def _left(self, work: Rewrite, found: _Found) -> list[int]:
        """The offsets that are not rewritten: their rows may be in a file that can't be read. A
        merge reads all files.

        Raises:
            WrongInput: a backfill would leave older rows there.
        """
        if work.kind == "backfill":
            found.require_readable()
        known = set() if self._upserts else found.known
        return [at for one in work.offsets for at in range(one.start, one.end) if at not in known]

    def _leaving(self, work: Rewrite, left: Sequence[int], found: _Found) -> Rewritten:
        """Rewrite all but some offsets."""
        others = work.without(left)
        done = self.rewrite(others) if others else Rewritten(0, 0, NO_RECORDS)
        path, why = next(iter(found.unreadable.items()))
        reason = f"its row may be in {path}, which can't be read: {why}: {_READABLE}"
        reasons = {(work.partition, at): reason for at in left}
        return done._replace(refused={**reasons, **done.refused})

    def _there(self, found: _Found, counts: Counts) -> Counts:
        """What the table contains of the offsets."""
        rows, digest, recipe = found.rows, None, self.sink.form.recipe
        if recipe is not None:
            offsets = rows[_OFFSET].to_numpy().astype(np.int64) if recipe.offset else None
            digest = digest_sum(row_digests(rows, offsets, recipe))
        distinct = pc.count_distinct(rows[_OFFSET]).as_py()
        rejects = len(found.letters)
        filtered = max(0, counts.records - distinct - rejects)
        known = "" if digest is None else str(recipe)
        return Counts(counts.records, rows.num_rows, rejects, filtered, digest, known)

    # -- writing -----------------------------------------------------------------------------

    def _kept(self, state: State, others: Iterable[pa.Table]) -> list[Staged]:
        """The other rows of the files that are replaced, with all columns of the table."""
        store, form, staged = self._plain.store, self._plain.form.staged, []
        for rows in others:
            unique = uuid.uuid4().int >> _UNIQUE
            task = FilesTask(store, form, {(): rows.schema}, self._fence(state), 0, unique)
            task.add_rows(rows)
            staged.append(task.finish())
        return staged

    def _stage(
        self, state: State, work: Rewrite, found: _Found
    ) -> tuple[list[Staged], list[Reject], Counts]:
        task = self.sink.staging(self._fence(state), 0, uuid.uuid4().int >> _UNIQUE)
        refused = sorted([*work.chunk.rejections, *task.add(work.chunk)])
        done = task.finish()
        letters, counts = _outcome(work, refused)
        counts = done.of_range(work.partition, counts)
        return [done, *self._kept(state, found.others())], letters, counts

    def _commit(
        self,
        state: State,
        kind: str,
        found: _Found,
        load: dict[str, Any],
        letters: Sequence[Reject],
        change: Counts,
    ) -> None:
        ledger = self.sink.ledger
        others = [one for one in state.document.rejects if one[0] not in found.files_of_letters]
        kept = ledger.keep(state, [*found.other_letters, *letters])
        document = msgspec.structs.replace(state.document, rejects=[*others, *kept])
        whole = OffsetRange(found.offsets[0].start, found.offsets[-1].end)
        if change != NO_RECORDS:
            own = Amendment(found.partition, whole, "backfill", change)
            document = ledger.amended(document, lambda _: [own])
        spans = [(one.start, one.end) for one in found.offsets]
        metadata = {"kind": kind, "rewritten": by_topic({found.partition: spans})}
        self.sink.commit(state, document, metadata, load)

    def _fence(self, state: State) -> Fence:
        return Fence(self.sink.pipeline, state.document.epoch)

    # -- upserts -----------------------------------------------------------------------------

    @property
    def _upserts(self) -> bool:
        return bool(self.sink.form.keys)

    def _merge(self, state: State, work: Rewrite, found: _Found) -> Rewritten:
        """Delete the rows of the offsets, and merge those of the records."""
        self._drop(state, found)
        load, refused = self._merging(found, work.chunk)
        letters, counts = _outcome(work, refused)
        self._commit(state, work.kind, found, load, letters, NO_RECORDS)
        return Rewritten(found.rows.num_rows, len(found.letters), counts)

    @property
    def _plain(self) -> DeltaSink:
        """The sink of files that are added as they are, not merged."""
        return replace(self.sink, form=replace(self.sink.form, keys=(), version=None))

    def _drop(self, state: State, found: _Found) -> None:
        """Remove missing and cut files, and replace those of another size, by a commit of its own:
        a merge reads all files.

        Raises:
            PositionMoved: there were some; decide again.
        """
        if gone := [*found.gone, *found.resized]:
            only = _Found(found.partition, found.offsets, found.schema)
            rows = [one for one in found.resized.values() if one.num_rows]
            whole = self._plain.load(self._kept(state, rows))
            self._commit(state, "repair", only, {**whole, "gone": gone}, [], NO_RECORDS)
            raise PositionMoved(str(found.partition))

    def _merging(self, found: _Found, chunk: Chunk) -> tuple[dict[str, Any], list[Rejection]]:
        """The rows of records, and the rows of the table that go; and the refused records."""
        form = self.sink.form
        formed = prepare(form, chunk)
        newer = newest(formed.rows, form.keys, form.version)
        gone = _in_sql(found.partition, found.offsets)
        merge = Merge(newer, form.keys, form.version, DELETED, CLEARED, gone)
        return {"merge": merge}, sorted(formed.rejections)


@dataclass
class _Found:
    """What a table contains of some offsets.

    Attributes:
        partition, offsets: the offsets.
        schema: the columns of the table.
        gone: files that the table names, and that the store does not have or that were cut.
        resized: files that have another size than the table names, with all their rows.
        unreadable: the other files that can't be read, and the reason.
        letters: the dead letters of the offsets.
        files_of_letters, other_letters: their files, and the other dead letters in these.
    """

    partition: TopicPartition
    offsets: Sequence[OffsetRange]
    schema: pa.Schema
    gone: list[str] = field(default_factory=list)
    resized: dict[str, pa.Table] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    letters: list[Reject] = field(default_factory=list)
    files_of_letters: list[str] = field(default_factory=list)
    other_letters: list[Reject] = field(default_factory=list)
    _hit: list[pa.Table] = field(default_factory=list)
    _others: dict[str, pa.Table] = field(default_factory=dict)

    def take(self, path: str, rows: pa.Table, condition: pc.Expression) -> None:
        """A file that contains rows of the offsets."""
        self._hit.append(rows.filter(condition))
        self._others[path] = rows.filter(~condition | condition.is_null())

    @property
    def rows(self) -> pa.Table:
        """The rows of the offsets."""
        return pa.concat_tables([self.schema.empty_table(), *self._hit])

    @property
    def known(self) -> set[int]:
        """The offsets that have rows or dead letters."""
        return {*self.rows[_OFFSET].to_pylist(), *(one.offset for one in self.letters)}

    def require_readable(self) -> None:
        """Refuse a file that can't be read.

        Raises:
            WrongInput: there is one.
        """
        for path, reason in self.unreadable.items():
            raise WrongInput(f"{path} can't be read: {reason}", key="sink.url", way_out=_READABLE)

    @property
    def files(self) -> list[str]:
        """The files to be removed from the table."""
        return [*self.gone, *self._others]

    def others(self) -> Iterator[pa.Table]:
        """Their rows of other offsets, by file."""
        yield from (rows for rows in self._others.values() if rows.num_rows)

    def contains(self, letter: Reject) -> bool:
        """True for a dead letter of the offsets."""
        inside = any(letter.offset in one for one in self.offsets)
        return letter.partition == self.partition and inside


def _outcome(work: Rewrite, refused: Sequence[Rejection]) -> tuple[list[Reject], Counts]:
    """The dead letters of a rewrite, and the counts of its records."""
    chunk = work.chunk
    bad = np.isin(chunk.row_record, [one.record for one in refused])
    counts = chunk.counts(chunk.row_record[~bad], refused)
    return chunk.letters(refused), counts.get(work.partition, NO_RECORDS)


def _in_sql(partition: TopicPartition, offsets: Sequence[OffsetRange]) -> str:
    """The condition of :func:`_condition` on rows of a merge's target."""
    topic = partition.topic.replace("'", "''")
    inside = " OR ".join(
        f't."{_OFFSET}" >= {one.start} AND t."{_OFFSET}" < {one.end}' for one in normalize(offsets)
    )
    of = f't."{_TOPIC}" = \'{topic}\' AND t."{_PARTITION}" = {partition.partition}'
    return f"{of} AND ({inside})"


def _condition(partition: TopicPartition, offsets: Sequence[OffsetRange]) -> pc.Expression:
    inside = pc.scalar(False)
    for one in normalize(offsets):
        inside |= (pc.field(_OFFSET) >= one.start) & (pc.field(_OFFSET) < one.end)
    topic = (pc.field(_TOPIC) == partition.topic) & (pc.field(_PARTITION) == partition.partition)
    # A row without an offset is another writer's, and stays.
    return pc.coalesce(topic & inside, pc.scalar(False))


_BATCH = -1
"""Output of a replay belongs to no batch."""


@dataclass
class DeltaReplay:
    """A replay of all dead letters that exist at its begin, each processed once.

    Attributes:
        sink: the prepared sink, for rows of the pipeline's columns.
    """

    sink: DeltaSink
    _waiting: list[str] = field(default_factory=list, init=False)
    """Files that were not processed completely."""
    _began: bool = field(default=False, init=False)
    _kept: int = field(default=0, init=False)
    """Number of pending dead letters at the beginning of the first file that were processed
    already."""
    _begun: tuple[str, list[tuple[str, int]], ReplayResult] | None = field(default=None, init=False)
    """The last commit that was begun, and the files that it writes in place of the first file."""

    @contextmanager
    def portion(self, limit: int) -> Iterator[LockedDeadLetters | None]:
        """Dead letters of one file; or the result of a commit whose answer was lost."""
        yield self._portion(limit)

    def _portion(self, limit: int) -> LockedDeadLetters | None:
        ledger = self.sink.ledger
        state = ledger.read()
        named = [path for path, _ in state.document.rejects]
        if not self._began:
            self._waiting, self._began = list(named), True
        if self._begun is not None and self._begun[0] == state.document.replay:
            _, left, done = self._begun
            return LockedDeadLetters((), lambda _: self._done(left, done))
        while self._waiting:
            letters = ledger.letters(self._waiting[0]) if self._waiting[0] in named else []
            if tried := [one for one in letters if one.pending][self._kept :][:limit]:
                return LockedDeadLetters(tried, partial(self._commit, state, letters, tried))
            self._waiting, self._kept = self._waiting[1:], 0
        return None

    def _commit(
        self,
        state: State,
        letters: Sequence[Reject],
        tried: Sequence[Reject],
        judged: Reprocessed | None,
    ) -> ReplayResult:
        if judged is None:
            raise InvariantViolation("dead letters were not judged")
        first = self._waiting[0]
        self.sink.begin_batch()
        fence = Fence(self.sink.pipeline, state.document.epoch)
        task = self.sink.staging(fence, _BATCH, uuid.uuid4().int >> 96)
        staged, refused = task.of_replay(judged)
        again = [judged.again(one) for one in refused]
        pending = [one for one in letters if one.pending]
        discarded = [one for one in letters if not one.pending]
        others = [*pending[: self._kept], *pending[self._kept + len(tried) :], *discarded]
        left = self.sink.ledger.keep(state, [*again, *others])
        files = [one for one in state.document.rejects if one[0] != first]
        name = uuid.uuid4().hex
        document = msgspec.structs.replace(state.document, rejects=[*left, *files], replay=name)
        done = ReplayResult(len(tried) - len(again), len(again))
        self._begun = name, left, done
        document = self.sink.ledger.amended(document, self._changes(judged, refused))
        metadata = {"kind": "replay", "replayed": first}
        self.sink.commit(state, document, metadata, self.sink.load([staged]))
        return self._done(left, done)

    def _changes(self, judged: Reprocessed, refused: Sequence[Rejection]) -> Changes:
        """The amendments of ranges."""
        form, chunk, failed = self.sink.form, judged.chunk, {one.record for one in refused}
        formed = prepare(form, chunk)
        if judged.traceable:
            formed = formed.without(refused)
        record = judged.own(formed.row_record, failed)
        digests = form.digests(chunk, formed.rows, record) if len(record) else None
        return partial(replayed, chunk, record, failed, digests)

    def _done(self, left: list[tuple[str, int]], done: ReplayResult) -> ReplayResult:
        """Continue in the rest of the first file after the dead letters that were kept."""
        self._begun = None
        self._waiting[:1] = [path for path, _ in left]
        self._kept = self._kept + done.kept if left else 0
        return done


# -- discards ------------------------------------------------------------------------------


def discard_letters(
    sink: DeltaSink, which: Which, execute: bool, check: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Discard pending dead letters: see
    :meth:`oncely.kinds.destination.Destination.discarding`. The sink may be without columns."""
    ledger, reasons = sink.ledger, Counter[str]()
    state = ledger.read()
    rejects, replaced = list(state.document.rejects), dict[str, str]()
    for at, (path, pending) in enumerate(rejects):
        letters = ledger.letters(path) if pending else []
        left = [one.discarded if one.pending and which(one) else one for one in letters]
        chosen = [new for new, old in zip(left, letters, strict=True) if new is not old]
        reasons.update(one.reason for one in chosen)
        if chosen and execute:
            [rejects[at]] = ledger.keep(state, left)
            replaced[rejects[at][0]] = path
    check()
    if replaced:
        document = msgspec.structs.replace(state.document, rejects=rejects)
        ledger.commit(state, document, {"kind": "discard", "replaced": replaced})
    if execute:  # the replaced files, also those of an attempt whose answer was lost
        ledger.tidy(Fence(sink.pipeline, state.document.epoch))
    return reasons
