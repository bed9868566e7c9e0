"""Where many records are refused the database does the work, and no lock waits for Kafka."""

from __future__ import annotations

import decimal
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from oncely.core.batch import Reject, Rejection
from oncely.errors import GivenUp
from oncely.stores.sql.connection import RowsDropped, close_all
from tests.contracts.looking import create, history, ids, rejected
from tests.sinktools import (
    Place,
    at_t0,
    commit_all,
    gone,
    numbered,
    ready,
    rec,
    sink_to,
    trigger,
    with_faults,
)

RECORDS = 2_000


class Calls:
    """Counts calls to the database, and knows whether a transaction is open."""

    def __init__(self) -> None:
        self.count = 0
        self.open = False

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        self.count += 1
        if name in ("begin", "commit", "rollback"):
            self.open = name == "begin"
        return call()


@pytest.mark.parametrize("good", [0, 2, 3], ids=["none", "every second", "every third"])
def test_many_refused_rows_take_few_calls(place: Place, good: int) -> None:
    """And each of the others is a row, in order."""
    create(place, f"id bigint CHECK ({f'id % {good} = 0' if good else 'id < 0'}), name text")
    sink, fence = ready(sink_to(place))
    close_all()
    calls = Calls()
    commit_all(with_faults(sink, calls), at_t0(0, numbered(0, RECORDS)), fence)
    kept = [n for n in range(RECORDS) if good and n % good == 0]
    assert ids(place) == kept
    assert place.sql("SELECT id FROM rows") == [(n,) for n in kept]
    assert [offset for offset, _ in rejected(place)] == sorted({*range(RECORDS)} - {*kept})
    assert all("check" in reason.lower() for _, reason in rejected(place))
    assert history(place)[0][5:] == (RECORDS, len(kept), RECORDS - len(kept), 0)
    assert calls.count < RECORDS / 5


LIMITED: dict[str, tuple[pa.DataType, object, object]] = {
    "char(8)": (pa.string(), "short", "x" * 9),
    "varchar(8)": (pa.string(), "short", "x" * 9),
    "char(8)[]": (pa.list_(pa.string()), ["a", None], ["x" * 9]),
    "varchar(8)[]": (pa.list_(pa.string()), ["a", None], ["x" * 9]),
    "bit(3)": (pa.string(), "101", "1010"),
    "bit varying(3)": (pa.string(), "10", "1010"),
    "numeric(4,1)": (pa.decimal128(6, 1), decimal.Decimal("1.5"), decimal.Decimal("99999.5")),
    "text CHECK (x <> 'bad')": (pa.string(), "good", "bad"),
}


@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
@pytest.mark.parametrize("type_", LIMITED)
def test_values_beyond_the_limit_of_a_type_take_few_calls(
    on_postgres: Place, type_: str, keys: tuple[str, ...]
) -> None:
    """One record in five: the types of the loop's own table have no such limits."""
    arrow, good, bad = LIMITED[type_]
    create(on_postgres, f"id bigint{' PRIMARY KEY' if keys else ''}, x {type_}")
    schema = pa.schema([("id", pa.int64()), ("x", arrow)])
    sink, fence = ready(sink_to(on_postgres, schema, keys=keys))
    close_all()
    calls = Calls()
    records = [rec(n, id=n, x=good if n % 5 else bad) for n in range(RECORDS)]
    what = at_t0(0, records, schema, keys=keys)
    commit_all(with_faults(sink, calls), what, fence)
    assert ids(on_postgres) == [n for n in range(RECORDS) if n % 5]
    assert [offset for offset, _ in rejected(on_postgres)] == list(range(0, RECORDS, 5))
    assert calls.count < RECORDS / 4


@pytest.mark.parametrize("version", [None, "version"])
def test_rows_of_an_upsert_that_are_written_separately_are_applied_in_order(
    on_postgres: Place, version: str | None
) -> None:
    """Rows, tombstones and versions, among many that are refused."""
    create(on_postgres, "id bigint PRIMARY KEY, name char(8), version bigint, other uuid")
    schema = pa.schema(
        [("id", pa.int64()), ("name", pa.string()), ("version", pa.int64()), ("other", pa.string())]
    )
    sink, fence = ready(sink_to(on_postgres, schema, keys=["id"], version=version))
    chosen, records = random.Random(7), []
    there: dict[int, tuple[int, str, int]] = {}
    for offset in range(1_500):
        key, number = chosen.randrange(40), chosen.randrange(20)
        if chosen.random() < 0.2:
            records.append(gone(offset, id=key))
            there.pop(key, None)
            continue
        name = chosen.choice(["x" * 9, f"n {offset}"])
        uuid = f"6d0f0a4e-0000-4000-8000-{offset:012}"
        records.append(rec(offset, id=key, name=name, version=number, other=uuid))
        old = there.get(key)
        if len(name) < 9 and (version is None or old is None or number >= old[2]):
            there[key] = (key, name.ljust(8), number)
    commit_all(sink, at_t0(0, records, schema, keys=["id"]), fence)
    assert on_postgres.sql("SELECT id, name, version FROM rows ORDER BY id") == sorted(
        there.values()
    )
    assert len(rejected(on_postgres)) > 400


def test_isolation_that_nobody_waits_for_any_more_ends(place: Place) -> None:
    """Nothing is written; it ends at the next refusal."""
    create(place, "id bigint CHECK (id % 2 = 0), name text")
    sink, fence = ready(sink_to(place))
    asked: list[int] = []

    def given_up(_: float) -> bool:
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(GivenUp):
        commit_all(sink, replace(at_t0(0, numbered(0, RECORDS)), given_up=given_up), fence)
    assert len(asked) == 3
    assert ids(place) == []
    assert rejected(place) == []


