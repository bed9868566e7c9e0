"""Destinations that are more than one plain table: inheritance, partitions, views."""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pytest

from oncely.audit.sql import open_evidence
from oncely.core.ranges import OffsetRange
from oncely.kinds.sql.change import SqlRewrites
from oncely.stores.sql.connection import RowsDropped
from tests.contracts.looking import ids, rejected
from tests.sinktools import (
    SCHEMA,
    T0,
    Place,
    at_t0,
    commit_all,
    gone,
    numbered,
    ready,
    rec,
    sink_to,
    trigger,
)

JSON = pa.schema([("id", pa.int64()), ("name", pa.string())])


def own_ids(place: Place, table: str) -> list[int]:
    return [int(one) for (one,) in place.sql(f"SELECT id FROM ONLY {table} ORDER BY id")]


def test_a_tombstone_deletes_no_row_of_a_table_that_inherits(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE rows (id bigint PRIMARY KEY, name text)")
    sink, fence = ready(sink_to(on_postgres, keys=["id"]))
    on_postgres.sql("CREATE TABLE others (more text) INHERITS (rows)")
    on_postgres.sql("INSERT INTO others VALUES (1, 'theirs'), (2, 'theirs')")
    records = [*numbered(0, 3), gone(3, id=1), rec(4, id=2, name="new")]
    commit_all(sink, at_t0(0, records, keys=["id"]), fence)
    assert own_ids(on_postgres, "rows") == [0, 2]
    assert on_postgres.sql("SELECT id, name FROM others ORDER BY id") == [
        (1, "theirs"),
        (2, "theirs"),
    ]


def test_a_tombstone_deletes_rows_of_partitions(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE rows (id bigint PRIMARY KEY, name text) PARTITION BY HASH (id)")
    for number in range(2):
        on_postgres.sql(
            f"CREATE TABLE rows_{number} PARTITION OF rows FOR VALUES"
            f" WITH (MODULUS 2, REMAINDER {number})"
        )
    sink, fence = ready(sink_to(on_postgres, keys=["id"]))
    commit_all(sink, at_t0(0, [*numbered(0, 6), gone(6, id=1), gone(7, id=4)], keys=["id"]), fence)
    assert ids(on_postgres) == [0, 2, 3, 5]


def test_audit_and_repair_are_of_the_tables_own_rows(on_postgres: Place) -> None:
    """A row of an inheriting table is neither compared nor deleted."""
    sink, fence = ready(sink_to(on_postgres, keep_source=True))
    commit_all(sink, at_t0(0, numbered(0, 10)), fence)
    on_postgres.sql("CREATE TABLE others () INHERITS (rows)")
    on_postgres.sql("INSERT INTO others SELECT * FROM ONLY rows WHERE id < 3")
    on_postgres.sql("INSERT INTO others SELECT id, name, 't', 7, 0 FROM ONLY rows WHERE id = 1")
    with closing(open_evidence("p", sink.dialect, sink.wanted.table)) as evidence:
        assert list(evidence.outside({T0: OffsetRange(0, 10)})) == []
    with closing(open_evidence("p", sink.dialect, sink.wanted.table, offsets=False)) as evidence:
        assert [one.rows for one in evidence.groups] == [10]
    expected = sink.ledger.entries()[T0]
    with pytest.raises(Exception, match="t-0"):
        SqlRewrites(sink).remove_beyond(T0, [OffsetRange(0, 10)], expected)
    on_postgres.sql('UPDATE oncely_positions SET "position" = 0')
    done = SqlRewrites(sink).remove_beyond(T0, [OffsetRange(0, 10)], sink.ledger.entries()[T0])
    assert done.removed_rows == 10
    assert own_ids(on_postgres, "rows") == []
    assert own_ids(on_postgres, "others") == [0, 1, 1, 2]


def view_that_keeps(place: Place, condition: str, kind: str = "text") -> None:
    """A view whose trigger inserts some rows, and passes over the others without an error."""
    place.sql(f"CREATE TABLE kept (id bigint CHECK (id < 1000), name {kind})")
    place.sql("CREATE VIEW rows AS SELECT * FROM kept")
    trigger(
        place,
        f"IF NOT ({condition}) THEN RETURN NULL; END IF;"
        f" INSERT INTO {place.schema}.kept VALUES (NEW.id, NEW.name); RETURN NEW;",
        "INSTEAD OF INSERT ON rows",
    )


@pytest.mark.parametrize("kind", ["text", "jsonb"])
def test_rows_that_the_trigger_of_a_view_drops_stop_the_commit(
    on_postgres: Place, kind: str
) -> None:
    """COPY counts every row that is sent to a view; INSERT counts those that its trigger took."""
    view_that_keeps(on_postgres, "NEW.id <> 1", kind)
    sink, fence = ready(sink_to(on_postgres, SCHEMA if kind == "text" else JSON))
    records = [rec(n, id=n, name="{}") for n in range(3)]
    with pytest.raises(RowsDropped, match="given 3 rows and has taken 2"):
        commit_all(sink, at_t0(0, records), fence)
    assert on_postgres.sql("SELECT id FROM kept") == []
    assert on_postgres.sql("SELECT count(*) FROM oncely_ranges") == [(0,)]


def test_a_view_takes_rows_in_order_and_refuses_some(on_postgres: Place) -> None:
    view_that_keeps(on_postgres, "true")
    sink, fence = ready(sink_to(on_postgres))
    records = [rec(n, id=n if n % 3 else 1000 + n, name="x") for n in range(120)]
    commit_all(sink, at_t0(0, records), fence)
    assert ids(on_postgres) == [n for n in range(120) if n % 3]
    assert [offset for offset, _ in rejected(on_postgres)] == list(range(0, 120, 3))


def test_a_view_that_needs_no_trigger_is_a_destination(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE kept (id bigint, name text, more int DEFAULT 7)")
    on_postgres.sql("CREATE VIEW rows AS SELECT id, name FROM kept WHERE id >= 0")
    sink, fence = ready(sink_to(on_postgres))
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    assert on_postgres.sql("SELECT count(*), min(more) FROM kept") == [(5, 7)]
