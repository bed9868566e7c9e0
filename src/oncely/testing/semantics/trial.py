"""Runs the trials of a sink in sequence, each in a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from oncely.errors import Stopped, Unavailable
from oncely.testing.semantics import reader
from oncely.testing.semantics.cells import Cell, Outcome
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from oncely.testing.servers.process import Process

RECORDS = 1_200
A_BATCH = 300  # records of a batch
A_COMMIT = 100  # records of a commit
FILES = 4  # of a batch
_SOURCE = "source"
_LONGEST = 180.0  # seconds for a restart and a run
_LOOK = 0.2  # seconds
_LIGHTLY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # Spark runs for seconds only


@dataclass(frozen=True)
class Stage:
    """The servers, and the folder of files. Contains the database's password: never shown."""

    brokers: str
    url: str = field(repr=False)
    folder: Path
    on_spark: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the trials early."""


def prepare(broker: Broker, postgres: Postgres, folder: Path, *, on_spark: bool = False) -> Stage:
    """Publish the records that every trial moves."""
    broker.create_topic(_SOURCE, 1)
    producer = Producer({**broker.client_config(), "linger.ms": 5, "log_level": 0})
    for number in range(RECORDS):
        record = {"id": number, "team": number % FILES}
        producer.produce(_SOURCE, json.dumps(record).encode(), partition=0)
    if producer.flush(60):
        raise Unavailable("the records of the trials were not acknowledged")
    url = postgres.create_database("semantics")
    return Stage(broker.bootstrap, url, folder, on_spark)


def run(
    stage: Stage, broker: Broker, wanted: Sequence[Cell], on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run trials of a sink in sequence; ``on_outcome`` is called with each outcome.

    Raises:
        Stopped: a pipeline ended otherwise than by the kill.
    """
    outcomes = []
    before: Cell | None = None
    for now in [*wanted, None]:
        if now is not None and now.sink == "kafka":
            broker.create_topic(now.name, 1)
        _process(stage, before, now)
        if before is not None:
            outcomes.append(_count(stage, before))
            on_outcome(outcomes[-1])
        before = now
    return outcomes


def pipeline(stage: Stage, cell: Cell) -> dict[str, Any]:
    """The pipeline file of a trial."""
    spark: dict[str, Any] = {"master": "local[2,4]", "max_records_per_batch": A_BATCH}
    in_files = cell.sink in ("files", "delta")
    if not in_files:
        spark["trigger"] = "0 seconds"
    # Without a guarantee positions follow the timer, here at every second batch.
    interval = 2 * A_BATCH if cell.delivery == "none" else A_COMMIT
    return {
        "name": cell.name,
        "delivery": cell.delivery,
        "commit_interval": interval,
        "source": {"brokers": stage.brokers, "topics": [_SOURCE]},
        "decode": {"format": "json", "schema": "id INT, team INT" if in_files else "id INT"},
        "sink": _sink(stage, cell),
        "spark": spark,
        **({} if stage.on_spark else {"runtime": "processes", "processes": 1}),
    }


def _sink(stage: Stage, cell: Cell) -> dict[str, Any]:
    """The ``[sink]`` of the pipeline file."""
    match cell.sink:
        case "sql":
            return {"kind": "sql", "url": stage.url, "table": cell.name}
        case "kafka":
            return {"kind": "kafka", "topic": cell.name}
        case "delta":
            url = _root(stage, cell).as_uri()
            return {"kind": "delta", "url": url, "partition_by": ["team"],
                    "flush_interval": "0 seconds"}  # fmt: skip
        case "files":
            return {
                "kind": "files",
                "url": _root(stage, cell).as_uri(),
                "partition_by": ["team"],
                "manifest_topic": _manifest(cell),
                # Separate topics: an open transaction after a kill hides the following messages
                # from others, and trials of other sinks run in parallel.
                "ledger_topic": "files.ledger",
                "flush_interval": "0 seconds",
            }


def _root(stage: Stage, cell: Cell) -> Path:
    return stage.folder / cell.sink / cell.name


def _manifest(cell: Cell) -> str:
    return f"{cell.name}.manifest"


def _process(stage: Stage, before: Cell | None, now: Cell | None) -> None:
    """Resume one trial and run the next until it dies."""
    name = now.name if now else f"after_{before.name if before else 'nothing'}"
    job, log = stage.folder / f"{name}.json", stage.folder / f"{name}.log"
    job.touch(mode=0o600)  # it contains a URL with a password
    order = {
        "resume": before and pipeline(stage, before),
        "run": now and pipeline(stage, now),
        "point": now and now.point,
        "files": FILES,
        "on_spark": stage.on_spark,
    }
    job.write_text(json.dumps(order))
    process = Process(
        f"the pipeline {name}",
        [sys.executable, "-P", "-m", "oncely.testing.semantics.child", str(job)],
        directory=stage.folder,
        log=log,
        environment={"SPARK_SUBMIT_OPTS": _LIGHTLY, **os.environ},
    )
    try:
        code = _wait(stage, process)
    finally:
        process.kill()
        job.unlink()
    resumed = before is None or job.with_suffix(".resumed").exists()
    if not resumed or code != (-signal.SIGKILL if now else 0):
        raise Stopped(
            f"{process.name} ended with code {code}; wanted was"
            f" {'its death by SIGKILL' if now else 'its ordinary end'}\n{process.log_tail()}",
            way_out=f"its log is {log}",
        )


def _wait(stage: Stage, process: Process) -> int | None:
    """The exit code; None after the timeout, or if the trials are ended."""
    deadline = time.monotonic() + _LONGEST
    code = process.wait(_LOOK)
    while code is None and time.monotonic() < deadline and not stage.stop.is_set():
        code = process.wait(_LOOK)
    return code


def _count(stage: Stage, cell: Cell) -> Outcome:
    match cell.sink:
        case "sql":
            found = reader.in_table(stage.url, cell.name)
        case "kafka":
            found = reader.in_topic(stage.brokers, cell.name)
        case "delta":
            found = reader.in_delta(_root(stage, cell))
        case "files":
            found = reader.in_files(stage.brokers, _manifest(cell), _root(stage, cell))
    return Outcome(cell, RECORDS, *reader.damage(found, RECORDS))
