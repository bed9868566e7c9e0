"""The number of round trips of a commit into PostgreSQL, counted in libpq's trace of the wire."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import IO, Any

import pyarrow as pa
import pytest
from psycopg import pq

from oncely.core.claim import PositionMoved
from oncely.stores.sql.connection import Statement, close_all
from tests.contracts.looking import create, ids, rejected
from tests.sinktools import (
    SCHEMA,
    T0,
    T1,
    Place,
    chunk,
    commit_all,
    numbered,
    ready,
    sink_to,
    with_faults,
)

A_COMMIT = 5
"""Positions; from BEGIN to COPY; from the rows to the catalog; positions and history; COMMIT."""


@contextmanager
def traced() -> Iterator[tuple[IO[str], Callable[[str, Callable[[], Any]], Any]]]:
    """A file, and a wrapper of calls that lets libpq write each message of a session into it."""
    close_all()
    with tempfile.TemporaryFile("w+") as file:

        def around(name: str, call: Callable[[], Any]) -> Any:
            made = call()
            if name == "connect":
                made._session.pgconn.trace(file.fileno())
                made._session.pgconn.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
            return made

        yield file, around
        close_all()


def round_trips(trace: str) -> int:
    """How often the client (F) has sent something after the server (B) was heard."""
    sides = [line[0] for line in trace.splitlines() if line[:2] in ("F\t", "B\t")]
    return sum(a == "B" and b == "F" for a, b in itertools.pairwise(sides))


@pytest.mark.parametrize(
    ("columns", "schema", "keys"),
    [
        ("id bigint, name text", SCHEMA, ()),
        ("id bigint, name text, more inet", pa.schema([*SCHEMA, ("more", pa.string())]), ()),
        ("id bigint PRIMARY KEY, name text", SCHEMA, ("id",)),
    ],
    ids=["append", "staged append", "upsert"],
)
def test_round_trips_of_a_commit(
    on_postgres: Place, columns: str, schema: pa.Schema, keys: tuple[str, ...]
) -> None:
    create(on_postgres, columns)
    sink, fence = ready(sink_to(on_postgres, schema, keys=keys), {T0: 0, T1: 0})
    with traced() as (file, around):
        sink = with_faults(sink, around)

        def commit(start: int) -> None:
            parts = {T0: (start, numbered(start, start + 50)), T1: (start, [])}
            parts[T1] = (start, numbered(1_000 + start, 1_050 + start))
            commit_all(sink, chunk(parts, schema), fence)

        commit(0)  # also logs in
        before = file.seek(0, 2)
        commit(50)
        file.seek(before)
        trace = file.read()
    assert len(ids(on_postgres)) == 200
    assert rejected(on_postgres) == []
    assert round_trips("B\t\n" + trace) == A_COMMIT


def test_nothing_is_run_after_a_statement_that_has_changed_no_row(on_postgres: Place) -> None:
    """And a text of the same words in a value is no such statement."""
    on_postgres.sql("CREATE TABLE notes (n int, said text)")
    notes = f"{on_postgres.schema}.notes"
    hit = Statement(f"UPDATE {notes} SET n = n + 1 WHERE said = %s", ("100% ' \\ é",), Exception())
    miss = hit._replace(params=("another",), otherwise=PositionMoved("t-0"))
    insert = Statement(f"INSERT INTO {notes} VALUES (%s, %s)", (1, "100% ' \\ é"))
    with closing(on_postgres.dialect.connect("oncely-test")) as session:
        session.execute_all([insert, hit])
        with pytest.raises(PositionMoved):
            session.execute_all([hit, miss, insert])
    assert on_postgres.sql("SELECT n, said FROM notes") == [(2, "100% ' \\ é")]
