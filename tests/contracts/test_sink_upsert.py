"""Upserts: applied as if one by one in order, whatever the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncely.core.batch import Chunk
from oncely.core.claim import Fence
from oncely.errors import TableMismatch
from oncely.kinds.sql.sink import SqlSink
from tests.conftest import examples
from tests.contracts.members import by_members
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    chunk,
    commit_all,
    gone,
    open_sink,
    quoted,
    ready,
    rec,
    sink_to,
)

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("name", pa.string())])


@pytest.fixture(params=["task", pytest.param("member", marks=pytest.mark.long)], autouse=True)
def runtime(request: pytest.FixtureRequest) -> Iterator[None]:
    """What commits: a task of Spark, or a member of a group."""
    with by_members() if request.param == "member" else nullcontext():
        yield


def upserts(start: int, records: list[Rec], keys: tuple[str, ...] = ("id",)) -> Chunk:
    return chunk({T0: (start, records)}, SCHEMA, keys)


def rows(place: Place) -> list[tuple[Any, ...]]:
    return place.sql("SELECT * FROM rows ORDER BY id")


def plain(place: Place) -> tuple[SqlSink, Fence]:
    return ready(sink_to(place, SCHEMA, keys=["id"]))


def versioned(place: Place) -> tuple[SqlSink, Fence]:
    return ready(sink_to(place, SCHEMA, keys=["id"], version="v"))


def test_the_last_offset_of_a_key_wins(place: Place) -> None:
    sink, fence = plain(place)
    commit_all(sink, upserts(0, [rec(0, id=1, v=9, name="a"), rec(1, id=2, v=1, name="b"),
                                 rec(2, id=1, v=5, name="c")]), fence)  # fmt: skip
    assert rows(place) == [(1, 5, "c"), (2, 1, "b")]
    outcomes = commit_all(sink, upserts(3, [rec(3, id=2, v=None, name=None)]), fence)
    assert rows(place) == [(1, 5, "c"), (2, None, None)]
    assert outcomes[0].counts.rows == 1


def test_a_tombstone_deletes(place: Place) -> None:
    sink, fence = plain(place)
    commit_all(sink, upserts(0, [rec(0, id=1), rec(1, id=2), rec(2, id=3)]), fence)
    outcomes = commit_all(sink, upserts(3, [gone(3, id=2), gone(4, id=77)]), fence)
    assert [row[0] for row in rows(place)] == [1, 3]
    assert place.sql("SELECT records, written FROM oncely_ranges WHERE range_start = 3") == [(2, 2)]
    assert outcomes[0].counts.filtered == 0


def test_tombstone_then_insert(place: Place) -> None:
    sink, fence = plain(place)
    commit_all(sink, upserts(0, [rec(0, id=1, v=1, name="old")]), fence)
    commit_all(sink, upserts(1, [gone(1, id=1), rec(2, id=1, v=2, name="new")]), fence)
    assert rows(place) == [(1, 2, "new")]


def test_a_tombstone_whose_key_cannot_be_cast_is_a_reject(place: Place) -> None:
    """The transform casts the keys of rows; the key of a tombstone is cast to their type."""
    sink, fence = plain(place)
    commit_all(sink, upserts(0, [rec(n, id=n) for n in range(4)]), fence)
    keys = pa.table({"id": ["1", "one", None, "2", "99999999999999999999"]})
    what = upserts(4, [rec(4, id=7), *(gone(n, id=0) for n in range(5, 10)), rec(10, id=8)])
    commit_all(sink, replace(what, deletes=keys), fence)
    assert [row[0] for row in rows(place)] == [0, 3, 7, 8]
    assert place.sql('SELECT "offset", reason FROM oncely_rejects ORDER BY 1') == [
        (6, "column 'id': one is not int64"),
        (7, "sink.keys: column 'id' is null"),
        (9, "column 'id': 99999999999999999999 is not int64"),
    ]


@pytest.mark.parametrize(
    "keys", [{"other": [1]}, {"id": [[1]]}], ids=["another name", "another kind"]
)
def test_tombstones_without_the_keys_of_the_rows_are_refused(
    place: Place, keys: dict[str, list[object]]
) -> None:
    sink, fence = plain(place)
    with pytest.raises(TableMismatch, match="a tombstone's key"):
        commit_all(sink, replace(upserts(0, [gone(0, id=1)]), deletes=pa.table(keys)), fence)


def test_insert_then_tombstone(place: Place) -> None:
    sink, fence = plain(place)
    commit_all(sink, upserts(0, [rec(0, id=1, v=1), gone(1, id=1), rec(2, id=2)]), fence)
    assert [row[0] for row in rows(place)] == [2]


def test_an_older_version_does_not_replace_a_newer_one(place: Place) -> None:
    sink, fence = versioned(place)
    commit_all(sink, upserts(0, [rec(0, id=1, v=5, name="five"), rec(1, id=1, v=3, name="three"),
                                 rec(2, id=2, v=1, name="one")]), fence)  # fmt: skip
    assert rows(place) == [(1, 5, "five"), (2, 1, "one")]
    commit_all(sink, upserts(3, [rec(3, id=1, v=4, name="four"), rec(4, id=2, v=2, name="two")]),
               fence)  # fmt: skip
    assert rows(place) == [(1, 5, "five"), (2, 2, "two")]
    commit_all(sink, upserts(5, [rec(5, id=1, v=5, name="five again")]), fence)
    assert rows(place)[0] == (1, 5, "five again")


def test_a_row_without_version_gives_way(place: Place) -> None:
    sink, fence = versioned(place)
    place.sql("INSERT INTO rows VALUES (1, NULL, 'from elsewhere')")
    commit_all(sink, upserts(0, [rec(0, id=1, v=-5, name="ours")]), fence)
    assert rows(place) == [(1, -5, "ours")]


def test_a_tombstone_deletes_whatever_the_version(place: Place) -> None:
    sink, fence = versioned(place)
    commit_all(sink, upserts(0, [rec(0, id=1, v=9)]), fence)
    commit_all(sink, upserts(1, [gone(1, id=1), rec(2, id=1, v=2, name="after")]), fence)
    assert rows(place) == [(1, 2, "after")]
    commit_all(sink, upserts(3, [rec(3, id=1, v=8), rec(4, id=1, v=7), gone(5, id=1)]), fence)
    assert rows(place) == []


def test_null_keys_and_null_versions_are_rejects(place: Place) -> None:
    sink, fence = versioned(place)
    records = [rec(0, id=None, v=1), rec(1, id=1, v=None), gone(2, id=None), rec(3, id=2, v=1)]
    commit_all(sink, upserts(0, records), fence)
    assert [row[0] for row in rows(place)] == [2]
    assert place.sql('SELECT "offset", reason FROM oncely_rejects ORDER BY 1') == [
        (0, "sink.keys: column 'id' is null"),
        (1, "sink.version: column 'v' is null"),
        (2, "sink.keys: column 'id' is null"),
    ]


def test_a_bad_row_in_an_upsert_leaves_order_intact(place: Place) -> None:
    type_, strict = ("bigint", "") if place.is_postgres else ("INT", " STRICT")
    place.sql(
        f"CREATE TABLE rows (id {type_} PRIMARY KEY, v {type_}, name text, CHECK (v <> 13)){strict}"
    )
    sink, fence = plain(place)
    records = [
        rec(0, id=1, v=1), rec(1, id=1, v=2), rec(2, id=1, v=13), gone(3, id=2), rec(4, id=2, v=4),
        rec(5, id=3, v=13), gone(6, id=3), rec(7, id=1, v=3), rec(8, id=4, v=13), rec(9, id=5, v=5),
    ]  # fmt: skip
    commit_all(sink, upserts(0, records), fence)
    assert [row[:2] for row in rows(place)] == [(1, 3), (2, 4), (5, 5)]
    rejected = [n for (n,) in place.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1')]
    # Also a value that a later one replaces within the chunk.
    assert rejected == [2, 5, 8]


def test_several_key_columns(place: Place) -> None:
    sink, fence = ready(sink_to(place, SCHEMA, keys=["name", "id"]))
    records = [
        rec(0, id=1, v=1, name="a"), rec(1, id=1, v=2, name="b"), rec(2, id=1, v=3, name="a"),
        gone(3, id=1, name="b"), rec(4, id=2, v=4, name="b"),
    ]  # fmt: skip
    commit_all(sink, upserts(0, records, ("name", "id")), fence)
    assert rows(place) == [(1, 3, "a"), (2, 4, "b")]


def test_a_table_of_keys_only(place: Place) -> None:
    schema = pa.schema([("id", pa.int64())])
    sink, fence = ready(sink_to(place, schema, keys=["id"]))
    for start in (0, 2):
        records = [rec(start, id=1), rec(start + 1, id=2)]
        commit_all(sink, chunk({T0: (start, records)}, schema), fence)
    commit_all(sink, chunk({T0: (4, [gone(4, id=2)])}, schema, ["id"]), fence)
    assert rows(place) == [(1,)]


def test_where_each_row_came_from(place: Place) -> None:
    sink, fence = ready(sink_to(place, SCHEMA, keys=["id"], keep_source=True), {T0: 0, T1: 0})
    parts = {
        T0: (0, [rec(0, id=1, v=1), gone(1, id=1), rec(2, id=1, v=2)]),
        T1: (0, [rec(5, id=9)]),
    }
    commit_all(sink, chunk(parts, SCHEMA, ["id"]), fence)
    assert rows(place) == [(1, 2, None, "t", 0, 2), (9, None, None, "t", 1, 5)]


def test_in_append_mode_a_tombstone_is_counted_as_filtered(place: Place) -> None:
    sink, fence = ready(sink_to(place, SCHEMA))
    outcomes = commit_all(sink, upserts(0, [rec(0, id=1), gone(1, id=1)]), fence)
    assert [row[0] for row in rows(place)] == [1]
    assert (outcomes[0].counts.rows, outcomes[0].counts.filtered) == (1, 1)


def test_a_chunk_of_tombstones_only(place: Place) -> None:
    sink, fence = plain(place)
    commit_all(sink, upserts(0, [rec(0, id=1), rec(1, id=2)]), fence)
    commit_all(sink, upserts(2, [gone(2, id=1)]), fence)
    assert [row[0] for row in rows(place)] == [2]


def test_a_replayed_and_a_trimmed_upsert(place: Place) -> None:
    sink, fence = plain(place)
    first = [rec(0, id=1, name="a"), gone(1, id=1), rec(2, id=2, name="b")]
    commit_all(sink, upserts(0, first), fence)
    place.sql("UPDATE rows SET name = 'changed since' WHERE id = 2")
    assert [o.replayed for o in commit_all(sink, upserts(0, first), fence)] == [True]
    commit_all(sink, upserts(0, [*first, rec(3, id=3, name="c")]), fence)
    assert [row[0::2] for row in rows(place)] == [(2, "changed since"), (3, "c")]


@pytest.mark.parametrize("table", ["rows_in", "s", "excluded", "a", "b", "c", "target", "place"])
def test_a_table_named_like_an_alias(place: Place, table: str) -> None:
    """An alias that shadows the table would turn "delete this key" into "delete all"."""
    schema = pa.schema([("id", pa.int64()), ("place", pa.int64()), ("gone_at", pa.string())])
    if place.is_postgres:  # unqualified, as an alias is
        place.sql(
            f"CREATE TABLE {quoted(table)} (id bigint PRIMARY KEY, place bigint, gone_at text)"
        )
        place = replace(
            place, url=f"{place.url}?options=-csearch_path%3D{place.schema}", schema=None
        )
    sink, fence = ready(sink_to(place, schema, table=table, keys=["id"], version="place"))
    records = [rec(n, id=n, place=1, gone_at="x") for n in range(3)]
    commit_all(sink, chunk({T0: (0, records)}, schema), fence)
    records = [gone(3, id=1), rec(4, id=2, place=2, gone_at="y"), rec(5, id=0, place=0)]
    commit_all(sink, chunk({T0: (3, records)}, schema, ["id"]), fence)
    found = place.sql(f"SELECT * FROM {quoted(table)} ORDER BY id")
    assert found == [(0, 1, "x"), (2, 2, "y")]


def test_sqlite_has_no_version_that_does_not_sort(on_sqlite: Place) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.decimal128(5, 2))])
    with pytest.raises(TableMismatch, match=r"sink\.version"):
        open_sink(sink_to(on_sqlite, schema, keys=["id"], version="v"))


# -- against a model -----------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "gone", "null key", "nothing"]),
        st.integers(0, 4),  # key
        st.integers(0, 5),  # version
    ),
    min_size=1,
    max_size=25,
)


def records_of(operations: list[tuple[str, int, int]], start: int) -> list[Rec]:
    made = {
        "put": lambda at, key, v: rec(at, id=key, v=v, name=f"at {at}"),
        "gone": lambda at, key, _: gone(at, id=key),
        "null key": lambda at, _, v: rec(at, id=None, v=v),
        "nothing": lambda at, _, __: Rec(at),
    }
    return [made[what](at, key, v) for at, (what, key, v) in enumerate(operations, start)]


def one_by_one(
    table: dict[int, tuple[int, str]], operations: list[tuple[str, int, int]], start: int,
    versions: bool,
) -> None:  # fmt: skip
    for at, (what, key, v) in enumerate(operations, start):
        if what == "gone":
            table.pop(key, None)
        elif what == "put" and not (versions and key in table and table[key][0] > v):
            table[key] = (v, f"at {at}")


@pytest.mark.parametrize("versions", [False, True], ids=["plain", "versioned"])
def test_as_if_one_by_one(place: Place, versions: bool) -> None:
    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPERATIONS, min_size=1, max_size=3))
    def check(chunks: list[list[tuple[str, int, int]]]) -> None:
        place.sql("DELETE FROM rows")
        place.sql('UPDATE oncely_positions SET "position" = 0')
        place.sql("DELETE FROM oncely_ranges")
        table: dict[int, tuple[int, str]] = {}
        at = 0
        for operations in chunks:
            commit_all(sink, upserts(at, records_of(operations, at)), fence)
            one_by_one(table, operations, at, versions)
            at += len(operations)
        assert {key: (v, name) for key, v, name in rows(place)} == table

    sink, fence = versioned(place) if versions else plain(place)
    check()


def test_rows_and_tombstones_of_mixed_partitions(place: Place) -> None:
    """Records of two partitions alternate; each key belongs to one of them."""
    sink, fence = ready(sink_to(place, SCHEMA, keys=["id"]), {T0: 0, T1: 0})
    what = chunk(
        {
            T0: (0, [rec(0, id=1, v=1), rec(1, id=1, v=2)]),
            T1: (0, [rec(0, id=2, v=1), gone(1, id=2)]),
        },
        SCHEMA,
        ["id"],
    )
    order = np.array([0, 2, 1, 3])  # records: T0-0, T1-0, T0-1, T1-1
    place_of = np.argsort(order)
    mixed = replace(
        what,
        partition=what.partition[order],
        offset=what.offset[order],
        rows=what.rows.take(np.argsort(place_of[what.row_record])),
        row_record=np.sort(place_of[what.row_record]),
        delete_record=place_of[what.delete_record],
    )
    commit_all(sink, mixed, fence)
    assert rows(place) == [(1, 2, None)]
