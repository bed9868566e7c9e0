"""`oncely run`: how it ends, by which exit code, and what it prints on the way."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from oncely.testing.processes import await_that, command_of, jvm_of, name_of, running, tree
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, assert_exactly_once, produce, toml

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) oncely\S* \[\S+\]: .+"
)


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(2)
    world.publish(1_000, partitions=2)
    return world


class Run:
    """A run that has committed something."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process, self.log = process, log

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 180) -> int:
        return int(self.process.wait(seconds))


@pytest.fixture
def started(world: World) -> Iterator[Run]:
    file = world.file()
    with running(file) as process:
        run = Run(process, file.with_suffix(".log"))
        await_that(lambda: world.count() == 1_000 or process.poll() is not None, "rows", 180)
        assert process.poll() is None, run.said
        await_that(lambda: "committed" in run.said, "the log of a commit")
        yield run


def test_stopped_by_the_reject_budget_it_shows_the_records(
    world: World, runtime: Any, tmp_path: Path
) -> None:
    """Nothing was committed of them, so ``rejects list`` has none."""
    produce(world.brokers, world.topic, [(0, None, b"{broken %d" % n) for n in range(3)])
    file = world.file(sink={"max_rejects": 1})
    log = tmp_path / "spark.log"
    done = oncely("run", file, "--until", "latest", "--spark-log", log, expect=1)
    assert "3 x " in done.stderr
    assert "{broken 0" in done.stderr
    (kept,) = tmp_path.glob("*.rejects.jsonl")
    assert str(kept) in done.stderr
    reason, *sample = map(json.loads, kept.read_text().splitlines())
    assert reason["records"] == 3
    assert [(one["topic"], one["partition"], one["value"]) for one in sample] == [
        (world.topic, 0, f"{{broken {n}") for n in range(3)
    ]
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.long  # in every run: the next test's lines, and runs in this process
def test_until_latest_ends_by_itself_and_prints_log_lines_only(world: World) -> None:
    done = oncely("run", world.file(), "--until", "latest", alone=True)
    assert done.stdout == ""
    assert_log_lines(done.stderr)
    assert_exactly_once(world)


def assert_log_lines(said: str) -> None:
    """All that a run has printed, of Spark's workers, too."""
    *lines, summary = said.strip().splitlines()
    assert lines
    assert not [line for line in lines if not LINE.fullmatch(line)]
    assert summary.startswith("1,000 records: 1,000 rows, 0 rejects in ")


@pytest.mark.parametrize(
    ("send", "number"),
    [
        # As a shell does it with Ctrl-C.
        pytest.param(os.killpg, signal.SIGINT, marks=pytest.mark.both),
        pytest.param(os.killpg, signal.SIGTERM, marks=pytest.mark.long),  # as `timeout` does it
        pytest.param(os.kill, signal.SIGINT, marks=pytest.mark.long),
        pytest.param(os.kill, signal.SIGTERM, marks=pytest.mark.long),
    ],
    ids=["group-2", "group-15", "2", "15"],
)
def test_one_signal_ends_it_in_order_and_its_processes(
    runtime: Any,
    world: World,
    started: Run,
    send: Callable[[int, int], None],
    number: signal.Signals,
) -> None:
    below = psutil.Process(started.process.pid).children(recursive=True)
    send(started.process.pid, number)
    assert started.wait() == 0, started.said
    assert "asked to stop" in started.said
    assert_log_lines(started.said)
    assert tree(started.process.pid) == []
    assert psutil.wait_procs(below, timeout=180)[1] == []
    assert_exactly_once(world)


@pytest.mark.long  # in every run: tests/unit/cli/test_run.py
def test_a_second_signal_ends_it_now_though_spark_hangs(world: World, started: Run) -> None:
    jvm = jvm_of(started.process.pid)
    jvm.suspend()
    for _ in range(2):
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert started.wait(180) == 1
    assert "the run did not end in time and was killed" in started.said
    await_that(lambda: not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE, "its end")


