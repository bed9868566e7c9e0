"""Kafka as a source: topic ids, bounds of the logs, single records, lag, permissions, samples.

Every call takes a bounded time. "End" is the last stable offset: the first offset of the oldest
open transaction, or the high watermark when none is open (KIP-98). Readers with ``read_committed``
read up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import confluent_kafka as ck
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec

from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import OncelyError, SourceMismatch, TopicMissing, Unavailable, WrongInput
from oncely.kafka.client import (
    SILENCE,
    ErrorState,
    KafkaAdmin,
    committed_offsets,
    largest_fetch,
    make,
    members,
)
from oncely.kafka.start import Start, StartTime
from oncely.kafka.topics import compacted, largest_batch, listed_offsets, offsets

if TYPE_CHECKING:
    from oncely.kafka.reader import RecordReader
    from oncely.kafka.records import KafkaRecord

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
    _readers: dict[tuple[bool, bool], RecordReader] = field(
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

    def reader(self, *, committed: bool = True, sparse: bool = False) -> RecordReader:
        """A new reader of the topics' records; the arguments are those of the class."""
        from oncely.kafka.reader import RecordReader  # not for status

        return RecordReader(self.brokers, self.kafka, committed=committed, sparse=sparse)

    def check_properties(self) -> None:
        """Refuse properties of which librdkafka refuses a consumer, but not another client.

        Raises:
            ConfigError: the error names the property.
        """
        with closing(self.reader()) as reader:
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
        with closing(self.reader(committed=False, sparse=True)) as reader:
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
        if isinstance(start, StartTime):
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

    def members(self, group: str) -> list[GroupMember]:
        """The members of a consumer group; none if there is no such group.

        Raises:
            ConfigError: ``worker.group``, the broker denies it; or it refuses the client.
            Unavailable: no answer.
        """
        return [GroupMember.of(one) for one in members(self._asking, group)]

    def mirrored(self, group: str) -> dict[TopicPartition, Position]:
        """The committed offsets of the group for these topics.

        Raises the errors of :meth:`identity`.
        """
        # Uncommitted: offsets that are pending in a transaction are not awaited.
        own = {
            "group.id": group,
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
        }
        with closing(
            make(ck.Consumer, self.brokers, self.kafka, ErrorState(self.brokers), **own)
        ) as consumer:
            found = committed_offsets(
                consumer, self.partitions(), self.timeout, f"read group {group!r}", self.brokers
            )
        return {
            TopicPartition(one.topic, one.partition): one.offset for one in found if one.offset >= 0
        }

    def read(
        self, ranges: Mapping[TopicPartition, OffsetRange], needs: frozenset[str]
    ) -> Iterator[pa.Table]:
        """The committed records of ranges, of all partitions together.

        A normal end of the iteration proves that every range was read to its end.

        Args:
            ranges: they end at or below the last stable offset.
            needs: names of :data:`oncely.kafka.records.RECORDS`.

        Raises:
            DataLost: records of a range were deleted.
            ConfigError: the broker refuses the client.
            Unavailable: no answer.
        """
        with closing(self.reader()) as reader:
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

    def _single(self, offsets: Sequence[int], *, committed: bool) -> RecordReader:
        """A reader of single records; it reads ahead where they are close to each other."""
        spread = max(offsets, default=0) - min(offsets, default=0)
        sparse = spread > _NEAR * len(offsets) or len(offsets) < _FEW
        if (committed, sparse) not in self._readers:
            self._readers[committed, sparse] = self.reader(committed=committed, sparse=sparse)
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
        with closing(self.reader(sparse=True)) as reader:
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


class PartitionLag(NamedTuple):
    """One line of ``oncely status``.

    Attributes:
        topic: the topic.
        partition: its partition.
        position: the next offset to read; None if the ledger has none yet.
        end: the last stable offset.
        lag: offsets between the two; holes are included, so it is no record count.
        lag_seconds: age of the next record to read; 0 if all records are read, None if it is
            unknown: no timestamp, or only transaction markers are left.
    """

    topic: str
    partition: int
    position: Position | None
    end: Position
    lag: int
    lag_seconds: float | None


