"""A log that was cut and has grown again beyond the position is refused, whatever keeps positions.

A broker that comes back with an empty disk stands for an unclean leader election: its log begins
anew, under a later leader epoch.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.core.ranges import TopicPartition
from oncely.errors import SourceMismatch
from oncely.kafka.source import KafkaSource
from oncely.pipeline import Pipeline
from oncely.runtimes.batches import run
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.scenarios.topic_world import TopicWorld
from tests.scenarios.world import World


@pytest.fixture(scope="module")
def own() -> Iterator[Broker]:
    """A broker that may be stopped and lose its disk."""
    with Broker() as running:
        yield running


@pytest.fixture
def topic(own: Broker) -> str:
    return own.create_topic(f"topic-{uuid.uuid4().hex[:12]}")


def come_back(broker: Broker, *empty: str) -> None:
    """Stop and start; these topics' first partitions lose their logs."""
    broker.stop()
    for topic in empty:
        shutil.rmtree(broker.directory / "data" / f"{topic}-0")
    broker.start()


def await_a_later_epoch(source: KafkaSource, tp: TopicPartition, epoch: int) -> None:
    """Records that are written before the controller has elected the leader again have the epoch of
    those that were lost."""
    await_that(lambda: source.leader_epochs().get(tp, -1) > epoch, "a later leader epoch")


def test_where_a_log_was_cut_is_told_by_the_leader_epoch(own: Broker, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    world = World(own.bootstrap, "", topic, Path())
    world.publish(20, partitions=1)
    with KafkaSource(own.bootstrap, [topic]) as source:
        epoch = source.leader_epochs()[tp]
        assert source.truncated({}) == {}
        for at in (0, 7, 20):
            assert source.truncated({tp: (at, epoch)}) == {}
        come_back(own)
        world.publish(20, partitions=1)
        assert source.leader_epochs()[tp] > epoch
        for at in (0, 7, 20):
            assert source.truncated({tp: (at, epoch)}) == {}
        epoch = source.leader_epochs()[tp]
        come_back(own, topic)
        await_a_later_epoch(source, tp, epoch)
        world.publish(60, partitions=1)
        assert source.truncated({tp: (0, epoch)}) == {}
        for at in (1, 40, 60):
            assert tp in source.truncated({tp: (at, epoch)})
        assert source.truncated({tp: (40, source.leader_epochs()[tp])}) == {}


@pytest.mark.parametrize("value", [None, b""])
def test_a_record_without_a_value_at_the_position_is_an_answer(
    broker: Broker, make_topic: Callable[..., str], value: bytes | None
) -> None:
    topic = make_topic(records=[(0, b"key", one) for one in (b"first", value, b"last")])
    tp = TopicPartition(topic, 0)
    with KafkaSource(broker.bootstrap, [topic]) as source:
        epoch = source.leader_epochs()[tp]
        for at in (0, 1, 2):
            assert source.truncated({tp: (at, epoch)}) == {}


@pytest.mark.long  # in every run: the test above, and tests/unit/runtimes/test_same_log.py
def test_a_topic_that_went_back_and_grew_again_is_refused(
    own: Broker, topic: str, database: str, runtime: Any, tmp_path: Path
) -> None:
    """By pipelines into a table and into a topic."""
    table = World(own.bootstrap, database, topic, tmp_path)
    output = TopicWorld(own.bootstrap, "", topic, tmp_path)
    pipelines = [Pipeline(parse(one.settings())) for one in (table, output)]

    def run_all() -> None:
        for one in pipelines:
            assert problems(one) == {}
            one.run("latest", spark=runtime)

    def seen() -> tuple[int, int]:
        return table.count(), len(output.ids())

    table.publish(20, partitions=1)
    run_all()
    come_back(own)  # in order: the log is whole
    table.publish(20, partitions=1, first=20)
    run_all()
    assert seen() == (40, 40)
    with KafkaSource(own.bootstrap, [topic]) as source:
        tp = TopicPartition(topic, 0)
        epoch = source.leader_epochs()[tp]
        come_back(own, topic)
        await_a_later_epoch(source, tp, epoch)
    table.publish(60, partitions=1, first=1_000)
    for one in [*pipelines, *pipelines]:
        with pytest.raises(SourceMismatch, match=f"{topic}-0: the topic has gone back"):
            one.run("latest", spark=runtime)
        assert "its log was cut before position 40" in problems(one)["source.topics"]
    assert seen() == (40, 40)
    for one in pipelines:
        reset_to(one, 40)  # the way out: a person says where to go on
    run_all()
    assert seen() == (60, 60)


@pytest.mark.long  # in every run: tests/unit/runtimes/test_rounds.py
def test_a_topic_that_goes_back_while_a_run_waits_for_records_ends_it(
    own: Broker, topic: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_STALE_LEADER_SECONDS", 1.0)
    world = World(own.bootstrap, database, topic, tmp_path)
    world.publish(20, partitions=1)
    pipeline = Pipeline(parse({**world.settings(), "runtime": "processes"}))
    committed = threading.Event()

    def heard(event: events.Event) -> None:
        if isinstance(event, events.BatchCommitted):
            committed.set()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pipeline.run, listener=heard)
        assert committed.wait(120)
        come_back(own, topic)
        with pytest.raises(SourceMismatch, match=f"{topic}-0.*the topic has gone back"):
            running.result(120)
    assert world.count() == 20


def problems(pipeline: Pipeline) -> dict[str, str]:
    """What `plan` says beforehand."""
    return {one.key: one.message for one in pipeline.plan(use_spark=False).problems}


def reset_to(pipeline: Pipeline, offset: int) -> None:
    from oncely.kafka.reset import Verb

    assert pipeline.reset(Verb("to-offset", offset), execute=True).epoch
