"""Topic to topic with two drivers: the newer run takes over, the older one ends with exit code 3.

Also when the older one was paused inside a transaction, and for so long that the broker has
given its transaction up.
"""

from __future__ import annotations

import signal
from typing import Any

from oncely.config import parse
from oncely.pipeline import Pipeline
from tests.scenarios.held import held, hold_file, running_held
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, watching
from tests.scenarios.world import await_that, kill_tree, running


def test_a_second_driver_fences_the_first(make_topic_world: Any, spark: Any) -> None:
    world: TopicWorld = make_topic_world(4)
    world.make_output()
    world.publish(20_000, pad=100)
    old = world.file(spark={"max_records_per_batch": 1_000})
    with watching(world) as watcher:
        with running(old) as first:
            await_that(lambda: watcher.seen, "records of the first driver")
            Pipeline(parse(world.settings())).run("latest", spark=spark)
            assert first.wait(60) == 3
        world.publish(1_000, first=20_000)
        Pipeline(parse(world.settings())).run("latest", spark=spark)
    assert assert_exactly_once(world, watcher) == 21_000
    assert "fenced" in old.with_suffix(".log").read_text()


def test_zombies_that_were_paused_inside_a_transaction(make_topic_world: Any, spark: Any) -> None:
    """One while its transaction is open, and one after the broker has given it up."""
    world: TopicWorld = make_topic_world(2)
    world.make_output()
    sink = {"transaction_timeout": "10 seconds"}
    file = world.file(sink=sink)
    hold_file(file).touch()
    world.publish(10_000, pad=200, partitions=2)
    with watching(world) as watcher:
        with running_held(file) as zombie:
            held(zombie.pid)
            kill_tree(zombie.pid, signal.SIGSTOP)
            assert world.held_back(world.output)
            await_that(lambda: not world.held_back(world.output), "the broker's timeout", 40)
            assert watcher.seen == []
            Pipeline(parse(world.settings())).run("latest", spark=spark)
            kill_tree(zombie.pid, signal.SIGCONT)
            assert zombie.wait(90) == 3, file.with_suffix(".log").read_text()[-3000:]
        assert_exactly_once(world)
        hold_file(file).touch()
        world.publish(10_000, pad=200, partitions=2, first=10_000)
        with running_held(file) as zombie:
            held(zombie.pid)
            kill_tree(zombie.pid, signal.SIGSTOP)
            assert world.held_back(world.output)
            Pipeline(parse(world.settings())).run("latest", spark=spark)
            assert not world.held_back(world.output)  # the takeover has ended it
            kill_tree(zombie.pid, signal.SIGCONT)
            assert zombie.wait(90) == 3, file.with_suffix(".log").read_text()[-3000:]
    assert assert_exactly_once(world, watcher) == 20_000
