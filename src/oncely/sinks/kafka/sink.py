"""The Kafka sink: records, rejects, offsets and ledger in one transaction of the cluster."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.clients.kafka import producer_settings, topics
from oncely.clients.kafka.sender import Sender
from oncely.core.batch import Batch, BudgetSpent, Chunk, IntArray, Reject, Staged
from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence, Opened, Takeover
from oncely.core.topics import TopicPartition
from oncely.errors import check
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.compare_and_set import moving, run_concurrently, write_positions
from oncely.ledgers.topic.ledger import TopicLedger
from oncely.ledgers.topic.records import Mode
from oncely.ledgers.topic.takeover import same_outputs
from oncely.sinks.kafka import letters, publishing
from oncely.sinks.kafka.messages import Encoded, encode
from oncely.sinks.kafka.record_format import RecordFormat
from oncely.sinks.kafka.staging import Staging, staged_batches


@dataclass
class KafkaSink:
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
        staging: makes this a run of batch commit, and is the folder where its tasks stage: a
            URL or an absolute path. It may hold a key, so it is in no repr.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    place: PipelineTopics
    form: RecordFormat
    rejects_topic: str
    create: bool = True
    headers: bool = False
    staging: str = field(default="", repr=False)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _limits: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def ledger(self) -> TopicLedger:
        """Epochs and positions, in the ledger topic and the group."""
        target = self.form.target
        return TopicLedger(self.place, self.mode, target, self._outputs, self.create, self.run)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ledger": self.ledger}  # a task's copy of it knows that it is one

    @property
    def cluster(self) -> Cluster:
        """The clients of this process."""
        return self.ledger.cluster

    @property
    def mode(self) -> Mode:
        """By which transactional ids this run moves positions."""
        return "batch" if self.staging else "partition"

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
        producer_settings.checked(self.place.producer)
        self.form.bind()
        if self.staging:
            self._staging.check()
        if not self.create:
            topics.require_topics(self.cluster.asker, self.named_topics)

    def prepare(self) -> None:
        """Create the topics that are missing, if they may be."""
        self.bind()

    def bind(self) -> KafkaSink:
        """Look at columns, settings and topics, and create what is missing and may be.

        Raises as :meth:`check` does.
        """
        self.check()
        self._refuse_deleted()
        topics.require_topics(self.cluster.asker, self.named_topics, create=self.create)
        self._limits = topics.largest_batch(self.cluster.asker, self.named_topics)
        return self

    def open(self, takeover: Takeover) -> Opened:
        """Take the ledger over; with a reset a topic that was deleted may be made again."""
        if takeover.reset is None:
            self.bind()
        else:
            topics.require_topics(self.cluster.asker, self.named_topics, create=self.create)
        return self.ledger.open(takeover)

    def close(self) -> None:
        """Close the clients; the next call makes new ones."""
        self.ledger.close()

    # -- partition commit ----------------------------------------------------------------------

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> dict[TopicPartition, Counts]:
        """Write the chunk and move its positions.

        Each topic-partition has a transaction of its own. When one of several fails, others may
        have taken effect: whoever asks the ledger again, as the port demands, skips these.
        """
        check(not self.staging, "a run of batch commit writes records by publishing them")
        # Made before anything is begun: a transaction's time is limited, and dead letters are
        # asked of the broker.
        encoded = encode(chunk, self.form, self.largest)
        if max_rejects is not None and len(encoded.rejections) > max_rejects:
            raise BudgetSpent(encoded.rejections, "decode, transform or topics")
        found = chunk.dead_letters(encoded.rejections) if encoded.rejections else []
        check(len(found) == len(encoded.rejections), "a rejection has no dead letter")
        counts = tally(chunk, encoded)

        def one(tp: TopicPartition) -> None:
            own = [reject for reject in found if reject.partition == tp]
            part = _Part(claim.only([tp]), counts) if claim is not None else None
            self._commit_one(encoded, encoded.of(chunk, tp), own, fence, part)

        if claim is None:
            for tp in sorted(chunk.ranges):
                one(tp)
        else:
            run_concurrently(one, sorted(chunk.ranges))
        return counts

    def _commit_one(
        self,
        encoded: Encoded,
        messages: Mapping[str, IntArray],
        rejects: Sequence[Reject],
        fence: Fence,
        part: _Part | None,
    ) -> None:
        """One topic-partition in one transaction, or its records without one."""
        sizes = self.largest([*messages, *([self.rejects_topic] if rejects else [])])

        def send(writer: Sender) -> None:
            _send(writer, encoded, messages)
            if rejects:
                writer.send(
                    self.rejects_topic, letters.letters(rejects, sizes[self.rejects_topic], fence)
                )

        if part is None:
            with self.cluster.plain(sizes.values()) as plain:
                send(plain)
                plain.finish()
            return
        with moving(self.cluster, "partition", part.claim, sizes.values()) as writer:
            writer.begin()
            send(writer)
            write_positions(self.cluster, writer, "partition", part.claim, part.counts)
            writer.commit()

    # -- batch commit --------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Staged files are named by the batch."""

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Encode a task's rows and keep them in a file of the attempt's own; in an executor."""
        encoded = staged_batches(rows, self.form, self.largest)
        return self._staging.write(fence, batch_id, attempt, encoded)

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Staged rows, rejects and every position in one transaction; in the driver."""
        load = publishing.StagedMessages(self.form, self._staging)
        publishing.Publisher(self.cluster, load, self.rejects_topic, self.largest).publish(
            batch, fence, claim
        )

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Remove staged files that nobody will publish; the number removed."""
        return self._staging.sweep(fence, keep_batches_from)

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _staging(self) -> Staging:
        check(bool(self.staging), "a batch commit needs a place to stage")
        return Staging(self.staging, self.place.pipeline)

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

    def largest(self, names: Sequence[str]) -> dict[str, int]:
        """``max.message.bytes`` of topics, asked once in a process; missing ones are left out."""
        if unknown := [name for name in names if name not in self._limits]:
            asker = self.cluster.asker
            there = topics.described(asker, unknown)
            self._limits |= topics.largest_batch(asker, there)
        return {name: self._limits[name] for name in names if name in self._limits}


@dataclass(frozen=True)
class _Part:
    """What the transaction of one topic-partition claims, and what the history says of it."""

    claim: Claim
    counts: Mapping[TopicPartition, Counts]


def _send(writer: Sender, encoded: Encoded, messages: Mapping[str, IntArray]) -> None:
    """Hand messages over, in bulk where none has headers."""
    for topic, wanted in messages.items():
        if encoded.headers is None:
            writer.send_columns(topic, encoded.columns(wanted))
        else:
            writer.send(topic, encoded.messages(wanted))


def tally(chunk: Chunk, encoded: Encoded) -> dict[TopicPartition, Counts]:
    """Count per topic-partition what became of the chunk's records."""
    rejected = np.zeros(chunk.records, dtype=bool)
    rejected[[one.record for one in encoded.rejections]] = True
    record = np.asarray(encoded.record, dtype=np.int64)
    written = record[~rejected[record]] if len(record) else record
    kept = np.zeros(chunk.records, dtype=bool)
    kept[written] = True
    counts: dict[TopicPartition, Counts] = dict.fromkeys(chunk.ranges, NO_RECORDS)
    for index, tp in enumerate(chunk.partitions):
        own = chunk.partition == index
        if tp in counts:
            counts[tp] = Counts(
                int(own.sum()),
                int((chunk.partition[written] == index).sum()),
                int((own & rejected).sum()),
                int((own & ~rejected & ~kept).sum()),
            )
    return counts
