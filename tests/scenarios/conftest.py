"""Fixtures of the scenarios: where their runs execute tasks, and a world for each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from oncely.stores.sql.connection import close_all
from oncely.testing.servers.kafka import Broker
from tests.audittools import Parts
from tests.scenarios import runtimes
from tests.scenarios.delta_world import DeltaWorld
from tests.scenarios.files_world import FilesWorld
from tests.scenarios.topic_world import TopicWorld
from tests.scenarios.world import World
from tests.scenarios.zygote import Zygote
from tests.sinktools import KINDS, postgres_place, sqlite_place


@pytest.fixture
def runtime(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where the runs of a test have their tasks: pass it on to ``run`` as the Spark session.

    None: on processes, and the pipeline files of worlds say so. Of tests that are marked `both` it
    is the session if ``--runtime`` is Spark.
    """
    on_spark = "spark" in request.fixturenames
    with runtimes.chosen("spark" if on_spark else "processes"):
        yield request.getfixturevalue("spark") if on_spark else None


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts processes that may be killed, each in milliseconds."""
    with Zygote() as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def parts(
    request: pytest.FixtureRequest, broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Parts]]:
    """``parts(partitions=1)``, on each kind of database: a world's that tests of a module share."""
    topics: list[str] = []
    with ExitStack() as left:

        def make(partitions: int = 1) -> Parts:
            if request.param == "sqlite":
                place = left.enter_context(sqlite_place())
            else:
                place = postgres_place(request.getfixturevalue("shared_database"))
            topics.append(broker.create_topic(f"topic-{uuid.uuid4().hex[:12]}", partitions))
            return broker.bootstrap, place, topics[-1], tmp_path_factory.mktemp("world")

        yield make
        close_all()
    for topic in topics:
        broker.delete_topic(topic)


@pytest.fixture
def make_world(
    broker: Broker, database: str, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., World]:
    """``make_world(partitions=4)`` gives an empty topic, an empty database and a fresh name."""

    def make(partitions: int = 4, **config: str) -> World:
        topic = make_topic(partitions=partitions, config=config or None)
        return World(broker.bootstrap, database, topic, tmp_path)

    return make


@pytest.fixture
def make_topic_world(
    broker: Broker, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., TopicWorld]:
    """``make_topic_world(partitions=4)`` gives an empty source topic and a fresh name."""

    def make(partitions: int = 4, **config: str) -> TopicWorld:
        topic = make_topic(partitions=partitions, config=config or None)
        return TopicWorld(broker.bootstrap, "", topic, tmp_path)

    return make


@pytest.fixture
def make_files_world(
    broker: Broker, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., FilesWorld]:
    """``make_files_world(partitions=4)`` gives an empty topic, an empty folder and a fresh name."""

    def make(partitions: int = 4, *, infer: bool = False, **config: str) -> FilesWorld:
        topic = make_topic(partitions=partitions, config=config or None)
        return FilesWorld(
            broker.bootstrap, "", topic, tmp_path, root=tmp_path / "lake", infer=infer
        )

    return make


@pytest.fixture
def make_delta_world(
    broker: Broker, make_topic: Callable[..., str], tmp_path: Path
) -> Callable[..., DeltaWorld]:
    """``make_delta_world(partitions=4)`` gives an empty topic, no table yet and a fresh name."""

    def make(partitions: int = 4, **config: str) -> DeltaWorld:
        topic = make_topic(partitions=partitions, config=config or None)
        return DeltaWorld(broker.bootstrap, "", topic, tmp_path, root=tmp_path / "table")

    return make
