"""The progress of a pipeline, read from ledger and topics; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oncely.config import FilterSettings
from oncely.core.progress import STALL_SECONDS, WARN_SECONDS, waited
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import Unavailable, WrongInput
from oncely.kafka.source import (
    GroupMember,
    KafkaSource,
    PartitionLag,
    measure_lag,
    open_transactions,
)
from oncely.kinds.destination import LedgerState
from oncely.wording import duration, plural

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts
    from oncely.stores.sql.tables import Activity

NOBODY = "no worker is there, and no run that stands by"


Kind = Literal[
    "current", "running", "waiting", "dead letters", "hidden", "behind", "never ran", "stalled",
    "refused", "unreadable", "unread",
]  # fmt: skip
State = Literal["OK", "WARN", "STALL"]
Level = Literal["fine", "busy", "warn", "bad", "unknown"]
_JUDGED: Mapping[Kind, tuple[State, Level, int]] = {
    "current": ("OK", "fine", 0),
    "running": ("OK", "busy", 0),
    "waiting": ("OK", "busy", 0),
    "dead letters": ("WARN", "warn", 1),
    "hidden": ("WARN", "warn", 1),
    "behind": ("WARN", "warn", 1),
    "never ran": ("WARN", "unknown", 1),
    "stalled": ("STALL", "bad", 2),
    "refused": ("WARN", "bad", 2),
    "unreadable": ("WARN", "bad", 3),
    "unread": ("WARN", "unknown", 3),
}


class Judgement(NamedTuple):
    """A verdict about a pipeline, its reason, and both in words; docs/metrics.md has the rules.

    ``status``, ``top`` and the pages read it, and so do the exit codes.
    """

    kind: Kind
    reason: str = ""
    sentence: str = ""

    @property
    def state(self) -> State:
        """In one word."""
        return _JUDGED[self.kind][0]

    @property
    def level(self) -> Level:
        """How a page shows it."""
        return _JUDGED[self.kind][1]

    @property
    def code(self) -> int:
        """The exit code of ``--check``, as the Monitoring Plugins have them."""
        return _JUDGED[self.kind][2]


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
        pause: seconds between two batches.
        hidden: the reason for which records at the end of a partition cannot be read; or empty.
        members: the workers, and the runs that stand by or were elected, by group; None if the
            broker does not tell. A run that does not stand by is in no group.
        limited: the time limits of commits for which records have waited for longer; or empty.
    """

    partitions: tuple[PartitionLag, ...]
    rejects: int
    epoch: int
    warnings: tuple[str, ...] = ()
    activity: Activity | None = None
    waits: float = 0.0
    hidden: str = ""
    members: Mapping[str, Sequence[GroupMember]] | None = None
    limited: str = ""
    pause: float = 0.0

    @property
    def lag(self) -> int:
        """Offsets that are not committed yet, of all partitions."""
        return sum(one.lag for one in self.partitions)

    @property
    def lag_seconds(self) -> float | None:
        """The age of the oldest record that waits; None if it is not known."""
        ages = (one.lag_seconds for one in self.partitions)
        return max((age for age in ages if age is not None), default=None)

    @property
    def judgement(self) -> Judgement:
        """The verdict."""
        return judge(self)

    def as_json(self) -> dict[str, Any]:
        """The documented JSON-able result."""
        last = self.activity.last_commit if self.activity else None
        return {
            "partitions": [one._asdict() for one in self.partitions],
            "rejects": self.rejects,
            "epoch": self.epoch,
            "state": self.judgement.state,
            "verdict": self.judgement.kind,
            "reason": self.judgement.reason or None,
            "last_commit": last.isoformat() if last else None,
            "records_per_second": round(self.activity.rate, 3) if self.activity else None,
            "members": self.members
            and [
                {
                    "group": group,
                    "client": one.client,
                    "host": one.host,
                    "partitions": [str(tp) for tp in one.partitions],
                }
                for group, found in self.members.items()
                for one in found
            ],
        }


