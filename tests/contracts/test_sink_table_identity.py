"""The ledger's positions belong to one table: a missing or another one is refused."""

from __future__ import annotations

import subprocess

import pytest

from oncely.config import parse
from oncely.core.claim import Fence, Takeover
from oncely.errors import TableMismatch
from oncely.kinds.destination import Inspection
from oncely.kinds.sql.destination import check_table
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql_ledger import look
from oncely.pipeline import Pipeline
from oncely.stores.sql.connection import close_all
from oncely.stores.sql.sqlite import Sqlite
from oncely.testing.servers import postgres
from tests.sinktools import (
    SOURCE,
    T0,
    Place,
    at_t0,
    commit_all,
    numbered,
    open_sink,
    ready,
    sink_to,
)

MADE = "CREATE TABLE rows (id bigint, name text)"


def begun(place: Place) -> tuple[SqlSink, Fence]:
    """A pipeline that has committed offsets 0 to 4."""
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    return sink, fence


def refused(sink: SqlSink, text: str) -> TableMismatch:
    """The run is refused, as ``plan`` and ``status`` say, and nothing was written."""
    with pytest.raises(TableMismatch, match=text) as looked:
        check_table(sink)
    with pytest.raises(TableMismatch, match=text) as caught:
        open_sink(sink)
    assert str(looked.value) == str(caught.value)
    assert caught.value.message in planned(sink)
    assert look(sink.ledger).refused == caught.value.message
    assert "offsets reset" in caught.value.way_out
    return caught.value


def planned(sink: SqlSink) -> list[str]:
    """The problems that ``oncely plan`` tells of the destination."""
    url = (
        f"sqlite:///{sink.dialect.endpoint}"
        if isinstance(sink.dialect, Sqlite)
        else sink.dialect.url
    )
    described = {
        "name": sink.pipeline,
        "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT, name STRING"},
        "sink": {"kind": "sql", "url": url, "table": str(sink.wanted.table)},
    }
    inspection = Inspection()
    Pipeline(parse(described)).destination.plan(sink.wanted.schema, inspection)
    return [f"{one.key}: {one.message}" for one in inspection.problems]


def reset(sink: SqlSink, to: int) -> None:
    sink.open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda _: {T0: to}))


def goes_on(sink: SqlSink, at: int) -> None:
    """The next run begins at ``at``, and commits."""
    opened = open_sink(sink)
    assert opened.positions == {T0: at}
    commit_all(sink.bind(), at_t0(at, numbered(at, at + 2)), opened.fence)


def test_a_missing_table_is_not_created_in_the_middle_of_the_topic(place: Place) -> None:
    sink, fence = begun(place)
    place.sql("DROP TABLE rows")
    refused(sink, "rows is missing.*holds positions of pipeline 'p'")
    with pytest.raises(Exception, match=r"rows"):
        place.sql("SELECT * FROM rows")
    assert place.sql("SELECT epoch FROM oncely_pipelines") == [(fence.epoch,)]


def test_after_a_reset_the_missing_table_is_created(place: Place) -> None:
    sink, _ = begun(place)
    for _ in range(2):
        place.sql("DROP TABLE rows")
        refused(sink, "is missing")
        reset(sink, 0)
        goes_on(sink, 0)
        assert place.sql("SELECT id FROM rows ORDER BY id") == [(0,), (1,)]


def test_a_table_without_positions_may_be_made_again(place: Place) -> None:
    """A first start that died before it settled positions has written nothing."""
    open_sink(sink_to(place))
    place.sql("DELETE FROM oncely_positions")
    place.sql("DROP TABLE rows")
    goes_on(sink_to(place), 0)
    place.sql("DROP TABLE rows")
    refused(sink_to(place), "is missing")


def test_a_table_that_is_rewritten_stays_the_same(place: Place) -> None:
    sink, _ = begun(place)
    if place.is_postgres:
        place.sql("TRUNCATE rows")
        place.sql("VACUUM FULL rows")
        place.sql("VACUUM FULL oncely_positions")
        place.sql("ALTER TABLE rows ALTER COLUMN name TYPE varchar(100)")
    else:
        place.sql("CREATE TABLE before_it (n INTEGER)")
        place.sql("DROP TABLE before_it")
        place.sql("VACUUM")
    goes_on(sink, 5)


# -- PostgreSQL tells a table from another one of its name ---------------------------------


def test_a_table_that_was_made_again_is_refused(on_postgres: Place) -> None:
    sink, _ = begun(on_postgres)
    on_postgres.sql("DROP TABLE rows")
    on_postgres.sql(MADE)
    refused(sink, "rows is not the table that pipeline 'p' has written to")
    reset(sink, 3)
    goes_on(sink, 3)
    on_postgres.sql("DROP TABLE rows")
    on_postgres.sql(MADE)
    refused(sink, "is not the table")


