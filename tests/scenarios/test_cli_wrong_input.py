"""Wrong input: one clear message with the key and the way out, exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tests.scenarios.commands import oncely
from tests.scenarios.world import World

COMMANDS = (("run",), ("run", "--until", "latest"), ("plan",), ("status",))


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(1)
    world.publish(3, partitions=1)
    return world


def assert_nothing_written(world: World, *own: str) -> None:
    tables = world.sql("SELECT relname FROM pg_class WHERE relkind = 'r' AND"
                       " relnamespace = 'public'::regnamespace")  # fmt: skip
    assert {name for (name,) in tables} == set(own)
    client = AdminClient(
        {"bootstrap.servers": world.brokers}
    )  # kept: its end would lose the answer
    groups = client.list_consumer_groups(request_timeout=60).result(120)
    assert not [one for one in groups.valid if world.name in one.group_id]


Sections = dict[str, dict[str, Any]]

MISTAKES: dict[str, tuple[Sections, tuple[str, ...], int]] = {
    "unknown key": ({"sink": {"tabel": "rows"}},
                    ("sink.tabel: unknown key", "did you mean table?"), 4),
    "type": ({"spark": {"max_records_per_batch": "many"}},
             ("spark.max_records_per_batch: found",), 4),
    "topic": ({"source": {"topics": ["not-there"]}},
              ("source.topics", "no such topic", "'not-there'"), 4),
    "no table and no create": ({"sink": {"create": False}},
                               ("sink.create is false", "oncely plan"), 3),
    "function": ({"transform": {"python": "no_such_module:f"}},
                 ("transform.python", "no_such_module"), 3),
    "not row-wise": ({"transform": {"sql": "SELECT id FROM (SELECT DISTINCT id FROM input)"}},
                     ("transform.sql: is not row-wise",), 1),
}  # fmt: skip
"""What is wrong in the file, what is said, and how many of the commands say it."""


def assert_refused(file: Path, *expected: str, commands: int = 4) -> None:
    for command in COMMANDS[:commands]:
        refused = oncely(*command, file, expect=2)
        said = " ".join((refused.stdout + refused.stderr).split())
        assert [one for one in expected if one not in said] == [], (command, said)
        assert "way out" in said or "allowed:" in said
        assert "canary" not in said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file(world: World, mistake: str) -> None:
    sections, expected, commands = MISTAKES[mistake]
    assert_refused(world.file(**sections), *expected, commands=commands)
    assert_nothing_written(world)


def test_a_missing_file(world: World, tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere.toml", "nowhere.toml", "can't read the pipeline file")
    assert_nothing_written(world)


def test_a_table_whose_columns_do_not_fit(world: World) -> None:
    world.sql("CREATE TABLE rows (id date, grp text, needed int NOT NULL)")
    words = "sink.table", "'id' is date", "no column 'pad'", "'needed' must have a value", "way out"
    assert_refused(world.file(), *words, commands=3)
    assert_nothing_written(world, "rows")


def test_a_wrong_password_is_told_and_not_shown(world: World) -> None:
    url = world.url.replace("://postgres:", "://postgres:canary-7331-")
    assert_refused(world.file(sink={"url": url}), "sink.url", "way out")


def test_several_mistakes_are_told_at_once(world: World) -> None:
    file = world.file(sink={"tabel": "rows", "mode": "replace"}, spark={"trigger": "soon"})
    refused = oncely("run", file, expect=2)
    for key in ("sink.tabel", "sink.mode", "spark.trigger"):
        assert key in refused.stderr


def test_an_unknown_option(world: World) -> None:
    refused = oncely("run", world.file(), "--untill", "latest", expect=2)
    assert "--until" in refused.stderr
    oncely("run", world.file(), "--until", "tomorrow", expect=2)
    oncely("offsets", "reset", world.file(), expect=2)
    assert_nothing_written(world)


def test_a_traceback_is_for_who_asks_for_it(world: World) -> None:
    from tests.scenarios import commands

    refused = commands.run("run", world.file(sink={"tabel": "x"}), "--debug")
    assert refused.returncode == 2
    assert "Traceback" in refused.stderr


TOO_OLD = 'openjdk version "1.8.0_292"', "Java 17+ is needed, found 1.8.0_292 at {}/bin/java"
MISSING = None, "Java 17+ is needed; none by JAVA_HOME={}"


@pytest.mark.parametrize(
    ("command", "transform", "says", "told"),
    [
        (("run",), False, *TOO_OLD),
        (("run",), True, *MISSING),
        (("plan",), True, *TOO_OLD),
        (("plan",), False, *MISSING),
    ],
    ids=["run", "run with Spark's transform", "plan with Spark's transform", "plan"],
)
def test_java_is_looked_at_before_anything(
    world: World,
    tmp_path: Path,
    command: tuple[str, ...],
    says: str | None,
    told: str,
    *,
    transform: bool,
) -> None:
    """A plan is refused where only Spark can run the pipeline; `oncely work` needs no Java."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    if says is not None:
        program = home / "bin" / "java"
        program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
        program.chmod(0o755)
    env = {"JAVA_HOME": str(home)}
    sections: dict[str, Any] = {}
    if transform:
        sections = {
            "transform": {"spark": "tests.scenarios.transforms:counted"},
            "sink": {"keep_source": False},
        }
    fine = command == ("plan",) and not transform
    answer = oncely(*command, world.file(**sections), expect=0 if fine else 2, env=env, alone=True)
    said = " ".join((answer.stdout + answer.stderr).split())
    if fine:
        assert f"not for `oncely work`: {told.partition('{}')[0].strip()}" in said
    else:
        assert told.format(home) in said
        assert "way out: install Java 17 or later" in said
    assert "starting Spark" not in said
    assert_nothing_written(world)
