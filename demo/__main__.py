"""``python -m demo``: publish, run and hurt all pipelines, count, report."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from demo import audit, control, lake, reader, records, report
from demo.faults import KINDS, Fault, Servers, fire
from demo.job import ROOT, Job, JobFailed, JobPlan
from demo.moment import Condition, Database, JobEnded, Missed
from demo.watch import Look, RowsBeforeCheckpoint, Sample, Watch, checkpoint, ledger
from oncely import artifacts
from oncely.errors import OncelyError
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres

BUILD = ROOT / "build" / "demo"
_PIPELINE_FILE = "examples/flights.toml"
_PIPELINE, _TABLE, _REJECTS = "flights", "public.flights", "public.oncely_rejects"
_FLIGHTS = 336_776
_INTO_FILES = 3  # one part in so many of the flights, the last ones: a file for each two rows
_LONGEST_RUN = 600.0  # seconds, for one job with all its faults
_READING = 120.0
_POLL = 0.05

console = Console(highlight=False)


@dataclass
class Run:
    """One job's run, as the report tells it."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


def main() -> int:
    """Do it all; the exit code is 0 only if everything came out as it must."""
    signal.signal(signal.SIGTERM, _end)
    BUILD.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(BUILD / "lake", ignore_errors=True)
    began = time.monotonic()
    for coordinate in (
        artifacts.KAFKA_BROKER,
        artifacts.spark_jars().kafka,
        artifacts.POSTGRES_JDBC,
    ):
        artifacts.resolve(coordinate)
    with _progress() as progress, _servers(progress) as servers, _work_directory() as work:
        published, end, last_part = _publish(servers.broker, progress)
        files = lake.Lake(servers.broker.bootstrap, BUILD / "lake", last_part, BUILD)
        into_files = _run_files(files, progress)
        ours = _run(_ours(servers), ledger(_PIPELINE, _TABLE), end, servers, progress)
        folder = work / "control-checkpoint"
        look = checkpoint(folder, control.TABLE)
        plan = _control(servers, folder)
        watching = Database(plan.url)
        damage = RowsBeforeCheckpoint(folder, control.TABLE, watching)
        theirs = _run(plan, look, end, servers, progress, damage)
        watching.close()
        answer = _read(servers, {"oncely": ours, "control": theirs}, progress)
        audited = _audit(servers, progress)
        in_files = _finish_files(files, into_files, progress)
    found = {
        "oncely": _told(ours, answer["oncely"]),
        "control": _told(theirs, answer["control"]),
        "files": in_files,
        "audit": audited,
        "published": asdict(published) | {"offsets": end},
        "seconds": round(time.monotonic() - began, 1),
    }
    found["problems"] = (
        ours.problems + theirs.problems + into_files.problems + report.judge(found, answer)
    )
    report.write(found, BUILD)
    report.show(found, console, BUILD)
    return 1 if found["problems"] else 0


def _end(*_: object) -> NoReturn:
    # As by Ctrl-C: all that was started is ended on the way out.
    raise KeyboardInterrupt


# -- the stages ----------------------------------------------------------------------------


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


@contextlib.contextmanager
def _servers(progress: Progress) -> Iterator[Servers]:
    task = progress.add_task("Kafka and PostgreSQL start", total=2)
    with Postgres() as postgres:
        progress.advance(task)
        with Broker() as broker:
            progress.advance(task)
            yield Servers(broker, postgres)


@contextlib.contextmanager
def _work_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="oncely-demo-") as name:
        yield Path(name)


def _publish(broker: Broker, progress: Progress) -> tuple[records.Published, int, datetime]:
    """What was published, where the topic ends, and the moment when its last part begins."""
    broker.create_topic(records.TOPIC, records.PARTITIONS)
    task = progress.add_task("Flights published", total=_FLIGHTS)
    done, moment = 0, datetime.now(UTC)

    def advance(more: int) -> None:
        nonlocal done, moment
        done += more
        progress.advance(task, more)
        if done <= _FLIGHTS - _FLIGHTS // _INTO_FILES:
            # All so far is acknowledged, in milliseconds that are over when the next one begins.
            time.sleep(0.002)
            moment = datetime.now(UTC)

    published = records.publish(broker.bootstrap, advance)
    end = sum(reader.stable_ends(broker.bootstrap, records.TOPIC).values())
    return published, end, moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def _run_files(files: lake.Lake, progress: Progress) -> lake.Run:
    total = _FLIGHTS // _INTO_FILES
    task = progress.add_task("files: rows that the manifest names", total=total)
    console.print(f"\n[bold]files[/bold]: {len(lake.KINDS)} faults are waiting")
    return lake.run(
        files,
        total,
        lambda rows: progress.update(task, completed=rows, total=max(rows, total)),
        lambda words: console.print(words, soft_wrap=True),
    )


