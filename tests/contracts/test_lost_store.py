"""An offset store that has lost its positions is not that of a first start."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.core.claim import Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Stopped
from oncely.kafka.reset import Verb
from oncely.pipeline import Pipeline
from oncely.pipeline.event_log import has_opened
from oncely.stores.offsets.base import OffsetStore, StoreLedger
from oncely.stores.offsets.file import FileStore
from oncely.stores.offsets.redis import RedisStore
from tests.deliverytools import opened, ready, run_of
from tests.scenarios.commands import run
from tests.scenarios.world import toml
from tests.sinktools import SOURCE, T0, T1, Place, at_t0, commit_all, numbered, sink_to
from tests.storetools import RedisServer, at, redis_url


@dataclass(frozen=True)
class Emptied:
    """A store, and what empties it as an accident does."""

    store: OffsetStore
    empty: Callable[[], object]


@pytest.fixture(params=["file", "redis"])
def emptied(request: pytest.FixtureRequest, tmp_path: Path) -> Emptied:
    """A folder that is deleted, and a server that is flushed."""
    if request.param == "file":
        folder = tmp_path / "positions"
        return Emptied(FileStore(folder, "p"), lambda: shutil.rmtree(folder))
    server: RedisServer = request.getfixturevalue("redis_server")
    store = RedisStore(redis_url(server), f"p-{tmp_path.name}")

    def empty() -> None:
        with server.client() as client:
            client.delete(store.key)

    return Emptied(store, empty)


def never() -> Any:
    raise AssertionError("to begin at `start` would skip records")


@pytest.mark.parametrize("position_first", [False, True])
def test_a_store_that_is_emptied_ends_the_run_and_nothing_is_skipped(
    emptied: Emptied, on_sqlite: Place, position_first: bool
) -> None:
    run, fence = ready(
        run_of(sink_to(on_sqlite), emptied.store, position_first=position_first), {T0: 0}
    )
    commit_all(run, at_t0(0, numbered(0, 3)), fence)
    emptied.empty()
    for work in (
        lambda: commit_all(run, at_t0(3, numbered(3, 5)), fence),
        run.positions,
        lambda: run.open(Takeover(SOURCE, never, {T0: 0}, fence.epoch)),
        lambda: run.add_partitions({T1: 0}, SOURCE),
    ):
        with pytest.raises(Stopped, match="no longer holds the position of t-0") as stopped:
            work()
        assert emptied.store.where in str(stopped.value)
        assert "oncely offsets reset" in stopped.value.way_out
    rows = [i for (i,) in on_sqlite.sql("SELECT id FROM rows ORDER BY id")]
    assert rows == [0, 1, 2]
    emptied.store.close()


def test_a_position_that_is_lost_alone_ends_the_run_too(tmp_path: Path, on_sqlite: Place) -> None:
    store = FileStore(tmp_path, "p")
    run, fence = ready(run_of(sink_to(on_sqlite), store), {T0: 0, T1: 0})
    store.file.unlink()
    store.save({T1: at(0, fence.epoch)})
    with pytest.raises(Stopped, match="the position of t-0, which"):
        commit_all(run, at_t0(0, numbered(0, 3)), fence)


def test_positions_that_went_back_are_no_defect_of_oncely(tmp_path: Path, on_sqlite: Place) -> None:
    """A server that was restarted with an older snapshot."""
    store = FileStore(tmp_path, "p")
    run, fence = ready(run_of(sink_to(on_sqlite), store), {T0: 0})
    before = store.load()
    commit_all(run, at_t0(0, numbered(0, 3)), fence)
    store.save(before)
    with pytest.raises(Stopped, match="put back to an older state") as stopped:
        commit_all(run, at_t0(3, numbered(3, 5)), fence)
    assert "start again" in stopped.value.way_out
    again = run_of(sink_to(on_sqlite), store)
    assert opened(again).positions == {T0: 0}


def test_another_process_opens_what_is_there(tmp_path: Path) -> None:
    """A first start, and a start after a reset, save positions that later ones find."""
    first = StoreLedger(FileStore(tmp_path, "p"), "p")
    first.open(Takeover(SOURCE, lambda: {T0: 17}, {T0: 2}))
    later = StoreLedger(FileStore(tmp_path, "p"), "p")
    assert later.open(Takeover(SOURCE, never, {T0: 2})).positions == {T0: 17}


# -- before the start ----------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A topic with records, and pipelines with positions in a folder."""

    broker: Any
    topic: str
    folder: Path
    name: str

    def settings(self, sink: dict[str, Any], **source: Any) -> dict[str, Any]:
        brokers = {"brokers": self.broker.bootstrap, "topics": self.topic, "start": "latest"}
        return {
            "name": self.name,
            "source": brokers | source,
            "decode": {"format": "json", "schema": "id BIGINT"},
            "sink": sink,
        }

    def weaker(self, sink: dict[str, Any], **source: Any) -> dict[str, Any]:
        store = {"store": "file", "path": str(self.folder / "positions")}
        weaker = {"delivery": "at_least_once", "offsets": store}
        return self.settings(sink, **source) | weaker

    def pipeline(self, sink: dict[str, Any], **source: Any) -> Pipeline:
        return Pipeline(parse(self.weaker(sink, **source)))

    def table(self, **more: Any) -> dict[str, Any]:
        return {"kind": "sql", "url": f"sqlite:///{self.folder}/rows.db", "table": "rows"} | more


