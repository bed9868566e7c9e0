"""The source topics: their ids and bounds, and which offsets have a readable record.

Readers of committed records get neither transaction markers nor records of aborted transactions,
and compaction and deletion remove records. Below the last stable offset that answer changes only by
compaction and deletion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
from confluent_kafka.admin import OffsetSpec

from oncely.audit.evidence import Bounds, IntArray, Readable, Span, clipped, moment, runs_of
from oncely.audit.stored.log import Topics
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import TopicMissing
from oncely.kafka import topics as descriptions
from oncely.kafka.client import KafkaAdmin
from oncely.kafka.records import timestamp_of

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
    """

    brokers: str
    topics: Sequence[str]
    kafka: Mapping[str, object] = field(default_factory=dict, repr=False)
    timeout: float = 10.0

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.brokers, self.kafka, self.timeout)

    @cached_property
    def _reader(self) -> Topics:
        return Topics(self.brokers, self.kafka)

    def close(self) -> None:
        """Close the connections."""
        self._admin.close()
        self._reader.close()

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
        """Read near spans of a partition in one go."""
        for unit in _units(spans):
            whole = OffsetRange(unit[0].range.start, unit[-1].range.end)
            tp = unit[0].partition
            runs = self._runs(tp, whole)
            first = self._first([tp])[tp]  # after the read
            for span in unit:
                yield Readable(span, clipped(runs, span.range), first)

    def _runs(self, tp: TopicPartition, range_: OffsetRange) -> IntArray:
        """The readable offsets of a range."""
        parts = [
            np.fromiter((one.offset() for one in messages), dtype=np.int64)
            for messages in self._read(tp, range_)
        ]
        found = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return runs_of(found[found >= range_.start])

    def _read(self, tp: TopicPartition, range_: OffsetRange) -> Iterator[list[Any]]:
        """The messages of a range, as far as the log reaches."""
        end = self._offsets({tp: OffsetSpec.latest()})[tp]
        return self._reader.batches({tp: min(range_.end, end)}, {tp: range_.start})

    def messages(self, tp: TopicPartition, offsets: Sequence[int]) -> Mapping[int, Any]:
        """Read near offsets in one go."""
        first, wanted = self._first([tp])[tp], set(offsets)
        spans = [Span(tp, OffsetRange(at, at + 1)) for at in sorted(wanted) if at >= first]
        found: dict[int, Any] = {}
        for unit in _units(spans):
            whole = OffsetRange(unit[0].range.start, unit[-1].range.end)
            for some in self._read(tp, whole):
                found |= {one.offset(): one for one in some if one.offset() in wanted}
        return found

    def times(
        self, around: Mapping[TopicPartition, Position]
    ) -> Mapping[TopicPartition, tuple[datetime | None, datetime | None]]:
        """Timestamps of the records before and at an offset, of all partitions together."""
        found: dict[TopicPartition, tuple[datetime | None, datetime | None]] = {}
        left, back = dict(around), _BACK
        while left:
            for tp, (before, after) in self._reader.around(left, back).items():
                found[tp] = _time(before), _time(after)
                if before is not None or left[tp] <= back:
                    del left[tp]
            back *= 16
        return found


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
    milliseconds = timestamp_of(message)
    return None if milliseconds is None else moment(milliseconds)
