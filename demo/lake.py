"""The files pipeline of the demo: run, killed while it stages and publishes, verified, vacuumed.

It runs first and is looked at last. Orphans must be older than two minutes before ``vacuum`` takes
them, and the other two pipelines run meanwhile: no clock is changed, and hardly anything is waited
for.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from demo import lake_reader, records
from demo.faults import kill_driver, workers
from demo.job import ROOT, Job, JobFailed, JobPlan
from demo.lake_moment import Caught, Eyes, Phase, caught
from demo.moment import JobEnded, Missed

PIPELINE_FILE = "examples/lake.toml"
_LEASES = "_oncely/staging/"  # below the root
_MANIFEST, _SCHEMAS, _REJECTS = "lake.manifest", "lake.schema", "lake.rejects"
# max_staging_age and transaction_timeout of the pipeline file, and the slack that vacuum adds.
YOUNG = 60.0 + 10.0 + 60.0
_PATIENCE = 120.0  # seconds until a phase is caught
_LONGEST_RUN = 600.0
_COMMAND = 300.0
_POLL = 0.05

Fire = Callable[[Job, Caught], str]
"""Fires while the job stands still; returns the target."""


def _kill_workers(_: Job, moment: Caught) -> str:
    # All of them: which of them was writing can't be seen from outside.
    found = workers(moment.processes)
    for process in found:
        process.kill()
    pids = ", ".join(str(process.pid) for process in found)
    return f"Python workers {pids}" if found else ""


def _kill_driver(job: Job, moment: Caught) -> str:
    return kill_driver(job, moment.processes)


KINDS: dict[str, tuple[str, Phase, Fire]] = {
    "kill_workers_staging": (
        "SIGKILL of the Python workers while they write files",
        "staging",
        _kill_workers,
    ),
    "kill_driver_staging": (
        "SIGKILL of the driver with its JVM while files are written",
        "staging",
        _kill_driver,
    ),
    "kill_driver_publishing": (
        "SIGKILL of the driver with its JVM inside the transaction that names the files",
        "publishing",
        _kill_driver,
    ),
}
"""What is done to the pipeline, in this order: kind, in words, in which phase, how."""


@dataclass
class Fault:
    """One fault as it happened.

    Attributes:
        at: seconds since the pipeline's first start.
        kind: a key of KINDS.
        target: what was hit, in words.
        staged: files that were there and that nobody named, at that moment.
        open_messages: of the manifest's open transaction, markers included.
        orphaned: how many of the staged files nobody has named in the end.
    """

    at: float
    kind: str
    target: str
    staged: frozenset[str] = field(repr=False)
    open_messages: int
    orphaned: int = 0

    def shown(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "at": round(self.at, 2), "staged": len(self.staged)}


@dataclass(frozen=True)
class Lake:
    """Where the pipeline's data comes from and goes to.

    Attributes:
        brokers: ``host:port``.
        root: folder of the files.
        start: from this moment on records are taken, by their timestamp.
        logs: folder of logs.
    """

    brokers: str
    root: Path
    start: datetime
    logs: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the pipeline file asks for."""
        return {
            "FLIGHTS_BROKERS": self.brokers,
            "LAKE_URL": self.root.as_uri(),
            "LAKE_START": self.start.isoformat(),
        }

    def plan(self) -> JobPlan:
        """The job."""
        spark_log = self.logs / "files-spark.log"
        spark_log.unlink(missing_ok=True)
        return JobPlan(
            name="files",
            command=[
                *(sys.executable, "-m", "oncely.cli", "run", PIPELINE_FILE),
                *("--until", "latest", "--spark-log", str(spark_log)),
            ],
            environment=self.environment,
            log=self.logs / "files.log",
        )


