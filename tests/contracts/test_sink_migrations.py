"""Ledger tables of earlier versions are migrated, and those of a newer version are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oncely.core.claim import Takeover
from oncely.errors import NewerFormat, TableMismatch
from oncely.ledgers.sql.tables import MIGRATIONS, TABLES, VERSION
from oncely.pipeline.inspect import check_table, dead_letters, look
from oncely.sinks.sql.sink import SqlSink
from tests.sinktools import (
    SOURCE,
    T0,
    Place,
    as_of,
    at_t0,
    commit_all,
    ledger_columns,
    numbered,
    open_sink,
    ready,
    sink_to,
    with_faults,
)

NEWER = VERSION + 95
STEPS = sum(map(len, MIGRATIONS.values())) + 1
"""Statements of a migration from version 1, with the index."""


def content(place: Place) -> dict[str, list[tuple[Any, ...]]]:
    return {name: sorted(place.sql(f"SELECT * FROM {name}"), key=str) for name in (*TABLES, "rows")}


def versions(place: Place) -> list[tuple[int]]:
    return place.sql("SELECT schema_version FROM oncely_pipelines ORDER BY pipeline")


def test_a_new_ledger_has_the_present_version(place: Place) -> None:
    open_sink(sink_to(place))
    open_sink(sink_to(place, pipeline="q"))
    assert versions(place) == [(VERSION,), (VERSION,)]


@pytest.mark.parametrize("version", range(1, VERSION))
def test_each_version_is_migrated_to_the_present_one(place: Place, version: int) -> None:
    """The result is a ledger as a new one is, with rows and positions as before."""
    sink, fence = ready(sink_to(place))
    fresh = ledger_columns(place)
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    as_of(place, version)
    assert ledger_columns(place) < fresh
    assert look(sink).positions == {T0: 2}
    sink, fence = ready(sink_to(place))
    assert ledger_columns(place) == fresh
    assert versions(place) == [(VERSION,)]
    commit_all(sink, at_t0(2, numbered(2, 4)), fence)
    assert place.sql("SELECT id FROM rows ORDER BY id") == [(0,), (1,), (2,), (3,)]
    assert look(sink).positions == {T0: 4}


def reset(sink: SqlSink) -> object:
    return sink.open(Takeover(SOURCE, dict, {T0: 0}, reset=lambda _: {T0: 0}))


@pytest.mark.parametrize(
    "act",
    [open_sink, reset, look, check_table, lambda sink: dead_letters(sink, 10)],
    ids=["open", "reset", "look", "plan", "rejects"],
)
@pytest.mark.parametrize("create", [True, False])
def test_a_newer_version_is_refused(
    place: Place, act: Callable[[SqlSink], object], create: bool
) -> None:
    sink, fence = ready(sink_to(place, create=True))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    place.sql(f"UPDATE oncely_pipelines SET schema_version = {NEWER}")
    place.sql("ALTER TABLE oncely_ranges DROP COLUMN digest")  # not added again
    before = content(place)
    with pytest.raises(NewerFormat, match=f"format {NEWER}, .* up to {VERSION}") as refused:
        act(sink_to(place, create=create))
    assert "upgrade Oncely" in refused.value.way_out
    assert content(place) == before


def test_a_takeover_by_a_newer_version_during_the_opening_is_noticed(place: Place) -> None:
    """Between the first check and the epoch: this version takes none any more."""
    open_sink(sink_to(place))
    begun: list[str] = []

    def migrate(name: str, call: Callable[[], Any]) -> Any:
        if name == "begin" and not begun:
            begun.append(name)
            place.sql(f"UPDATE oncely_pipelines SET schema_version = {NEWER}")
        return call()

    with pytest.raises(NewerFormat):
        open_sink(with_faults(sink_to(place), migrate))
    assert begun
    assert place.sql("SELECT epoch FROM oncely_pipelines") == [(1,)]


def test_other_pipelines_of_the_schema_go_on_in_the_version_before(place: Place) -> None:
    """A step only adds. A newer version has migrated the tables for its own pipeline."""
    sink, fence = ready(sink_to(place))
    open_sink(sink_to(place, pipeline="q"))
    place.sql(f"UPDATE oncely_pipelines SET schema_version = {NEWER} WHERE pipeline = 'q'")
    for table in TABLES:
        place.sql(f"ALTER TABLE {table} ADD COLUMN from_later TEXT NOT NULL DEFAULT ''")
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(2, numbered(2, 3)), fence)
    assert look(sink).positions == {T0: 3}
    assert versions(place) == [(VERSION,), (NEWER,)]


def test_two_openers_migrate_once(place: Place) -> None:
    """The second one waits for the lock of the first one, and then migrates nothing."""
    open_sink(sink_to(place))
    as_of(place, 1)
    migrating, waiting = threading.Event(), threading.Event()
    calls: dict[str, list[str]] = {"p": [], "q": []}

    def first(name: str, call: Callable[[], Any]) -> Any:
        calls["p"].append(name)
        answer = call()
        if name == "execute" and not migrating.is_set():
            migrating.set()
            assert waiting.wait(180)
        return answer

    def second(name: str, call: Callable[[], Any]) -> Any:
        calls["q"].append(name)
        if name == "begin":
            waiting.set()
        return call()

    with ThreadPoolExecutor() as pool:
        one = pool.submit(open_sink, with_faults(sink_to(place), first))
        assert migrating.wait(180)
        other = pool.submit(open_sink, with_faults(sink_to(place, pipeline="q"), second))
        assert one.result(120).fence.epoch == 2
        assert other.result(120).fence.epoch == 1
    assert versions(place) == [(VERSION,), (VERSION,)]
    changes = {name: own[: own.index("commit")].count("execute") for name, own in calls.items()}
    assert changes == {"p": 1 + STEPS, "q": 1}, "one of them is the destination table"


def test_an_opener_that_ends_within_a_migration_leaves_the_old_tables(place: Place) -> None:
    sink = sink_to(place)
    open_sink(sink)
    as_of(place, 1)
    before = ledger_columns(place)

    class Ends(Exception):
        pass

    for number in range(1, STEPS + 2):
        done: list[str] = []

        def end(
            name: str, call: Callable[[], Any], done: list[str] = done, number: int = number
        ) -> Any:
            answer = call()
            if name == "execute":
                done.append(name)
                if len(done) == number:
                    raise Ends
            return answer

        with pytest.raises(Ends):
            open_sink(with_faults(sink, end))
        assert ledger_columns(place) == before
        assert len(done) == number
    assert open_sink(sink).fence.epoch == 2
    assert versions(place) == [(VERSION,)]


def test_without_create_the_migration_is_told_and_accepted(place: Place) -> None:
    sink = sink_to(place, create=False)
    open_sink(sink_to(place))
    as_of(place, 1)
    before = ledger_columns(place)
    with pytest.raises(TableMismatch, match="earlier version") as refused:
        open_sink(sink)
    assert ledger_columns(place) == before
    for statement in refused.value.way_out.partition(": ")[2].split("; "):
        place.sql(statement)
    assert open_sink(sink).fence.epoch == 2
    assert versions(place) == [(VERSION,)]
