"""Names of tables, columns and pipelines may hold anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from oncely.core.batch import Batch
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange
from oncely.errors import TableMismatch
from oncely.stores.sql.connection import application_prefix, brief_session, close_all
from tests.sinktools import (
    T0,
    Place,
    Rec,
    at_t0,
    commit_all,
    gone,
    open_sink,
    postgres_place,
    publish_on,
    quoted,
    ready,
    sink_to,
    with_faults,
    with_rows,
)

HOSTILE = [
    'we"ird; DROP TABLE x; --',
    "100%s",
    "%(name)s %% %",
    "tab\nle",
    "tab\u2028le\x0b\x1c",
    "tabelle für 😀",
    "it's",
    "back\\slash",
    "dotted.name",
    "SELECT",
    "{oncely_positions}",
    "?1 :name @x $1",
    "COPY x, line 7",
    " ",
]


def hostile_schema(name: str) -> pa.Schema:
    return pa.schema([("id", pa.int64()), (name, pa.int64()), (f"{name} 2", pa.string())])


def row(name: str, at: int, text: str | None = "x") -> Rec:
    return Rec(at, ({"id": at % 10, name: at, f"{name} 2": text},))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
def test_hostile_names_in_every_statement(place: Place, name: str, keys: tuple[str, ...]) -> None:
    schema = hostile_schema(name)
    sink = sink_to(
        place, schema, table=name, pipeline=name, keys=keys, version=name if keys else None
    )
    sink, fence = ready(sink)
    good = [row(name, at) for at in range(9)]
    bad = row(name, 4, "a\x00b")
    commit_all(sink, at_t0(0, [*good[:4], bad, *good[5:]], schema), fence)
    commit_all(sink, at_t0(9, [gone(9, id=2), row(name, 13)], schema, keys=keys), fence)
    found = place.sql(
        f"SELECT {quoted(name)}, {quoted(name + ' 2')} FROM {quoted(name)} ORDER BY 1"
    )
    wanted = [0, 1, 3, 5, 6, 7, 8, 13] if keys else [0, 1, 2, 3, 5, 6, 7, 8, 13]
    wanted = [n for n in wanted if not (keys and n == 3)]  # 13 has the key of 3
    assert found == [(n, "x") for n in wanted]
    assert place.sql('SELECT pipeline, "offset" FROM oncely_rejects') == [(name, 4)]
    assert sink.ledger.join_history(fence, keep_newest=0) == 1
    newer = open_sink(sink)
    assert newer.positions == {T0: 14}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_in_batch_commit(place: Place, name: str) -> None:
    schema = hostile_schema(name)
    sink, fence = ready(sink_to(place, schema, table=name, pipeline=name))
    rows = pa.Table.from_pylist([row(name, at).rows[0] for at in range(3)], schema=schema)
    what = with_rows(Batch({T0: OffsetRange(0, 3)}, {T0: Counts(3, 3, 0, 0)}), sink, rows)
    publish_on(sink, what, sink.ledger.positions(fence), fence)
    assert place.sql(f"SELECT COUNT(*) FROM {quoted(name)}") == [(3,)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_of_that_name(on_postgres: Place, shared_database: str, name: str) -> None:
    schema_name = f"{name}{on_postgres.schema}"
    on_postgres.sql(f"CREATE SCHEMA {quoted(schema_name)}")
    inside = Place(shared_database, schema_name)
    schema = hostile_schema(name)
    sink, fence = ready(sink_to(inside, schema, table=name, keys=["id"]))
    commit_all(sink, at_t0(0, [row(name, 1), row(name, 2, "a\x00")], schema), fence)
    found = on_postgres.sql(f"SELECT id FROM {quoted(schema_name)}.{quoted(name)}")
    assert found == [(1,)]


@pytest.mark.parametrize("name", HOSTILE)
def test_copy_s_error_names_the_line_whatever_the_table_s_name(
    on_postgres: Place, name: str
) -> None:
    """The named line saves the search: one COPY for all, then one for each of three parts."""
    sink, fence = ready(sink_to(on_postgres, hostile_schema(name), table=name))
    copies = []

    def counting(call: str, go: Callable[[], Any]) -> Any:
        copies.extend(["copy"] * (call == "copy"))
        return go()

    on_postgres.sql(f"ALTER TABLE {quoted(name)} ADD CHECK ({quoted(name)} <> 300)")
    close_all()
    records = [row(name, at) for at in range(1000)]
    commit_all(with_faults(sink, counting), at_t0(0, records, hostile_schema(name)), fence)
    # The fifth is in a transaction without the refused row, and the sixth is of its dead letter.
    assert len(copies) == 6
    assert on_postgres.sql('SELECT "offset" FROM oncely_rejects') == [(300,)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_takeover_finds_sessions_whatever_the_pipeline_s_name(database: str, name: str) -> None:
    """PostgreSQL changes an application_name that is not plain ASCII, and cuts a long one."""
    place = postgres_place(database)
    sink, fence = ready(sink_to(place, pipeline=name * 30))
    sink.ledger.positions(fence)  # its session is kept
    dialect, tables = place.dialect, sink.ledger.tables.all()
    with brief_session(dialect, "test", sink.connect) as session:
        assert dialect.end_sessions(session, application_prefix(sink.pipeline), tables) == 1
    close_all()


def test_names_that_are_ours(place: Place) -> None:
    schema = pa.schema([("id", pa.int64()), ("_oncely_ord", pa.int64())])
    with pytest.raises(TableMismatch, match="'_oncely_ord': names that begin with _oncely_"):
        open_sink(sink_to(place, schema))
    with pytest.raises(TableMismatch, match="_oncely_rows"):
        open_sink(sink_to(place, table="_oncely_rows"))


def test_two_schemas_have_two_ledgers(shared_database: str) -> None:
    one, other = postgres_place(shared_database), postgres_place(shared_database)
    assert open_sink(sink_to(one)).fence.epoch == 1
    assert open_sink(sink_to(other)).fence.epoch == 1