@dataclass
class Run:
    """The pipeline's run."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def run(lake: Lake, total: int, progress: Callable[[int], None], say: Callable[[str], None]) -> Run:
    """Run the pipeline to its end, with every fault on the way.

    Args:
        lake: of which.
        total: rows that are expected, about; faults are spread over them.
        progress: told how many rows the manifest names.
        say: told of each fault.
    """
    lake.root.mkdir(parents=True, exist_ok=True)
    job, eyes, run = Job(lake.plan()), Eyes(lake.brokers, _MANIFEST, lake.root), Run()
    try:
        job.start()
        for kind in KINDS:
            share = total * (len(run.faults) + 0.5) / (len(KINDS) + 1)
            _await_rows(job, eyes, max(share, eyes.rows + 1), progress)
            run.faults.append(_fire(kind, job, eyes))
            say(_said(run.faults[-1]))
        while not job.tend():
            _look(job, eyes, progress)
    except JobEnded:
        pass  # what was not fired is found missing by the judge
    except (JobFailed, Missed) as problem:
        run.problems.append(str(problem))
    finally:
        job.close()
        eyes.look(0.5)
        progress(eyes.rows)
        eyes.close()
    run.facts = {
        "restarts": [asdict(one) for one in job.restarts],
        "run_seconds": round(job.seconds, 2),
    }
    return run


def _fire(kind: str, job: Job, eyes: Eyes) -> Fault:
    _, phase, fire = KINDS[kind]
    with caught(job, eyes, phase, _PATIENCE) as moment:
        at = job.seconds
        target = fire(job, moment)
    return Fault(at, kind, target, moment.staged, moment.open_messages)


def _said(fault: Fault) -> str:
    inside = (
        f"; {fault.open_messages:,} messages in the open transaction" if fault.open_messages else ""
    )
    target = fault.target or "nothing: the job has no such process"
    return (
        f"{fault.at:6.1f} s  {KINDS[fault.kind][0]}: {target}\n"
        f"          {len(fault.staged):,} files staged that nobody has named{inside}"
    )


def _await_rows(job: Job, eyes: Eyes, wanted: float, progress: Callable[[int], None]) -> None:
    while eyes.rows < wanted:
        if job.tend():
            raise JobEnded(job.plan.name)
        _look(job, eyes, progress)


def _look(job: Job, eyes: Eyes, progress: Callable[[int], None]) -> None:
    if job.seconds > _LONGEST_RUN:
        raise JobFailed(f"{job.plan.name} is not done after {_LONGEST_RUN:.0f} s")
    eyes.look(_POLL)
    progress(eyes.rows)
    time.sleep(_POLL)


# -- afterwards ----------------------------------------------------------------------------


def finish(lake: Lake, run: Run, step: Callable[[str], None]) -> dict[str, Any]:
    """Verify and count, vacuum, and look again: the report's part.

    Args:
        lake: of which.
        run: what was done to it.
        step: told what comes next.
    """
    step("Files verified, and counted by the reader")
    topics = records.TOPIC, _MANIFEST, _SCHEMAS, _REJECTS
    with _oncely(lake, "verify") as verifying:  # beside the reader: each keeps one core busy
        counted = _read(lake, "count", *topics, str(lake.start.timestamp()))
        verified = _answer(verifying)
    orphans = set(counted.pop("orphans"))
    for fault in run.faults:
        fault.orphaned = len(fault.staged & orphans)
    waited = _await_age(counted.pop("newest_orphan"), step)
    step("Orphans vacuumed")
    with _oncely(lake, "vacuum") as vacuuming:
        vacuumed = _answer(vacuuming)
    after = _read(lake, "look", _MANIFEST)
    return {
        **counted,
        "missing": after["missing"],
        "orphans_before_vacuum": len(orphans),
        "orphans_after": len(after["orphans"]),
        "verify": {name: verified[name] for name in ("ok", "files", "rows", "unnamed")},
        "vacuum": _removed_files(vacuumed),
        "waited_seconds": round(waited, 1),
        "start": lake.start.isoformat(),
        "faults": [fault.shown() for fault in run.faults],
        **run.facts,
    }


def _removed_files(vacuumed: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of vacuum without the expired staging leases, which the reader does not count."""
    files = [one for one in vacuumed["orphans"] if not one["path"].startswith(_LEASES)]
    return {
        "removed": len(files) if vacuumed["removed"] == len(vacuumed["orphans"]) else 0,
        "bytes": sum(one["bytes"] for one in files),
        **{name: vacuumed[name] for name in ("young", "live")},
    }


def _await_age(newest: float | None, step: Callable[[str], None]) -> float:
    """Wait until the newest orphan is old enough for vacuum; seconds waited."""
    left = 0.0 if newest is None else newest + YOUNG + 1 - time.time()
    if left <= 0:
        return 0.0
    step(f"Waiting {left:.0f} s: orphans must be {YOUNG:.0f} s old before vacuum takes them")
    time.sleep(left)
    return left


@contextlib.contextmanager
def _oncely(lake: Lake, command: str) -> Iterator[subprocess.Popen[str]]:
    """``oncely files COMMAND``, under way; ended with the block, also by Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-m", "oncely.cli", "files", command, PIPELINE_FILE, "--json"],
        cwd=ROOT,
        env={**os.environ, **lake.environment},
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it has printed; ``verify`` ends with 1 when something is wrong, and says what."""
    printed, _ = process.communicate(timeout=_COMMAND)
    if process.returncode not in (0, 1) or not printed:
        raise RuntimeError(f"`oncely files` ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(printed)
    return found


def _read(lake: Lake, *arguments: str) -> dict[str, Any]:
    """Let the independent reader count, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "demo.lake_reader", *arguments, str(lake.root)],
        cwd=ROOT,
        env=lake_reader.environment(lake.brokers),
        text=True,
        start_new_session=True,  # a Ctrl-C is for us; run() ends it
        stdout=subprocess.PIPE,
        timeout=_COMMAND,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
