"""Digests beside the history: each range's is that of the rows that the table has of it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.audit.tally import offset_digests
from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.commit.path import Delivery, pass_over
from oncely.core.batch import Batch
from oncely.core.change import Judge
from oncely.core.claim import Counts, Takeover
from oncely.core.digest import Recipe, digest_sum, row_digests
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.sql.change import SqlReplay
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.dialects import dialect_for
from oncely.stores.sql.postgres_types import row_digest
from tests.contracts.looking import create, ids
from tests.replaytools import judging, mixing
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    impatient,
    numbered,
    publish_on,
    ready,
    rec,
    sink_to,
    together,
    with_rows,
)

WITH_OFFSET = "1 offset id=bigint name=text"
WITHOUT = "1 row id=bigint name=text"


def stored(place: Place, columns: str = "range_start, digest, recipe") -> list[tuple[Any, ...]]:
    """The history, digests without a sign."""
    rows = place.sql(
        f'SELECT {columns} FROM oncely_ranges ORDER BY "partition", range_start, epoch'
    )
    at = columns.split(", ").index("digest")
    return [
        (*row[:at], None if row[at] is None else row[at] % 2**64, *row[at + 1 :]) for row in rows
    ]


def of_rows(place: Place, where: str, recipe: str = WITH_OFFSET) -> int:
    """The digest of rows that the table has: computed by PostgreSQL, or by reading them."""
    known = Recipe.parse(recipe)
    if place.is_postgres:
        types = {"id": "bigint", "name": "text"}
        each = row_digest(known, types, dialect_for(place.url).quote, "kafka_offset")
        (total,) = place.sql(f"SELECT COALESCE(SUM({each}), 0) FROM rows WHERE {where}")[0]
        return int(total) % 2**64
    at = "kafka_offset" if known.offset else "0"
    rows = place.sql(f"SELECT id, name, {at} FROM rows WHERE {where}")
    table = pa.table([*zip(*rows, strict=True)] or [[], [], []], names=["id", "name", "at"])
    return digest_sum(row_digests(table, table["at"].to_numpy(), known))


def test_the_digest_of_a_range_is_that_of_its_rows(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True), {T0: 0, T1: 0})
    first = {T0: (0, [*numbered(0, 5), Rec(5), Rec(6, bad="no")]), T1: (0, [rec(3, id=7)])}
    commit_all(sink, chunk(first), fence)
    outcomes = commit_all(sink, at_t0(7, [rec(9, id=None, name="ä")]), fence)
    parts = [
        "kafka_partition = 0 AND kafka_offset < 7", "kafka_offset = 9", "kafka_partition = 1"
    ]  # fmt: skip
    digests = [of_rows(place, one) for one in parts]
    assert len({*digests, 0}) == 4
    assert stored(place) == [
        (start, digest, WITH_OFFSET) for start, digest in zip((0, 7, 0), digests, strict=True)
    ]
    assert [one.counts.digest for one in outcomes] == [digests[1]]


def test_rows_without_their_origin_have_a_digest_too(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    assert stored(place) == [(0, of_rows(place, "1 = 1", WITHOUT), WITHOUT)]


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_the_table_refuses_have_no_part(place: Place, ahead: bool) -> None:
    create(place, "id bigint CHECK (id <> 3), name text, kafka_topic text, kafka_partition bigint,"
           " kafka_offset bigint")  # fmt: skip
    sink, fence = ready(sink_to(place, keep_source=True))
    given = at_t0(0, numbered(0, 6))
    if ahead:
        sink.prepare_chunk(given)
    commit_all(sink, given, fence)
    assert ids(place) == [0, 1, 2, 4, 5]
    assert stored(place) == [(0, of_rows(place, "1 = 1"), WITH_OFFSET)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_part_that_was_committed_before_has_no_part(place: Place, ahead: bool) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, numbered(0, 4)), fence)
    given = at_t0(0, numbered(0, 9))
    if ahead:
        sink.prepare_chunk(given)
    commit_all(sink, given, fence)
    assert ids(place) == list(range(9))
    assert stored(place)[1:] == [(4, of_rows(place, "kafka_offset >= 4"), WITH_OFFSET)]


def test_a_chunk_that_was_prepared_for_other_types_is_prepared_again(place: Place) -> None:
    create(place, "id integer, name text")
    sink, fence = ready(sink_to(place))
    given = at_t0(0, [rec(n, id=2**40 + n, name="n") for n in range(4)])
    sink.prepare_chunk(given)
    place.sql("DROP TABLE rows")
    create(place, "id bigint, name text")
    commit_all(sink.bind(), given, fence)
    assert ids(place) == [2**40 + n for n in range(4)]
    assert stored(place) == [(0, of_rows(place, "1 = 1", WITHOUT), WITHOUT)]


def test_ranges_without_rows_have_the_digest_zero(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, [Rec(0), Rec(1, bad="no")]), fence)
    pass_over(together(sink), {T0: OffsetRange(2, 5)}, fence, "hole", impatient())
    assert [row[:2] for row in stored(place)] == [(0, None), (2, 0)]


def test_an_upsert_has_none(place: Place) -> None:
    """It replaces rows of earlier ranges, whose digests would be theirs no more."""
    sink, fence = ready(sink_to(place, keys=["id"]))
    commit_all(sink, at_t0(0, numbered(0, 4)), fence)
    assert stored(place) == [(0, None, None)]


def test_records_before_positions(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(Delivery(sink, sink.ledger, "records_first"), at_t0(0, numbered(0, 4)), fence)
    assert stored(place) == [(0, of_rows(place, "1 = 1"), WITH_OFFSET)]


def test_positions_before_records(place: Place) -> None:
    """The rows are not known when the history is written."""
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(Delivery(sink, sink.ledger, "position_first"), at_t0(0, numbered(0, 4)), fence)
    assert stored(place) == [(0, None, None)]


# -- types ---------------------------------------------------------------------------------


NOON = dt.datetime(1969, 7, 20, 20, 17, 40, 1, dt.UTC)
TYPES: dict[str, tuple[pa.DataType, str, object, str | None]] = {
    "whole": (pa.int16(), "bigint", 7, "bigint"),
    "narrow": (pa.int64(), "integer", 7, "integer"),
    "ratio": (pa.float32(), "double precision", 0.1, "float"),
    "money": (pa.decimal128(9, 2), "numeric(20,4)", Decimal("1.10"), "decimal2"),
    "large": (pa.decimal128(30, 2), "numeric", Decimal("1.10"), "numeric2"),
    "at": (pa.timestamp("ms", "UTC"), "timestamptz", NOON.replace(microsecond=0), "instant"),
    "exact": (pa.timestamp("ms"), "timestamp(3)", NOON.replace(tzinfo=None, microsecond=0),
              "timestamp"),
    "name": (pa.string(), "varchar(9)", "ä", "text"),
    "raw": (pa.binary(), "bytea", b"\x00\xff", "bytes"),
    "day": (pa.date32(), "date", NOON.date(), "date"),
    "flag": (pa.bool_(), "boolean", True, "boolean"),
    "padded": (pa.string(), "char(5)", "a", None),
    "document": (pa.string(), "jsonb", '{"b":  1}', None),
    "id": (pa.string(), "uuid", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", None),
    "list": (pa.list_(pa.int64()), "bigint[]", [1], None),
    "number": (pa.float64(), "numeric", 1.5, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_columns_that_return_what_was_sent_are_covered(name: str, on_postgres: Place) -> None:
    given, column, value, kind = TYPES[name]
    on_postgres.sql(f"CREATE TABLE rows ({name} {column})")
    schema = pa.schema([(name, given)])
    sink, fence = ready(sink_to(on_postgres, schema))
    commit_all(sink, at_t0(0, [rec(0, **{name: value})], schema), fence)
    recipe = "1 row" if kind is None else f"1 row {name}={kind}"
    (type_,) = on_postgres.sql(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = 'rows'::regclass AND attnum = 1"
    )[0]
    each = row_digest(Recipe.parse(recipe), {name: type_}, on_postgres.dialect.quote, None)
    (digest,) = on_postgres.sql(f"SELECT {each} FROM rows")[0]
    assert stored(on_postgres) == [(0, digest % 2**64, recipe)]


@pytest.mark.parametrize(
    ("given", "column", "kind"),
    [
        (pa.decimal128(9, 4), "numeric(9,2)", None),
        (pa.timestamp("us"), "timestamp(3)", None),
        (pa.float64(), "real", "float"),
    ],
)
def test_columns_that_may_round_are_not_covered(
    given: pa.DataType, column: str, kind: str | None, on_postgres: Place
) -> None:
    """Except real: the sink itself has rounded, and sends what the column returns."""
    on_postgres.sql(f"CREATE TABLE rows (v {column})")
    schema = pa.schema([("v", given)])
    sink, _ = ready(sink_to(on_postgres, schema, may_round=True))
    assert sink.target is not None
    assert str(sink.target.recipe(keep_source=False)) == ("1 row v=float" if kind else "1 row")


def test_values_that_sqlite_stores_as_text_are_covered(on_sqlite: Place) -> None:
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("money", pa.decimal128(9, 2))])
    sink, fence = ready(sink_to(on_sqlite, schema))
    row = {"at": NOON, "money": Decimal("1.10")}
    commit_all(sink, at_t0(0, [rec(0, **row)], schema), fence)
    recipe = "1 row at=instant money=decimal2"
    rows = pa.Table.from_pylist([row], schema=schema)
    assert stored(on_sqlite) == [
        (0, digest_sum(row_digests(rows, None, Recipe.parse(recipe))), recipe)
    ]


# -- the history ---------------------------------------------------------------------------


def test_joined_ranges_have_the_sum(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    for start in range(0, 60, 10):
        commit_all(sink, at_t0(start, numbered(start, start + 10)), fence)
    pass_over(together(sink), {T0: OffsetRange(60, 70)}, fence, "hole", impatient())
    assert sink.ledger.join_history(fence, keep_newest=2) == 4
    assert sink.ledger.join_history(fence, keep_newest=0) == 2
    assert stored(place) == [(0, of_rows(place, "1 = 1"), WITH_OFFSET)]
    assert place.sql("SELECT kind, written FROM oncely_ranges") == [("joined", 60)]


def test_joined_ranges_of_several_recipes_have_none(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    for start in range(0, 40, 10):
        commit_all(sink, at_t0(start, numbered(start, start + 10)), fence)
    place.sql("UPDATE oncely_ranges SET recipe = '1 offset id=bigint' WHERE range_start = 10")
    sink.ledger.join_history(fence, keep_newest=2)
    assert stored(place)[0] == (0, None, None)
    place.sql("UPDATE oncely_ranges SET recipe = NULL, digest = NULL WHERE range_start = 20")
    sink.ledger.join_history(fence, keep_newest=0)
    assert stored(place) == [(0, None, None)]


def test_a_batch(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    rows = [at_t0(0, numbered(*ends)).rows for ends in ((0, 3), (0, 3), (5, 9))]
    ranges = {T0: OffsetRange(0, 20), T1: OffsetRange(0, 3)}
    counts = {T0: Counts(20, 0, 0, 0), T1: Counts(3, 0, 0, 0)}
    batch = with_rows(Batch(ranges, counts), sink, *rows)
    publish_on(sink, batch, sink.ledger.positions(fence), fence)
    assert ids(place) == [0, 0, 1, 1, 2, 2, 5, 6, 7, 8]
    assert stored(place, "written, digest, recipe") == [
        (10, of_rows(place, "1 = 1", WITHOUT), WITHOUT), (0, 0, None)
    ]  # fmt: skip


# -- amendments ----------------------------------------------------------------------------

AMENDMENTS = ('topic, "partition", range_start, range_end, kind, records, written, rejected,'
              " filtered, recipe, superseded")  # fmt: skip


def amendments(place: Place) -> list[tuple[Any, ...]]:
    return place.sql(f"SELECT {AMENDMENTS} FROM oncely_amendments ORDER BY 1, 2, 3")


def replayed(sink: SqlSink, judge: Judge, at_once: int = 500) -> tuple[int, int]:
    return replay(SqlReplay(sink.bind()), judge, Backoff(0.001, 0.01, 1), at_once)


def bad(*offsets: int) -> list[Rec]:
    return [Rec(n, bad="no JSON") for n in offsets]


def whole(place: Place, partition: TopicPartition = T0) -> tuple[int, int, int]:
    """Rows, rejects and digest of a partition, by its history and amendments together."""
    sums = [0, 0, 0]
    for table in ("oncely_ranges", "oncely_amendments"):
        for row in place.sql(
            f'SELECT written, rejected, COALESCE(digest, 0) FROM {table} WHERE "partition" = ?'
            " AND superseded = 0",
            partition.partition,
        ):
            sums = [a + b for a, b in zip(sums, row, strict=True)]
    return sums[0], sums[1], sums[2] % 2**64


@pytest.mark.parametrize("at_once", [500, 2])
def test_replayed_dead_letters_amend_the_ranges_that_they_come_from(
    place: Place, at_once: int
) -> None:
    sink, fence = ready(sink_to(place, keep_source=True), {T0: 0, T1: 0})
    first = {T0: (0, [*bad(0, 1), *numbered(2, 5)]), T1: (0, bad(7))}
    commit_all(sink, chunk(first), fence)
    commit_all(sink, at_t0(5, [*bad(5), *numbered(6, 8), *bad(8)]), fence)
    assert replayed(sink, judging(lambda one: one.offset != 5), at_once) == (4, 1)
    assert amendments(place) == [
        ("t", 0, 0, 2, "replay", 0, 2, -2, 0, WITH_OFFSET, 0),
        ("t", 0, 8, 9, "replay", 0, 1, -1, 0, WITH_OFFSET, 0),
        ("t", 1, 7, 8, "replay", 0, 1, -1, 0, WITH_OFFSET, 0),
    ]
    assert whole(place) == (8, 1, of_rows(place, "kafka_partition = 0"))
    assert whole(place, T1) == (1, 0, of_rows(place, "kafka_partition = 1"))
    assert replayed(sink, judging(), at_once) == (1, 0)  # the same range once more
    assert whole(place) == (9, 0, of_rows(place, "kafka_partition = 0"))


def test_a_replayed_record_may_be_filtered_now(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, bad(0)), fence)

    def judge(found: Sequence[Any]) -> Any:
        return type(judging()(found))(at_t0(0, [Rec(one.offset) for one in found]), found)

    assert replayed(sink, judge) == (1, 0)
    assert amendments(place) == [("t", 0, 0, 1, "replay", 0, 0, -1, 1, None, 0)]


def test_replayed_rows_of_a_spark_transform_are_counted_once(place: Place) -> None:
    """They belong to no single record, and the first one is still a dead letter."""
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, bad(0, 1, 2)), fence)
    assert replayed(sink, mixing(lambda count: {"id": count, "name": "sum"})) == (2, 1)
    assert amendments(place) == [("t", 0, 1, 3, "replay", 0, 1, -2, 1, WITHOUT, 0)]
    assert whole(place) == (1, 1, of_rows(place, "1 = 1", WITHOUT))


def test_nothing_that_decides_on_positions_reads_amendments(place: Place) -> None:
    """Ranges beyond the position count as done; an amendment is no range."""
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, bad(0, 1)), fence)
    replayed(sink, judging())
    place.sql("UPDATE oncely_amendments SET range_start = 2, range_end = 50")
    assert sink.ledger.positions(fence)[T0].done == ()
    commit_all(sink, at_t0(2, numbered(2, 5)), fence)
    assert sink.ledger.join_history(fence, keep_newest=0) == 1
    assert ids(place) == [0, 1, 2, 3, 4]
    assert len(amendments(place)) == 1


def test_a_reset_supersedes_amendments_beyond_it(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, bad(0)), fence)
    commit_all(sink, at_t0(1, bad(1)), fence)
    replayed(sink, judging())
    epoch = sink.open(Takeover(SOURCE, dict, {}, reset=lambda _: {T0: 1})).fence.epoch
    assert [(row[2], row[-1]) for row in amendments(place)] == [(0, 0), (1, epoch)]


def test_a_replay_that_is_rolled_back_amends_nothing(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, bad(0)), fence)

    def dies() -> None:
        with SqlReplay(sink.bind()).portion(5) as portion:
            assert portion is not None
            portion.commit(judging()(portion.rejects))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dies()
    assert amendments(place) == []
    assert ids(place) == []


def test_the_digest_of_an_offset_is_that_of_postgres(on_postgres: Place) -> None:
    offsets = [0, 1, 2, 1_000_003, 1 << 31, 1 << 40, (1 << 62) + 7]
    listed = ", ".join(map(str, offsets))
    rows = on_postgres.sql(
        f"SELECT hashint8extended(1, at) FROM unnest(ARRAY[{listed}]::bigint[]) WITH ORDINALITY"
        " AS given (at, number) ORDER BY number"
    )
    found = offset_digests(np.array(offsets, np.int64))
    assert found.tolist() == [digest % (1 << 64) for (digest,) in rows]
