"""Ledger tables of a newer version, and those from before the first release, are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from oncely.audit.sql import open_evidence
from oncely.audit.stored.sql_ledger import open_ledger
from oncely.core.claim import Takeover
from oncely.errors import NewerFormat, OlderFormat
from oncely.kinds.sql.destination import check_table
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql_ledger import dead_letters, look
from oncely.stores.sql.tables import TABLES, VERSION
from oncely.verify.reading import of_tables
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
    with_faults,
)

NEWER = VERSION + 95


def content(place: Place) -> dict[str, list[tuple[Any, ...]]]:
    return {name: sorted(place.sql(f"SELECT * FROM {name}"), key=str) for name in (*TABLES, "rows")}


def versions(place: Place) -> list[tuple[int]]:
    return place.sql("SELECT schema_version FROM oncely_pipelines ORDER BY pipeline")


def test_a_new_ledger_has_the_present_version(place: Place) -> None:
    open_sink(sink_to(place))
    open_sink(sink_to(place, pipeline="q"))
    assert versions(place) == [(VERSION,), (VERSION,)]


def reset(sink: SqlSink) -> object:
    return sink.open(Takeover(SOURCE, dict, {T0: 0}, reset=lambda _: {T0: 0}))


def audit(sink: SqlSink) -> None:
    closing(open_evidence("p", sink.dialect, sink.wanted.table)).__enter__()


def verify(sink: SqlSink) -> None:
    with open_ledger(sink.dialect, sink.wanted.table, "p") as tables:
        of_tables(tables)


ACTS = {
    "open": open_sink,
    "reset": reset,
    "look": lambda sink: look(sink.ledger),
    "plan": check_table,
    "rejects": lambda sink: dead_letters(sink.ledger, 10),
}
Act = Callable[[SqlSink], object]


@pytest.fixture
def begun(place: Place) -> Place:
    """With a pipeline that has committed."""
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    return place


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("create", [True, False])
def test_a_newer_version_is_refused(begun: Place, act: Act, create: bool) -> None:
    begun.sql(f"UPDATE oncely_pipelines SET schema_version = {NEWER}")
    before = content(begun)
    with pytest.raises(NewerFormat, match=f"format {NEWER}, .* up to {VERSION}") as refused:
        act(sink_to(begun, create=create))
    assert "upgrade Oncely" in refused.value.way_out
    assert content(begun) == before


@pytest.mark.parametrize("act", [*ACTS.values(), audit, verify], ids=[*ACTS, "audit", "verify"])
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "older",
    [
        f"UPDATE oncely_pipelines SET schema_version = {VERSION - 1}",
        "ALTER TABLE oncely_pipelines DROP COLUMN schema_version",
    ],
    ids=["row", "tables"],
)
def test_an_older_version_is_refused(begun: Place, act: Act, create: bool, older: str) -> None:
    begun.sql(older)
    before = content(begun)
    with pytest.raises(
        OlderFormat, match=r"ledger of pipeline 'p' in .* before 0\.1\.0"
    ) as refused:
        act(sink_to(begun, create=create))
    assert "docs/runbook.md" in refused.value.way_out
    assert content(begun) == before


def test_tables_from_before_amendments_are_refused_by_the_audit(begun: Place) -> None:
    begun.sql("ALTER TABLE oncely_pipelines DROP COLUMN schema_version")
    begun.sql("DROP TABLE oncely_amendments")
    for act in (audit, verify):
        with pytest.raises(OlderFormat):
            act(sink_to(begun))


def test_a_takeover_by_a_newer_version_during_the_opening_is_noticed(place: Place) -> None:
    """Between the first check and the epoch: this version takes none any more."""
    open_sink(sink_to(place))
    begun: list[str] = []

    def upgrade(name: str, call: Callable[[], Any]) -> Any:
        if name == "begin" and not begun:
            begun.append(name)
            place.sql(f"UPDATE oncely_pipelines SET schema_version = {NEWER}")
        return call()

    with pytest.raises(NewerFormat):
        open_sink(with_faults(sink_to(place), upgrade))
    assert begun
    assert place.sql("SELECT epoch FROM oncely_pipelines") == [(1,)]


def test_other_pipelines_of_the_schema_go_on_in_the_version_before(place: Place) -> None:
    """A newer version has added columns for its own pipeline."""
    sink, fence = ready(sink_to(place))
    open_sink(sink_to(place, pipeline="q"))
    place.sql(f"UPDATE oncely_pipelines SET schema_version = {NEWER} WHERE pipeline = 'q'")
    for table in TABLES:
        place.sql(f"ALTER TABLE {table} ADD COLUMN from_later TEXT NOT NULL DEFAULT ''")
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(2, numbered(2, 3)), fence)
    assert look(sink.ledger).positions == {T0: 3}
    assert versions(place) == [(VERSION,), (NEWER,)]