def test_a_key_twice_in_a_chunk_is_refused_the_second_time(place: Place) -> None:
    create(place, "id bigint PRIMARY KEY, name text")
    sink, fence = ready(sink_to(place))
    twice = [replace(one, offset=n) for n, one in enumerate(2 * numbered(0, 500))]
    commit_all(sink, at_t0(0, twice), fence)
    assert ids(place) == list(range(500))
    assert [offset for offset, _ in rejected(place)] == list(range(500, 1_000))


def test_a_value_that_cannot_be_sent_among_many_refused_rows(on_postgres: Place) -> None:
    """PostgreSQL has no time before 4714 BC: such a row is refused before any table sees it."""
    schema = pa.schema([("id", pa.int64()), ("x", pa.int64())])
    create(on_postgres, "id bigint CHECK (id % 2 = 0), x timestamp")
    sink, fence = ready(sink_to(on_postgres, pa.schema([schema[0], ("x", pa.timestamp("us"))])))
    records = [rec(n, id=n, x=-(2**62) if n == 200 else n) for n in range(300)]
    what = at_t0(0, records, schema)
    times = what.rows.set_column(1, "x", what.rows["x"].cast(pa.timestamp("us")))
    commit_all(sink, replace(what, rows=times), fence)
    assert ids(on_postgres) == [n for n in range(0, 300, 2) if n != 200]
    assert len(rejected(on_postgres)) == 151


TEXTS = ["a", "a\x00b", None, "", "\x00", "a\\u0000"]
JSON = [r'{"a": "b"}', r'"\u0000"', None, r'"\\u0000"', r'{"\\\u0000": 1}', '[\n"a\\u0000"]']


@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
@pytest.mark.parametrize(
    ("type_", "arrow", "values", "good"),
    [
        ("text", pa.string(), TEXTS, {0, 2, 3, 5}),
        ("jsonb", pa.string(), JSON, {0, 2, 3}),
        ("json", pa.string(), [*JSON, "\x00"], {0, 1, 2, 3, 4, 5}),
        ("jsonb", pa.struct([("a", pa.string())]), [{"a": one} for one in TEXTS], {0, 2, 3, 5}),
        ("text[]", pa.list_(pa.string()), [["a", one] for one in TEXTS], {0, 2, 3, 5}),
        ("text[]", pa.large_list(pa.string()), [[], None, ["\x00", "\x00"]], {0, 1}),
        ("varchar(9)", pa.dictionary(pa.int8(), pa.string()), TEXTS, {0, 2, 3, 5}),
        ("uuid", pa.string(), [None, "6d0f0a4e-0000-4000-8000-000000000001\x00"], {0}),
    ],
    ids=[
        "text", "jsonb", "json", "struct", "list", "large list", "dictionary", "uuid",
    ],
)  # fmt: skip
def test_many_nuls_take_few_calls(
    on_postgres: Place,
    keys: tuple[str, ...],
    type_: str,
    arrow: pa.DataType,
    values: list[Any],
    good: set[int],
) -> None:
    """PostgreSQL names no row where it casts a text, and none of an upsert goes one by one."""
    create(on_postgres, f"id bigint{' PRIMARY KEY' if keys else ''}, x {type_}")
    schema = pa.schema([("id", pa.int64()), ("x", arrow)])
    sink, fence = ready(sink_to(on_postgres, schema, keys=keys))
    close_all()
    calls = Calls()
    count = 40 * len(values)
    column = pa.array([values[n % len(values)] for n in range(count)], arrow)
    what = at_t0(0, [rec(n, id=n) for n in range(count)], schema.remove(1))
    # Chunks and slices, as batches of a Kafka fetch are.
    halves = pa.chunked_array([column[:7], column[7:], column[:0]])
    commit_all(
        with_faults(sink, calls), replace(what, rows=what.rows.append_column("x", halves)), fence
    )
    kept = [n for n in range(count) if n % len(values) in good]
    assert ids(on_postgres) == kept
    assert [offset for offset, _ in rejected(on_postgres)] == sorted({*range(count)} - {*kept})
    assert calls.count < 30
    assert all("NUL (0x00)" in reason for _, reason in rejected(on_postgres))


def test_a_trigger_that_drops_rows_among_many_refused_ones_stops(on_postgres: Place) -> None:
    create(on_postgres, "id bigint CHECK (id % 2 = 0), name text")
    sink, fence = ready(sink_to(on_postgres))
    trigger(on_postgres, "RETURN CASE WHEN NEW.id = 200 THEN NULL ELSE NEW END;")
    with pytest.raises(RowsDropped):
        commit_all(sink, at_t0(0, numbered(0, 300)), fence)
    assert ids(on_postgres) == []


def test_refused_records_are_read_from_kafka_while_no_transaction_is_open(place: Place) -> None:
    create(place, "id bigint CHECK (id <> 3), name text")
    sink, fence = ready(sink_to(place))
    close_all()
    calls = Calls()
    asked: list[tuple[int, bool]] = []
    what = at_t0(0, numbered(0, 5))

    def letters(wanted: Sequence[Rejection]) -> list[Reject]:
        asked.extend((one.record, calls.open) for one in wanted)
        return what.dead_letters(wanted)

    commit_all(with_faults(sink, calls), replace(what, dead_letters=letters), fence)
    assert asked == [(3, False)]
    assert ids(place) == [0, 1, 2, 4]