def judge(status: Status, still: float | None = None) -> Judgement:
    """Judge a pipeline by its ledger and the topics' ends.

    Args:
        status: what was read of them.
        still: seconds for which no position was seen to move; None: nobody has looked.
    """
    if status.warnings:
        reason = "; ".join(status.warnings)
        return Judgement("refused", reason, f"Before the next start: {reason}")
    if not status.epoch and all(one.position is None for one in status.partitions):
        return Judgement("never ran", "it has never run", "It has never run")
    letters = plural(status.rejects, "dead letter") if status.rejects else ""
    kind, reason = _progress(status, still)
    if kind in ("current", "running", "waiting") and (status.hidden or letters):
        kind, reason = ("hidden" if status.hidden else "dead letters"), status.hidden or letters
    said = "All records are committed"
    if status.lag:
        said = "Stalled" if kind == "stalled" else f"Behind by {plural(status.lag, 'offset')}"
    age = status.lag_seconds
    waits = f"the oldest record waits for {duration(age)}" if age and not reason else ""
    gone = status.lag and status.members is not None and not any(status.members.values())
    told = letters if letters != reason else ""
    parts = (said, reason or waits, NOBODY if gone else "", told, status.limited)
    reason = "; ".join(filter(None, (reason, status.limited)))
    return Judgement(kind, reason, "; ".join(filter(None, parts)))


def unreadable(why: str) -> Judgement:
    """The verdict about a pipeline whose file, ledger or topics can't be read."""
    return Judgement("unreadable", why, f"Can't be read: {why}")


def _progress(status: Status, still: float | None) -> tuple[Kind, str]:
    """The verdict by the time for which records have waited without a commit, and the reason.

    That is the age of the oldest record to read, or that of the last commit if it is less; of the
    whole pipeline, and of each partition beside others that have commits. Where the time of the
    last commit is not known, it is that for which no position was seen to move (``still``).
    """
    more = status.waits + status.pause
    warn, stall = WARN_SECONDS + more, STALL_SECONDS + more
    left, oldest = status.lag, status.lag_seconds or 0.0
    if not left or oldest <= warn:
        if left and status.waits:
            return "waiting", f"its filter makes records wait for {status.waits:,.0f} s"
        return ("running" if left else "current"), ""
    activity = status.activity
    since = activity.seconds if activity is not None else None
    since = still if since is None else since
    moved = activity.partitions if activity is not None else {}
    lag = {TopicPartition(one.topic, one.partition): one for one in status.partitions if one.lag}
    ages = {tp: one.lag_seconds or 0.0 for tp, one in lag.items()}
    wait = waited(ages, since or 0.0, moved)
    if wait.all > warn:
        said = f"no commit for {wait.all:,.0f} s, and {left:,} offsets are left"
        return ("stalled" if wait.all > stall else "behind"), said
    for tp, seconds in wait.each.items():
        if moved and seconds > stall:
            said = f"no commit of {tp} for {seconds:,.0f} s, and {lag[tp].lag:,} offsets are left"
            return "behind", said
    if oldest > stall:
        return "behind", f"{oldest:,.0f} s behind"
    return "running", ""


def status(pipeline: Parts) -> Status:
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
        _members(pipeline),
        _limited(known.time_limits, lags),
        pipeline.settings.trigger_seconds,
    )


def _members(pipeline: Parts) -> Mapping[str, Sequence[GroupMember]] | None:
    settings = pipeline.settings
    groups = (settings.worker_group, settings.standby_group)
    try:
        return {group: pipeline.source.members(group) for group in groups}
    except (Unavailable, WrongInput):
        return None


def _limited(limits: Mapping[str, float], lags: Sequence[PartitionLag]) -> str:
    """A commit that was ended by one of these limits has left records that are older than it."""
    oldest = max((one.lag_seconds or 0.0 for one in lags), default=0.0)
    return "; ".join(said for said, seconds in limits.items() if seconds < oldest)


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


def _reading(pipeline: Parts, known: LedgerState) -> dict[TopicPartition, Position]:
    """The positions at which the next start would begin to read."""
    if known.positions:
        return dict(known.positions)
    return pipeline.source.resolve_start(pipeline.settings.source.start)


def _warnings(pipeline: Parts, known: LedgerState) -> tuple[str, ...]:
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
