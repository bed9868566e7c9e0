"""The view by identity: the ids of a pipeline's records and those of its destination, by group.

The rows that records should have become are made by the pipeline's decode and transform of today,
which are passed in. So this view trusts more than the comparison by offset, and its findings name
what a user knows: an id, an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from oncely.audit.datasets import by_id, committed, doubt_deleted, reading, right_side
from oncely.audit.evidence import Bounds, Log
from oncely.audit.matching import PLACE, side
from oncely.audit.outcome import Compared, Outcome
from oncely.audit.report import Report, Undecided
from oncely.audit.spark_rows import Window
from oncely.config import PipelineSettings
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import SourceMismatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC, PARTITION, OFFSET, TIME, DELETES = (
    f"_oncely_{name}" for name in ("topic", "partition", "offset", "timestamp", "deletes")
)
"""The columns of expected rows beside the rows' own: their record, and whether it deletes."""


@dataclass(frozen=True)
class Views:
    """What the view needs of a pipeline.

    Attributes:
        expected: makes rows of :func:`~oncely.audit.datasets.committed` records: the columns of the
            destination, and the columns above. Records that become dead letters or are filtered
            have no row; tombstones have one.
        rows: the present rows of the destination.
        window: reads the ledger.
        log: the topics.
    """

    settings: PipelineSettings
    expected: Callable[[DataFrame], DataFrame]
    rows: Callable[[], DataFrame]
    window: Callable[[], Window]
    log: Log


@reading()
def audit_by_id(
    spark: SparkSession,
    views: Views,
    id_left: str,
    id_right: str,
    by: str | None,
    *,
    until: datetime | None = None,
    limit: int = 1_000,
) -> Report:
    """Compare the ids of a pipeline's records with those of its destination.

    Args:
        spark: a session that reads both.
        views: the pipeline.
        id_left, id_right: the expressions of the id, over expected rows and present ones.
        by: the expression of the group, or None.
        until: compare only records before this time.
        limit: the number of findings of each kind that are named.

    Raises:
        SourceMismatch: the topic is not that of the ledger.
        ConfigError: an expression is wrong.
        Unavailable: a server does not answer.
    """
    began, log = time.monotonic(), views.log
    window = views.window()
    at = datetime.now(UTC)
    _require_same(window.source, log.identity())
    bounds = log.bounds()
    compared = _compared(log, bounds, window, until)
    letters = _letters(spark, window, compared)
    sink = views.settings.sink
    keyed = getattr(sink, "mode", "append") == "upsert"
    records = _records(spark, views, id_left, by, compared, letters, keyed)
    rows = right_side(views.rows(), id_right, by)

    now = partial(_present, views, window)
    outcome = by_id(records, rows, compared, now, keyed=keyed, limit=limit)
    _doubts(outcome, log, bounds, window)
    seconds = time.monotonic() - began
    return outcome.report(views.settings.name, at, seconds, source=window.source, until=until)


def _present(views: Views, window: Window) -> Mapping[TopicPartition, Bounds]:
    """The offsets that the destination has rows of by now.

    Rows from before the positions at which the pipeline began are of no record that it has read.
    """
    present, later = views.log.bounds(), views.window()
    began = window.started if window.begins else {}
    return {
        tp: Bounds(max(present[tp].first, began.get(tp, 0)), min(end, present[tp].end))
        for tp, end in later.positions.items()
        if tp in present
    }


def _require_same(ours: object, now: object) -> None:
    if ours != now:
        raise SourceMismatch(
            "the topic is not that of the ledger: cluster or topic ids differ",
            way_out="oncely audit without --id tells what can still be proved",
        )


def _compared(
    log: Log,
    bounds: Mapping[TopicPartition, Bounds],
    window: Window,
    until: datetime | None,
) -> Compared:
    ends = log.offsets_at(until) if until is not None else {}
    ends = {tp: min(at, ends.get(tp, at)) for tp, at in window.positions.items()}
    own = {tp: one for tp, one in bounds.items() if tp in ends}
    return Compared.between(window.started, ends, own, skipped=window.skipped)


def _letters(spark: SparkSession, window: Window, compared: Compared) -> DataFrame | None:
    """The places of dead letters; None if there is none."""
    places = {tp: at << compared.bits for at, tp in enumerate(compared.places)}
    found = [(places[tp] + offset,) for tp, offset in window.letters if tp in places]
    return spark.createDataFrame(found, f"{PLACE} BIGINT") if found else None


def _records(
    spark: SparkSession,
    views: Views,
    id_: str,
    by: str | None,
    compared: Compared,
    letters: DataFrame | None,
    keyed: bool,
) -> Callable[[Mapping[TopicPartition, OffsetRange]], DataFrame]:
    from pyspark.sql import functions as F

    source = views.settings.source

    def records(ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        kafka = source.kafka_properties()
        made = views.expected(committed(spark, source.brokers, kafka, ranges))
        own = side(
            made, "left", id_, by=by,
            place=compared.place(F.col(TOPIC), F.col(PARTITION), F.col(OFFSET)),
            at=F.unix_millis(TIME), deletes=F.col(DELETES) if keyed else None,
        )  # fmt: skip
        return own if letters is None else own.join(letters, PLACE, "left_anti")

    return records


def _doubts(
    outcome: Outcome,
    log: Log,
    bounds: Mapping[TopicPartition, Bounds],
    window: Window,
) -> None:
    """What the topic and the ledger no longer have proves nothing."""
    if not window.begins:
        outcome.undecided += [
            Undecided(tp, OffsetRange(0, at), "the ledger does not tell whether they were read")
            for tp, at in window.started.items()
            if at > 0
        ]
    gone = {
        tp: OffsetRange(at, bounds[tp].first)
        for tp, at in window.started.items()
        if tp in bounds and bounds[tp].first > at
    }
    doubt_deleted(outcome, log, gone)