def measure_lag(
    source: KafkaSource, positions: Mapping[TopicPartition, Position], now_ms: int
) -> list[PartitionLag]:
    """Compare the present positions and ends of every partition.

    A partition without a position is counted from its first offset, at which reading will begin.

    Args:
        source: the topics.
        positions: the ledger's positions.
        now_ms: the present, in ms since 1970.

    Raises:
        ConfigError: a topic is missing, or the broker refuses the client.
        Unavailable: no answer.
    """
    marks = source.watermarks()
    reading = {tp: max(positions.get(tp, mark.low), mark.low) for tp, mark in marks.items()}
    behind = {tp: at for tp, at in reading.items() if at < marks[tp].stable}
    ages = source.timestamps_at(behind) if behind else {}
    lines = []
    for tp, mark in sorted(marks.items()):
        position = positions.get(tp)
        lag = max(0, mark.stable - (mark.low if position is None else position))
        lag_seconds = _seconds(ages, behind, tp, now_ms)
        lines.append(PartitionLag(*tp, position, mark.stable, lag, lag_seconds))
    return lines


def open_transactions(
    source: KafkaSource, lines: Iterable[PartitionLag], now_ms: int
) -> dict[TopicPartition, float]:
    """The partitions at whose end a transaction is open: seconds since its first record.

    Its first record is the one at the last stable offset, which has not moved since ``lines``.
    Raises the errors of :func:`measure_lag`.
    """
    ends = {TopicPartition(one.topic, one.partition): one.end for one in lines}
    marks = source.watermarks().items()
    hidden = [(tp, mark.stable) for tp, mark in marks if ends.get(tp) == mark.stable < mark.high]
    firsts = [
        (tp, one.timestamp_ms) for tp, at in hidden for one in source.fetch(tp, [at]).values()
    ]
    return {tp: (now_ms - at) / 1000 for tp, at in firsts if at is not None}


def _seconds(
    ages: Mapping[TopicPartition, int | None],
    behind: Mapping[TopicPartition, Position],
    tp: TopicPartition,
    now_ms: int,
) -> float | None:
    if tp not in behind:
        return 0.0
    timestamp_ms = ages.get(tp)
    return None if timestamp_ms is None else max(0, now_ms - timestamp_ms) / 1000


class Missing(NamedTuple):
    """A permission that is missing.

    Attributes:
        text: a part of a sentence.
        shows_only: a run works without it, and does not show its position in the group.
    """

    text: str
    shows_only: bool = False


def missing_permissions(source: KafkaSource, group: str | None) -> list[Missing]:
    """Each permission that is missing to read, or to mirror to ``group``.

    If the broker cannot answer, the permissions are assumed: the first read will fail otherwise.

    Raises:
        ConfigError: the broker refuses the client altogether.
        Unavailable: no answer.
    """
    with closing(KafkaAdmin(source.brokers, source.kafka, source.timeout)) as admin:
        return _missing(admin, source, group)


def _missing(admin: KafkaAdmin, source: KafkaSource, group: str | None) -> list[Missing]:
    names = ck.TopicCollection(list(source.topics))
    topics = admin.ask(
        "ask for permissions",
        lambda client, wait: client.describe_topics(
            names, include_authorized_operations=True, request_timeout=wait
        ),
    )
    missing = [
        Missing(f"Read on topic {name!r}") for name, found in topics.items() if not _may_read(found)
    ]
    if group is not None and not _may_read(_group(admin, group)):
        missing.append(Missing(f"Read on group {group!r}, to show the position to lag tools", True))
    return missing


def _group(admin: KafkaAdmin, group: str) -> Any:
    try:
        return admin.ask(
            "ask for permissions",
            lambda client, wait: client.describe_consumer_groups(
                [group], include_authorized_operations=True, request_timeout=wait
            ),
        )[group]
    except OncelyError:  # display only: no reason to refuse a pipeline
        return None


def _may_read(found: Any) -> bool:
    if isinstance(found, Exception):
        code = found.args[0].code() if isinstance(found, ck.KafkaException) else None
        return code not in (
            ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
            ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
        )
    operations = getattr(found, "authorized_operations", None)
    return not operations or any(one.name in ("READ", "ALL") for one in operations)


