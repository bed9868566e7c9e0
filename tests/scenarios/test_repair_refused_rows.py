"""Rows that were committed, and that the table refuses now: named, and left as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncely.testing.servers.kafka import Broker
from tests.audittools import BAD, AuditWorld, found
from tests.scenarios.commands import oncely, oncely_json
from tests.sinktools import Place

COUNT = 20


@pytest.fixture
def world(
    broker: Broker, make_topic: Callable[..., str], on_postgres: Place, tmp_path: Path
) -> AuditWorld:
    """A topic of one partition, a fifth of its records broken, committed in ranges of seven."""
    world = AuditWorld(broker.bootstrap, on_postgres, make_topic(), tmp_path)
    publish(world, range(COUNT))
    world.run()
    assert world.audit().verdict == "clean"
    return world


def publish(world: AuditWorld, numbers: range) -> None:
    for n in numbers:
        world.produce([(0, b"bad", BAD)]) if n % 5 == 4 else world.publish([n])


def content(world: AuditWorld) -> tuple[list[Any], list[Any]]:
    rows = world.sql("SELECT kafka_offset, id, name FROM rows ORDER BY 1")
    return rows, world.sql('SELECT "offset", stage FROM oncely_rejects ORDER BY 1')


def impossible(done: Any) -> dict[int, str]:
    return {one["offset"]: one["reason"] for one in done["impossible"]}


def test_a_constraint_that_was_added_since(world: AuditWorld) -> None:
    rows, letters = content(world)
    world.sql("INSERT INTO rows SELECT * FROM rows WHERE id = 11")
    world.sql("ALTER TABLE rows ADD CONSTRAINT odd CHECK (id NOT IN (3, 8, 11)) NOT VALID")
    world.sql("DELETE FROM rows WHERE id IN (8, 10)")
    world.sql('DELETE FROM oncely_rejects WHERE "offset" = 9')
    damage = {"lost": [(0, 8), (0, 9), (0, 10)], "duplicated": [(0, 11)]}
    assert found(world.audit()) == damage, "the row of 3 is right"

    done = oncely_json("repair", world.file(), "--execute", expect=1)
    assert done["offsets"] == {"lost": 2}
    told = impossible(done)
    assert told.keys() == {8, 11}
    assert all("odd" in one and "repair again" in one for one in told.values())
    left = [one for one in rows if one[0] != 8]
    assert content(world) == (sorted([*left, *(one for one in rows if one[0] == 11)]), letters)
    assert found(world.audit()) == {"lost": [(0, 8)], "duplicated": [(0, 11)]}

    world.sql("ALTER TABLE rows DROP CONSTRAINT odd")
    oncely_json("repair", world.file(), "--execute")
    assert content(world) == (rows, letters)


def test_a_dead_letter_that_the_table_has_refused_before(world: AuditWorld) -> None:
    """It is restored, also beside a row that is not."""
    world.sql("ALTER TABLE rows ADD CONSTRAINT odd CHECK (id <> 22)")
    publish(world, range(COUNT, COUNT + 10))
    world.run()
    _, letters = before = content(world)
    assert (22, "write") in letters
    world.sql('DELETE FROM oncely_rejects WHERE "offset" = 22')
    oncely_json("repair", world.file(), "--execute")
    assert content(world) == before

    world.sql('DELETE FROM oncely_rejects WHERE "offset" = 22')
    world.sql("DELETE FROM rows WHERE id = 2")
    world.sql("ALTER TABLE rows ADD CONSTRAINT even CHECK (id <> 2) NOT VALID")
    done = oncely_json("repair", world.file(), "--execute", expect=1)
    assert impossible(done).keys() == {2}
    assert content(world) == ([one for one in before[0] if one[0] != 2], letters)


def test_a_table_that_accepts_no_row(world: AuditWorld) -> None:
    before, file = content(world), world.file()
    world.sql("ALTER TABLE rows ADD COLUMN more int NOT NULL DEFAULT 0")
    world.sql("ALTER TABLE rows ALTER COLUMN more DROP DEFAULT")
    clean = world.audit()
    assert clean.verdict == "clean"
    assert any("'more'" in one for one in clean.limits)

    world.sql("DELETE FROM rows WHERE id = 8")
    world.sql('DELETE FROM oncely_rejects WHERE "offset" = 9')
    world.sql(
        "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset, more)"
        " SELECT 99, 'x', kafka_topic, 0, 99, 1 FROM rows LIMIT 1"
    )
    damaged = world.audit()
    assert found(damaged) == {"lost": [(0, 8), (0, 9)], "unexpected": [(0, 99)]}
    assert all("'more'" in one.detail for one in damaged.findings if one.kind == "lost")

    done = oncely_json("repair", file, "--execute", expect=1)
    assert (done["offsets"], done["removed_rows"]) == ({"lost": 1, "unexpected": 1}, 1)
    assert "'more'" in impossible(done)[8]
    assert content(world) == ([one for one in before[0] if one[0] != 8], before[1])
    whole = f"{world.topic}:0:0-{COUNT}"
    assert "'more'" in oncely("backfill", file, "--offsets", whole, "--execute", expect=2).stderr

    world.sql("ALTER TABLE rows ALTER COLUMN more SET DEFAULT 0")
    oncely_json("repair", file, "--execute")
    assert content(world) == before


def test_a_row_that_other_rows_refer_to(world: AuditWorld) -> None:
    """It can't be deleted; all else is repaired."""
    before = content(world)
    world.sql("ALTER TABLE rows ADD UNIQUE (id)")
    world.sql("CREATE TABLE refs AS SELECT 6::bigint AS id")
    world.sql("ALTER TABLE refs ADD FOREIGN KEY (id) REFERENCES rows (id)")
    world.sql("UPDATE rows SET name = 'x' WHERE id IN (2, 6, 7)")
    world.sql("DELETE FROM rows WHERE id IN (1, 16)")
    done = oncely_json("repair", world.file(), "--execute", expect=1)
    assert (done["offsets"], impossible(done).keys()) == ({"lost": 2, "altered": 2}, {6})
    assert "foreign key" in impossible(done)[6]
    world.sql("DROP TABLE refs")
    oncely_json("repair", world.file(), "--execute")
    assert content(world) == before
