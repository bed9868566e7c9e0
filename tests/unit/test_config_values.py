"""Budgets, durations, times, tables and URLs."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from oncely.config.base import (
    RejectBudget,
    dialect_of,
    parse_budget,
    parse_seconds,
    parse_start,
    parse_table,
    passwords,
    quoted,
    without_password,
)
from oncely.config.runtimes import is_local, parse_master
from oncely.kafka.start import StartTime
from oncely.stores.sql.connection import TableName


@pytest.mark.parametrize(
    ("value", "budget", "text"),
    [
        ("1%", RejectBudget(share=Fraction(1, 100)), "1%"),
        ("0.5 %", RejectBudget(share=Fraction(1, 200)), "0.5%"),
        ("100%", RejectBudget(share=Fraction(1)), "100%"),
        ("0%", RejectBudget(share=Fraction(0)), "0%"),
        (0, RejectBudget(count=0), "0"),
        (7, RejectBudget(count=7), "7"),
    ],
)
def test_budgets(value: object, budget: RejectBudget, text: str) -> None:
    assert parse_budget(value) == budget
    assert str(budget) == text
    assert budget.unlimited == (value == "100%")


@pytest.mark.parametrize(
    "value", ["", "%", "1", "-1%", "100.1%", "1e2%", "one", -1, 1.5, True, None]
)
def test_not_budgets(value: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_budget(value)


def test_a_share_is_exact() -> None:
    """29 of 100 is 29%, though 0.29 * 100 is less than 29 for a float."""
    assert parse_budget("29%").allowed(100) == 29
    assert parse_budget("1%").allowed(99) == 0
    assert parse_budget("0.5%").allowed(1000) == 5
    assert parse_budget(7).allowed(3) == 7


@given(st.integers(0, 100), st.integers(0, 10**12))
def test_a_share_never_allows_more_than_itself(percent: int, records: int) -> None:
    allowed = parse_budget(f"{percent}%").allowed(records)
    assert allowed * 100 <= percent * records < (allowed + 1) * 100


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1 second", 1.0),
        ("0 seconds", 0.0),
        ("500 ms", 0.5),
        ("500ms", 0.5),
        ("1 millisecond", 0.001),
        ("2 minutes", 120.0),
        ("2 min", 120.0),
        ("1.5 Hours", 5400.0),
        ("3s", 3.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "1", "second", "-1 s", "1 day", "1 ss", "1 s s", 1, 1.0, None]
)
def test_not_durations(value: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_seconds(value)


def test_starts() -> None:
    assert parse_start("earliest") == "earliest"
    assert parse_start("1970-01-01T00:00:01Z") == StartTime(1000)
    assert str(StartTime(1_717_171_200_123)) == "2024-05-31T16:00:00.123Z"
    for value in ("newest", "", 5, None, True):
        with pytest.raises(PydanticCustomError):
            parse_start(value)


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("flights", None, "flights"),
        ("public.flights", "public", "flights"),
        (" public . flights ", "public", "flights"),
        ('public."we""ird"', "public", 'we"ird'),
        ('"a.b"."c d"', "a.b", "c d"),
        ('"; DROP TABLE x --"', None, "; DROP TABLE x --"),
        ("flüge", None, "flüge"),
        ("_x$1", None, "_x$1"),
    ],
)
def test_tables(text: str, schema: str | None, name: str) -> None:
    assert parse_table(text) == TableName(schema, name)


@pytest.mark.parametrize(
    "value", ["", ".", "a.", ".a", "a.b.c", "a b", "1a", 'a"b', '""', '"a', "a;b", "a-b", '"\0"', 5]
)
def test_not_tables(value: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_table(value)


names = st.text(min_size=1).filter(lambda text: "\0" not in text)


@given(st.none() | names, names)
def test_every_table_is_read_back(schema: str | None, name: str) -> None:
    assert parse_table(quoted(TableName(schema, name))) == TableName(schema, name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://h/db", "postgresql://h/db"),
        ("postgresql://u@h:5432/db", "postgresql://u@h:5432/db"),
        ("postgresql://u:opensesame@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:open@ses/ame@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:open?sesame@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h/db?password=opensesame&x=1", "postgresql://h/db?password=***&x=1"),
        ("postgresql://u:opensesame@a:1,b:2/db", "postgresql://u:***@a:1,b:2/db"),
        ("sqlite:////var/x.db", "sqlite:////var/x.db"),
    ],
)
def test_urls_are_shown_without_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert ("***" in shown) == bool(passwords(url))


@pytest.mark.parametrize(
    ("url", "dialect"),
    [
        ("postgresql://u:p%40%2F@h:1/db", "postgresql"),
        ("postgres://[::1]:5432,other/db?application_name=a@b", "postgresql"),
        ("postgresql:///db?host=/var/run", "postgresql"),
        ("sqlite:///x.db", "sqlite"),
        ("SQLite:////var/x.db?timeout=5", "sqlite"),
    ],
)
def test_dialects(url: str, dialect: str) -> None:
    assert dialect_of(url) == dialect


@pytest.mark.parametrize(
    ("master", "local"),
    [
        ("local", True),
        ("local[2]", True),
        ("local[*]", True),
        ("local[*,4]", True),
        ("local[2, 4]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://a:7077,b:7077", False),
        ("yarn", False),
        ("k8s://https://h:443", False),
    ],
)
def test_masters(master: str, local: bool) -> None:
    assert parse_master(master) == master
    assert is_local(master) == local


@pytest.mark.parametrize("master", ["", "local[]", "local[x]", "mesos://h", "spark://", 4])
def test_not_masters(master: Any) -> None:
    with pytest.raises(PydanticCustomError):
        parse_master(master)
