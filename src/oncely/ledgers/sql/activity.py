"""The time of the last commit, and the recent rate, from the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from oncely.clients.sql.connection import Connection
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
    """

    last_commit: datetime | None
    seconds: float | None
    rate: float


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
            f" ORDER BY committed_at DESC LIMIT {_NEWEST}"
        ),
        (tables.pipeline,),
    )
    return recent([_Range(kind, _time(at), records) for kind, at, records in rows], _time(now))


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