def _finish_files(files: lake.Lake, run: lake.Run, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("", total=1)
    found = lake.finish(files, run, lambda words: progress.update(task, description=words))
    progress.update(task, description="Files verified, counted and vacuumed", completed=1)
    return found


def _audit(servers: Servers, progress: Progress) -> dict[str, Any]:
    """Damage Oncely's table on purpose, when it has been counted; find and repair the damage."""
    task = progress.add_task("", total=1)
    url = servers.postgres.url("oncely")
    found = audit.run(
        _PIPELINE_FILE,
        _flights(servers, url),
        url,
        BUILD,
        lambda words: progress.update(task, description=words),
    )
    progress.update(task, description="Table damaged, audited and repaired", completed=1)
    return found


def _ours(servers: Servers) -> JobPlan:
    url = servers.postgres.create_database("oncely")
    spark_log = BUILD / "oncely-spark.log"
    spark_log.unlink(missing_ok=True)
    return JobPlan(
        name="oncely",
        command=[
            *(sys.executable, "-m", "oncely.cli", "run", _PIPELINE_FILE),
            *("--until", "latest", "--spark-log", str(spark_log)),
        ],
        environment=_flights(servers, url),
        log=BUILD / "oncely.log",
        url=url,
        applications=f"oncely/{_PIPELINE}-%",
        statement="COPY",
    )


def _control(servers: Servers, folder: Path) -> JobPlan:
    url = servers.postgres.create_database("control")
    return JobPlan(
        name="control",
        command=[sys.executable, "-m", "demo.control", str(folder)],
        environment=_flights(servers, url),
        log=BUILD / "control.log",
        url=url,
        applications=control.APPLICATION,
        statement="INSERT",
    )


def _flights(servers: Servers, url: str) -> dict[str, str]:
    return {"FLIGHTS_BROKERS": servers.broker.bootstrap, "FLIGHTS_POSTGRES_URL": url}


def _run(
    plan: JobPlan,
    look: Look,
    end: int,
    servers: Servers,
    progress: Progress,
    damage: Condition | None = None,
) -> Run:
    """Run a job to its end, with every fault on the way."""
    job, run = Job(plan), Run()
    watch, database = Watch(job, look), Database(plan.url)
    task = progress.add_task(f"{plan.name}: committed offsets", total=end)
    console.print(f"\n[bold]{plan.name}[/bold]: {len(KINDS)} faults are waiting")
    try:
        job.start()
        watch.start()
        for kind in KINDS:
            condition = damage if kind == "kill_driver" else None
            _await_progress(job, watch, len(run.faults), end, progress, task)
            _hurt(kind, job, servers, database, run, condition)
        while not job.tend():
            _in_time(job)
            progress.update(task, completed=watch.offsets)
            time.sleep(_POLL)
    except JobEnded:
        pass  # what was not fired is found missing by the judge
    except (JobFailed, Missed) as problem:
        run.problems.append(str(problem))
    finally:
        job.close()
        watch.close()
        database.close()
    progress.update(task, completed=watch.offsets)
    run.facts = {
        "faults": [fault.shown() for fault in run.faults],
        "restarts": [asdict(one) for one in job.restarts],
        "run_seconds": round(job.seconds, 2),
    }
    run.samples = watch.samples
    return run


def _hurt(
    kind: str,
    job: Job,
    servers: Servers,
    database: Database,
    run: Run,
    condition: Condition | None,
) -> None:
    fault = fire(kind, job, servers, database, condition)
    if isinstance(condition, RowsBeforeCheckpoint):
        fault.also = condition.seen
    run.faults.append(fault)
    seen = fault.seen
    console.print(
        f"{fault.at:6.1f} s  {KINDS[kind][0]}: {fault.target}\n"
        f"          inside {seen['statement']}, transaction open for {seen['open_ms']:.0f} ms"
        + (f"; {fault.also}" if fault.also else ""),
        soft_wrap=True,
    )


def _await_progress(
    job: Job, watch: Watch, fired: int, end: int, progress: Progress, task: TaskID
) -> None:
    """Let the job commit something since the last fault, and reach its share of the topic."""
    share = end * (fired + 0.5) / (len(KINDS) + 1)
    wanted = max(share, watch.offsets + 1)
    while watch.offsets < wanted:
        if job.tend():
            raise JobEnded(job.plan.name)
        _in_time(job)
        progress.update(task, completed=watch.offsets)
        time.sleep(_POLL)


def _in_time(job: Job) -> None:
    if job.seconds > _LONGEST_RUN:
        raise JobFailed(f"{job.plan.name} is not done after {_LONGEST_RUN:.0f} s")


def _told(run: Run, answer: dict[str, Any]) -> dict[str, Any]:
    """A run's part of the report. A sample: seconds, offsets, rows, flights up to the offsets."""
    before = answer.pop("flights_before")
    samples = [
        [round(sample.at, 2), sample.offsets, sample.rows, flights]
        for sample, flights in zip(run.samples, before, strict=True)
    ]
    return {**answer, **run.facts, "samples": samples}


def _read(servers: Servers, runs: dict[str, Run], progress: Progress) -> dict[str, Any]:
    """Let the independent reader count, in a process of its own."""
    task = progress.add_task("Topic and tables compared", total=1)
    databases = {name: servers.postgres.url(name) for name in ("oncely", "control")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "demo.reader", records.TOPIC),
            *(f"oncely={_TABLE},{_REJECTS}", f"control={control.TABLE}"),
        ],
        cwd=ROOT,
        env=reader.environment(servers.broker.bootstrap, databases),
        input=json.dumps({n: [s.positions for s in run.samples] for n, run in runs.items()}),
        text=True,
        start_new_session=True,  # a Ctrl-C is for us; run() ends it
        stdout=subprocess.PIPE,
        timeout=_READING,
        check=True,
    )
    progress.advance(task)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("stopped; everything that was started has been ended")
        sys.exit(130)
    except (OncelyError, RuntimeError, subprocess.SubprocessError) as error:
        console.print(f"[red]error:[/red] {error}")
        sys.exit(getattr(error, "exit_code", 1))
