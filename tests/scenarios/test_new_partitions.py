"""A partition that is added, while running or while stopped, is read from its first offset."""

from __future__ import annotations

import threading
from typing import Any

from oncely.config import parse
from oncely.core.events import PartitionAdded
from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from oncely.threads import StopSignal
from tests.scenarios.world import World, assert_exactly_once


def test_added_while_stopped_though_start_is_latest(
    make_world: Any, runtime: Any, broker: Broker
) -> None:
    world: World = make_world(1)
    settings = parse(world.settings(source={"start": "latest"}))
    Pipeline(settings).run("latest", spark=runtime)
    broker.add_partitions(world.topic, 2)
    world.publish(100, partitions=2)
    Pipeline(settings).run("latest", spark=runtime)
    assert_exactly_once(world)


def test_added_while_running(make_world: Any, runtime: Any, broker: Broker) -> None:
    world: World = make_world(1)
    world.publish(100, partitions=1)
    events: list[object] = []
    stop = StopSignal()
    pipeline = Pipeline(parse(world.settings()))
    run = threading.Thread(
        target=lambda: pipeline.run(stop=stop, spark=runtime, listener=events.append)
    )
    run.start()
    await_that(lambda: world.count() == 100, "the first rows")
    broker.add_partitions(world.topic, 3)
    world.publish(300, partitions=3, first=100)
    await_that(lambda: world.count() == 400, "rows of the new partitions")
    stop.ask()
    run.join(180)
    assert not run.is_alive()
    assert sum(isinstance(event, PartitionAdded) for event in events) == 2
    assert_exactly_once(world)
