"""Finding refused rows: every good row once, every bad one named, few questions asked."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.core.claim import PositionMoved
from oncely.kinds.sql.write import insert_or_isolate
from oncely.stores.sql.connection import BadData


class Fake:
    """A table with savepoints, which refuses some rows and may tell which one it was."""

    def __init__(self, bad: set[int], tells: bool, deferred: set[int] | None = None) -> None:
        self.bad, self.tells, self.deferred = bad, tells, deferred or set()
        self.rows: list[int] = []
        self.savepoints: list[int] = []
        self.inserts = 0

    def defer(self, sql: str) -> None:
        match sql.split(maxsplit=1)[0]:
            case "SAVEPOINT":
                self.savepoints.append(len(self.rows))
            case "ROLLBACK":
                del self.rows[self.savepoints[-1] :]
            case "RELEASE":
                self.savepoints.pop()

    def insert(self, rows: pa.Table) -> None:
        self.inserts += 1
        for line, number in enumerate(rows.column("n").to_pylist()):
            if number in self.bad:
                raise BadData(f"row {number}", line if self.tells else None)
            self.rows.append(number)
        for number in self.rows:
            if number in self.deferred:
                raise BadData(f"row {number}, at last")


def isolate(fake: Any, count: int, still_ours: Any = lambda: None) -> dict[int, str]:
    refused: dict[int, str] = {}

    def refuse(row: int, reason: str) -> None:
        assert row not in refused
        refused[row] = reason

    rows = pa.table({"n": list(range(count))})
    insert_or_isolate(fake, fake.insert, rows, still_ours, refuse)
    return refused


@settings(deadline=None)
@given(st.integers(0, 60), st.data(), st.booleans())
def test_every_good_row_once_in_order_and_every_bad_one_refused(
    count: int, data: st.DataObject, tells: bool
) -> None:
    numbers = st.sets(st.integers(0, 59))
    bad, deferred = data.draw(numbers), data.draw(numbers)
    fake = Fake(bad, tells, deferred)
    refused = isolate(fake, count)
    wanted = {n for n in bad | deferred if n < count}
    assert set(refused) == wanted
    assert all(f"row {row}" in reason for row, reason in refused.items())
    assert fake.rows == [n for n in range(count) if n not in wanted]


def test_a_line_that_lies_is_not_believed() -> None:
    class Liar(Fake):
        def insert(self, rows: pa.Table) -> None:
            try:
                super().insert(rows)
            except BadData as error:
                raise BadData(error.reason, 0) from None

    fake = Liar({40}, tells=True)
    assert set(isolate(fake, 100)) == {40}
    assert fake.rows == [n for n in range(100) if n != 40]


@pytest.mark.parametrize("line", [-1, 100, 10**9])
def test_a_line_beyond_the_rows_is_no_line(line: int) -> None:
    class Beyond(Fake):
        def insert(self, rows: pa.Table) -> None:
            try:
                super().insert(rows)
            except BadData as error:
                raise BadData(error.reason, line) from None

    assert set(isolate(Beyond({40}, tells=True), 100)) == {40}


def test_a_named_line_costs_four_inserts() -> None:
    fake = Fake({5_000}, tells=True)
    isolate(fake, 8_000)
    assert fake.inserts == 4


def test_one_unnamed_row_costs_a_binary_search() -> None:
    fake = Fake({5_000}, tells=False)
    isolate(fake, 8_192)
    assert fake.inserts <= 3 * math.log2(8_192)


def test_many_bad_rows_do_not_cost_a_chunk_each() -> None:
    """Rows sent in all, not inserts: halving the window bounds them."""
    sent = 0

    class Counting(Fake):
        def insert(self, rows: pa.Table) -> None:
            nonlocal sent
            sent += rows.num_rows
            super().insert(rows)

    bad = set(range(0, 20_000, 100))
    fake = Counting(bad, tells=True)
    assert set(isolate(fake, 20_000)) == bad
    assert sent < 20_000 * 6


def test_a_moved_ledger_ends_it_before_anything_is_refused() -> None:
    def moved() -> None:
        raise PositionMoved("t-0")

    fake = Fake({3}, tells=True)
    with pytest.raises(PositionMoved):
        isolate(fake, 10, moved)


def test_whatever_is_no_bad_data_goes_through() -> None:
    class Broken(Fake):
        def insert(self, rows: pa.Table) -> None:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        isolate(Broken(set(), tells=False), 10)


def test_nothing_to_insert_asks_nothing() -> None:
    fake = Fake(set(), tells=True)
    assert isolate(fake, 0) == {}
    assert (fake.inserts, fake.savepoints) == (0, [])


def test_progress_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At a level that a worker process without a configuration of logging shows."""
    monkeypatch.setattr("oncely.kinds.sql.write._SECONDS_A_LINE", 0.0)
    with caplog.at_level("WARNING", logger="oncely"):
        isolate(Fake({3, 700}, tells=False), 1_000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "isolating refused rows: 0 of 1000 rows done, 0 refused"
    assert lines[-1].endswith("2 refused")
