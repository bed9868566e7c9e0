"""`oncely verify` on what real runs have stored: it holds, and damage to each store is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.scenarios.commands import oncely, oncely_json, run
from tests.scenarios.world import World, assert_steps, steps


def run_three_times(world: World, runtime: Any) -> None:
    """Two runs, a reset of one partition that goes back, and a run that reads it again."""
    for first in (0, 200):
        world.publish(200, first=first, partitions=2)
        world.run(runtime)
    done = oncely_json(
        "offsets", "reset", world.file(), "--shift-by", "-20", "--topic", f"{world.topic}:1",
        "--execute", *world.logged,
    )  # fmt: skip
    assert done["executed"]
    world.run(runtime)


def verify(world: World, *, log: bool = True) -> tuple[int, dict[str, Any]]:
    more = world.logged if log else ()
    done = run("verify", world.file(), *more, "--json")
    return done.returncode, json.loads(done.stdout)


def sqlite(world: World) -> dict[str, Any]:
    return {"sink": {"url": f"sqlite:///{world.folder}/rows.db"}}


def lines(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in world.events.read_text().splitlines()]


def write(world: World, events: list[dict[str, Any]]) -> None:
    world.events.write_text("".join(json.dumps(one) + "\n" for one in events))


def test_a_table(make_world: Callable[..., World], runtime: Any) -> None:
    world = make_world(2)
    run_three_times(world, runtime)
    code, found = verify(world)
    assert (code, found["verdict"]) == (0, "holds")
    assert found["checked"]["partitions"] == 2
    kinds = [one["type"] for one in lines(world)]
    assert kinds.count("opened") == 3
    assert kinds.count("reset") == 1
    assert verify(world, log=False)[0] == 0
    shown = oncely("verify", world.file(), *world.logged)
    assert "every step follows from the one before it" in shown.stdout


def test_damage_to_the_ledger_of_a_table(make_world: Callable[..., World], runtime: Any) -> None:
    world = make_world(2)
    world.overrides = {"spark": {"max_records_per_batch": 60}}
    run_three_times(world, runtime)

    def damaged(statement: str, rule: str, *, log: bool = True) -> None:
        world.sql("CREATE TABLE kept AS SELECT * FROM oncely_ranges")
        world.sql("CREATE TABLE kept_at AS SELECT * FROM oncely_positions")
        world.sql(statement)
        code, found = verify(world, log=log)
        assert (code, found["verdict"]) == (1, "broken"), statement
        assert found["first"]["rule"] == rule, found
        assert found["first"]["context"]
        world.sql("DELETE FROM oncely_ranges")
        world.sql("INSERT INTO oncely_ranges SELECT * FROM kept")
        world.sql("DELETE FROM oncely_positions")
        world.sql("INSERT INTO oncely_positions SELECT * FROM kept_at")
        world.sql("DROP TABLE kept")
        world.sql("DROP TABLE kept_at")
        assert verify(world, log=log)[0] == 0

    one = (
        '"partition" = 0 AND range_start = (SELECT min(range_end) FROM kept WHERE "partition" = 0)'
    )
    last = '"partition" = 0 AND range_end = (SELECT max(range_end) FROM kept WHERE "partition" = 0)'
    gone = f"DELETE FROM oncely_ranges WHERE {one}"
    damaged(gone, "ledger")
    damaged(gone, "missing", log=False)
    damaged(f"DELETE FROM oncely_ranges WHERE {last}", "ledger")
    damaged(f"UPDATE oncely_ranges SET range_end = range_end - 1 WHERE {one}", "entry", log=False)
    damaged(f"UPDATE oncely_ranges SET range_end = range_end + 1 WHERE {one}", "overlap", log=False)
    damaged(f"UPDATE oncely_ranges SET records = records - 1 WHERE {one}", "entry", log=False)
    damaged(f"UPDATE oncely_ranges SET epoch = epoch + 9 WHERE {one}", "entry", log=False)
    first = '"partition" = 0 AND range_start = 0'
    damaged(f"UPDATE oncely_ranges SET epoch = epoch + 1 WHERE {first}", "epoch", log=False)
    damaged('UPDATE oncely_positions SET "position" = "position" - 1', "position", log=False)
    damaged('UPDATE oncely_positions SET "position" = "position" + 1', "position")


def test_damage_to_the_event_log(make_world: Callable[..., World], runtime: Any) -> None:
    world = make_world(2)
    run_three_times(world, runtime)
    whole = lines(world)
    at = next(i for i, one in enumerate(whole) if one["type"] == "range_committed")
    write(world, [*whole[:at], *whole[at + 1 :]])
    code, found = verify(world)
    assert (code, found["first"]["rule"]) == (1, "missing")
    text = world.events.read_text().splitlines()
    text[at] = text[at][:-10]
    world.events.write_text("\n".join(text) + "\n")
    shown = oncely("verify", world.file(), *world.logged, expect=1)
    assert "is no event" in shown.stdout
    write(world, [{**one, "pipeline": "another"} for one in whole])
    assert verify(world)[1]["first"]["rule"] == "log"
    refused = oncely("run", world.file(), "--until", "latest", *world.logged, expect=2)
    assert "belongs to pipeline 'another'" in refused.stderr


def test_a_log_that_cannot_be_written_ends_a_run_before_it_begins(
    make_world: Callable[..., World],
) -> None:
    world = make_world(1)
    path = world.folder / "no" / "log"
    done = oncely("run", world.file(), "--until", "latest", "--events", path, expect=2)
    assert "can't be written" in done.stderr
    assert world.sql("SELECT to_regclass('oncely_pipelines')") == [(None,)]


def test_a_pipeline_that_never_ran_is_unknown(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    for sections in ({}, sqlite(world)):
        done = oncely_json("verify", world.file(**sections), expect=4)
        assert done["verdict"] == "unknown"
        assert "never run" in done["unknown"][0]["text"]


def test_sqlite(make_world: Callable[..., World], runtime: Any) -> None:
    world = make_world(2)
    world.overrides = sqlite(world)
    run_three_times(world, runtime)
    assert_steps(world)


def test_topics(make_topic_world: Callable[..., World], runtime: Any) -> None:
    world = make_topic_world(2)
    run_three_times(world, runtime)
    assert_steps(world)
    code, found = verify(world, log=False)
    assert (code, found["verdict"]) == (0, "holds")  # compaction has not removed the first steps


def test_files(make_files_world: Callable[..., Any], runtime: Any) -> None:
    world = make_files_world(2)
    run_three_times(world, runtime)
    assert_steps(world)
    path = next(Path(world.root).rglob("*.avro"))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert "bytes" in broken_file(world)["text"]
    path.unlink()
    assert "is not stored" in broken_file(world)["text"]
    path.write_bytes(content)
    (path.parent / "orphan.avro").write_bytes(content)
    assert steps(world).checked["orphans"] == 1
    assert_steps(world)


def test_delta(make_delta_world: Callable[..., Any], runtime: Any) -> None:
    world = make_delta_world(2)
    run_three_times(world, runtime)
    assert_steps(world)
    assert verify(world, log=False)[0] == 0
    path = next(Path(world.root).glob("*.parquet"))
    content = path.read_bytes()
    path.unlink()
    assert "is not stored" in broken_file(world)["text"]
    path.write_bytes(content)
    version = max(Path(world.root).glob("_delta_log/*.json"))
    version.rename(version.with_suffix(".gone"))
    assert verify(world)[0] == 1  # the log tells of a commit that the table does not contain


def broken_file(world: World) -> dict[str, Any]:
    code, found = verify(world)
    assert (code, found["first"]["rule"]) == (1, "file"), found
    first: dict[str, Any] = found["first"]
    return first
