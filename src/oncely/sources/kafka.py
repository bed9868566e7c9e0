"""Kafka metadata and single records, read without Spark: topic ids, bounds of the logs, records.

Every call takes a bounded time. "End" is the last stable offset: the first offset of the oldest
open transaction, or the high watermark when none is open (KIP-98). Readers with ``read_committed``
read up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import confluent_kafka as ck
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec

from oncely.clients.kafka.client import KafkaAdmin, largest_fetch
from oncely.clients.kafka.groups import Member, members
from oncely.clients.kafka.reader import SILENCE, Reader
from oncely.clients.kafka.records import KafkaRecord
from oncely.clients.kafka.topics import compacted, largest_batch, listed_offsets, offsets
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import TopicMissing, Unavailable, WrongInput
from oncely.sources.start import Moment, Start

_FEW = 100  # single records
_NEAR = 100  # mean distance of offsets
_NO_SUCH_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION)


class Watermarks(NamedTuple):
    """The offsets that bound a partition: ``low <= stable <= high``.

    Attributes:
        low: the first offset that is still in the topic.
        stable: the last stable offset; the end for readers of committed records.
        high: the high watermark, beyond the last record of any transaction.
    """

    low: Position
    stable: Position
    high: Position


class Look(NamedTuple):
    """A source at one moment.

    Attributes:
        topic_ids: the ids of the topics.
        ends: the last stable offset of every partition.
        leader_epochs: the leader epoch of every partition when its end was read; unknown ones are
            left out. No record below the end has a later one.
    """

    topic_ids: dict[str, str]
    ends: dict[TopicPartition, Position]
    leader_epochs: dict[TopicPartition, int]


@dataclass
class KafkaSource:
    """Topics on a cluster. Picklable; clients are created at first use and are not shared across
    forks.

    Attributes:
        brokers: ``host:port``, separated by commas.
        topics: the topics that are read.
        kafka: librdkafka's properties, from ``[source.kafka]``. May contain secrets; never in a
            repr.
        timeout: seconds to wait for a response.
    """

    brokers: str
    topics: Sequence[str]
    kafka: Mapping[str, object] = field(default_factory=dict, repr=False)
    timeout: float = 10.0
    _admin: KafkaAdmin | None = field(default=None, init=False, repr=False, compare=False)
    _readers: dict[tuple[bool, bool], Reader] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_admin": None, "_readers": {}}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the clients; the next call creates new ones."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._admin is not None:
            self._admin.close()
        self._admin = None

    def check_properties(self) -> None:
        """Refuse properties of which librdkafka refuses a consumer, but not another client.

        Raises:
            ConfigError: the error names the property.
        """
        with closing(Reader(self.brokers, self.kafka)) as reader:
            reader.check()

    def identity(self) -> SourceIdentity:
        """Cluster id and topic ids (KIP-78, KIP-516), read from the cluster now.

        Raises:
            TopicMissing: a topic is missing (``source.topics``).
            ConfigError: the broker refuses the client.
            Unavailable: no answer.
        """
        ids = self.topic_ids()
        cluster = self._asking.one(
            "describe the cluster",
            lambda client, wait: {"": client.describe_cluster(request_timeout=wait)},
        )[""]
        return SourceIdentity(str(cluster.cluster_id), ids)

    def topic_ids(self) -> dict[str, str]:
        """The ids of the topics, in one request. Raises the errors of :meth:`identity`."""
        return _ids(self._describe())

    def look(self) -> Look:
        """The topics' ids, ends and leader epochs, in two requests. Raises the errors of
        :meth:`identity`."""
        topics = self._describe()
        latest = dict.fromkeys(_partitions(topics), OffsetSpec.latest())
        found = listed_offsets(self._asking, "look up offsets", latest, committed=True)
        ends = {tp: int(one.offset) for tp, one in found.items()}
        return Look(_ids(topics), ends, _epochs(found))

    def partitions(self) -> list[TopicPartition]:
        """All present partitions of the topics, sorted. Raises the errors of :meth:`identity`."""
        return _partitions(self._describe())

    def earliest(self) -> dict[TopicPartition, Position]:
        """The first offset of every partition. Raises the errors of :meth:`identity`."""
        return self._offsets(dict.fromkeys(self.partitions(), OffsetSpec.earliest()))

    def stable_end(self) -> dict[TopicPartition, Position]:
        """The last stable offset of every partition. Raises the errors of :meth:`identity`."""
        return self._offsets(dict.fromkeys(self.partitions(), OffsetSpec.latest()))

    def watermarks(self) -> dict[TopicPartition, Watermarks]:
        """Low watermark, last stable offset and high watermark of every partition.

        They are requested in this order, so that they never cross although the log moves meanwhile:
        each of them only grows. Raises the errors of :meth:`identity`.
        """
        partitions = self.partitions()
        low = self._offsets(dict.fromkeys(partitions, OffsetSpec.earliest()))
        stable = self._offsets(dict.fromkeys(partitions, OffsetSpec.latest()))
        high = self._offsets(dict.fromkeys(partitions, OffsetSpec.latest()), committed=False)
        return {tp: Watermarks(low[tp], stable[tp], high[tp]) for tp in partitions}

    def leader_epochs(self) -> dict[TopicPartition, int]:
        """The present leader epoch of every partition; unknown ones are left out.

        Raises the errors of :meth:`identity`.
        """
        latest = dict.fromkeys(self.partitions(), OffsetSpec.latest())
        return _epochs(listed_offsets(self._asking, "look up offsets", latest, committed=False))

    def truncated(
        self, positions: Mapping[TopicPartition, tuple[Position, int]], *, timeout: float = SILENCE
    ) -> dict[TopicPartition, str]:
        """The partitions that have lost records before a position, and the broker's message.

        An unclean leader election, or a broker that returns with an empty disk, truncates the log.
        When new records grow it beyond an old position again, the position alone does not show the
        loss, and reading on would skip the new records below it. Each leader writes its epoch into
        the batches that it appends, so the leader can return the end of an epoch's records. If this
        end is below the position, records that were read are gone (KIP-320).

        Args:
            positions: per partition the next offset to read, which is still in the log, and a
                leader epoch that is no older than the record before it.
            timeout: seconds.

        Raises:
            ConfigError: the broker refuses the client.
            Unavailable: no answer.
        """
        with closing(Reader(self.brokers, self.kafka, committed=False, sparse=True)) as reader:
            return reader.refused(positions, timeout)

    def offsets_at(self, timestamp_ms: int) -> dict[TopicPartition, Position]:
        """The first record at or after a time, in every partition; the end if there is none.

        Raises the errors of :meth:`identity`.
        """
        # Negative numbers name special offsets in the protocol, so 1969 is requested as 1970.
        spec = OffsetSpec.for_timestamp(max(0, timestamp_ms))
        found = self._offsets(dict.fromkeys(self.partitions(), spec))
        if all(offset >= 0 for offset in found.values()):
            return found
        none_later = [tp for tp, offset in found.items() if offset < 0]
        return found | self._offsets(dict.fromkeys(none_later, OffsetSpec.latest()))

    def resolve_start(self, start: Start) -> dict[TopicPartition, Position]:
        """Resolve ``source.start`` to a present position for every partition.

        Raises the errors of :meth:`identity`.
        """
        if isinstance(start, Moment):
            return self.offsets_at(start.timestamp_ms)
        return self.earliest() if start == "earliest" else self.stable_end()

    def mirror(self, group: str, positions: Mapping[TopicPartition, Position]) -> None:
        """Show positions to lag tools as the committed offsets of a consumer group.

        For display only: they are never read back. They may go backwards, after a reset.

        Raises:
            Unavailable: the group was not written, for any reason: log it and continue.
        """
        if not positions:
            return
        offsets = [ck.TopicPartition(tp.topic, tp.partition, at) for tp, at in positions.items()]
        request = [ck.ConsumerGroupTopicPartitions(group, offsets)]
        doing = f"mirror the position to group {group!r}"
        try:
            self._asking.one(
                doing,
                lambda client, wait: client.alter_consumer_group_offsets(
                    request, request_timeout=wait
                ),
                lambda answer: (one.error for one in answer.topic_partitions if one.error),
            )
        except WrongInput as error:
            raise Unavailable(f"{doing}: {error}") from error

    def members(self, group: str) -> list[Member]:
        """The members of a consumer group; none if there is no such group.

        Raises:
            ConfigError: ``worker.group``, the broker denies it; or it refuses the client.
            Unavailable: no answer.
        """
        return [Member.of(one) for one in members(self._asking, group)]

    def mirrored(self, group: str) -> dict[TopicPartition, Position]:
        """The committed offsets of the group for these topics.

        Raises:
            Unavailable: no answer.
        """
        answer = self._asking.one(
            f"read group {group!r}",
            lambda client, wait: client.list_consumer_group_offsets(
                [ck.ConsumerGroupTopicPartitions(group)], request_timeout=wait
            ),
            lambda answer: (one.error for one in answer.topic_partitions if one.error),
        )[group]
        return {
            TopicPartition(one.topic, one.partition): one.offset
            for one in answer.topic_partitions
            if one.topic in self.topics and one.offset >= 0
        }

    def read(
        self, ranges: Mapping[TopicPartition, OffsetRange], needs: frozenset[str]
    ) -> Iterator[pa.Table]:
        """The committed records of ranges, of all partitions together.

        A normal end of the iteration proves that every range was read to its end.

        Args:
            ranges: they end at or below the last stable offset.
            needs: names of :data:`oncely.clients.kafka.records.RECORDS`.

        Raises:
            DataLost: records of a range were deleted.
            ConfigError: the broker refuses the client.
            Unavailable: no answer.
        """
        with closing(Reader(self.brokers, self.kafka)) as reader:
            yield from reader.tables(ranges, needs)

    def fetch(
        self, partition: TopicPartition, offsets: Sequence[int], *, timeout: float = SILENCE
    ) -> dict[int, KafkaRecord]:
        """Read single records again, by offset. Records that are no longer in the topic are absent.

        Raises:
            ConfigError: the broker refuses the client.
            Unavailable: no message arrived for ``timeout`` seconds.
        """
        return self._single(offsets, committed=False).at(partition, offsets, timeout)

    def fetch_committed(
        self, partition: TopicPartition, offsets: Sequence[int]
    ) -> dict[int, KafkaRecord]:
        """Like :meth:`fetch`, without records of aborted transactions."""
        return self._single(offsets, committed=True).at(partition, offsets)

    def _single(self, offsets: Sequence[int], *, committed: bool) -> Reader:
        """A reader of single records; it reads ahead where they are close to each other."""
        spread = max(offsets, default=0) - min(offsets, default=0)
        sparse = spread > _NEAR * len(offsets) or len(offsets) < _FEW
        if (committed, sparse) not in self._readers:
            self._readers[committed, sparse] = Reader(
                self.brokers, self.kafka, committed=committed, sparse=sparse
            )
        return self._readers[committed, sparse]

    def compacted(self) -> list[str]:
        """The topics that are compacted. Raises the errors of :meth:`identity`."""
        return compacted(self._asking, self.topics)

    def too_large(self) -> list[str]:
        """The topics that accept larger batches than a response may be. Raises the errors of
        :meth:`identity`."""
        bound, sizes = largest_fetch(self.kafka), largest_batch(self._asking, self.topics)
        return [
            f"{topic} accepts batches of {size:,} bytes (max.message.bytes), and a response has"
            f" {bound:,} at most: raise receive.message.max.bytes in [source.kafka]"
            for topic, size in sizes.items()
            if size > bound
        ]

    def timestamps_at(
        self, positions: Mapping[TopicPartition, Position], *, timeout: float = SILENCE
    ) -> dict[TopicPartition, int | None]:
        """The timestamp of the next record to read, in ms since 1970, in every partition.

        None if there is no record left, or it has no timestamp.

        Raises:
            ConfigError: the broker refuses the client.
            Unavailable: no message arrived for ``timeout`` seconds.
        """
        with closing(Reader(self.brokers, self.kafka, sparse=True)) as reader:
            found = reader.first(positions, frozenset({"timestamp"}), timeout)
        return {
            tp: None if record is None else _milliseconds(record["timestamp"])
            for tp, record in found.items()
        }

    @property
    def _asking(self) -> KafkaAdmin:
        if self._admin is None:
            self._admin = KafkaAdmin(self.brokers, self.kafka, self.timeout)
        return self._admin

    def _describe(self) -> dict[str, Any]:
        doing = "describe the topics"
        names = ck.TopicCollection(list(self.topics))
        answers = self._asking.ask(
            doing, lambda client, wait: client.describe_topics(names, request_timeout=wait)
        )
        missing = [name for name, answer in answers.items() if _is_missing(answer)]
        if missing:
            raise TopicMissing(
                "source.topics",
                f"no such topic on {self.brokers}: {', '.join(map(repr, missing))}",
                way_out="create it (kafka-topics --create), correct the name, or check that this "
                "user may Describe it: a topic that may not be seen looks like a missing one",
            )
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise self._asking.sorted(answer, doing)
        return answers

    def _offsets(
        self, wanted: Mapping[TopicPartition, OffsetSpec], *, committed: bool = True
    ) -> dict[TopicPartition, Position]:
        return offsets(self._asking, "look up offsets", wanted, committed=committed)


def _ids(topics: Mapping[str, Any]) -> dict[str, str]:
    # URL-safe Base64: the spelling of topic ids in Kafka's own tools.
    return {
        name: str(topic.topic_id).replace("+", "-").replace("/", "_")
        for name, topic in topics.items()
    }


def _partitions(topics: Mapping[str, Any]) -> list[TopicPartition]:
    return sorted(
        TopicPartition(name, info.id) for name, topic in topics.items() for info in topic.partitions
    )


def _epochs(found: Mapping[TopicPartition, Any]) -> dict[TopicPartition, int]:
    return {
        tp: one.leader_epoch
        for tp, one in found.items()
        if one.leader_epoch is not None and one.leader_epoch >= 0
    }


def _milliseconds(timestamps: pa.ChunkedArray) -> int | None:
    micros: int | None = timestamps[0].cast(pa.int64()).as_py()
    return None if micros is None else micros // 1000


def _is_missing(answer: object) -> bool:
    return isinstance(answer, KafkaException) and answer.args[0].code() in _NO_SUCH_TOPIC
