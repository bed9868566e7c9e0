"""The source topics: their ids and bounds, and which offsets have a readable record.

Readers of committed records get neither transaction markers nor records of aborted transactions,
and compaction and deletion remove records. Below the last stable offset that answer changes only by
compaction and deletion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import confluent_kafka as ck
import numpy as np
from confluent_kafka.admin import OffsetSpec

from oncely.audit.evidence import (
    Bounds,
    IntArray,
    Readable,
    Span,
    clipped,
    moment,
    no_runs,
    runs_of,
)
from oncely.audit.spark_offsets import readable_runs
from oncely.clients.kafka import topics as descriptions
from oncely.clients.kafka.client import KafkaAdmin
from oncely.clients.kafka.range_reader import RangeReader
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, SourceIdentity, TopicPartition
from oncely.errors import TopicMissing

_UNIT = 1_000_000  # offsets that are read in one go, at most
_NEAR = 10_000  # offsets: reading over so many is faster than a seek
_BACK = 64  # offsets, to look for the record before an offset


@dataclass
class KafkaLog:
    """Topics on a cluster.

    Attributes:
        brokers: ``host:port``, separated by commas.
        topics: the topics that the pipeline reads.
        kafka: librdkafka's properties; may contain secrets.
        timeout: seconds to wait for a response.
        spark: opens a Spark session, for large reads; None: a consumer reads all.
        spark_from: the number of offsets from which on Spark reads them: its start takes about as
            long as a consumer takes for half as many.
    """

    brokers: str
    topics: Sequence[str]
    kafka: Mapping[str, object] = field(default_factory=dict, repr=False)
    timeout: float = 10.0
    spark: Callable[[], AbstractContextManager[Any]] | None = field(default=None, repr=False)
    spark_from: int = 5_000_000

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.brokers, self.kafka, self.timeout)

    def close(self) -> None:
        """Close the connections."""
        self._admin.close()

    # -- ids and bounds --------------------------------------------------------------------

    def identity(self) -> SourceIdentity:
        """Cluster and topic ids."""
        ids = self._described(descriptions.ids(self._admin, self.topics))
        cluster = self._admin.one(
            "describe the cluster",
            lambda client, wait: {"": client.describe_cluster(request_timeout=wait)},
        )[""]
        # URL-safe Base64: the spelling in the ledger, and of Kafka's own tools.
        spelled = {name: one.replace("+", "-").replace("/", "_") for name, one in ids.items()}
        return SourceIdentity(str(cluster.cluster_id), spelled)

    def bounds(self) -> Mapping[TopicPartition, Bounds]:
        """First offset and last stable offset, requested in this order: they never cross."""
        partitions = self._partitions()
        first = self._first(partitions)
        end = self._offsets(dict.fromkeys(partitions, OffsetSpec.latest()))
        return {tp: Bounds(first[tp], end[tp]) for tp in partitions}

    def compacted(self) -> frozenset[str]:
        """The topics with cleanup.policy=compact."""
        return frozenset(descriptions.compacted(self._admin, self.topics))

    def offsets_at(self, at: datetime) -> Mapping[TopicPartition, Position]:
        """The first record at or after a time; the end if there is none."""
        partitions = self._partitions()
        spec = OffsetSpec.for_timestamp(max(0, int(at.timestamp() * 1000)))
        found = self._offsets(dict.fromkeys(partitions, spec))
        later = [tp for tp, offset in found.items() if offset < 0]
        return found | self._offsets(dict.fromkeys(later, OffsetSpec.latest()))

    def _partitions(self) -> list[TopicPartition]:
        found = self._described(descriptions.described(self._admin, self.topics))
        return sorted(
            TopicPartition(name, number) for name, count in found.items() for number in range(count)
        )

    def _described(self, found: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in self.topics if found.get(name) is None]
        if missing:
            raise TopicMissing(
                "source.topics",
                f"no such topic on {self.brokers}: {', '.join(map(repr, missing))}",
                way_out="without its topic nothing can be compared; correct the name, or check"
                " that this user may Describe it: a topic that may not be seen looks missing",
            )
        return dict(found)

    def _first(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Position]:
        return self._offsets(dict.fromkeys(partitions, OffsetSpec.earliest()))

    def _offsets(
        self, wanted: Mapping[TopicPartition, OffsetSpec]
    ) -> dict[TopicPartition, Position]:
        return descriptions.offsets(self._admin, "look up offsets", wanted)

    # -- readable offsets ------------------------------------------------------------------

    def readable(self, spans: Sequence[Span]) -> Iterator[Readable]:
        """Read near spans of a partition in one go, by one consumer; or all by Spark."""
        if not spans:
            return
        wanted = sum(span.range.end - span.range.start for span in spans)
        hulls = _hulls(spans)
        dense = 2 * wanted >= sum(one.end - one.start for one in hulls.values())
        if self.spark is not None and dense and wanted >= self.spark_from:
            yield from self._by_spark(self.spark, spans, hulls)
            return
        with closing(RangeReader(self.brokers, self.kafka)) as reader:
            for unit in _units(spans):
                whole = OffsetRange(unit[0].range.start, unit[-1].range.end)
                tp = unit[0].partition
                runs = _runs(reader, tp, whole)
                first = self._first([tp])[tp]  # after the read
                for span in unit:
                    yield Readable(span, clipped(runs, span.range), first)

    def _by_spark(
        self,
        spark: Callable[[], AbstractContextManager[Any]],
        spans: Sequence[Span],
        hulls: Mapping[TopicPartition, OffsetRange],
    ) -> Iterator[Readable]:
        low = self._first(sorted(hulls))
        ranges = {
            tp: OffsetRange(max(one.start, low[tp]), one.end)
            for tp, one in hulls.items()
            if one.end > low[tp]
        }
        with spark() as session:
            runs = readable_runs(session, self.brokers, self.kafka, ranges) if ranges else {}
        first = self._first(sorted(hulls))  # after the read
        for span in spans:
            tp = span.partition
            yield Readable(span, clipped(runs.get(tp, no_runs()), span.range), first[tp])

    def times(
        self, around: Mapping[TopicPartition, Position]
    ) -> Mapping[TopicPartition, tuple[datetime | None, datetime | None]]:
        """Timestamps of the records before and at an offset, of all partitions together."""
        found: dict[TopicPartition, tuple[datetime | None, datetime | None]] = {}
        left, back = dict(around), _BACK
        with closing(RangeReader(self.brokers, self.kafka)) as reader:
            while left:
                for tp, (before, after) in reader.around(left, back).items():
                    found[tp] = _time(before), _time(after)
                    if before is not None or left[tp] <= back:
                        del left[tp]
                back *= 16
        return found


def _hulls(spans: Sequence[Span]) -> dict[TopicPartition, OffsetRange]:
    """By partition the offsets from the first span to the last."""
    found: dict[TopicPartition, OffsetRange] = {}
    for tp, range_ in spans:
        start = found[tp].start if tp in found else range_.start
        found[tp] = OffsetRange(start, range_.end)
    return found


def _runs(reader: RangeReader, tp: TopicPartition, range_: OffsetRange) -> IntArray:
    """The readable offsets of a range."""
    parts = [
        np.fromiter((one.offset() for one in messages), dtype=np.int64)
        for messages in reader.read(tp, range_)
    ]
    found = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return runs_of(found[found >= range_.start])


def _units(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Groups of near spans of one partition."""
    unit: list[Span] = []
    for span in spans:
        if unit and not (
            span.partition == unit[0].partition
            and 0 <= span.range.start - unit[-1].range.end <= _NEAR
            and span.range.end - unit[0].range.start <= _UNIT
        ):
            yield unit
            unit = []
        unit.append(span)
    if unit:
        yield unit


def _time(message: Any | None) -> datetime | None:
    if message is None:
        return None
    kind, milliseconds = message.timestamp()
    return None if kind == ck.TIMESTAMP_NOT_AVAILABLE else moment(milliseconds)
