"""The outcome, looked at through the plain drivers."""

from __future__ import annotations

import threading
from typing import Any

from tests.sinktools import Place, offsets


def ids(place: Place) -> list[int]:
    return offsets(place.sql("SELECT id FROM rows ORDER BY id"))


def history(place: Place) -> list[tuple[Any, ...]]:
    return place.sql(
        'SELECT "partition", range_start, range_end, epoch, kind, records, written, rejected,'
        ' filtered FROM oncely_ranges ORDER BY "partition", range_start, epoch'
    )


def positions(place: Place) -> list[tuple[Any, ...]]:
    return place.sql('SELECT "partition", "position" FROM oncely_positions ORDER BY "partition"')


def rejected(place: Place) -> list[tuple[int, str]]:
    """Offset and reason of every reject."""
    return [
        (offset, reason)
        for offset, reason in place.sql(
            'SELECT "offset", reason FROM oncely_rejects ORDER BY topic, "partition", "offset"'
        )
    ]


def create(place: Place, columns: str, table: str = "rows") -> None:
    """Create a table; types are written as PostgreSQL's."""
    if place.is_postgres:
        place.sql(f"CREATE TABLE {table} ({columns})")
    else:
        own = columns.replace("bigint", "INT").replace("text", "TEXT")
        place.sql(f"CREATE TABLE {table} ({own}) STRICT")


def wait_for_a_lock(place: Place) -> None:
    """Until a session waits for a lock of another one."""
    for _ in range(3_000):
        waits = place.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"
            " AND datname = current_database()"
        )
        if waits[0][0]:
            return
        threading.Event().wait(0.01)
    raise AssertionError("nobody waits for a lock")
