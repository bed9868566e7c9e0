"""Rejects are listed, and replayed exactly once, whatever kills the replay.

The replaying process is killed before and after every statement. The records were rejected
because the pipeline's columns were too narrow; it is described anew, and they pass.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any, ClassVar

import pytest

from oncely.config import parse
from oncely.pipeline import Pipeline
from tests.scenarios import replay_jobs
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, produce
from tests.scenarios.zygote import Zygote, kills

NARROW = {"decode": {"schema": "id INT NOT NULL, grp STRING, pad STRING"}}
BIG = 1 << 40
BAD = b"not json"


@pytest.fixture
def world(make_world: Any, runtime: Any) -> World:
    """Seven rejects: five that pass with wider columns, two that never will."""
    world: World = make_world(2)
    world.sql("CREATE TABLE rows (id bigint, grp text, pad text, kafka_topic text,"
              " kafka_partition int, kafka_offset bigint)")  # fmt: skip
    values = [record(i) if i % 2 else record(BIG + i) for i in range(10)] + [BAD, BAD]
    produce(world.brokers, world.topic, ((i % 2, b"k", v) for i, v in enumerate(values)))
    overrides = {"sink": {"max_rejects": 100}}
    world.overrides = overrides
    Pipeline(parse(world.settings(**NARROW))).run("latest", spark=runtime)
    assert rejected(world) == 7
    return world


def record(i: int) -> bytes:
    return json.dumps({"id": i, "grp": "g", "pad": ""}).encode()


def rejected(world: World) -> int:
    return int(world.sql("SELECT count(*) FROM oncely_rejects")[0][0])


def seen(world: World) -> Counter[tuple[int, int]]:
    """How often each record is a row or a reject."""
    rows = world.sql("SELECT kafka_partition, kafka_offset FROM rows")
    rest = world.sql('SELECT "partition", "offset" FROM oncely_rejects')
    return Counter([(p, o) for p, o in [*rows, *rest]])


def assert_each_once(world: World) -> None:
    assert seen(world) == Counter({(p, o): 1 for p in range(2) for o in range(6)})


@pytest.mark.parametrize(
    "every",
    [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.deep])],
    ids=["each kind", "each"],
)
def test_killed_before_and_after_every_statement(world: World, zygote: Zygote, every: bool) -> None:
    settings = world.settings()
    world.sql("CREATE TABLE kept_rows AS TABLE rows")
    world.sql("CREATE TABLE kept_rejects AS TABLE oncely_rejects")
    (moved, kept), calls = replayed(zygote, settings)
    assert (moved, kept) == (5, 2)
    assert calls.count("COMMIT") >= 3, "several transactions"
    for kill in kills(calls, every=every):
        again_from_the_start(world)
        died = zygote.run(replay_jobs.replay, settings, kill, 3)
        assert died.signal == signal.SIGKILL, died.error
        assert_each_once(world)
        replayed(zygote, settings)
        assert_each_once(world)
        assert rejected(world) == 2


def again_from_the_start(world: World) -> None:
    for table, kept in (("rows", "kept_rows"), ("oncely_rejects", "kept_rejects")):
        world.sql(f"TRUNCATE {table}")
        world.sql(f"INSERT INTO {table} SELECT * FROM {kept}")


def replayed(zygote: Zygote, settings: dict[str, Any]) -> Any:
    """Replay to the end: (moved, kept) and the calls that it took."""
    ended = zygote.run(replay_jobs.replay, settings, {}, 3)
    assert not ended.error, ended.error
    return ended.value


def test_two_replays_at_once(world: World, zygote: Zygote) -> None:
    jobs = [zygote.start(replay_jobs.replay, world.settings(), {}, 1) for _ in range(4)]
    done = [job.wait() for job in jobs]
    assert not any(one.error for one in done), done
    assert sum(one.value[0][0] for one in done) == 5
    assert_each_once(world)


def test_the_commands(world: World) -> None:
    file = world.file()
    listed = oncely_json("rejects", "list", file, "--limit", "2")
    assert listed["total"] == 7
    first = listed["rejects"][0]
    assert first["topic"] == world.topic
    assert (first["partition"], first["offset"], first["stage"]) == (0, 0, "decode")
    assert json.loads(first["value"])["id"] == BIG
    assert first["key"] == "k"
    screen = oncely("rejects", "list", file).stdout
    assert "not json" in screen
    assert "7 rejects" in screen
    assert oncely_json("rejects", "replay", file) == {"moved": 5, "kept": 2}
    assert_each_once(world)
    assert oncely_json("rejects", "replay", file) == {"moved": 0, "kept": 2}
    assert oncely_json("status", file)["rejects"] == 2


def test_what_fails_still_has_the_newer_reason(world: World) -> None:
    world.sql("ALTER TABLE rows ADD CHECK (id < 1000)")
    Pipeline(parse(world.settings())).replay()
    reasons = {o: (s, r) for s, r, o in world.sql(
        'SELECT stage, reason, "offset" FROM oncely_rejects WHERE "partition" = 0')}  # fmt: skip
    assert reasons[0][0] == "write"
    assert "rows_id_check" in reasons[0][1]
    assert reasons[5][0] == "decode"
    assert_each_once(world)


def test_a_filtered_record_is_no_reject_any_more(world: World) -> None:
    settings = world.settings(transform={"sql": f"SELECT * FROM input WHERE id <> {BIG}"})
    assert Pipeline(parse(settings)).replay() == (5, 2)
    assert world.sql(f"SELECT count(*) FROM rows WHERE id = {BIG}") == [(0,)]
    assert rejected(world) == 2


def test_a_spark_transform_gets_the_decoded_rows(world: World, spark: Any) -> None:
    world.sql("ALTER TABLE rows ADD COLUMN n bigint")
    settings = world.settings(
        transform={"spark": "tests.scenarios.transforms:counted"}, sink={"keep_source": False}
    )
    assert Pipeline(parse(settings)).replay(spark=spark) == (5, 2)
    assert world.sql("SELECT grp, n FROM rows WHERE n IS NOT NULL") == [("g", 5)]
    assert rejected(world) == 2


def test_a_row_of_a_spark_transform_that_is_refused_changes_nothing(
    world: World, spark: Any
) -> None:
    world.sql("ALTER TABLE rows ADD COLUMN n bigint CHECK (n > 100)")
    settings = world.settings(
        transform={"spark": "tests.scenarios.transforms:counted"}, sink={"keep_source": False}
    )
    with pytest.raises(Exception, match="a row of the Spark transform can't be written"):
        Pipeline(parse(settings)).replay(spark=spark)
    assert_each_once(world)
    assert rejected(world) == 7


class TestUpsert:
    """A replayed record is old: without a version it could overwrite what is newer."""

    SINK: ClassVar = {"mode": "upsert", "keys": ["id"], "keep_source": False, "table": "latest"}
    KEY: ClassVar = {"format": "json", "schema": "id BIGINT NOT NULL"}

    def settings(self, world: World, **sink: Any) -> dict[str, Any]:
        return world.settings(
            decode={"schema": "id BIGINT NOT NULL, v INT", "key": self.KEY},
            sink={**self.SINK, **sink},
        )

    def test_without_a_version_it_is_refused(self, world: World) -> None:
        file = world.file(
            decode={"schema": "id BIGINT NOT NULL, v INT", "key": self.KEY}, sink=self.SINK
        )
        refused = oncely("rejects", "replay", file, expect=2)
        assert "sink.version: is missing" in refused.stderr
        assert "way out" in refused.stderr
        assert rejected(world) == 7

    def test_with_a_version_the_newer_row_stays(self, make_world: Any, runtime: Any) -> None:
        world: World = make_world(1)
        world.overrides = {"sink": {"max_rejects": 100}}
        world.sql("CREATE TABLE latest (id bigint PRIMARY KEY, v bigint)")
        key = b'{"id": 1}'
        other = b'{"id": 2}'
        records = [
            (key, {"id": 1, "v": BIG}),
            (key, {"id": 1, "v": 7}),
            (other, {"id": 2, "v": BIG}),
        ]
        sent = [(0, k, json.dumps(v).encode()) for k, v in records]
        produce(world.brokers, world.topic, [*sent, (0, b"?", None)])
        narrow = self.settings(world, version="v")
        Pipeline(parse(narrow)).run("latest", spark=runtime)
        assert rejected(world) == 3
        world.sql("UPDATE latest SET v = %s WHERE id = 1", BIG + 5)
        wide = self.settings(world, version="v")
        wide["decode"] = {**wide["decode"], "schema": "id BIGINT NOT NULL, v BIGINT"}
        assert Pipeline(parse(wide)).replay() == (2, 1)
        assert sorted(world.sql("SELECT id, v FROM latest")) == [(1, BIG + 5), (2, BIG)]
