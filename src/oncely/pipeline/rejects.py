"""Listing, replay and discard of dead letters, with the present settings of the pipeline.

They may be chosen by reason, partition and time.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from oncely.commit import change as commit
from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.config.base import parse_seconds
from oncely.core.batch import Reject, Rejection
from oncely.core.change import Judge, Reprocessed
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import RejectSummary, TopicMissing, WrongInput
from oncely.extras import require
from oncely.kafka.records import shown
from oncely.kafka.start import parse_moment
from oncely.runtimes.chunks import Processing, records_of
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.batch_commit import NO_TOMBSTONES, transform_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.parts import Parts


_PARTITIONS = r"[\w.-]+(:\s*\d+\s*(,\s*\d+\s*)*)?"


@dataclass(frozen=True)
class RejectFilter:
    """Dead letters that have all of these properties.

    Attributes:
        reason: a part of the reason; capitals do not matter.
        partitions: ``topic`` or ``topic:0,1``; empty: all.
        since, before: the least timestamp of the record, and the end of the timestamps, in ms since
            1970. A record without a timestamp is never chosen by them.
    """

    reason: str = ""
    partitions: tuple[str, ...] = ()
    since: int | None = None
    before: int | None = None

    def __call__(self, one: Reject) -> bool:
        """True if the dead letter has the properties."""
        topic, number = one.partition
        named = [
            text.rpartition(":") if ":" in text else (text, "", "") for text in self.partitions
        ]
        inside = [
            not numbers or str(number) in map(str.strip, numbers.split(","))
            for name, _, numbers in named
            if name == topic
        ]
        at = one.timestamp_ms
        return (
            self.reason.lower() in one.reason.lower()
            and (any(inside) or not self.partitions)
            and (self.since is None or (at is not None and at >= self.since))
            and (self.before is None or (at is not None and at < self.before))
        )


def filter_of(
    reason: str | None,
    partition: Sequence[str] | None,
    since: str | None,
    before: str | None = None,
    *,
    dashes: str = "--",
) -> RejectFilter:
    """The filter of options, or of the fields of a form.

    Args:
        reason, partition: see :class:`RejectFilter`.
        since, before: ISO 8601, or an age before now; None: any time.
        dashes: precede the names of options in errors.

    Raises:
        WrongInput: ``since`` or ``before`` is no time, or ``partition`` has another form.
    """
    for text in partition or ():
        if not re.fullmatch(_PARTITIONS, text, re.ASCII):
            raise WrongInput(
                f"{dashes}partition: {text!r} names no partitions",
                way_out="write TOPIC or TOPIC:0,1",
            )
    times = _moment(f"{dashes}since", since), _moment(f"{dashes}before", before)
    return RejectFilter(reason or "", tuple(partition or ()), *times)


def _moment(option: str, text: str | None) -> int | None:
    """A time, or an age before now, in ms since 1970."""
    if text is None:
        return None
    with suppress(ValueError):
        return parse_moment(text).timestamp_ms
    with suppress(ValueError):
        return int((time.time() - _age(text)) * 1000)
    raise WrongInput(
        f"{option}: {text!r} is no time",
        way_out='write ISO 8601, 2026-01-31T12:00:00Z, or an age: 90d, "12 hours"',
    )


def _age(text: str) -> float:
    """Seconds; in addition to the times of a pipeline file, days."""
    days = re.fullmatch(r"(\d{1,6})\s*(?:d|days?)", text.strip().lower())
    return int(days[1]) * 86_400.0 if days else parse_seconds(text)


_GROUPED, _FILTERED = 1_000, 100_000
"""Dead letters that are read to group, and to filter them: they are in memory with their values."""


class RejectReason(NamedTuple):
    """A group of dead letters whose reasons differ in numbers and quoted values only."""

    reason: str
    rejects: int


@dataclass(frozen=True)
class Rejects:
    """Some of a pipeline's dead letters, by topic, partition and offset.

    Attributes:
        listed: the first dead letters.
        total: their total number.
        reasons: the most frequent reasons.
        scanned: the number of dead letters that were grouped and filtered, if there are more; or 0.
    """

    listed: tuple[Reject, ...]
    total: int
    reasons: tuple[RejectReason, ...] = ()
    scanned: int = 0


def rejects(pipeline: Parts, limit: int, which: RejectFilter | None, *, discarded: bool) -> Rejects:
    """See :meth:`oncely.pipeline.Pipeline.rejects`."""
    most = _GROUPED if which is None else _FILTERED
    found, total = pipeline.destination.rejects(max(limit, most), discarded=discarded)
    chosen = [one for one in found if which is None or which(one)]
    summary = RejectSummary.of([one.reason for one in chosen], lambda _: ())
    return Rejects(
        tuple(chosen[:limit]),
        total if which is None else len(chosen),
        tuple(RejectReason(*one) for one in summary.reasons),
        scanned=len(found) if total > len(found) else 0,
    )


def replay(
    pipeline: Parts,
    *,
    spark: SparkSession | None,
    progress: Callable[[int, int], None],
) -> tuple[int, int]:
    """See :meth:`oncely.pipeline.Pipeline.replay`."""
    if pipeline.spark_path is not None and spark is None:
        require("spark", "transform.spark", "a replay")
    destination = pipeline.destination
    destination.check_replay()
    if not destination.look().rejects:
        return 0, 0
    if pipeline.spark_path is not None and spark is None:
        spark = pipeline.start_spark()
    schema = pipeline.row_schema(spark)
    judge = _judge(pipeline, spark, headers="headers" in destination.sink(schema).needs)
    with destination.replaying(schema) as letters:
        return commit.replay(letters, judge, Backoff(), progress=progress)


@dataclass(frozen=True)
class Discarded:
    """Dead letters that were discarded, or would be.

    Attributes:
        reasons: their reasons, masked, with the numbers of dead letters; the most frequent first.
        executed: False: a dry run.
        shown: identifies the dead letters: others have another text.
    """

    reasons: tuple[RejectReason, ...]
    executed: bool
    shown: str

    @property
    def total(self) -> int:
        """The number of dead letters."""
        return sum(one.rejects for one in self.reasons)

    def as_json(self) -> dict[str, Any]:
        """JSON-able values."""
        reasons = [one._asdict() for one in self.reasons]
        return {"discarded": self.total, "executed": self.executed, "reasons": reasons}


class _Chosen:
    """The dead letters that a filter has chosen, in any order, as a sum of digests."""

    def __init__(self, which: RejectFilter, shown: str | None) -> None:
        self._which, self._shown, self._sum = which, shown, 0

    def __call__(self, one: Reject) -> bool:
        if chosen := self._which(one):
            told = repr((*one.partition, one.offset, one.timestamp_ms, one.reason)).encode()
            self._sum += int.from_bytes(hashlib.sha256(told).digest())
        return chosen

    def __str__(self) -> str:
        return f"{self._sum:x}"

    def check(self) -> None:
        """Refuse others than a dry run has shown."""
        if self._shown not in (None, str(self)):
            raise WrongInput(
                "the dead letters that are chosen now are not those that the dry run has shown:"
                " they stay",
                way_out="look at the dry run again",
            )


def discard(
    pipeline: Parts, which: RejectFilter, *, execute: bool, shown: str | None = None
) -> Discarded:
    """Remove the content of pending dead letters; see :meth:`Pipeline.discard`."""
    discarding, found = pipeline.destination.discarding(), Counter[str]()
    chosen = _Chosen(which, shown)
    if pipeline.destination.look().rejects:
        for attempt in attempts(Backoff()):
            with attempt:
                chosen = _Chosen(which, shown)
                found = Counter(discarding(chosen, execute, chosen.check))
    return Discarded(tuple(RejectReason(*one) for one in found.most_common()), execute, str(chosen))


def _judge(pipeline: Parts, spark: SparkSession | None, *, headers: bool) -> Judge:
    by_spark = pipeline.spark_transform is not None
    transform = Unchanged() if by_spark else pipeline.row_transform
    late = NO_TOMBSTONES if by_spark else pipeline.destination.late_delete
    decode = decoding(pipeline.decoder, late)
    again = Processing(decode, transform, headers=headers and not by_spark)

    same = _same_topics(pipeline)

    def judge(found: Sequence[Reject]) -> Reprocessed:
        records = _as_in_topic(pipeline, found, same)
        chunk = again.chunk(records_of(records))
        if pipeline.spark_transform is None or spark is None:
            return Reprocessed(chunk, records)
        rows = transform_rows(spark, pipeline.spark_transform, chunk.rows)
        first = np.zeros(rows.num_rows, dtype=np.int64)
        return Reprocessed(replace(chunk, rows=rows, row_record=first), records, traceable=False)

    return judge


def _same_topics(pipeline: Parts) -> set[str]:
    """The topics that are those of the ledger: others have other records at the same offsets."""
    try:
        now = pipeline.source.identity()
    except TopicMissing:
        return set()
    known = pipeline.destination.look()
    same = known.topic_ids.items() & now.topic_ids.items()
    return {name for name, _ in same} if known.cluster_id == now.cluster_id else set()


def _as_in_topic(pipeline: Parts, found: Sequence[Reject], same: set[str]) -> list[Reject]:
    """Dead letters with the content that their records have in the topic, as far as it still has
    them: where dead letters are stored they may have been altered."""
    done: list[Reject] = []
    for tp, own in groupby(found, lambda one: one.partition):
        letters = list(own)
        offsets = [one.offset for one in letters] if tp.topic in same else []
        there = pipeline.source.fetch_committed(tp, offsets) if offsets else {}
        done += [replace(one, **there[one.offset]._asdict()) if one.offset in there else one
                 for one in letters]  # fmt: skip
    return done


def decoding(decoder: Decoder, late_delete: str | None) -> Callable[[pa.Table], Decoded]:
    """Isolate crashes: dead letters include records that have crashed the decoder.

    Args:
        decoder: the pipeline's.
        late_delete: the reason why tombstones remain rejects; None: they are replayed.
    """

    def decode(records: pa.Table) -> Decoded:
        decoded = isolate_crashes(decoder, records)
        if late_delete is None or not len(decoded.tombstone_record):
            return decoded
        gone = decoded.tombstone_record.to_pylist()
        more = [Rejection(int(i), "write", late_delete) for i in gone]
        rejections = tuple(sorted((*decoded.rejections, *more)))
        return replace(
            decoded,
            rejections=rejections,
            tombstones=None,
            tombstone_record=pa.array([], pa.int64()),
        )

    return decode


def as_json(found: Rejects) -> dict[str, Any]:
    """JSON-able values; bytes that are not UTF-8 are ``{"base64": ...}``."""
    return {
        "rejects": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "offset": one.offset,
                "timestamp_ms": one.timestamp_ms,
                "key": shown(one.key),
                "value": shown(one.value),
                "headers": [[name, shown(value)] for name, value in one.headers],
                "stage": one.stage,
                "reason": one.reason,
            }
            for one in found.listed
        ],
        "total": found.total,
        "reasons": [one._asdict() for one in found.reasons],
    }
