"""Events in the order of their time, as a log has them: a week, hour by hour, eight carriers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.workload import CARRIERS, delay, flight, flight_json

PARTITION_BY = ["carrier", "date(time_hour)", "hour(time_hour)"]
HOURS = 7 * 24


@dataclass(frozen=True)
class Events:
    """The events of a topic.

    Attributes:
        records: how many; ids run from 0.
        groups: distinct carriers, other than the eight; for very many open directories.
    """

    records: int
    groups: int = 0

    def carrier(self, i: int) -> str:
        """The carrier of event ``i``."""
        return f"c{i % self.groups:05d}" if self.groups else CARRIERS[i % 8]

    def hour(self, i: int) -> tuple[str, str]:
        """Date and hour of event ``i``: in order, so that an hour's events are neighbours."""
        hour = 0 if self.groups else i * HOURS // self.records
        return f"2013-01-{hour // 24 + 1:02}", f"{hour % 24:02}"

    def value(self, i: int) -> bytes:
        """Event ``i``: about 100 bytes of JSON."""
        return flight_json(i, self.carrier(i), "T".join(self.hour(i)))

    def directory(self, i: int) -> str:
        """Where event ``i`` belongs."""
        date, hour = self.hour(i)
        return f"carrier={self.carrier(i)}/date={date}/hour={hour}"

    def wrong(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
        """What is wrong with rows and their directories, looked at one by one; None: nothing."""
        seen = bytearray(self.records)
        for directory, row in rows:
            i = int(row["id"])
            expected = (flight(i), delay(i), self.carrier(i))
            if (row["flight"], row["dep_delay"], row["carrier"]) != expected:
                return f"record {i} became {dict(row)}"
            if directory != self.directory(i):
                return f"record {i} lies in {directory}"
            if seen[i]:
                return f"record {i} is repeated"
            seen[i] = 1
        missing = self.records - sum(seen)
        return f"{missing} records are missing" if missing else None
