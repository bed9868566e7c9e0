"""``start = "latest"`` is resolved once: a crash before the first commit does not move it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import Unavailable
from oncely.pipeline import Pipeline
from oncely.stores.sql.connection import Connection, Dialect, connect
from tests.scenarios.world import World, assert_exactly_once


def test_latest_stays_where_it_was_first(make_world: Any, runtime: Any) -> None:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    settings = parse(world.settings(source={"start": "latest"}))

    crashed = False

    def listener(event: object) -> None:
        nonlocal crashed
        if type(event).__name__ == "PipelineOpened" and not crashed:
            crashed = True
            raise KeyboardInterrupt  # the process dies after open, before any batch

    with pytest.raises(KeyboardInterrupt):
        Pipeline(settings).run("latest", spark=runtime, listener=listener)
    world.publish(60, partitions=2, first=1_000)
    Pipeline(settings).run("latest", spark=runtime)
    assert world.sql("SELECT count(*), min(id) FROM rows") == [(60, 1_000)]


def test_a_database_that_fails_during_open(make_world: Any, runtime: Any) -> None:
    """The session dies before positions are written: nothing is settled, and nothing is lost."""
    world: World = make_world(1)
    world.publish(10, partitions=1)
    Pipeline(parse(world.settings())).replaced(connect=Failing()).run("latest", spark=runtime)
    assert_exactly_once(world)


class Failing:
    """The third session of the driver fails."""

    def __init__(self) -> None:
        self.tries, self.of = 0, os.getpid()

    def __call__(self, dialect: Dialect, application: str) -> Connection:
        self.tries += os.getpid() == self.of
        if self.tries == 3:
            self.tries += 1
            raise Unavailable("no answer")
        return connect(dialect, application)
