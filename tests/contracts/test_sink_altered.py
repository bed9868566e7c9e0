"""A table that is altered while a run is up: nothing is written by types that no longer hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from oncely.commit.change import try_portion
from oncely.core.batch import Batch, Reject
from oncely.core.change import Reprocessed
from oncely.core.claim import Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.errors import TableMismatch
from oncely.kinds.sql.change import SqlReplay
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.connection import close_all
from tests.sinktools import (
    T0,
    Place,
    Rec,
    at_t0,
    commit_all,
    open_sink,
    publish_on,
    ready,
    rec,
    sink_to,
    with_faults,
    with_rows,
)

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("w", pa.int32())])

ALTERED = {
    "double": "ALTER TABLE rows ALTER COLUMN v TYPE double precision",
    "timestamptz": "ALTER TABLE rows ALTER COLUMN v TYPE timestamptz USING to_timestamp(v)",
    "real": "ALTER TABLE rows ALTER COLUMN w TYPE real",
    "numeric": "ALTER TABLE rows ALTER COLUMN v TYPE numeric(30,2)",
    "required": "ALTER TABLE rows ADD more int NOT NULL DEFAULT 0;"
    " ALTER TABLE rows ALTER more DROP DEFAULT",
    "another table": "DROP TABLE rows; CREATE TABLE rows (id bigint PRIMARY KEY, v bigint, w int)",
}


def records(start: int, end: int) -> list[Rec]:
    return [rec(n, id=n, v=5, w=7) for n in range(start, end)]


def begun(place: Place, **more: Any) -> tuple[SqlSink, Fence]:
    sink, fence = ready(sink_to(place, SCHEMA, **more))
    commit_all(sink, at_t0(0, records(0, 3), SCHEMA), fence)
    return sink, fence


def state(place: Place) -> list[list[tuple[Any, ...]]]:
    """Everything that a commit changes."""
    tables = ("rows ORDER BY 1", "oncely_positions", "oncely_ranges", "oncely_rejects")
    return [place.sql(f"SELECT * FROM {one}") for one in tables]


def alter(place: Place, how: str) -> None:
    for statement in ALTERED[how].split("; "):
        place.sql(statement)


@pytest.mark.parametrize("how", ALTERED)
@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
def test_a_commit_is_refused(on_postgres: Place, how: str, keys: Sequence[str]) -> None:
    sink, fence = begun(on_postgres, keys=keys)
    alter(on_postgres, how)
    before = state(on_postgres)
    with pytest.raises(TableMismatch, match="during the run") as caught:
        commit_all(sink, at_t0(3, records(3, 6), SCHEMA), fence)
    assert "start again" in caught.value.way_out
    assert state(on_postgres) == before


def test_the_column_is_named_with_both_types(on_postgres: Place) -> None:
    sink, fence = begun(on_postgres)
    alter(on_postgres, "double")
    with pytest.raises(TableMismatch, match=r"'v' was bigint and is double precision"):
        commit_all(sink, at_t0(3, records(3, 6), SCHEMA), fence)


def test_rows_that_the_new_type_refuses_are_no_rejects(on_postgres: Place) -> None:
    """As a time, 2 ** 62 is out of range: the records are not at fault."""
    sink, fence = begun(on_postgres)
    alter(on_postgres, "timestamptz")
    before = state(on_postgres)
    refused = [rec(n, id=n, v=2**62, w=1) for n in range(3, 6)]
    with pytest.raises(TableMismatch, match="during the run"):
        commit_all(sink, at_t0(3, refused, SCHEMA), fence, max_rejects=1)
    assert state(on_postgres) == before


def test_columns_that_the_pipeline_does_not_write_may_come(place: Place) -> None:
    sink, fence = begun(place)
    place.sql("ALTER TABLE rows ADD COLUMN more INTEGER")
    commit_all(sink, at_t0(3, records(3, 6), SCHEMA), fence)
    assert place.sql("SELECT count(*) FROM rows") == [(6,)]


def test_after_a_new_start_the_new_type_is_written(on_postgres: Place) -> None:
    sink, _ = begun(on_postgres)
    alter(on_postgres, "double")
    fence = open_sink(sink).fence
    commit_all(sink.bind(), at_t0(3, records(3, 6), SCHEMA), fence)
    assert on_postgres.sql("SELECT DISTINCT v FROM rows") == [(5.0,)]


@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
def test_wherever_an_alter_falls_in_a_commit(on_postgres: Place, keys: Sequence[str]) -> None:
    """Before each call of the connection: it waits for the commit, or the commit is refused."""
    sink, _ = begun(on_postgres, keys=keys)
    waited = [False]
    for at in itertools.count():
        on_postgres.sql("ALTER TABLE rows ALTER COLUMN v TYPE bigint")
        opened = open_sink(sink)
        start, calls = opened.positions[T0], itertools.count()

        def around(name: str, call: Callable[[], Any], calls: Any = calls, at: int = at) -> Any:
            if next(calls) == at:
                waited.append(not altered(on_postgres))
            return call()

        close_all()
        what = at_t0(start, records(start, start + 3), SCHEMA)
        faulty = with_faults(sink.bind(), around)
        before = state(on_postgres)
        waited.clear()
        try:
            commit_all(faulty, what, opened.fence)
        except TableMismatch:
            assert waited == [False]
            assert state(on_postgres)[1:] == before[1:]
        else:
            assert waited in ([], [True])
            assert on_postgres.sql("SELECT DISTINCT v FROM rows") == [(5,)]
        if not waited:
            return


def altered(place: Place) -> bool:
    """Alter the type, unless somebody holds a lock of the table."""
    with closing(place.session()) as session:
        session.execute("SET lock_timeout = '200ms'")
        try:
            session.execute("ALTER TABLE rows ALTER COLUMN v TYPE double precision")
        except psycopg.errors.LockNotAvailable:
            return False
    return True


@pytest.mark.parametrize("how", ALTERED)
def test_a_publication_is_refused(on_postgres: Place, how: str) -> None:
    sink, fence = begun(on_postgres)
    what = with_rows(
        Batch({T0: OffsetRange(3, 6)}, {T0: Counts(3, 0, 0, 0)}),
        sink,
        at_t0(3, records(3, 6), SCHEMA).rows,
    )
    entries = sink.ledger.positions(fence)
    alter(on_postgres, how)
    before = state(on_postgres)
    with pytest.raises(TableMismatch, match="during the run"):
        publish_on(sink, what, entries, fence)
    assert state(on_postgres) == before


def test_a_replay_is_refused(on_postgres: Place) -> None:
    sink, fence = begun(on_postgres)
    commit_all(sink, at_t0(3, [Rec(3, bad="no JSON")], SCHEMA), fence)
    alter(on_postgres, "double")
    before = state(on_postgres)

    def judge(found: Sequence[Reject]) -> Reprocessed:
        return Reprocessed(at_t0(0, records(3, 3 + len(found)), SCHEMA), found)

    with pytest.raises(TableMismatch, match="during the run"):
        try_portion(SqlReplay(sink), judge, 10)
    assert state(on_postgres) == before
