"""`oncely run FOLDER`: several pipelines in one Spark application; one that fails ends alone."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oncely.runtimes.spark import session
from oncely.testing.processes import await_that, running, tree
from oncely.testing.servers.postgres import Postgres
from oncely.testing.servers.process import free_port
from tests.prometheus import samples
from tests.scenarios import delta_world, files_world
from tests.scenarios.commands import oncely
from tests.scenarios.delta_world import DeltaWorld
from tests.scenarios.files_world import FilesWorld
from tests.scenarios.test_probes import asked
from tests.scenarios.world import World, assert_exactly_once


@pytest.fixture
def worlds(make_world: Any, postgres: Postgres) -> Iterator[list[World]]:
    """Three pipelines of the same folder, each with records and a database of its own."""
    made: list[World] = [make_world(2) for _ in range(3)]
    names = [f"many_{uuid.uuid4().hex[:12]}" for _ in made]
    for world, name in zip(made, names, strict=True):
        world.url = postgres.create_database(name)
        world.publish(100, partitions=2)
    yield made
    for name in names:
        postgres.drop_database(name)


def lines_of(said: str, world: World) -> str:
    """The log lines that name a pipeline."""
    return "\n".join(line for line in said.splitlines() if f"[{world.name}]" in line)


def test_one_that_fails_ends_alone_and_a_signal_ends_the_others(
    worlds: list[World], tmp_path: Path
) -> None:
    bad, *good = worlds
    for one in worlds:
        one.file()
    port, log, events = free_port(), tmp_path.with_suffix(".log"), tmp_path / "events"
    events.mkdir()
    with running(tmp_path, "--http", f":{port}", "--events", str(events)) as process:
        await_that(lambda: all(one.count() == 100 for one in worlds), "rows of all", 180)
        await_that(lambda: asked(port, "/readyz")[0] == 200, "ready")
        bad.sql("DROP TABLE rows")
        bad.publish(10, first=100, partitions=2)
        await_that(lambda: "failed, and ends alone" in log.read_text(), "the failure")
        for one in good:
            one.publish(50, first=100, partitions=2)
        await_that(lambda: all(one.count() == 150 for one in good), "the rows of the others")
        await_that(lambda: asked(port, "/readyz")[0] == 503, "not all are ready")
        assert_pages(port, bad, good)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 2, log.read_text()
        assert tree(process.pid) == []
    said = log.read_text()
    assert "Traceback" not in said
    assert "failed, and ends alone: " in lines_of(said, bad)
    assert "error: 1 of 3 pipelines failed" in said
    for one in good:
        assert "batch 0 committed" in lines_of(said, one)
        assert "asked to stop" in lines_of(said, one)
        assert "failed" not in lines_of(said, one)
        assert f"  {one.name}: 150 records: 150 rows, 0 rejects in " in said
        assert (events / f"{one.name}.jsonl").exists()
        assert_exactly_once(one)


def assert_pages(port: int, bad: World, good: list[World]) -> None:
    """A restart would end the others: the application is alive, but not ready."""
    assert asked(port, "/livez")[0] == 200
    document = json.loads(asked(port, "/readyz")[1])
    assert document["reasons"] == [f"{bad.name}: the run is ended"]
    assert {one["pipeline"] for one in document["pipelines"]} == {one.name for one in (bad, *good)}
    page = asked(port, "/metrics")[1]
    assert page.count("# TYPE oncely_running ") == 1
    found = samples(page)
    assert [found["oncely_running", f'pipeline="{one.name}"'] for one in (bad, *good)] == [0, 1, 1]


def test_those_that_can_run_do_each_in_a_pool_of_its_own(
    worlds: list[World], spark: Any, tmp_path: Path
) -> None:
    bad, *good = worlds
    bad.sql("CREATE TABLE rows (id text)")
    for one in worlds:
        one.file()
    done = oncely("run", tmp_path, "--until", "latest", expect=2)
    pools = spark._jsc.sc().getAllPools()
    names = {pools.apply(at).name() for at in range(pools.size())}
    assert names >= {one.name for one in good}
    assert "failed, and ends alone: " in lines_of(done.stderr, bad)
    for one in good:
        assert f"  {one.name}: 100 records: 100 rows, 0 rejects in " in done.stderr
        assert_exactly_once(one)


def rows_in(world: World) -> int:
    """The number of rows that a reader of the destination sees."""
    if isinstance(world, DeltaWorld):
        return len(world.place.ids()) if (world.root / "_delta_log").exists() else 0
    return len(world.rows()) if isinstance(world, FilesWorld) else world.count()


def fail(world: FilesWorld, log: Path) -> None:
    """Replace the root of a pipeline that runs by a file, until the pipeline has failed."""
    moved = world.root.rename(world.root.with_suffix(".moved"))
    world.root.touch()
    world.publish(10, first=1_000, partitions=2)
    failure = "failed, and ends alone: "
    await_that(lambda: failure in lines_of(log.read_text(), world), "the failure")
    world.root.unlink()
    moved.rename(world.root)


@pytest.mark.long
def test_a_table_files_and_a_delta_table_in_one_application(
    make_world: Any, make_files_world: Any, make_delta_world: Any, tmp_path: Path
) -> None:
    """The Delta table fails, then the files; the others go on, and a second run completes all."""
    table, files, delta = worlds = [
        make(2) for make in (make_world, make_files_world, make_delta_world)
    ]
    for one in worlds:
        one.publish(100, partitions=2)
        one.file()
    log, events = tmp_path.with_suffix(".log"), tmp_path / "events"
    events.mkdir()
    with running(tmp_path, "--events", str(events)) as process:
        await_that(lambda: all(rows_in(one) == 100 for one in worlds), "rows of all", 180)
        fail(delta, log)
        for one in (table, files):
            one.publish(50, first=100, partitions=2)
        await_that(lambda: rows_in(table) == rows_in(files) == 150, "rows of the other two")
        fail(files, log)
        table.publish(50, first=150, partitions=2)
        await_that(lambda: rows_in(table) == 200, "rows of the last one")
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 2, log.read_text()
        assert tree(process.pid) == []
    said = log.read_text()
    assert "Traceback" not in said
    assert "error: 2 of 3 pipelines failed" in said
    assert "failed" not in lines_of(said, table)

    oncely("run", tmp_path, "--until", "latest")
    assert_exactly_once(table)
    assert files_world.assert_exactly_once(files) == 160
    assert delta_world.assert_exactly_once(delta) == 110


def test_a_pipeline_has_settings_of_its_own(spark: Any) -> None:
    key = "spark.sql.shuffle.partitions"

    def entered() -> tuple[str, str, str]:
        own = session.enter(spark, "p", {key: "3"}, alone=False)
        pool = own.sparkContext.getLocalProperty("spark.scheduler.pool")
        return own.conf.get(key), spark.conf.get(key), pool

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(entered).result() == ("3", "2", "p")
    assert spark.sparkContext.getLocalProperty("spark.scheduler.pool") is None


def test_nothing_starts_if_a_file_is_wrong_or_no_pipeline_can_run(
    worlds: list[World], tmp_path: Path
) -> None:
    for one in worlds:
        one.sql("CREATE TABLE rows (id text)")
        one.file()
    done = oncely("run", tmp_path, expect=2)
    assert "error: 3 of 3 pipelines failed" in done.stderr
    assert all(f"  {one.name}: " in done.stderr for one in worlds)
    worlds[0].file(sink={"table": 5})
    said = oncely("run", tmp_path, expect=2).stderr
    assert "sink.table: found 5" in said
    assert "Spark" not in done.stderr + said
