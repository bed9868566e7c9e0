"""A ledger that topic and rows contradict is what is damaged: no right row is removed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oncely.core.claim import Takeover
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests.audittools import BAD, AuditWorld, found
from tests.scenarios.commands import oncely, oncely_json
from tests.sinktools import Place

COUNT = 30
COLUMNS = (
    'pipeline, topic, "partition", "offset", timestamp_ms, "key", "value", headers, stage, reason,'
    " epoch"
)


@pytest.fixture
def world(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> AuditWorld:
    """A topic of one partition, a fifth of its records broken, committed in ranges of seven."""
    world = AuditWorld(broker.bootstrap, place, make_topic(), tmp_path)
    publish(world, range(COUNT))
    world.run()
    assert world.audit().verdict == "clean"
    return world


def publish(world: AuditWorld, numbers: range) -> None:
    for n in numbers:
        world.produce([(0, b"bad", BAD)]) if n % 5 == 4 else world.publish([n])


def content(world: AuditWorld) -> tuple[list[Any], list[Any]]:
    rows = world.sql("SELECT kafka_offset, id, name FROM rows ORDER BY 1")
    return rows, world.sql('SELECT pipeline, "offset" FROM oncely_rejects ORDER BY 1, 2')


def insert(world: AuditWorld, offset: int | None, **more: Any) -> None:
    columns = {"id": 1, "name": "x", "kafka_topic": world.topic, "kafka_partition": 0}
    columns |= {"kafka_offset": offset, **more}
    marks = ", ".join("?" * len(columns))
    world.sql(f"INSERT INTO rows ({', '.join(columns)}) VALUES ({marks})", *columns.values())


def successor(world: AuditWorld) -> AuditWorld:
    """A pipeline of another name that continues at the end of the topic, in the same table."""
    new = replace(world, pipeline=f"{world.pipeline}-new")
    new.open(new.ends())
    publish(new, range(COUNT, COUNT + 10))
    new.run()
    return new


# -- the ledger is wrong -------------------------------------------------------------------------

DAMAGED_LEDGERS: dict[str, Sequence[str]] = {
    "the first range is gone": ("DELETE FROM oncely_ranges WHERE range_start = 0",),
    "a range in the middle is gone": ("DELETE FROM oncely_ranges WHERE range_start = 14",),
    "all ranges are gone": ("DELETE FROM oncely_ranges",),
    "a range begins later": ("UPDATE oncely_ranges SET range_start = 3 WHERE range_start = 0",),
    "the position is before its rows": ('UPDATE oncely_positions SET "position" = 14',),
    "there is no position": ("DELETE FROM oncely_positions",),
}


@pytest.mark.parametrize("damage", DAMAGED_LEDGERS.values(), ids=DAMAGED_LEDGERS.keys())
def test_a_ledger_that_does_not_account_for_right_rows(
    world: AuditWorld, damage: Sequence[str]
) -> None:
    before = content(world)
    for statement in damage:
        world.sql(statement)
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {})
    assert any("ledger" in one.reason for one in report.undecided)
    oncely_json("repair", world.file(), "--execute", "--max-removed", 1_000, expect=4)
    assert content(world) == before


def test_a_pipeline_that_continues_under_another_name(world: AuditWorld) -> None:
    new = successor(world)
    before = content(new)
    report = new.audit()
    assert (report.verdict, report.found) == ("clean", {})
    (told,) = report.limits
    assert repr(world.pipeline) in told
    oncely_json("repair", new.file(), "--execute", "--max-removed", 1_000)
    assert content(new) == before
    assert world.audit().verdict == "clean"  # and the rows of the new one are not the old one's


def test_wrong_rows_that_no_ledger_accounts_for_are_removed(world: AuditWorld) -> None:
    """Beside right ones: of no record, and with other values than their record's."""
    before = content(world)
    world.sql("DELETE FROM oncely_ranges WHERE range_start = 0")
    world.sql("UPDATE rows SET name = 'other' WHERE kafka_offset = 2")
    insert(world, 4)  # beside a dead letter
    insert(world, COUNT + 5)
    report = world.audit()
    assert found(report) == {"unexpected": [(0, 2), (0, COUNT + 5)]}
    oncely_json("repair", world.file(), "--execute", expect=4)
    rows, letters = content(world)
    assert letters == before[1]
    assert [one[0] for one in rows if one[0] != 4] == [at for at, *_ in before[0] if at != 2]


def test_the_topic_no_longer_has_the_records(world: AuditWorld, broker: Broker) -> None:
    before = content(world)
    world.sql("DELETE FROM oncely_ranges WHERE range_start = 0")
    broker.delete_records(world.topic, {0: 7})
    assert world.audit().verdict == "unknown"
    oncely_json("repair", world.file(), "--execute", expect=4)
    assert content(world) == before