@pytest.mark.long  # in every run: tests/unit/pipeline/test_running.py
def test_the_end_of_the_jvm_is_told(world: World, started: Run) -> None:
    jvm_of(started.process.pid).kill()
    assert started.wait() == 1
    assert "error: Spark's Java process has ended by signal 9" in started.said
    assert "way out:" in started.said
    assert "Traceback" not in started.said


@pytest.mark.parametrize(
    ("until", "code"), [pytest.param((), 0, marks=pytest.mark.long), (("--until", "latest"), 1)]
)
def test_a_signal_while_spark_starts_ends_it_at_once(
    world: World, until: tuple[str, ...], code: int
) -> None:
    """With nothing done, a run until the end is not done."""
    file = world.file()
    with running(file, *until) as process:
        run = Run(process, file.with_suffix(".log"))
        await_that(lambda: "starting Spark" in run.said, "Spark's start")
        process.send_signal(signal.SIGTERM)
        assert run.wait(180) == code, run.said
    assert "asked to stop before anything was done" in run.said
    assert not world.sql("SELECT to_regclass('oncely_pipelines')")[0][0]


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param("", marks=pytest.mark.long),
        pytest.param("log4j", marks=pytest.mark.long),
        "NativeCodeLoader",
    ],
)
def test_a_signal_while_spark_starts_leaves_no_jvm(world: World, tmp_path: Path, sign: str) -> None:
    """The JVM's process is there; its gateway comes up; within it a SparkContext is being made."""
    file, spark_log = world.file(), tmp_path / "spark.log"

    def jvms(pid: int) -> list[psutil.Process]:
        commands = {one: command_of(one) for one in tree(pid) if name_of(one) == "java"}
        return [
            one
            for one, command in commands.items()
            if "deploy.SparkSubmit" in command and "launcher.Main" not in command
        ]

    with running(file, "--spark-log", str(spark_log)) as process:
        run = Run(process, file.with_suffix(".log"))
        (jvm,) = await_that(lambda: jvms(process.pid), "Spark's process")
        await_that(lambda: sign in spark_log.read_text(), "a line of the JVM")
        process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.said
        try:
            await_that(lambda: not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE, "end")
        finally:
            with suppress(psutil.NoSuchProcess):
                jvm.kill()
    assert "asked to stop before anything was done" in run.said


def test_a_run_that_is_fenced_ends_with_3(world: World, runtime: Any) -> None:
    file = world.file()

    def reset() -> Any:
        await_that(lambda: world.count() == 1_000, "rows", 180)
        reset = ("offsets", "reset", file, "--shift-by", "0", "--execute")
        answer = oncely_json(*reset, alone=True)
        world.publish(100, first=1_000, partitions=2)
        return answer

    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(reset)
        said = oncely("run", file, expect=3).stderr
        assert answer.result()["epoch"] == 2
    assert "is fenced by epoch 2" in said
    assert "must not restart it on exit code 3" in said
    assert world.count() == 1_000


RULES = """
import bisect, os, sys
assert bisect.bisect([1, 2], 1) == 1
def keep(rows):
    return rows
"""


@pytest.mark.parametrize("on", ["processes", pytest.param("spark", marks=pytest.mark.long)])
@pytest.mark.parametrize("transform", [False, True])
def test_a_module_beside_the_file_shadows_none_of_pythons(
    make_world: Any, on: str, transform: bool
) -> None:
    """The folder is the working directory, too: neither the command nor its processes look there
    before Python's own modules."""
    world: World = make_world(1)
    world.publish(5, partitions=1)
    folder = world.folder / "pipelines"
    folder.mkdir(mode=0o755)
    for name in filter(importlib.util.find_spec, sys.stdlib_module_names):
        (folder / f"{name}.py").write_text(f"raise SystemExit('executed {name}')\n")
    (folder / "rules.py").write_text(RULES)
    raw = world.settings() | {"runtime": on}
    raw |= {"transform": {"python": "rules:keep"}} if transform else {}
    (folder / "p.toml").write_text(toml(raw))
    command = [sys.executable, "-P", "-m", "oncely.cli", "run", "p.toml", "--until", "latest"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, world.count()) == (0, 5), done.stderr
    assert "executed" not in done.stderr