def test_positions_that_were_restored_alone_are_refused(on_postgres: Place) -> None:
    """They may be older than the rows: the records in between would be written twice."""
    sink, _ = begun(on_postgres)
    on_postgres.sql("ALTER TABLE oncely_positions RENAME TO kept")
    on_postgres.sql("CREATE TABLE oncely_positions (LIKE kept INCLUDING ALL)")
    on_postgres.sql("INSERT INTO oncely_positions SELECT * FROM kept")
    refused(sink, "oncely_positions is not the table.*rows is")
    reset(sink, 4)
    goes_on(sink, 4)


def test_table_and_ledger_restored_together_go_on(on_postgres: Place) -> None:
    sink, _ = begun(on_postgres)
    close_all()
    dumped_and_restored(on_postgres)
    check_table(sink)
    goes_on(sink, 5)
    on_postgres.sql("DROP TABLE rows")
    on_postgres.sql(MADE)
    refused(sink, "is not the table")


def dumped_and_restored(place: Place) -> None:
    """By PostgreSQL's own programs, as an administrator does."""
    assert place.schema
    programs = postgres.programs()
    dump = subprocess.run(
        [programs / "pg_dump", place.url, "-n", place.schema], check=True, capture_output=True
    )
    place.sql(f"DROP SCHEMA {place.schema} CASCADE")
    subprocess.run(
        [programs / "psql", place.url, "-qX", "-v", "ON_ERROR_STOP=1"],
        input=dump.stdout,
        check=True,
        capture_output=True,
    )


# -- tables that a crash of the server empties, and tables that are elsewhere ---------------

FOREIGN = (
    "CREATE FOREIGN DATA WRAPPER {w}",
    "CREATE SERVER {w} FOREIGN DATA WRAPPER {w}",
)
PARTITIONED = "CREATE TABLE rows (id bigint, name text) PARTITION BY RANGE (id)"


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (["CREATE UNLOGGED TABLE rows (id bigint, name text)"], "rows is UNLOGGED"),
        (
            [*FOREIGN, "CREATE FOREIGN TABLE rows (id bigint, name text) SERVER {w}"],
            "rows is a foreign table",
        ),
        (
            [
                PARTITIONED,
                "CREATE TABLE low PARTITION OF rows FOR VALUES FROM (0) TO (10)",
                "CREATE UNLOGGED TABLE high PARTITION OF rows FOR VALUES FROM (10) TO (20)",
            ],
            "high is UNLOGGED",
        ),
        (
            [
                *FOREIGN,
                PARTITIONED,
                "CREATE FOREIGN TABLE far PARTITION OF rows DEFAULT SERVER {w}",
            ],
            "far is a foreign table",
        ),
        (
            ["CREATE MATERIALIZED VIEW rows AS SELECT 1::bigint AS id, ''::text AS name"],
            "rows is a materialized view",
        ),
        (
            [
                "CREATE TABLE rows (id bigint, name text)",
                "CREATE RULE r AS ON INSERT TO rows WHERE NEW.id = 1 DO INSTEAD NOTHING",
            ],
            "rows has a rewrite rule",
        ),
    ],
    ids=["unlogged", "foreign", "unlogged partition", "foreign partition", "stored view", "rule"],
)
def test_a_table_that_does_not_commit_with_the_ledger_is_refused(
    on_postgres: Place, statements: list[str], problem: str
) -> None:
    wrapper = f"w_{on_postgres.schema}"
    for statement in statements:
        on_postgres.sql(statement.format(w=wrapper))
    try:
        for look in (check_table, open_sink, SqlSink.bind):
            with pytest.raises(TableMismatch, match=problem):
                look(sink_to(on_postgres))
        assert any(problem in one for one in planned(sink_to(on_postgres)))
    finally:  # a wrapper is the database's, and the schema is the test's
        on_postgres.sql(f"DROP FOREIGN DATA WRAPPER IF EXISTS {wrapper} CASCADE")


def test_a_ledger_that_a_crash_of_the_server_empties_is_refused(on_postgres: Place) -> None:
    sink, _ = begun(on_postgres)
    on_postgres.sql("ALTER TABLE oncely_positions SET UNLOGGED")
    for refusing in (check_table, open_sink):
        with pytest.raises(TableMismatch, match="oncely_positions is UNLOGGED") as caught:
            refusing(sink)
    on_postgres.sql(caught.value.way_out.partition("`")[2].partition("`")[0])
    goes_on(sink, 5)