def needed_acls(source: KafkaSource, group: str | None) -> list[str]:
    """``kafka-acls`` commands that grant exactly the permissions that a pipeline needs."""
    user = source.kafka.get("sasl.username") or "ANONYMOUS"
    head = f"kafka-acls --bootstrap-server {source.brokers} --add --allow-principal User:{user}"
    acls = [f"{head} --operation Read --operation Describe --topic {one}" for one in source.topics]
    if group is not None:
        acls.append(f"{head} --operation Read --group {group}")
    return acls


def sample(source: KafkaSource, count: int) -> pa.Table:
    """Committed records, half of them the oldest and half the newest of each partition, by
    partition and ascending: a table of the form of :data:`oncely.kafka.records.RECORDS`.

    Old records have the old form of what producers have changed since. Nothing is written to the
    cluster, and no group is used.

    Args:
        source: the topics.
        count: the number of records, fewer if there are not as many.

    Raises:
        TopicMissing: a topic is missing.
        ConfigError: the broker refuses the client.
        Unavailable: no answer.
    """
    from oncely.kafka.records import EVERY_COLUMN, table_of

    marks = source.watermarks()
    with closing(source.reader()) as reader:
        found = [
            records
            for tp, share in sorted(shares(marks, count).items())
            for records in _read(reader, tp, marks[tp], share)
        ]
    return pa.concat_tables([table_of([], EVERY_COLUMN), *found]).unify_dictionaries()


def shares(marks: Mapping[TopicPartition, Watermarks], count: int) -> dict[TopicPartition, int]:
    """The number of offsets of each partition, as even as their sizes allow."""
    sizes = {tp: one.stable - one.low for tp, one in marks.items() if one.stable > one.low}
    found, left = {}, count
    for at, tp in enumerate(sorted(sizes, key=lambda tp: (sizes[tp], tp))):
        found[tp] = min(sizes[tp], -(-left // (len(sizes) - at)))
        left -= found[tp]
    return {tp: share for tp, share in found.items() if share}


def _read(
    reader: RecordReader, tp: TopicPartition, marks: Watermarks, share: int
) -> Iterator[pa.Table]:
    newest = marks.stable - share // 2
    yield from _oldest(reader, tp, OffsetRange(marks.low, newest), share - share // 2)
    yield from reader.tables({tp: OffsetRange(newest, marks.stable)}, lost="skip")


def _oldest(
    reader: RecordReader, tp: TopicPartition, range_: OffsetRange, most: int
) -> Iterator[pa.Table]:
    """The first records of a range: offsets without one, such as aborted records, don't count."""
    with closing(reader.tables({tp: range_}, lost="skip")) as tables:
        for records in tables:
            yield records.slice(0, most)
            most -= records.num_rows
            if most <= 0:
                return


def refuse_cut(
    log: KafkaSource,
    now: Mapping[TopicPartition, int],
    positions: Mapping[TopicPartition, Position],
    noted: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Refuse a log that was truncated before a position.

    Args:
        log: the source.
        now: its leader epochs.
        positions: the ledger's positions that are still in the log.
        noted: the leader epochs that the ledger has noted.

    Returns:
        The leader epochs that differ from the noted ones.

    Raises:
        SourceMismatch: records that were read are gone.
        Unavailable: no answer.
    """
    changed = {tp: one for tp, one in now.items() if tp in positions and noted.get(tp) != one}
    asked = {tp: (positions[tp], noted[tp]) for tp in changed if tp in noted}
    for tp, why in sorted(log.truncated(asked).items()):
        raise SourceMismatch(
            f"{tp}: the topic has gone back: its log was cut before position {positions[tp]}, and"
            f" other records have taken the place of those that were read ({why})",
            way_out="restore the topic, or set the positions with `oncely offsets reset`; an"
            " unclean leader election does this (unclean.leader.election.enable), or a broker"
            " that has lost its disk",
        )
    return changed


class GroupMember(NamedTuple):
    """A member of a consumer group.

    Attributes:
        client: its client id.
        host: the address from which it is connected.
        partitions: those that are assigned to it.
    """

    client: str
    host: str
    partitions: tuple[TopicPartition, ...]

    @classmethod
    def of(cls, described: Any) -> GroupMember:
        """The member of a description."""
        assigned = described.assignment.topic_partitions if described.assignment else ()
        partitions = sorted(TopicPartition(one.topic, one.partition) for one in assigned)
        return cls(described.client_id, described.host.removeprefix("/"), tuple(partitions))
