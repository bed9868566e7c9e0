"""What people ask of a pipeline into files: plan, status, resets, replayed dead letters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import ConfigError, TableMismatch
from oncely.kafka.reset import Verb
from oncely.pipeline import Pipeline
from oncely.testing.servers.kafka import Broker
from tests.scenarios.commands import oncely
from tests.scenarios.files_world import FilesWorld, assert_exactly_once

Make = Callable[..., FilesWorld]


def pipeline(world: FilesWorld, **sections: Any) -> Pipeline:
    return Pipeline(parse(world.settings(**sections)))


def test_a_plan_says_what_would_happen_and_writes_nothing(make_files_world: Make) -> None:
    world = make_files_world()
    world.publish(10)
    told = pipeline(world).plan()
    assert not told.problems
    assert told.guarantee.commit == "batch"
    assert "manifest" in told.guarantee.means
    assert told.sink is not None
    assert (told.sink.kind, told.sink.table) == ("files", world.manifest)
    assert not told.sink.exists
    assert any(world.manifest in one and "cleanup.policy=compact" in one for one in told.ddl)
    assert not world.exists(world.manifest)
    assert not any(path.suffix == ".avro" for path in world.root.rglob("*"))


WRONG = [
    ({"partition_by": ["nobody"]}, "sink.partition_by", "nobody"),
    ({"partition_by": ["date(id)", "hour(user)"]}, "sink.partition_by", "different columns"),
    ({"url": "s3://lake/x", "s3": {"endpoint": "http://127.0.0.1:9", "retries": 0}}, "sink.", "9"),
    ({"url": "file:///proc/nowhere"}, "sink.url", "proc"),
]


@pytest.mark.parametrize(("given", "key", "text"), WRONG, ids=lambda one: str(one)[:30])
def test_what_does_not_fit_is_told_by_its_key(
    make_files_world: Make, given: dict[str, Any], key: str, text: str
) -> None:
    world = make_files_world()
    with pytest.raises(ConfigError) as caught:
        pipeline(world, sink=given).preflight()
    assert str(caught.value).startswith(key), caught.value
    assert text in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_manifest_topic_of_another_kind_is_refused(
    make_files_world: Make, runtime: Any, broker: Broker
) -> None:
    world = make_files_world()
    broker.create_topic(world.manifest, 3, {"cleanup.policy": "delete"})
    with pytest.raises(ConfigError, match=r"sink\.manifest_topic.*3 partitions"):
        pipeline(world).run("latest", spark=runtime)
    assert world.entries() == {}


def test_letters_are_replayed_into_files(make_files_world: Make, runtime: Any) -> None:
    """Records of a pipeline that was wrong about its columns become rows, once."""
    world = make_files_world(1)
    world.overrides["sink"] = {"max_rejects": "100%"}
    world.publish_values({"id": i, "user": "ann", "ts": "2026-03-01T07:00:00Z"} for i in range(5))
    world.publish_values([{"id": "no number", "user": "ann"}, b"{"])
    nobody_has_a_pad = "id BIGINT, user STRING, ts TIMESTAMP, pad STRING NOT NULL"
    wrong = pipeline(world, decode={"schema": nobody_has_a_pad})
    wrong.run("latest", spark=runtime)
    assert world.entries() == {}
    assert wrong.status().rejects == 7
    right = pipeline(world)
    assert right.replay() == (5, 2)
    assert right.replay() == (0, 2)
    assert right.status().rejects == 2
    assert sorted(row["id"] for row in world.rows()) == [0, 1, 2, 3, 4]
    world.publish(100, partitions=1, first=100)
    right.run("latest", spark=runtime)
    assert len(world.rows()) == 105


def test_a_reset_reads_again(make_files_world: Make, runtime: Any) -> None:
    world = make_files_world()
    world.publish(100)
    first = pipeline(world)
    first.run("latest", spark=runtime)
    done = first.reset(Verb("to-earliest", 0), execute=True)
    assert done.epoch == 3
    first.run("latest", spark=runtime)
    rows = [row["id"] for row in world.rows()]
    assert sorted(rows) == sorted([*range(100)] * 2)  # a person has asked for it


def test_columns_that_old_files_do_not_resolve_to_are_refused(
    make_files_world: Make, runtime: Any
) -> None:
    world = make_files_world()
    world.publish(100)
    pipeline(world).run("latest", spark=runtime)
    other = pipeline(world, decode={"schema": "id STRING, user STRING, ts TIMESTAMP"})
    with pytest.raises(TableMismatch, match=r"decode\.schema: id: it is BIGINT, found STRING"):
        other.run("latest", spark=runtime)
    more = {"schema": "id DOUBLE, user STRING, ts TIMESTAMP, pad STRING, more ARRAY<INT>"}
    world.publish(100, first=100)
    pipeline(world, decode=more).run("latest", spark=runtime)
    assert assert_exactly_once(world) == 200


def test_the_commands(make_files_world: Make, runtime: Any) -> None:
    world = make_files_world(infer=True)
    world.publish(60, bad_every=50)
    world.overrides["sink"] = {"max_rejects": "100%"}
    pipeline(world).run("latest", spark=runtime)
    file = world.file()
    listed = json.loads(oncely("files", "list", str(file), "--json").stdout)
    assert {one["path"] for one in listed["files"]} == set(world.entries())
    assert json.loads(oncely("files", "verify", str(file), "--json").stdout)["problems"] == []
    rows = [json.loads(line) for line in oncely("files", "read", str(file)).stdout.splitlines()]
    assert sorted(row["id"] for row in rows) == [n for n in range(60) if n % 50]
    assert oncely("files", "compact", str(file)).returncode == 0
    assert len(world.rows()) == 58
    assert oncely("files", "vacuum", str(file)).returncode == 0
    assert oncely("status", str(file), "--json").returncode == 0
    shown = oncely("plan", str(file))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "manifest" in shown.stdout
