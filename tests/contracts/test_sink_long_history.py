"""A long history costs commits nothing: one lookup in an index for each partition, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from oncely.core.claim import Entry, Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.connection import Connection, Dialect, Params, Row, close_all, connect
from tests.contracts.looking import history
from tests.sinktools import T0, Place, ready, sink_to

PARTITIONS, RANGES = 20, 200


def long_history(place: Place, superseded: int = 0) -> tuple[SqlSink, Fence]:
    """A sink with many partitions and ranges of one record each, those after a position undone."""
    partitions = {TopicPartition("t", number): 0 for number in range(PARTITIONS)}
    sink, fence = ready(sink_to(place), partitions)
    place.sql(
        "WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM r WHERE n < ?)"
        ' INSERT INTO oncely_ranges (pipeline, topic, "partition", range_start, range_end, epoch,'
        " kind, records, written, rejected, filtered, superseded)"
        f" SELECT 'p', 't', p.\"partition\", n, n + 1, 1, 'data', 1, 1, 0, 0,"
        f" CASE WHEN n < {RANGES} THEN 0 ELSE 2 END FROM oncely_positions p, r",
        RANGES + superseded - 1,
    )
    place.sql(f'UPDATE oncely_positions SET "position" = {RANGES}')
    # Not the whole database, which holds other tests' tables, too.
    for table in ("oncely_positions", "oncely_ranges"):
        place.sql(f"ANALYZE {table}")
    return sink, fence


class Recorded:
    """A connection that keeps its calls, and what came back."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self.calls: list[str] = []
        self.statements: list[tuple[str, Params]] = []
        self.longest = 0

    def query(self, sql: str, params: Params = ()) -> list[Row]:
        rows = self._inner.query(sql, params)
        self.statements.append((sql, params))
        self.longest = max(self.longest, len(rows))
        return rows

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._inner, name)


@contextmanager
def recorded(sink: SqlSink) -> Iterator[tuple[SqlSink, list[Recorded]]]:
    """The sink, and the connections that it has opened."""
    opened: list[Recorded] = []

    def connecting(dialect: Dialect, application: str) -> Connection:
        opened.append(Recorded(connect(dialect, application)))
        return opened[-1]  # type: ignore[return-value]

    close_all()
    yield replace(sink, connect=connecting), opened
    close_all()


def rows_visited(place: Place, sql: str, params: Params) -> int:
    """Rows of the history that PostgreSQL reads to answer a statement."""

    def visited(node: dict[str, Any]) -> int:
        own = 0
        if node.get("Relation Name") == "oncely_ranges":
            removed = node.get("Rows Removed by Filter", 0)
            own = int((node["Actual Rows"] + removed) * node["Actual Loops"])
        return own + sum(visited(one) for one in node.get("Plans", ()))

    explain = "EXPLAIN (ANALYZE, FORMAT JSON) " + sql
    with closing(place.session()) as session:
        plan = session.execute(explain.encode(), params).fetchone()[0]
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return visited(plan[0]["Plan"])


def searches(place: Place, sql: str, params: Params) -> list[str]:
    """How SQLite reads the history to answer a statement."""
    with closing(place.session()) as session:
        plan = session.execute("EXPLAIN QUERY PLAN " + sql.replace("%s", "?"), params).fetchall()
    return [detail for *_, detail in plan if " r" in detail]


def test_positions_are_read_by_one_index_lookup_for_each_partition(place: Place) -> None:
    """Also after a reset, which leaves undone ranges beyond the positions."""
    sink, fence = long_history(place, superseded=RANGES)
    with recorded(sink) as (seen, connections):
        assert set(seen.ledger.positions(fence).values()) == {
            Entry(RANGES, fence.epoch, run=fence.run)
        }
    (connection,) = connections
    assert connection.longest == PARTITIONS
    if place.is_postgres:
        visited = [rows_visited(place, *one) for one in connection.statements]
        assert any("oncely_ranges" in sql for sql, _ in connection.statements)
        assert max(visited) <= PARTITIONS
    else:
        found = [how for one in connection.statements for how in searches(place, *one)]
        key = "pipeline=? AND topic=? AND partition=? AND superseded=? AND range_end>?"
        assert found
        assert [how for how in found if key not in how] == []


def test_ranges_done_beyond_a_position_are_found(place: Place) -> None:
    sink, fence = long_history(place)
    place.sql('UPDATE oncely_positions SET "position" = ? WHERE "partition" = 3', RANGES - 2)
    place.sql('UPDATE oncely_ranges SET range_end = ? WHERE "partition" = 3 AND range_start = ?',
              RANGES + 5, RANGES - 1)  # fmt: skip
    found = sink.ledger.positions(fence)
    done = (OffsetRange(RANGES - 2, RANGES - 1), OffsetRange(RANGES - 1, RANGES + 5))
    assert found[TopicPartition("t", 3)] == Entry(RANGES - 2, fence.epoch, done, fence.run)
    assert found[T0] == Entry(RANGES, fence.epoch, run=fence.run)


def test_a_long_history_is_joined_in_the_database_and_one_partition_at_a_time(place: Place) -> None:
    """No row of it travels, and nobody waits for the pipeline's row until all is joined."""
    sink, fence = long_history(place)
    with recorded(sink) as (seen, connections):
        assert seen.ledger.join_history(fence, keep_newest=50) == PARTITIONS * (RANGES - 50 - 1)
    (connection,) = connections
    assert connection.longest <= PARTITIONS
    assert connection.calls.count("begin") == connection.calls.count("commit") == PARTITIONS
    joined = [row[1:] for row in history(place) if row[4] == "joined"]
    assert joined == [(0, RANGES - 50, 1, "joined", RANGES - 50, RANGES - 50, 0, 0)] * PARTITIONS
