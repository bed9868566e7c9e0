"""The progress of a pipeline, read from ledger and topics; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oncely.config import FilterSettings
from oncely.core.ranges import Position, TopicPartition
from oncely.ledgers.sql.activity import Activity
from oncely.pipeline.destination import LedgerState
from oncely.sources.kafka import KafkaSource
from oncely.sources.lag import PartitionLag, measure_lag, open_transactions

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
        warnings: what the next start would refuse, or finds lost.
        activity: the newest commits; None if the ledger does not store their times.
        waits: seconds for which a filter makes records wait.
        hidden: the reason for which records at the end of a partition cannot be read; or empty.
    """

    partitions: tuple[PartitionLag, ...]
    rejects: int
    epoch: int
    warnings: tuple[str, ...] = ()
    activity: Activity | None = None
    waits: float = 0.0
    hidden: str = ""

    @property
    def judgement(self) -> Judgement:
        """The verdict."""
        return self.judged(None)

    def judged(self, still: float | None) -> Judgement:
        """The verdict of one who has seen no position move for some seconds, or has not looked."""
        own = (self.partitions, self.epoch, self.activity, self.warnings)
        found = judged(*own, self.waits, still)
        return Judgement("WARN", self.hidden) if self.hidden and found.state == "OK" else found

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
    waits: float = 0.0,
    still: float | None = None,
) -> Judgement:
    """Judge a pipeline by the time for which records have waited without a commit.

    That is the age of the oldest record to read, or that of the last commit if it is less; of the
    whole pipeline, and of each partition beside others that have commits. Where the time of the
    last commit is not known, it is that for which no position was seen to move (``still``).
    """
    warn, stall = WARN_SECONDS + waits, STALL_SECONDS + waits
    if warnings:
        return Judgement("WARN", warnings[0])
    left = sum(one.lag for one in partitions)
    oldest = max((one.lag_seconds or 0.0 for one in partitions), default=0.0)
    if not left or oldest <= warn:
        waiting = f"its filter makes records wait for {waits:,.0f} s" if left and waits else ""
        return Judgement("OK", waiting)
    if not epoch:
        return Judgement("WARN", "it has never run")
    since = activity.seconds if activity is not None else None
    since = still if since is None else since
    if since is not None and min(since, oldest) > warn:
        waited = min(since, oldest)
        state: Literal["WARN", "STALL"] = "STALL" if waited > stall else "WARN"
        return Judgement(state, f"no commit for {waited:,.0f} s, and {left:,} offsets are left")
    ages = activity.partitions if activity is not None else {}
    for one in partitions:
        tp, age = TopicPartition(one.topic, one.partition), one.lag_seconds or 0.0
        waited = min(ages.get(tp, age), age) if ages else 0.0
        if one.lag and waited > stall:
            said = f"no commit of {tp} for {waited:,.0f} s, and {one.lag:,} offsets are left"
            return Judgement("WARN", said)
    if oldest > stall:
        return Judgement("WARN", f"{oldest:,.0f} s behind")
    return Judgement("OK")


def status(pipeline: Pipeline) -> Status:
    """See :meth:`oncely.pipeline.Pipeline.status`."""
    known = pipeline.destination.look()
    now_ms = int(time.time() * 1000)
    lags = measure_lag(pipeline.source, _reading(pipeline, known), now_ms)
    return Status(
        tuple(
            one._replace(position=known.positions.get(TopicPartition(one.topic, one.partition)))
            for one in lags
        ),
        known.rejects,
        known.epoch,
        _warnings(pipeline, known),
        known.activity,
        _waits(pipeline.settings.filter),
        _hidden(pipeline.source, lags, now_ms),
    )


def _hidden(source: KafkaSource, lags: Sequence[PartitionLag], now_ms: int) -> str:
    """The oldest transaction at an end of the topics, if it is open for long."""
    found = open_transactions(source, lags, now_ms)
    tp = max(found, key=found.__getitem__, default=None)
    if tp is None or found[tp] <= WARN_SECONDS:
        return ""
    (end,) = (one.end for one in lags if (one.topic, one.partition) == tp)
    return (
        f"records of {tp} from offset {end} on wait for a transaction whose first record is"
        f" {found[tp]:,.0f} s old: its producer, or the broker after transaction.timeout.ms, ends"
        f" it; else kafka-transactions.sh --bootstrap-server {source.brokers} abort --topic"
        f" {tp.topic} --partition {tp.partition} --start-offset {end}"
    )


def _waits(given: FilterSettings) -> float:
    return (given.delay or 0.0) + (given.throttle.seconds if given.throttle else 0.0)


def _reading(pipeline: Pipeline, known: LedgerState) -> dict[TopicPartition, Position]:
    """The positions at which the next start would begin to read."""
    if known.positions:
        return dict(known.positions)
    return pipeline.source.resolve_start(pipeline.settings.source.start)


def _warnings(pipeline: Pipeline, known: LedgerState) -> tuple[str, ...]:
    if told := known.lost or known.refused or known.notice:
        return (told,)
    now = pipeline.source.identity()
    if known.cluster_id not in (None, now.cluster_id):
        return (f"the ledger was written for another Kafka cluster, {known.cluster_id}",)
    return tuple(
        f"topic {topic} was deleted and recreated since the pipeline read it"
        for topic, topic_id in now.topic_ids.items()
        if known.topic_ids.get(topic, topic_id) != topic_id
    )
