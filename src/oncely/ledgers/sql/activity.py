"""The time of the last commit, and the recent rate, from the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from oncely.clients.sql.connection import Connection
from oncely.core.ranges import TopicPartition
from oncely.ledgers.sql.tables import LedgerTables

WINDOW = timedelta(minutes=5)
_NEWEST = 2_000


@dataclass(frozen=True)
class Activity:
    """The newest commits of a pipeline.

    Attributes:
        last_commit: when the last range was committed; None if there is none.
        seconds: its age, by the clock of the database.
        rate: records a second of the last five minutes.
        partitions: the age of the last commit of each partition.
    """

    last_commit: datetime | None
    seconds: float | None
    rate: float
    partitions: Mapping[TopicPartition, float] = field(default_factory=dict)


class _Range(NamedTuple):
    kind: str
    at: datetime
    records: int


def activity(connection: Connection, tables: LedgerTables) -> Activity:
    """Read the newest ranges of the history."""
    ((now,),) = connection.query("SELECT CURRENT_TIMESTAMP")
    rows = connection.query(
        tables.sql(
            "SELECT kind, committed_at, records FROM {oncely_ranges} WHERE pipeline = %s"
            f" AND kind <> 'skipped' ORDER BY committed_at DESC LIMIT {_NEWEST}"
        ),
        (tables.pipeline,),
    )
    last = connection.query(
        tables.sql(
            'SELECT topic, "partition", MAX(committed_at) FROM {oncely_ranges} WHERE pipeline = %s'
            " AND kind <> 'skipped' GROUP BY topic, \"partition\""
        ),
        (tables.pipeline,),
    )
    found = recent([_Range(kind, _time(at), records) for kind, at, records in rows], _time(now))
    ages = {TopicPartition(t, p): (_time(now) - _time(at)).total_seconds() for t, p, at in last}
    return replace(found, partitions=ages)


def recent(ranges: Sequence[_Range], now: datetime) -> Activity:
    """The activity of ranges, the newest first.

    Housekeeping joins old ranges: a joined range has the time of the join and the records of a
    longer time. Then, and beyond the limit, the time is that since the oldest range that is left.
    """
    if not ranges:
        return Activity(None, None, 0.0)
    last = ranges[0].at
    new = [one for one in ranges if one.at > now - WINDOW]
    kept = [one for one in new if one.kind != "joined"]
    span = WINDOW
    if kept and (len(kept) < len(new) or len(new) == _NEWEST):
        span = max(now - kept[-1].at, timedelta(seconds=1))
    rate = sum(one.records for one in kept) / span.total_seconds()
    return Activity(last, max(0.0, (now - last).total_seconds()), rate)


def _time(value: datetime | str) -> datetime:
    """SQLite has times as text, in UTC."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value if value.tzinfo else value.replace(tzinfo=UTC)