@pytest.mark.parametrize("report", [False, True])
def test_more_than_the_allowed_number_is_not_removed(world: AuditWorld, report: bool) -> None:
    """Neither rows nor dead letters; nothing is written then, and a dry run tells it."""
    before = content(world)
    for offset in range(COUNT, COUNT + 3):
        insert(world, offset)
    world.sql("DELETE FROM rows WHERE kafka_offset = 1")
    damaged, more = content(world), ()
    if report:
        path = world.folder / "report.json"
        path.write_text(oncely("audit", world.file(), "--json", expect=1).stdout)
        more = ("--report", path)
    plan = oncely("repair", world.file(), "--max-removed", 2, *more, expect=1)
    assert "it removes 3 rows and 0 rejects" in plan.stderr
    refused = oncely("repair", world.file(), "--max-removed", 2, *more, "--execute", expect=2)
    assert "nothing was written" in refused.stderr
    assert "--max-removed 3" in refused.stderr
    assert content(world) == damaged
    oncely("repair", world.file(), "--max-removed", 3, *more, "--execute")
    assert content(world) == before


def test_what_a_report_names_is_audited_again(world: AuditWorld) -> None:
    """The rows of an old report may be right today."""
    path, before = world.folder / "report.json", content(world)
    world.sql("UPDATE rows SET name = 'other' WHERE kafka_offset = 2")
    path.write_text(oncely("audit", world.file(), "--json", expect=1).stdout)
    world.sql("UPDATE rows SET name = 'name 2' WHERE kafka_offset = 2")
    done = oncely_json("repair", world.file(), "--report", path, "--execute")
    ((left,), removed) = done["impossible"], done["removed_rows"]
    assert (left["offset"], removed) == (2, 0)
    assert "the audit of now does not find it" in left["reason"]
    assert content(world) == before


def test_what_is_removed_can_be_put_back(world: AuditWorld) -> None:
    """As JSON, in the transaction of the removal."""
    world.sql("INSERT INTO rows SELECT * FROM rows WHERE kafka_offset = 3")
    world.sql("UPDATE rows SET name = NULL, id = -1 WHERE kafka_offset = 6")
    letter = f"'{world.pipeline}', '{world.topic}', 0, {COUNT}, 1, ?, ?, '[]', 'decode', 'x', 1"
    world.sql(f"INSERT INTO oncely_rejects ({COLUMNS}) VALUES ({letter})", b"k\x00", None)
    oncely("repair", world.file(), "--execute")
    kept = world.sql(
        'SELECT pipeline, kind, topic, "partition", "offset", content FROM oncely_removed'
        ' ORDER BY kind, "offset"'
    )
    assert {one[0] for one in kept} == {world.pipeline}
    assert [(kind, *place) for _, kind, *place, _ in kept] == [
        ("dead letter", world.topic, 0, COUNT), *[("row", world.topic, 0, at) for at in (3, 3, 6)]
    ]  # fmt: skip
    contents = [json.loads(text) for *_, text in kept]
    assert contents[0]["key"].lower() == "\\x6b00"
    assert contents[0]["value"] is None
    assert contents[3] == {
        "id": -1, "name": None, "kafka_topic": world.topic, "kafka_partition": 0, "kafka_offset": 6
    }  # fmt: skip
    ((repairs,),) = world.sql("SELECT COUNT(DISTINCT repair) FROM oncely_removed")
    assert repairs == 2  # the dead letter is beyond the position
    if world.place.is_postgres:
        world.sql(
            "INSERT INTO rows SELECT (json_populate_record(NULL::rows, content::json)).*"
            " FROM oncely_removed WHERE kind = 'row' AND \"offset\" = 6"
        )
        assert (6, -1, None) in content(world)[0]


