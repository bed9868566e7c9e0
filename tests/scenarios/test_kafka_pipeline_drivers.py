"""Topic to topic with two drivers: the newer run takes over, the older one ends with exit code 3.

Also when the older one was paused inside a transaction, and for so long that the broker has
given its transaction up.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.halting import ask_to_halt, halted, running_halting
from oncely.testing.processes import await_that, kill_tree, running
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, watching


@pytest.mark.long
def test_a_second_driver_fences_the_first(make_topic_world: Any, runtime: Any) -> None:
    world: TopicWorld = make_topic_world(4)
    world.make_output()
    world.publish(10_000)
    old = world.file(spark={"max_records_per_batch": 500})
    with watching(world) as watcher:
        with running(old) as first:
            await_that(lambda: watcher.seen, "records of the first driver")
            Pipeline(parse(world.settings())).run("latest", spark=runtime)
            assert first.wait(180) == 3
        world.publish(1_000, first=10_000)
        Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert assert_exactly_once(world, watcher) == 11_000
    assert "fenced" in old.with_suffix(".log").read_text()


@pytest.mark.long  # a process without Spark is in every run: test_kafka_crash_points.py
def test_a_zombie_that_was_paused_inside_a_transaction(make_topic_world: Any, runtime: Any) -> None:
    """The takeover ends its open transaction, and what it wakes up with is refused."""
    zombie(make_topic_world(2), runtime, until_given_up=False)


@pytest.mark.long
def test_a_zombie_whose_transaction_the_broker_has_given_up(
    make_topic_world: Any, runtime: Any
) -> None:
    """Paused for longer than ``transaction_timeout``; the broker looks every 10 seconds."""
    zombie(make_topic_world(2), runtime, until_given_up=True)


def zombie(world: TopicWorld, runtime: Any, *, until_given_up: bool) -> None:
    """A driver stands still with all of its processes, and another run takes over."""
    world.make_output()
    file = world.file(sink={"transaction_timeout": "10 seconds"})
    ask_to_halt(file, "commit")
    world.publish(4_000, pad=100, partitions=2)
    with watching(world) as watcher, running_halting(file) as paused:
        halted(paused.pid)
        kill_tree(paused.pid, signal.SIGSTOP)
        assert world.held_back(world.output)
        if until_given_up:
            await_that(lambda: not world.held_back(world.output), "the broker's timeout", 180)
        seen = len(watcher.seen)
        Pipeline(parse(world.settings())).run("latest", spark=runtime)
        await_that(lambda: not world.held_back(world.output), "the takeover has ended it")
        kill_tree(paused.pid, signal.SIGCONT)
        assert paused.wait(180) == 3, file.with_suffix(".log").read_text()[-3000:]
    assert seen < 4_000
    assert assert_exactly_once(world, watcher) == 4_000
