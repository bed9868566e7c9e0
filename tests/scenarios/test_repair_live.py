"""A repair of files, and of a Delta table, while a run of the pipeline commits."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake.exceptions import CommitFailedError

from oncely.audit.stored.manifest import rows_of
from oncely.core.ranges import TopicPartition
from oncely.kinds.delta.sink import DeltaSink
from oncely.kinds.files.manifest import Replacing
from oncely.kinds.files.table import table_of
from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from oncely.threads import StopSignal
from tests.scenarios.test_audit_sinks import SinkWorld, _sink

pytestmark = pytest.mark.long

MOMENTS: Mapping[str, tuple[type, str]] = {
    "files": (Replacing, "compared"),
    "delta": (DeltaSink, "commit"),
}
"""What a repair calls when it has decided, and nothing is written."""


class Load(threading.Thread):
    """Publishes records until it is stopped."""

    def __init__(self, world: SinkWorld) -> None:
        super().__init__(daemon=True)
        self.published = 0
        self._world, self._over = world, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            at = self.published
            for partition in range(2):
                self._world.publish(range(at + 5 * partition, at + 5 * partition + 5), partition)
            self.published = at + 10

    def end(self) -> None:
        self._over.set()
        self.join()


class Live(threading.Thread):
    """`oncely run` in a thread, with the session of the tests."""

    def __init__(self, pipeline: Pipeline, spark: Any) -> None:
        super().__init__(daemon=True)
        self._pipeline, self._spark, self._over = pipeline, spark, StopSignal()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._pipeline.run(stop=self._over, spark=self._spark)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._over.ask()
        self.join(120)
        assert not self.is_alive()


def positions(world: SinkWorld) -> dict[TopicPartition, int]:
    found = world.pipeline.status().partitions
    return {one.partition: one.position or 0 for one in found}


def committed(world: SinkWorld) -> Callable[[], bool]:
    """True when both partitions have moved on."""
    before = positions(world)
    return lambda: all(at > before[tp] for tp, at in positions(world).items())


@contextmanager
def beside(world: SinkWorld, spark: Any) -> Iterator[Load]:
    """A run under load, which is not fenced, and has committed something."""
    load, live = Load(world), Live(world.pipeline, spark)
    load.start()
    live.start()
    try:
        await_that(lambda: live.error or sum(positions(world).values()) > 50, "commits")
        yield load
    finally:
        load.end()
        live.end()
    assert live.error is None


def files(world: SinkWorld) -> dict[str, list[int]]:
    """The ids in each file that a reader sees."""
    if world.given["kind"] == "delta":
        table = world.sink.tables.load()
        return {"": pa.table(table.to_pyarrow_table())["id"].to_pylist()}
    store = world.pipeline.settings.sink.store  # type: ignore[union-attr]
    with table_of(world.pipeline).manifest() as manifest:
        named = manifest.settled().files
    return {
        path: rows_of(store.read(path), one.format)["id"].to_pylist() for path, one in named.items()
    }


def damage(world: SinkWorld) -> int:
    """Lose rows by other means; how many."""
    if world.given["kind"] == "delta":
        lost = files(world)[""][:4]
        while True:
            with contextlib.suppress(CommitFailedError):  # the run has committed meanwhile
                world.sink.tables.load().delete(f"id IN ({', '.join(map(str, lost))})")
                return len(lost)
    path, rows = next(iter(files(world).items()))
    (Path(world.given["url"].removeprefix("file://")) / path).unlink()
    return len(rows)


@contextmanager
def beside_a_commit(world: SinkWorld, patched: pytest.MonkeyPatch) -> Iterator[None]:
    """The repair of this thread goes on when the run has committed after its decision."""
    of, name = MOMENTS[world.given["kind"]]
    inner, acted = getattr(of, name), []

    def late(self: Any, *args: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not acted:
            acted.append(True)
            await_that(committed(world), "a commit of the run")
        return inner(self, *args)

    with patched.context() as within:
        within.setattr(of, name, late)
        yield
    assert acted


@pytest.mark.parametrize("kind", MOMENTS)
def test_a_repair_beside_a_run_that_commits(
    kind: str,
    request: pytest.FixtureRequest,
    broker: Broker,
    make_topic: Callable[..., str],
    tmp_path: Path,
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {**_sink(f"{kind} with sources", request, tmp_path), "flush_interval": "0 seconds"}
    world = SinkWorld(broker.bootstrap, make_topic(partitions=2), given, tmp_path)
    with beside(world, spark) as load:
        for _ in range(2):
            lost = damage(world)
            report = world.audit()
            assert report.found == {"lost": lost}
            found = report.findings
            with beside_a_commit(world, monkeypatch):
                done = world.pipeline.repair(found, execute=True)
            assert done.impossible == ()
            await_that(committed(world), "a commit after the repair")
    assert world.pipeline.run("latest", spark=spark)
    ids = Counter(n for rows in files(world).values() for n in rows)
    assert ids == Counter(range(load.published))
    report = world.audit(download=True)
    assert report.verdict == "clean", report.as_json()
