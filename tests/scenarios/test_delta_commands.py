"""A Delta table by key, by a Spark transform, by a weaker delivery; and by command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from oncely.cli.verbs import app
from oncely.config import parse
from oncely.pipeline import Pipeline
from tests.scenarios.delta_world import DeltaWorld, assert_exactly_once
from tests.scenarios.world import run

Make = Callable[..., DeltaWorld]


def oncely(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_rejects_and_positions_by_command(make_delta_world: Make, runtime: Any) -> None:
    """Too narrow columns make rejects; described anew, they are replayed. A reset reads again."""
    world = make_delta_world(1)
    world.overrides["sink"] = {"max_rejects": "100%"}
    values = [{"id": i, "user": "u", "ts": None, "pad": "" if i % 3 else [i]} for i in range(30)]
    world.publish_values(values)
    run(world, runtime)
    file = str(world.file())
    listed = oncely("rejects", "list", file)
    assert listed["total"] == 10
    assert listed["rejects"][0]["offset"] == 0
    wide = {"schema": "id BIGINT, user STRING, ts TIMESTAMP"}
    file = str(world.file(decode=wide))
    assert oncely("rejects", "replay", file) == {"moved": 10, "kept": 0}
    assert world.place.ids() == [*range(30)]
    assert oncely("status", file)["partitions"][0]["lag"] == 0
    assert oncely("plan", file)["can_run"] is True

    oncely("offsets", "reset", file, "--to-earliest", "--execute")
    assert oncely("status", file)["partitions"][0]["position"] == 0
    run(world, runtime, decode=wide)
    assert world.place.ids() == sorted([*range(30), *range(30)]), "read again, as was asked for"


def test_an_upsert_with_tombstones(make_delta_world: Make, runtime: Any) -> None:
    world = make_delta_world()
    world.overrides["sink"] = {"mode": "upsert", "keys": ["key"], "version": "v"}
    world.overrides["decode"] = {
        "schema": "v BIGINT, name STRING",
        "key": {"format": "string", "column": "key"},
    }
    world.publish_keyed([(f"k{i % 50}", {"v": i, "name": f"n{i}"}) for i in range(500)])
    run(world, runtime)
    world.publish_keyed(
        [
            ("k1", None),
            ("k2", None),
            ("k2", {"v": 1, "name": "again"}),
            ("k3", {"v": 2, "name": "old"}),
        ]
    )
    pipeline = run(world, runtime)
    rows = {row["key"]: (row["v"], row["name"]) for row in world.place.rows()}
    expected = {f"k{i % 50}": (i, f"n{i}") for i in range(450, 500)}
    del expected["k1"]
    expected["k2"] = (1, "again")
    assert rows == expected
    assert [one.lag for one in pipeline.status().partitions] == [0, 0, 0, 0]


def test_a_spark_transform_and_a_weaker_delivery(make_delta_world: Make, spark: Any) -> None:
    world = make_delta_world()
    world.overrides["transform"] = {"spark": "tests.scenarios.test_delta_commands:shuffled"}
    world.publish(300)
    run(world, spark)
    assert assert_exactly_once(world) == 300
    del world.overrides["transform"]
    settings = world.settings() | {"delivery": "at_least_once"}
    world.publish(300, first=300)
    Pipeline(parse(settings)).run("latest", spark=spark)
    assert assert_exactly_once(world) == 600, "without a crash it is exact, too"


def shuffled(frame: Any) -> Any:
    """Rows of all partitions, mixed."""
    return frame.repartition(3, "id")
