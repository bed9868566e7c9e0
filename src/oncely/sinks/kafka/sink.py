"""The Kafka sink: records, rejects, offsets and ledger in one transaction of the cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from oncely.core.ledger import Entry, advance
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.errors import InvariantViolation, check
from oncely.sinks.base import (
    BudgetSpent,
    Chunk,
    Fence,
    IntArray,
    Opened,
    Publication,
    RangeKind,
    Reject,
    Reset,
    Staged,
    Written,
)
from oncely.sinks.kafka import letters, publishing, settings, topics
from oncely.sinks.kafka.cluster import Cluster, Place
from oncely.sinks.kafka.form import Form
from oncely.sinks.kafka.ledger import LedgerInTopic
from oncely.sinks.kafka.messages import Encoded, encode
from oncely.sinks.kafka.sender import Sender
from oncely.sinks.kafka.settling import refuse_moved, together, write_moves
from oncely.sinks.kafka.staging import Staging, staged_batches
from oncely.sinks.kafka.takeover import same_outputs
from oncely.sinks.kafka.transaction import Transaction
from oncely.sinks.kafka.words import Mode, Moved


@dataclass
class KafkaSink(LedgerInTopic):
    """Topics of the cluster that the source is on, with the ledger in a topic beside them.

    A chunk of several topic-partitions is one transaction for each of them: a position is moved
    by one transactional id only, that of its topic-partition (docs/decisions/0010). In a run of
    batch commit it is the publisher's, and all that is published is one transaction
    (docs/decisions/0012).

    Attributes:
        place: cluster, pipeline, group and ledger topic.
        form: what a record is made of.
        rejects_topic: where dead letters go, in the transaction of their topic-partition.
        create: create the ledger topic, and the topics written to, when they are missing.
        headers: write the source record's headers, and with them its trace context.
        staging: makes this a run of batch commit, and is the folder where its tasks stage: a URL
            or an absolute path. It may hold a key, so it is in no repr.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    place: Place
    form: Form
    rejects_topic: str
    create: bool = True
    headers: bool = False
    staging: str = field(default="", repr=False)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _cluster: tuple[int, Cluster] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _limits: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        """The source's headers, where they are carried."""
        return frozenset({"headers"}) if self.headers else frozenset()

    @property
    def named_topics(self) -> list[str]:
        """The topics that records and rejects go to, as far as their names are known."""
        return [*([self.form.topic] if self.form.topic else []), self.rejects_topic]

    def check(self) -> None:
        """Look at columns, settings and topics as they are now; nothing is created.

        Raises:
            ConfigError: a key that would weaken the producer, naming it.
            TableMismatch: the rows have no form, or a topic is missing that may not be created.
        """
        settings.checked(self.place.producer)
        self.form.bind()
        if self.staging:
            self._staging.check()
        if not self.create:
            topics.require_topics(self.cluster.asker, self.named_topics)

    @property
    def one_store(self) -> bool:
        """A partition may lose records alone."""
        return False

    @property
    def timed(self) -> bool:
        """Positions move with the records."""
        return False

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> KafkaSink:  # noqa: ARG002
        """The same for every batch."""
        return self

    def bind(self) -> KafkaSink:
        """Look at columns, settings and topics, and create what is missing and may be.

        Raises as :meth:`check` does.
        """
        self.check()
        self._refuse_deleted()
        topics.require_topics(self.cluster.asker, self.named_topics, create=self.create)
        self._limits = topics.largest_batch(self.cluster.asker, self.named_topics)
        return self

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None = None,
    ) -> Opened:
        """Take the next epoch and settle a position for every partition; see the port.

        Raises:
            Stopped: the pipeline has written before, and its position is nowhere to be found.
        """
        self.bind()
        target, outputs = self.form.target, self._outputs()
        return self.take_over(source, target, start, earliest, expected, outputs=outputs)

    def reset(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Take the next epoch and put positions elsewhere; from here on it writes to our topic.

        ``positions`` is asked when the old run is fenced, with where it has really ended.
        """
        topics.require_topics(self.cluster.asker, self.named_topics, create=self.create)
        return self.take_over(
            source, self.form.target, start, earliest, None, positions, self._outputs()
        )

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        max_rejects: int | None = None,
        kind: RangeKind = "data",
    ) -> dict[TopicPartition, Written]:
        """Write the chunk and move its positions; see the port.

        Each topic-partition has a transaction of its own. When one of several fails, others may
        have taken effect: whoever asks the ledger again, as the port demands, skips these.
        """
        if self.mode == "batch":
            return self._pass_over(chunk, entries, fence, kind)
        encoded, found = self._encoded(chunk, max_rejects)
        written = tally(chunk, encoded)

        def one(tp: TopicPartition) -> None:
            own = [reject for reject in found if reject.partition == tp]
            part = _Part(tp, chunk.ranges[tp], entries[tp], fence, kind, written[tp])
            self._commit_one(part, encoded, encoded.of(chunk, tp), own)

        together(one, sorted(chunk.ranges))
        return written

    def _encoded(self, chunk: Chunk, max_rejects: int | None) -> tuple[Encoded, list[Reject]]:
        """Messages and dead letters, made before anything is begun: a transaction's time is
        limited, and dead letters are asked of the broker.
        """  # fmt: skip
        encoded = encode(chunk, self.form, self._largest)
        _spend(encoded, max_rejects)
        found = chunk.dead_letters(encoded.rejections) if encoded.rejections else []
        check(len(found) == len(encoded.rejections), "a rejection has no dead letter")
        return encoded, found

    def write(
        self,
        chunk: Chunk,
        fence: Fence,
        max_rejects: int | None = None,
    ) -> dict[TopicPartition, Written]:
        """Write the chunk without a transaction; see :class:`oncely.sinks.base.Halves`."""
        encoded, found = self._encoded(chunk, max_rejects)
        by_tp = {tp: encoded.of(chunk, tp) for tp in sorted(chunk.ranges)}
        names = {topic for messages in by_tp.values() for topic in messages}
        sizes = self._largest([*names, *([self.rejects_topic] if found else [])])
        with self.cluster.plain(sizes.values()) as writer:
            for messages in by_tp.values():
                _send(writer, encoded, messages)
            if found:
                writer.send(
                    self.rejects_topic, letters.letters(found, sizes[self.rejects_topic], fence)
                )
            writer.finish()
        return tally(chunk, encoded)

    def write_staged(self, what: Publication, fence: Fence) -> None:
        """Write staged records without a transaction."""
        self._publisher.write(what, fence)

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
        kind: RangeKind,
    ) -> None:
        """Move positions alone, each in its transaction; see the port."""
        if self.mode == "batch":
            empty = Publication(ranges, written, (), ())
            self._publisher.publish(empty, entries, fence, kind)
            return
        nothing = Encoded.nothing()

        def one(tp: TopicPartition) -> None:
            part = _Part(tp, ranges[tp], entries[tp], fence, kind, written[tp])
            self._commit_one(part, nothing, {}, ())

        together(one, sorted(ranges))

    def prepare(self) -> None:
        """Create the topics that are missing, if they may be."""
        self.bind()

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Encode a task's rows and keep them in a file of the attempt's own; in an executor.

        Raises:
            Stopped: a row can't be written, and no single record answers for it.
            Unavailable: the staging place does not take them.
        """
        encoded = staged_batches(rows, self.form, self._largest)
        return self._staging.write(fence, batch_id, attempt, encoded)

    def publish(
        self, what: Publication, entries: Mapping[TopicPartition, Entry], fence: Fence
    ) -> None:
        """Staged rows, rejects and every position in one transaction; in the driver.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """
        self._publisher.publish(what, entries, fence)

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Remove staged files that nobody will publish; the number removed."""
        return self._staging.sweep(fence, keep_batches_from)

    @property
    def mode(self) -> Mode:
        """By which transactional ids this run moves positions."""
        return "batch" if self.staging else "partition"

    @property
    def _staging(self) -> Staging:
        check(bool(self.staging), "a batch commit needs a place to stage")
        return Staging(self.staging, self.place.pipeline)

    @property
    def _publisher(self) -> publishing.Publisher:
        load = publishing.StagedMessages(self.form, self._staging)
        return publishing.Publisher(self.cluster, load, self.rejects_topic, self._largest)

    def _pass_over(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        kind: RangeKind,
    ) -> dict[TopicPartition, Written]:
        """Move over holes and gaps by the id that moves everything in a run of batch commit."""
        check(not chunk.records, "a run of batch commit writes records by publishing them")
        nothing = dict.fromkeys(chunk.ranges, Written(0, 0, 0, 0))
        self.move(chunk.ranges, entries, fence, nothing, kind)
        return nothing

    def _commit_one(
        self,
        part: _Part,
        encoded: Encoded,
        messages: Mapping[str, IntArray],
        rejects: Sequence[Reject],
    ) -> None:
        """One topic-partition in one transaction of a new instance.

        The order is what makes it safe. ``init`` ends and fences whoever was about to move this
        position; only what is read after it can't change before our own commit. Read before,
        it would let a rival's records and ours both take effect.
        """
        check(part.entry.epoch == part.fence.epoch, "decided on another epoch's entry")
        cluster = self.cluster
        sizes = self._largest([*messages, *([self.rejects_topic] if rejects else [])])
        identity = self.place.words.writer(part.tp)
        with cluster.transaction(identity, sizes.values()) as writer:
            writer.init()
            refuse_moved(cluster, {part.tp: part.entry}, "partition")
            writer.begin()
            _send(writer, encoded, messages)
            if rejects:
                limit = sizes[self.rejects_topic]
                writer.send(self.rejects_topic, letters.letters(rejects, limit, part.fence))
            self._move(writer, part)
            writer.commit()
        cluster.remember(part.tp, Entry(part.position, part.fence.epoch))

    def _move(self, writer: Transaction, part: _Part) -> None:
        registered = self.cluster.registered().pipeline
        if registered is None:
            raise InvariantViolation(f"pipeline {self.place.pipeline!r} is not in the ledger")
        done = part.written
        moved = Moved(
            part.position,
            part.fence.epoch,
            registered.cluster,
            registered.topic_ids.get(part.tp.topic, ""),
            part.range.start,
            part.range.end,
            part.kind,
            done.records,
            done.rows,
            done.rejects,
            done.filtered,
        )
        write_moves(self.cluster, writer, {part.tp: moved})

    def _outputs(self) -> dict[str, str]:
        """The id of the topic that all records go to."""
        named = [self.form.topic] if self.form.topic else []
        return {name: id_ for name, id_ in topics.ids(self.cluster.asker, named).items() if id_}

    def _refuse_deleted(self) -> None:
        """Refuse to make a topic again that was written to; whoever asks for a reset may.

        Raises:
            TableMismatch: naming the topic.
        """
        topic, asker = self.form.topic, self.cluster.asker
        if topic is None or not topics.missing(asker, [topic]):
            return
        if topics.missing(asker, [self.place.ledger_topic]):
            return
        known = self.cluster.look().pipeline
        if known is not None:
            same_outputs(known, {topic: None}, self.place.pipeline)

    def _largest(self, names: Sequence[str]) -> dict[str, int]:
        """``max.message.bytes`` of topics, asked once in a process; missing ones are left out."""
        if unknown := [name for name in names if name not in self._limits]:
            asker = self.cluster.asker
            there = topics.described(asker, unknown)
            self._limits |= topics.largest_batch(asker, there)
        return {name: self._limits[name] for name in names if name in self._limits}


@dataclass(frozen=True)
class _Part:
    """What a transaction claims for its topic-partition, and on which entry that was decided."""

    tp: TopicPartition
    range: OffsetRange
    entry: Entry
    fence: Fence
    kind: RangeKind
    written: Written

    @property
    def position(self) -> Position:
        return advance(self.entry, [self.range])


def _send(writer: Sender, encoded: Encoded, messages: Mapping[str, IntArray]) -> None:
    """Hand messages over, in bulk where none has headers."""
    for topic, wanted in messages.items():
        if encoded.headers is None:
            writer.send_columns(topic, encoded.columns(wanted))
        else:
            writer.send(topic, encoded.messages(wanted))


def _spend(encoded: Encoded, limit: int | None) -> None:
    """Stop before anything is written when there are more rejects than the budget has left."""
    if limit is not None and len(encoded.rejections) > limit:
        raise BudgetSpent(encoded.rejections, "decode, transform or topics")


def tally(chunk: Chunk, encoded: Encoded) -> dict[TopicPartition, Written]:
    """Count per topic-partition what became of the chunk's records."""
    rejected = np.zeros(chunk.records, dtype=bool)
    rejected[[one.record for one in encoded.rejections]] = True
    record = np.asarray(encoded.record, dtype=np.int64)
    written = record[~rejected[record]] if len(record) else record
    kept = np.zeros(chunk.records, dtype=bool)
    kept[written] = True
    counts: dict[TopicPartition, Written] = dict.fromkeys(chunk.ranges, Written(0, 0, 0, 0))
    for index, tp in enumerate(chunk.partitions):
        own = chunk.partition == index
        if tp in counts:
            counts[tp] = Written(
                int(own.sum()),
                int((chunk.partition[written] == index).sum()),
                int((own & rejected).sum()),
                int((own & ~rejected & ~kept).sum()),
            )
    return counts
