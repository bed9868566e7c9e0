"""A ledger in SQL that another program has changed, beside rows that are right."""

from __future__ import annotations

from contextlib import closing

import pytest

from oncely.audit.sql import open_evidence
from oncely.audit.stored.sql_ledger import open_ledger
from oncely.commit.path import pass_over
from oncely.core.claim import Takeover
from oncely.core.ranges import OffsetRange
from oncely.errors import Stopped
from oncely.kinds.sql.sink import SqlSink
from oncely.verify.check import check
from oncely.verify.reading import Rules, of_tables
from oncely.verify.report import Report
from tests.sinktools import (
    SOURCE,
    T0,
    Place,
    Rec,
    at_t0,
    commit_all,
    numbered,
    ready,
    sink_to,
    together,
)

LAST = "range_start = 10"


@pytest.fixture
def changed(place: Place) -> SqlSink:
    """Rows [0, 10), of [10, 20) one dead letter, and a hole [20, 25)."""
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, numbered(0, 10)), fence)
    commit_all(sink, at_t0(10, [*numbered(10, 19), Rec(19, bad="bad")]), fence)
    pass_over(together(sink), {T0: OffsetRange(20, 25)}, fence, "hole")
    return sink


def verified(sink: SqlSink) -> Report:
    with open_ledger(sink.dialect, sink.wanted.table, "p") as tables:
        found = of_tables(tables)
    assert found is not None
    return check(found, rules=Rules(one_row=True))


def test_nothing_was_changed(changed: SqlSink) -> None:
    assert verified(changed).verdict == "holds", verified(changed).as_json()


@pytest.mark.parametrize(
    ("statement", "verdict", "text"),
    [
        (f"UPDATE oncely_ranges SET range_end = 5 WHERE {LAST}", "broken", "t-0 [10, 5)"),
        (f"UPDATE oncely_ranges SET digest = NULL WHERE {LAST}", "broken", "recipe without digest"),
        (f"UPDATE oncely_ranges SET recipe = NULL WHERE {LAST}", "broken", "without recipe"),
        (f"UPDATE oncely_ranges SET digest = NULL, recipe = NULL WHERE {LAST}", "unknown",
         "it has no digest"),
        (f"UPDATE oncely_ranges SET written = written - 1, rejected = rejected + 1 WHERE {LAST}",
         "unknown", "fewer than its rejects"),
        ("DELETE FROM oncely_rejects", "unknown", "fewer than its rejects"),
        ("DELETE FROM oncely_ranges", "broken", "in no committed range"),
        ("DELETE FROM oncely_ranges WHERE range_start = 0", "unknown", "was begun at 10"),
        ('UPDATE oncely_positions SET "position" = -3', "broken", "was committed"),
        ("UPDATE oncely_positions SET run = 'other'", "broken", "epoch 1 was given to one run"),
        ("UPDATE oncely_positions SET epoch = epoch + 1", "broken", "and 1 was given out last"),
    ],
)  # fmt: skip
def test_what_the_ledger_itself_shows(
    changed: SqlSink, place: Place, statement: str, verdict: str, text: str
) -> None:
    place.sql(statement)
    found = verified(changed)
    assert found.verdict == verdict, found.as_json()
    assert any(text in one.text for one in (*found.broken, *found.unknown)), found.as_json()


def test_a_pipeline_that_began_behind_offset_0(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 100})
    assert verified(sink).verdict == "holds", verified(sink).as_json()
    commit_all(sink, at_t0(100, numbered(100, 110)), fence)
    commit_all(sink, at_t0(110, numbered(110, 120)), fence)
    sink.open(Takeover(SOURCE, dict, {T0: 0}, reset=lambda _: {T0: 200}))
    assert verified(sink).verdict == "holds", verified(sink).as_json()
    place.sql("DELETE FROM oncely_ranges WHERE range_start = 100")
    assert [one.rule for one in verified(sink).broken] == ["missing"]
    place.sql("DELETE FROM oncely_ranges WHERE range_start = 0")
    assert verified(sink).verdict == "unknown"


def test_the_position_goes_back_over_a_hole(changed: SqlSink, place: Place) -> None:
    """No row tells of it."""
    place.sql('UPDATE oncely_positions SET "position" = 20')
    assert "has gone back" in verified(changed).broken[0].text


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (f"UPDATE oncely_ranges SET range_end = 5 WHERE {LAST}", r"\[10, 5\) of t-0"),
        (f"UPDATE oncely_ranges SET range_start = -5 WHERE {LAST}", r"\[-5, 20\) of t-0"),
        ('UPDATE oncely_positions SET "position" = -3', r"\[0, -3\) of t-0"),
    ],
)
def test_an_audit_names_what_is_no_range(
    changed: SqlSink, place: Place, statement: str, named: str
) -> None:
    place.sql(statement)
    with pytest.raises(Stopped, match=f"the ledger is damaged: it contains {named}"):
        closing(open_evidence("p", changed.dialect, changed.wanted.table)).__enter__()


def test_a_run_names_what_is_no_range(changed: SqlSink, place: Place) -> None:
    place.sql(f"UPDATE oncely_ranges SET range_start = 40, range_end = 30 WHERE {LAST}")
    with pytest.raises(Stopped, match=r"\[40, 30\) of t-0"):
        changed.ledger.entries()
