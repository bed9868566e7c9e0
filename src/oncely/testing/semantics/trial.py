"""Runs the trials of a sink in sequence, each in a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from oncely.errors import Stopped, Unavailable
from oncely.kinds.trial import Place
from oncely.testing.readers import messages
from oncely.testing.semantics.cells import TRIALS, Cell, Outcome
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
class Stage(Place):
    """The servers, where pipelines run, and the end of all trials."""

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
    return Stage(broker.bootstrap, url, folder, partial(messages, broker.bootstrap), on_spark)


def run(
    stage: Stage, wanted: Sequence[Cell], on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run trials of a sink in sequence; ``on_outcome`` is called with each outcome.

    Raises:
        Stopped: a pipeline ended otherwise than by the kill.
    """
    outcomes = []
    before: Cell | None = None
    for now in [*wanted, None]:
        _process(stage, before, now)
        if before is not None:
            outcomes.append(_count(stage, before))
            on_outcome(outcomes[-1])
        before = now
    return outcomes


def pipeline(stage: Stage, cell: Cell) -> dict[str, Any]:
    """The pipeline file of a trial."""
    spark: dict[str, Any] = {"master": "local[2,4]", "max_records_per_batch": A_BATCH}
    trial = TRIALS[cell.sink]
    if not trial.in_files:
        spark["trigger"] = "0 seconds"
    # Without a guarantee positions follow the timer, here at every second batch.
    interval = 2 * A_BATCH if cell.delivery == "none" else A_COMMIT
    return {
        "name": cell.name,
        "delivery": cell.delivery,
        "commit_interval": interval,
        "source": {"brokers": stage.brokers, "topics": [_SOURCE]},
        "decode": {"format": "json", "schema": "id INT, team INT" if trial.in_files else "id INT"},
        "sink": trial.sink(stage, cell.name),
        "spark": spark,
        **({} if stage.on_spark else {"runtime": "processes", "processes": 1}),
    }


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
    found = TRIALS[cell.sink].found(stage, cell.name)
    return Outcome(cell, RECORDS, *damage(found, RECORDS))


def damage(found: Counter[int], records: int) -> tuple[int, int]:
    """The number of missing ids from 0 on, and the number of effects beyond the first."""
    lost = sum(1 for one in range(records) if not found[one])
    return lost, sum(count - 1 for count in found.values() if count > 1)
