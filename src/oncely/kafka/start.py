"""The start position of a new pipeline: ``earliest``, ``latest`` or a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Literal


@dataclass(frozen=True)
class StartTime:
    """The first record at or after a time.

    Attributes:
        timestamp_ms: milliseconds since 1970, the unit of Kafka's timestamps.
    """

    timestamp_ms: int

    def __str__(self) -> str:
        moment = datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Start = Literal["earliest", "latest"] | StartTime


def parse_moment(value: str | date) -> StartTime:
    """Parse an ISO 8601 date or time; without an offset it is UTC.

    Raises:
        ValueError: neither a date nor a time, or outside of the years 1 to 9999.
    """
    if isinstance(value, str):
        value = datetime.fromisoformat(value.strip())
    if not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    try:
        value = value.astimezone(UTC)
    except OverflowError:
        raise ValueError("outside of the years 1 to 9999") from None
    # Whole milliseconds, rounded down: the start includes a record of the same millisecond.
    since = value - datetime(1970, 1, 1, tzinfo=UTC)
    return StartTime((since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000)
