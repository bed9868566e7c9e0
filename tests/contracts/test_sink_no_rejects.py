"""What says nothing about a row rejects nobody: full disks, deadlocks, other attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from psycopg.copy import LibpqWriter

from oncely.errors import Unavailable
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.connection import Contention, close_all
from tests.contracts.looking import create, ids, rejected
from tests.sinktools import (
    SCHEMA,
    T0,
    Place,
    at_t0,
    chunk,
    commit_all,
    numbered,
    ready,
    sink_to,
    with_faults,
)


def test_an_error_of_the_database_rejects_nobody(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    calls = []

    def full_disk(name: str, go: Callable[[], Any]) -> Any:
        if name == "copy":
            calls.append(name)
            if len(calls) < 3:
                raise Unavailable("disk full") if len(calls) == 1 else Contention("deadlock")
        return go()

    close_all()
    commit_all(with_faults(sink, full_disk), at_t0(0, numbered(0, 5)), fence)
    assert len(calls) == 3
    assert ids(place) == list(range(5))
    assert rejected(place) == []


def test_a_full_sqlite_file(on_sqlite: Place) -> None:
    sink, fence = ready(sink_to(on_sqlite))
    pages = int(on_sqlite.sql("PRAGMA page_count")[0][0])
    close_all()

    def small(name: str, go: Callable[[], Any]) -> Any:
        found = go()
        if name == "connect":
            found._session.execute(f"PRAGMA max_page_count = {pages + 20}")
        return found

    with pytest.raises(Unavailable, match="full"):
        commit_all(with_faults(sink, small), at_t0(0, numbered(0, 20_000)), fence)
    assert rejected(on_sqlite) == []
    assert ids(on_sqlite) == []
    commit_all(sink, at_t0(0, numbered(0, 20_000)), fence)
    assert len(ids(on_sqlite)) == 20_000


def test_a_writer_that_never_ends_is_contention(on_sqlite: Place) -> None:
    place = Place(on_sqlite.url, connect_timeout=0.05)
    sink, fence = ready(sink_to(place))
    holder = place.session()
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Contention, match="locked"):
        commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    holder.execute("ROLLBACK")
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    assert ids(place) == [0, 1]


def test_a_violation_by_another_attempt_s_rows_is_a_replay(place: Place) -> None:
    """The other attempt commits the very same rows while ours are on their way."""
    create(place, "id bigint PRIMARY KEY, name text")
    sink, fence = ready(sink_to(place))
    other: list[SqlSink] = [sink]
    what = chunk({T0: (0, numbered(0, 4))})

    def meanwhile(name: str, go: Callable[[], Any]) -> Any:
        if name == ("copy" if place.is_postgres else "begin") and other:
            commit_all(other.pop(), what, fence)
        return go()

    close_all()
    outcomes = commit_all(with_faults(sink, meanwhile), what, fence)
    assert [o.replayed for o in outcomes] == [True]
    assert ids(place) == [0, 1, 2, 3]
    assert rejected(place) == []


def test_a_replay_is_seen_whatever_the_server_s_default_isolation(
    on_postgres: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one old snapshot the other attempt's commit is never seen, and its rows are "rejects"."""
    on_postgres.sql("CREATE TABLE rows (id bigint PRIMARY KEY, name varchar, more inet)")
    url = f"{on_postgres.url}?options=-cdefault_transaction_isolation%3Drepeatable%5C%20read"
    schema = pa.schema([*SCHEMA, ("more", pa.string())])  # inet: staged as text first
    sink, fence = ready(sink_to(Place(url, on_postgres.schema), schema))
    other = [sink]
    what = at_t0(0, numbered(0, 4), schema)

    write = LibpqWriter.write

    def meanwhile(self: LibpqWriter, data: Any) -> None:
        if other:
            commit_all(other.pop(), what, fence)
        write(self, data)

    close_all()
    monkeypatch.setattr(LibpqWriter, "write", meanwhile)
    outcomes = commit_all(sink, what, fence, max_rejects=0)
    assert not other
    assert [o.replayed for o in outcomes] == [True]
    assert ids(on_postgres) == [0, 1, 2, 3]
