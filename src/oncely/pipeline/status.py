"""The progress of a pipeline, read from ledger and topics; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oncely.core.topics import Position, TopicPartition
from oncely.ledgers.sql.activity import Activity
from oncely.pipeline.destination import LedgerState
from oncely.sources.lag import PartitionLag, measure_lag

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline

WARN_SECONDS, STALL_SECONDS = 60.0, 300.0
"""Seconds for which records may wait without a commit."""


class Judgement(NamedTuple):
    """A verdict about the progress, and its reason; docs/metrics.md has the rules."""

    state: Literal["OK", "WARN", "STALL"]
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """The result of ``oncely status``.

    Attributes:
        partitions: position, end and lag of every partition that the topics have.
        rejects: number of dead letters.
        epoch: the last epoch; 0 if the pipeline never ran.
        warnings: problems that the next start would refuse.
        activity: the newest commits; None if the ledger does not store their times.
    """

    partitions: tuple[PartitionLag, ...]
    rejects: int
    epoch: int
    warnings: tuple[str, ...] = ()
    activity: Activity | None = None

    @property
    def judgement(self) -> Judgement:
        """The verdict."""
        return judged(self.partitions, self.epoch, self.activity, self.warnings)

    def as_json(self) -> dict[str, Any]:
        """The documented JSON-able result."""
        last = self.activity.last_commit if self.activity else None
        return {
            "partitions": [one._asdict() for one in self.partitions],
            "rejects": self.rejects,
            "epoch": self.epoch,
            "state": self.judgement.state,
            "reason": self.judgement.reason or None,
            "last_commit": last.isoformat() if last else None,
            "records_per_second": round(self.activity.rate, 3) if self.activity else None,
        }


def judged(
    partitions: Sequence[PartitionLag],
    epoch: int,
    activity: Activity | None,
    warnings: Sequence[str] = (),
) -> Judgement:
    """Judge a pipeline by the time for which records have waited without a commit.

    That is the age of the oldest record to read, or that of the last commit if it is less.
    """
    if warnings:
        return Judgement("WARN", warnings[0])
    left = sum(one.lag for one in partitions)
    oldest = max((one.lag_seconds or 0.0 for one in partitions), default=0.0)
    if not left or oldest <= WARN_SECONDS:
        return Judgement("OK")
    if not epoch:
        return Judgement("WARN", "it has never run")
    since = activity.seconds if activity is not None else None
    if since is not None and min(since, oldest) > WARN_SECONDS:
        waited = min(since, oldest)
        state: Literal["WARN", "STALL"] = "STALL" if waited > STALL_SECONDS else "WARN"
        return Judgement(state, f"no commit for {waited:,.0f} s, and {left:,} offsets are left")
    if oldest > STALL_SECONDS:
        return Judgement("WARN", f"{oldest:,.0f} s behind")
    return Judgement("OK")


def status(pipeline: Pipeline) -> Status:
    """See :meth:`oncely.pipeline.Pipeline.status`."""
    known = pipeline.destination.look()
    lags = measure_lag(pipeline.source, _reading(pipeline, known), int(time.time() * 1000))
    return Status(
        tuple(
            one._replace(position=known.positions.get(TopicPartition(one.topic, one.partition)))
            for one in lags
        ),
        known.rejects,
        known.epoch,
        _warnings(pipeline, known),
        known.activity,
    )


def _reading(pipeline: Pipeline, known: LedgerState) -> dict[TopicPartition, Position]:
    """The positions at which the next start would begin to read."""
    if known.positions:
        return dict(known.positions)
    return pipeline.source.resolve_start(pipeline.settings.source.start)


def _warnings(pipeline: Pipeline, known: LedgerState) -> tuple[str, ...]:
    now = pipeline.source.identity()
    if known.cluster_id not in (None, now.cluster_id):
        return (f"the ledger was written for another Kafka cluster, {known.cluster_id}",)
    return tuple(
        f"topic {topic} was deleted and recreated since the pipeline read it"
        for topic, topic_id in now.topic_ids.items()
        if known.topic_ids.get(topic, topic_id) != topic_id
    )
