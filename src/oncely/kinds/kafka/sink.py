"""The Kafka sink: records, rejects, offsets and ledger in one transaction of the cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from oncely.core.batch import Batch, Chunk, CommitBudget, IntArray, Packet, Reject
from oncely.core.claim import Claim, Counts, Fence, Opened, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, check
from oncely.kafka import topics
from oncely.kafka.properties import checked_producer
from oncely.kafka.sender import Sender
from oncely.kinds.kafka.form import (
    Messages,
    PackedMessages,
    digested,
    encode,
    of_partition,
    packets,
)
from oncely.kinds.kafka.format import RecordFormat
from oncely.kinds.topic_publishing import Publisher, dead_letters
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.compare_and_set import moving, run_concurrently, write_positions
from oncely.stores.topic.ledger import TopicLedger
from oncely.stores.topic.records import RunMode
from oncely.stores.topic.takeover import same_outputs

_ABORT_CHECK = 10.0
"""Seconds; a broker looks for expired transactions once in this time by default
(``transaction.abort.timed.out.transaction.cleanup.interval.ms``)."""


@dataclass
class KafkaSink:
    """Topics of the source's cluster, with the ledger in another topic.

    A chunk of several topic-partitions is one transaction for each of them: a position is moved by
    one transactional id only, that of its topic-partition (docs/decisions/0010). In a run of batch
    commit it is the publisher's, and a publication is one transaction (docs/decisions/0012).

    Attributes:
        pipeline_topics: cluster, pipeline, group and ledger topic.
        form: the contents of a record.
        rejects_topic: the topic of dead letters, written in the transaction of their
            topic-partition.
        create: create the ledger topic and the output topics if they are missing.
        headers: write the source record's headers, and with them its trace context.
        by_batch: true for a run of batch commit.
        turns: move each position by two transactional ids in turn, for a run that commits often
            (docs/decisions/0047).
        run: a unique name of this run, which identifies it in the ledger.
        partitions: the number of partitions of an output topic that is created; None: as many as
            the largest of ``source_topics``.
        source_topics: the topics of the source, on the same cluster.
    """

    pipeline_topics: PipelineTopics
    form: RecordFormat
    rejects_topic: str
    create: bool = True
    headers: bool = False
    by_batch: bool = False
    turns: bool = False
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    partitions: int | None = None
    source_topics: Sequence[str] = ()
    _limits: dict[str, topics.TopicLimits] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def ledger(self) -> TopicLedger:
        """Epochs and positions, in the ledger topic and the group."""
        target = self.form.target
        return TopicLedger(
            self.pipeline_topics, self.mode, target, self._outputs, self.create, self.run
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ledger": self.ledger}  # marks a task's copy as such

    @property
    def cluster(self) -> Cluster:
        """The clients of this process."""
        return self.ledger.cluster

    @property
    def mode(self) -> RunMode:
        """The transactional ids by which this run moves positions."""
        if self.turns:
            return "turns"
        return "batch" if self.by_batch else "partition"

    @property
    def needs(self) -> frozenset[str]:
        """The source's headers and timestamps, if they are copied."""
        wanted = {"headers": self.headers, "timestamp": self.form.source_timestamp}
        return frozenset(name for name, copied in wanted.items() if copied)

    @property
    def named_topics(self) -> list[str]:
        """The topics of records and rejects whose names are known."""
        return [*([self.form.topic] if self.form.topic else []), self.rejects_topic]

    def check(self) -> None:
        """Check the present columns, settings and topics; no topic is created.

        Raises:
            ConfigError: a property would weaken the producer, or the output topic needs keys; the
                error names the setting.
            TableMismatch: the rows cannot be encoded, or a topic is missing that may not be
                created.
        """
        checked_producer(self.pipeline_topics.producer)
        self.form.bind()
        if not self.create:
            topics.require_topics(self.cluster.admin, self.named_topics)
        self._refuse_unkeyed()

    def prepare(self) -> None:
        """Create missing topics, if permitted."""
        self.bind()

    def bind(self) -> KafkaSink:
        """Check columns, settings and topics, and create missing topics, if permitted.

        Raises the errors of :meth:`check`.
        """
        self.check()
        self._refuse_deleted()
        self._require_topics()
        self._limits = topics.topic_limits(self.cluster.admin, self.named_topics)
        return self

    def open(self, takeover: Takeover) -> Opened:
        """Take over the ledger; with a reset a deleted topic may be recreated."""
        if takeover.reset is None:
            self.bind()
        else:
            self._require_topics()
        return self.ledger.open(takeover)

    def _require_topics(self) -> None:
        """Check the topics, and create missing topics, if permitted."""
        admin, create = self.cluster.admin, self.create
        topics.require_topics(
            admin, self.named_topics, create=create, partitions=self.new_partitions
        )

    def new_partitions(self) -> dict[str, int]:
        """The number of partitions of the output topic, if it is created."""
        if self.form.topic is None:
            return {}
        if self.partitions is not None:
            return {self.form.topic: self.partitions}
        found = topics.described(self.cluster.admin, self.source_topics)
        return {self.form.topic: max(found.values())} if found else {}

    def close(self) -> None:
        """Close the clients; the next call creates new ones."""
        self.ledger.close()

    # -- in a worker ---------------------------------------------------------------------------

    @property
    def hidden_seconds(self) -> float:
        """Until the broker aborts a transaction."""
        return self.pipeline_topics.transaction_timeout + _ABORT_CHECK

    def for_worker(self) -> KafkaSink:
        """Positions are moved by two transactional ids in turn."""
        return replace(self, turns=True)

    def joined(self, metadata: Callable[[], Any]) -> None:
        """Name the member that sends offsets."""
        self.cluster.group_metadata = metadata

    # -- partition commit ----------------------------------------------------------------------

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> dict[TopicPartition, Counts]:
        """Write the chunk and move its positions.

        Each topic-partition has a transaction of its own. If one of several fails, others may have
        taken effect: the caller reads the ledger again, as the port requires, and skips these.
        """
        check(not self.by_batch, "a run of batch commit writes records by publishing them")
        # Created before a transaction begins: its time is limited, and dead letters are fetched
        # from the broker.
        formed = encode(chunk, self.form, self.limits)
        CommitBudget(max_rejects, "decode, transform or topics").spend(formed.rejections)
        letters = chunk.letters(formed.rejections)
        counts = digested(formed, chunk, self.form.recipe).counts(chunk)
        places = {tp: of_partition(formed, chunk, tp) for tp in chunk.ranges}
        outgoing = _Outgoing(self, formed.rows, places, letters, fence)
        if claim is None:
            for tp in sorted(chunk.ranges):
                outgoing.write(tp)
        else:
            run_concurrently(partial(outgoing.commit, claim, counts), sorted(chunk.ranges))
        return counts

    # -- batch commit --------------------------------------------------------------------------

    def pack(self, rows: pa.Table) -> list[Packet]:
        """Encode rows of a Spark transform; in an executor."""
        return packets(rows, self.form, self.limits)

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Publish rows, rejects and every position in one transaction; in the driver."""
        check(self.by_batch, "a run that commits by partitions does not publish")
        load = PackedMessages()
        Publisher(self.cluster, load, self.rejects_topic, self.largest).publish(batch, fence, claim)

    # -- parts ---------------------------------------------------------------------------------

    def _outputs(self) -> dict[str, str]:
        """The id of the topic of all records."""
        named = [self.form.topic] if self.form.topic else []
        return {name: id_ for name, id_ in topics.ids(self.cluster.admin, named).items() if id_}

    def _refuse_unkeyed(self) -> None:
        """Refuse a compacted output topic for records without keys."""
        topic = self.form.topic
        if topic is None or self.form.key is not None:
            return
        limits = self.limits([topic]).get(topic)
        if limits is not None and limits.keyed:
            raise ConfigError(
                "sink.key",
                f"is missing: topic {topic!r} is compacted (cleanup.policy), and takes no record"
                " without a key",
                way_out="name the column of the key; or set the topic's cleanup.policy to delete",
            )

    def _refuse_deleted(self) -> None:
        """Refuse to recreate a deleted output topic, which is permitted in a reset.

        Raises:
            TableMismatch: the error names the topic.
        """
        topic, admin = self.form.topic, self.cluster.admin
        if topic is None or not topics.missing(admin, [topic]):
            return
        if topics.missing(admin, [self.pipeline_topics.ledger_topic]):
            return
        known = self.cluster.look().pipeline
        if known is not None:
            same_outputs(known, {topic: None}, self.pipeline_topics.pipeline)

    def largest(self, names: Sequence[str]) -> dict[str, int]:
        """``max.message.bytes`` of topics."""
        return {name: one.size for name, one in self.limits(names).items()}

    def limits(self, names: Sequence[str]) -> dict[str, topics.TopicLimits]:
        """The limits of topics, requested once in a process; missing topics are left out."""
        if unknown := [name for name in names if name not in self._limits]:
            admin = self.cluster.admin
            there = topics.described(admin, unknown)
            self._limits |= topics.topic_limits(admin, there)
        return {name: self._limits[name] for name in names if name in self._limits}


@dataclass(frozen=True)
class _Outgoing:
    """A chunk on its way: messages by partition and topic, and dead letters."""

    sink: KafkaSink
    messages: Messages
    places: Mapping[TopicPartition, Mapping[str, IntArray]]
    rejects: Sequence[Reject]
    fence: Fence

    def commit(
        self, claim: Claim, counts: Mapping[TopicPartition, Counts], tp: TopicPartition
    ) -> None:
        """One topic-partition in one transaction."""
        cluster, own = self.sink.cluster, claim.only([tp])
        sizes = self._sizes(tp)
        with moving(cluster, self.sink.mode, own, sizes.values()) as move:
            move.writer.begin()
            self._send(move.writer, tp, sizes)
            write_positions(cluster, move, own, counts)
            move.writer.commit()

    def write(self, tp: TopicPartition) -> None:
        """The records of one topic-partition, without a transaction."""
        sizes = self._sizes(tp)
        with self.sink.cluster.plain(sizes.values()) as plain:
            self._send(plain, tp, sizes)
            plain.finish()

    def _of(self, tp: TopicPartition) -> list[Reject]:
        return [one for one in self.rejects if one.partition == tp]

    def _sizes(self, tp: TopicPartition) -> dict[str, int]:
        """``max.message.bytes`` of the topics that are written to."""
        rejects = [self.sink.rejects_topic] if self._of(tp) else []
        return self.sink.largest([*self.places[tp], *rejects])

    def _send(self, writer: Sender, tp: TopicPartition, sizes: Mapping[str, int]) -> None:
        """Queue messages, in bulk if none has headers or a timestamp."""
        for topic, wanted in self.places[tp].items():
            if self.messages.plain:
                writer.send_columns(topic, self.messages.columns(wanted))
            else:
                writer.send(topic, self.messages.messages(wanted))
        if rejects := self._of(tp):
            topic = self.sink.rejects_topic
            writer.send(topic, dead_letters(rejects, sizes[topic], self.fence))