@pytest.fixture
def world(broker: Any, make_topic: Any, tmp_path: Path, topic_name: str) -> World:
    records = [(0, None, json.dumps({"id": i}).encode()) for i in range(5)]
    return World(broker, make_topic(records=records), tmp_path, f"p-{topic_name}")


def refused(pipeline: Pipeline, evidence: str) -> None:
    """By `run`, `plan` and `status`; until a reset says where to begin."""
    with pytest.raises(ConfigError, match=r"offsets\.store: file .* is empty, and ") as caught:
        pipeline.run("latest")
    assert evidence in str(caught.value)
    assert "oncely offsets reset" in caught.value.way_out
    (problem,) = pipeline.plan(use_spark=False).problems
    assert (problem.key, evidence in problem.message) == ("offsets.store", True)
    assert problem.way_out == caught.value.way_out
    status = pipeline.status()
    assert status.judgement.state == "WARN"
    assert evidence in status.judgement.reason
    with pytest.raises(ConfigError, match="is empty"):  # the others would begin at `latest`
        pipeline.reset(Verb("to-earliest", 0), [f"{pipeline.settings.source.topics[0]}:0"])
    pipeline.reset(Verb("to-earliest", 0), execute=True)
    ready_to_run(pipeline)
    assert [one.position for one in pipeline.status().partitions] == [0]


def ready_to_run(pipeline: Pipeline) -> None:
    pipeline.preflight()
    assert pipeline.plan(use_spark=False).problems == ()
    assert pipeline.status().warnings == ()


def written(world: World, topic: str) -> None:
    """Rows of a topic, in the table as it is created."""
    with closing(sqlite3.connect(world.folder / "rows.db")) as file, file:
        file.execute("CREATE TABLE rows (id INTEGER, kafka_topic TEXT, kafka_partition INTEGER,"
                     " kafka_offset INTEGER) STRICT")  # fmt: skip
        file.execute("INSERT INTO rows VALUES (7, ?, 0, 0)", (topic,))


def test_a_first_start_is_none_of_that(world: World) -> None:
    ready_to_run(world.pipeline(world.table()))


def test_beside_a_table_with_rows_of_the_topic(world: World) -> None:
    pipeline = world.pipeline(world.table())
    written(world, world.topic)
    refused(pipeline, "table rows has rows")


def test_rows_of_another_topic_are_no_evidence(world: World) -> None:
    pipeline = world.pipeline(world.table())
    written(world, "another")
    ready_to_run(pipeline)


def test_rows_that_name_no_topic_are(world: World) -> None:
    with closing(sqlite3.connect(world.folder / "rows.db")) as file, file:
        file.execute("CREATE TABLE rows (id INTEGER) STRICT")
    pipeline = world.pipeline(world.table())
    ready_to_run(pipeline)
    with closing(sqlite3.connect(world.folder / "rows.db")) as file, file:
        file.execute("INSERT INTO rows VALUES (7)")
    refused(pipeline, "table rows has rows")


def test_beside_a_delta_table_with_rows(world: World) -> None:
    url = f"file://{world.folder}/table"
    pipeline = world.pipeline({"kind": "delta", "url": url, "keep_source": False})
    deltalake.write_deltalake(str(world.folder / "table"), pa.table({"id": [1, 2]}))
    refused(pipeline, f"the table at {url} has rows")


def test_beside_the_group_that_shows_its_positions(world: World) -> None:
    """Into a topic that is all there is."""
    pipeline = world.pipeline({"kind": "kafka", "topic": f"{world.topic}-out"})
    ready_to_run(pipeline)
    pipeline.source.mirror(f"oncely-{world.name}", {TopicPartition(world.topic, 0): 3})
    refused(pipeline, f"group oncely-{world.name} has offsets")


def test_beside_the_ledger_of_an_earlier_exactly_once(world: World) -> None:
    pipeline = world.pipeline(world.table(), group="")
    tp = TopicPartition(world.topic, 0)
    before = Pipeline(parse(world.settings(world.table())))
    sink = before.sink(before.row_schema())
    sink.open(Takeover(pipeline.source.identity(), lambda: {tp: 3}, {tp: 0}))
    refused(pipeline, "the sink's own ledger has positions")


def test_beside_an_event_log_with_a_run(world: World) -> None:
    log = world.folder / "events.jsonl"
    line = {"time": "2026-01-01T00:00:00Z", "pipeline": world.name, "epoch": 1, "run": "r"}
    started = {**line, "type": "started", "version": 1, "cut": 0}
    log.write_text(json.dumps(started, separators=(",", ":")) + "\n")
    pipeline = world.pipeline(world.table(), group=False)
    pipeline.preflight()
    opened_ = {**line, "type": "opened", "positions": {}, "first_start": True}
    with log.open("a") as more:
        more.write(json.dumps(opened_, separators=(",", ":")) + "\n")
    with pytest.raises(ConfigError, match=r"is empty, and the event log .*events\.jsonl has an"):
        pipeline.run("latest", events=log)
    file = world.folder / "p.toml"
    file.write_text(toml(world.weaker(world.table(), group=False)))
    said = run("run", file, "--until", "latest", "--events", log)
    assert (said.returncode, "is empty, and the event log" in said.stderr) == (2, True)
    pipeline.reset(Verb("to-earliest", 0), execute=True, events=log)
    assert has_opened(log)
    assert [one.position for one in pipeline.status().partitions] == [0]
