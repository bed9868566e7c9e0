"""`oncely status` and `oncely offsets`: shown without writing, reset with a new epoch."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from oncely.testing.processes import await_that
from tests.scenarios.commands import oncely, oncely_json, reset_fences_a_run
from tests.scenarios.world import World, assert_history, run


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    return world


def positions(world: World) -> list[int]:
    return [at for (at,) in world.sql('SELECT "position" FROM oncely_positions ORDER BY 1')]


def mirrored(world: World) -> list[int]:
    admin = AdminClient({"bootstrap.servers": world.brokers})
    group = f"oncely-{world.name}"
    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
    return sorted(one.offset for one in answer.result().topic_partitions)


class TestStatus:
    def test_of_a_pipeline_that_never_ran(self, world: World) -> None:
        def members() -> object:
            return oncely_json("status", world.file())["members"]

        await_that(lambda: members() == [], "the coordinator of a new broker's first group")
        now = time.time()
        status = oncely_json("status", world.file())
        assert (status["rejects"], status["epoch"]) == (0, 0)
        more = {"state", "verdict", "reason", "last_commit", "records_per_second", "members"}
        assert set(status) == {"partitions", "rejects", "epoch", *more}
        assert (status["last_commit"], status["records_per_second"]) == (None, None)
        assert status["members"] == []
        for number, one in enumerate(status["partitions"]):
            seconds = one.pop("lag_seconds")
            assert 0 <= seconds <= time.time() - now + 120
            assert one == {
                "topic": world.topic, "partition": number, "position": None, "end": 50, "lag": 50
            }  # fmt: skip
        assert world.sql("SELECT to_regclass('oncely_pipelines')") == [(None,)]

    def test_a_latest_start_that_never_ran_has_no_lag(self, world: World) -> None:
        status = oncely_json("status", world.file(source={"start": "latest"}))
        assert [(p["position"], p["lag"], p["lag_seconds"]) for p in status["partitions"]] == [
            (None, 0, 0.0), (None, 0, 0.0)
        ]  # fmt: skip

    def test_of_one_that_has_caught_up_and_one_that_lags(self, world: World, runtime: Any) -> None:
        run(world, runtime)
        status = oncely_json("status", world.file())
        assert status["epoch"] == 1
        assert status["partitions"] == [
            {"topic": world.topic, "partition": n, "position": 50, "end": 50, "lag": 0,
             "lag_seconds": 0.0} for n in range(2)
        ]  # fmt: skip
        published = time.time()
        world.publish(1, partitions=1, first=100)
        time.sleep(1.1)  # the record grows old
        behind = oncely_json("status", world.file())["partitions"][0]
        assert (behind["position"], behind["end"], behind["lag"]) == (50, 51, 1)
        assert 1.0 < behind["lag_seconds"] <= time.time() - published
        screen = oncely("status", world.file()).stdout
        assert f"{world.name}: epoch 1, lag 1, rejects 0" in screen
        assert ", last commit 20" in screen
        assert " records/s in the last 5 minutes" in screen


class TestReset:
    def test_a_dry_run_writes_nothing(self, world: World, runtime: Any) -> None:
        run(world, runtime)
        before = world.sql("SELECT * FROM oncely_positions, oncely_pipelines ORDER BY 3")
        plan = oncely_json("offsets", "reset", world.file(), "--to-earliest")
        assert plan["executed"] is False
        assert plan["epoch"] is None
        assert plan["partitions"] == [
            {"topic": world.topic, "partition": n, "position": 50, "new_position": 0}
            for n in range(2)
        ]
        screen = oncely("offsets", "reset", world.file(), "--to-earliest")
        assert "a dry run: nothing was written" in screen.stdout
        assert "50 are read again" in screen.stdout
        assert world.sql("SELECT * FROM oncely_positions, oncely_pipelines ORDER BY 3") == before

    def test_the_mirror_and_the_next_run_follow(self, world: World, runtime: Any) -> None:
        run(world, runtime)
        done = oncely_json("offsets", "reset", world.file(), "--shift-by", "-10", "--execute")
        assert (done["executed"], done["epoch"]) == (True, 2)
        assert positions(world) == [40, 40]
        assert mirrored(world) == [40, 40]
        run(world, runtime)
        assert positions(world) == [50, 50]
        assert world.count() == 120
        assert_history(world)
        shown = oncely_json("offsets", "show", world.file())["partitions"]
        assert shown[0] == {
            "topic": world.topic, "partition": 0, "first": 0, "position": 50, "end": 50,
            "mirrored": 50,
        }  # fmt: skip

    def test_before_the_first_start(self, world: World, runtime: Any) -> None:
        done = oncely_json("offsets", "reset", world.file(), "--to-offset", "45", "--execute")
        assert done["epoch"] == 1
        assert positions(world) == [45, 45]
        run(world, runtime)
        assert world.count() == 10

    @pytest.mark.parametrize(
        ("verb", "expected"),
        [
            (["--to-earliest"], [0, 0]),
            (["--to-latest"], [50, 50]),
            (["--to-offset", "7"], [7, 7]),
            (["--shift-by", "-3"], [47, 47]),
            (["--shift-by", "-1000"], [0, 0]),
            (["--by-duration", "PT1H"], [0, 0]),
            (["--by-duration", "PT0S"], [50, 50]),
            (["--to-datetime", "2001-01-01T00:00:00"], [0, 0]),
        ],
        ids=lambda value: " ".join(map(str, value)),
    )
    def test_every_verb(
        self, world: World, runtime: Any, verb: list[str], expected: list[int]
    ) -> None:
        run(world, runtime)
        done = oncely_json("offsets", "reset", world.file(), *verb)
        assert [one["new_position"] for one in done["partitions"]] == expected
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        done = oncely_json("offsets", "reset", world.file(), "--to-datetime", later)
        assert [one["new_position"] for one in done["partitions"]] == [50, 50]

    def test_some_partitions_only(self, world: World, runtime: Any) -> None:
        run(world, runtime)
        only = f"{world.topic}:1"
        oncely("offsets", "reset", world.file(), "--to-earliest", "--topic", only, "--execute")
        assert positions(world) == [0, 50]
        for wrong in (f"{world.topic}:7", "other-topic", f"{world.topic}:x"):
            refused = oncely("offsets", "reset", world.file(), "--to-earliest", "--topic", wrong,
                             "--execute", expect=2)  # fmt: skip
            assert wrong in refused.stderr
            assert "way out" in refused.stderr
        assert positions(world) == [0, 50]

    def test_one_verb_is_needed(self, world: World) -> None:
        for verbs in ([], ["--to-earliest", "--to-latest"], ["--to-datetime", "soon"],
                      ["--by-duration", "1 hour"]):  # fmt: skip
            refused = oncely("offsets", "reset", world.file(), *verbs, expect=2)
            assert "way out" in refused.stderr
        assert world.sql("SELECT to_regclass('oncely_pipelines')") == [(None,)]

    def test_rejects_that_are_read_again_are_judged_anew(self, world: World, runtime: Any) -> None:
        """Else a replay after the reset would write a record that is a row already."""
        narrow = {"decode": {"schema": "id BIGINT NOT NULL, grp INT"}}
        run(world, runtime, **narrow, sink={"max_rejects": 1000, "table": "narrow"})
        assert oncely_json("status", world.file())["rejects"] == 100
        oncely("offsets", "reset", world.file(), "--to-offset", "20", "--execute")
        assert oncely_json("status", world.file())["rejects"] == 40
        run(world, runtime)
        assert world.count() == 60
        assert oncely_json("rejects", "replay", world.file()) == {"moved": 40, "kept": 0}
        assert world.sql("SELECT count(*), count(DISTINCT id) FROM rows") == [(100, 100)]

    def test_a_reset_while_a_run_waits_for_records(self, world: World, runtime: Any) -> None:
        """The open run is fenced and can't move the position back to where it stood."""
        reset_fences_a_run(world, runtime, lambda: world.count() == 100)
        assert positions(world) == [30, 30]