def test_two_pipelines_divide_a_topic_between_them(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> None:
    """Each filters what the other one writes, into the same table."""
    one = AuditWorld(broker.bootstrap, place, make_topic(), tmp_path)
    other = replace(one, pipeline=f"{one.pipeline}-b")
    one.expand = lambda row: [row] if row["id"] < 10 else []
    other.expand = lambda row: [] if row["id"] < 10 else [{**row, "name": "b"}]
    one.publish(range(20))
    one.run()
    other.run()
    before = content(one)
    sql = {"transform": {"sql": "SELECT * FROM input WHERE id < 10"}}
    report = one.audit(sections=sql)
    assert (report.verdict, report.found) == ("unknown", {})
    assert any(repr(other.pipeline) in one.reason for one in report.undecided)
    oncely("repair", one.file(**sql), "--execute", expect=4)
    assert content(one) == before
    refused = oncely(
        "backfill", one.file(**sql), "--offsets", f"{one.topic}:0:0-20", "--execute", expect=2
    )
    assert f"pipeline {other.pipeline!r} has committed records" in refused.stderr
    assert content(one) == before
    place.sql("DELETE FROM rows WHERE kafka_offset = 3")
    assert found(one.audit(sections=sql)) == {"lost": [(0, 3)]}
    oncely("repair", one.file(**sql), "--execute", expect=4)
    assert content(one) == before


def test_the_rows_of_another_table_are_told_apart(world: AuditWorld) -> None:
    """Of the same place, with the same offsets."""
    other = replace(world, pipeline=f"{world.pipeline}-b", table="other")
    other.run()
    publish(other, range(COUNT, COUNT + 5))
    other.run()
    before = content(world)
    insert(world, COUNT + 1)
    world.sql("UPDATE rows SET name = 'x' WHERE kafka_offset = 2")
    assert found(world.audit()) == {"altered": [(0, 2)], "unexpected": [(0, COUNT + 1)]}
    oncely_json("repair", world.file(), "--execute")
    assert content(world)[0] == before[0]


SAME_ROWS: dict[str, Sequence[str]] = {
    "a view": ("CREATE VIEW other AS SELECT * FROM rows",),
    "a partition": (
        "ALTER TABLE rows RENAME TO old",
        "CREATE TABLE rows (LIKE old) PARTITION BY RANGE (id)",
        "CREATE TABLE other PARTITION OF rows FOR VALUES FROM (0) TO (1000)",
        "INSERT INTO rows SELECT * FROM old",
    ),
    "a view of the parent": (
        "ALTER TABLE rows RENAME TO old",
        "CREATE TABLE parent (LIKE old) PARTITION BY RANGE (id)",
        "CREATE TABLE rows PARTITION OF parent FOR VALUES FROM (0) TO (1000)",
        "INSERT INTO rows SELECT * FROM old",
        "CREATE VIEW other AS SELECT * FROM parent",
    ),
}


@pytest.mark.parametrize("statements", SAME_ROWS.values(), ids=SAME_ROWS.keys())
@pytest.mark.parametrize("turned", [False, True])
def test_another_relation_with_the_same_rows(
    broker: Broker,
    make_topic: Callable[..., str],
    on_postgres: Place,
    tmp_path: Path,
    statements: Sequence[str],
    turned: bool,
) -> None:
    """The old pipeline writes to one of them, and the new one, which continues, to the other."""
    first, second = ("other", "rows") if turned else ("rows", "other")
    world = AuditWorld(broker.bootstrap, on_postgres, make_topic(), tmp_path, table=first)
    world.sql(
        "CREATE TABLE rows (id bigint, name text, kafka_topic text, kafka_partition int,"
        " kafka_offset bigint)"
    )
    for one in statements:
        world.sql(one)
    publish(world, range(COUNT))
    world.run()
    new = replace(world, pipeline=f"{world.pipeline}-new", table=second)
    new.open(new.ends())
    publish(new, range(COUNT, COUNT + 10))
    new.run()
    before = content(world)
    for each in (world, new):
        assert (each.audit().found, each.audit().verdict) == ({}, "clean")
        oncely_json("repair", each.file(), "--execute", "--max-removed", 1_000)
    assert content(world) == before


KEEPS = {
    "postgresql": (
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER keep BEFORE DELETE ON rows FOR EACH ROW EXECUTE FUNCTION keep()",
    ),
    "sqlite": ("CREATE TRIGGER keep BEFORE DELETE ON rows BEGIN SELECT RAISE(IGNORE); END",),
}


def test_a_table_that_keeps_deleted_rows(world: AuditWorld) -> None:
    """Their replacement would be there beside them."""
    world.sql("UPDATE rows SET name = 'x' WHERE kafka_offset = 2")
    world.sql("DELETE FROM rows WHERE kafka_offset = 1")
    before = content(world)
    for one in KEEPS[world.place.kind]:
        world.sql(one)
    done = oncely_json("repair", world.file(), "--execute", expect=1)
    assert done["offsets"] == {"lost": 1}
    assert "keeps rows that were deleted" in done["impossible"][0]["reason"]
    rows, letters = content(world)
    assert ([one for one in rows if one[0] != 1], letters) == before
    whole = f"{world.topic}:0:0-7"
    refused = oncely("backfill", world.file(), "--offsets", whole, "--execute", expect=1)
    assert "keeps rows that were deleted" in refused.stderr
    assert content(world)[0] == rows


# -- odd rows ------------------------------------------------------------------------------------


def test_odd_rows_are_named_and_all_else_is_repaired(world: AuditWorld) -> None:
    before = content(world)
    odd: Sequence[dict[str, Any]] = (
        {"kafka_offset": -5}, {"kafka_offset": None}, {"kafka_partition": None},
        {"kafka_topic": None}, {"kafka_partition": None, "kafka_topic": None},
        {"kafka_topic": "elsewhere"}, {"kafka_partition": 7}, {"kafka_partition": -1},
        {"kafka_offset": 1 << 62}, {"kafka_partition": 3_000_000_000},
    )  # fmt: skip
    if world.place.is_postgres:
        world.sql("ALTER TABLE rows ALTER kafka_partition TYPE bigint")
    for one in odd:
        insert(world, 3, **one)
    world.sql("DELETE FROM rows WHERE kafka_offset = 1")
    world.sql("INSERT INTO rows SELECT * FROM rows WHERE id = 2")
    done = oncely_json("repair", world.file(), "--execute", expect=1)
    assert done["offsets"] == {"lost": 1, "duplicated": 1, "unexpected": 1}
    assert len(done["impossible"]) == len(odd) - 1
    assert done["audit"]["found"] == {
        "lost": 0, "duplicated": 0, "altered": 0, "unexpected": len(odd) - 1
    }  # fmt: skip
    world.sql("DELETE FROM rows WHERE name = 'x'")
    assert content(world) == before
    assert "no record has the place of this row" in json.dumps(done["audit"]["unexpected"])


# -- dead letters in place of rows ---------------------------------------------------------------

LETTER = 'UPDATE oncely_rejects SET "offset" = ? WHERE "offset" = ?'


@pytest.mark.parametrize("beside", [None, 2, 1])
def test_a_row_and_a_dead_letter_exchange_their_offsets(
    world: AuditWorld, beside: int | None
) -> None:
    """Alone, beside another damage of the same range, and where it is that range's only one."""
    before = content(world)
    world.sql("UPDATE rows SET kafka_offset = 4 WHERE kafka_offset = 3")
    world.sql(LETTER, 3, 4)
    if beside is not None:
        world.sql("DELETE FROM rows WHERE kafka_offset = ?", beside)
    report = world.audit()
    assert report.verdict == "damaged"
    named = {one.offset for one in report.findings}
    assert named == {3, 4} if beside is None else named == {3, 4, beside}
    oncely("repair", world.file(), "--execute")
    assert content(world) == before


def test_a_fabricated_dead_letter_in_place_of_a_row(world: AuditWorld) -> None:
    """It has all of the record, as one that the table has refused."""
    before = content(world)
    for message in messages(world.brokers, world.topic):
        if message.offset() in (2, 10, 11):
            world.sql("DELETE FROM rows WHERE kafka_offset = ?", message.offset())
            kept = (message.timestamp()[1], message.key(), message.value(), "[]", "write", "x", 1)
            world.sql(
                f"INSERT INTO oncely_rejects ({COLUMNS}) VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?)",
                world.pipeline, world.topic, message.offset(), *kept,
            )  # fmt: skip
    report = world.audit()
    assert found(report) == {"lost": [(0, 2), (0, 10), (0, 11)]}
    oncely("repair", world.file(), "--execute")
    assert content(world) == before


# -- histories that users make --------------------------------------------------------------------


def reset(world: AuditWorld, at: int) -> None:
    again = Takeover(world.identity, dict, {world.tp(): 0}, reset=lambda _: {world.tp(): at})
    world.sink.bind().open(again)


def test_a_reset_to_an_offset_within_a_range(world: AuditWorld) -> None:
    """The range is superseded, and its first records are not read again."""
    reset(world, 10)
    world.sql("DELETE FROM rows WHERE kafka_offset >= 10")
    world.run()
    report = world.audit()
    assert (report.verdict, report.found) == ("clean", {}), report.undecided
    world.sql("DELETE FROM rows WHERE kafka_offset IN (8, 12)")
    assert found(world.audit()) == {"lost": [(0, 8), (0, 12)]}


def test_decode_was_changed_since(world: AuditWorld) -> None:
    """The ledger does not account for rows that records would not give today."""
    old = replace(world, pipeline=f"{world.pipeline}-old", expand=_in_capitals)
    old.sql("DELETE FROM rows")
    old.run()
    assert old.audit().verdict == "clean"
    old.sql("DELETE FROM oncely_ranges WHERE range_start = 0")
    old.sql("DELETE FROM oncely_ranges WHERE pipeline = ?", world.pipeline)
    insert(old, COUNT)
    before = content(old)
    assert found(old.audit()) == {"unexpected": [(0, COUNT)]}
    oncely_json("repair", old.file(), "--execute", expect=4)
    assert content(old)[0] == before[0][:-1]


def _in_capitals(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "name": row["name"].upper()}]
