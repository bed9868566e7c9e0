"""The faults, each fired into an open transaction of the job; see :mod:`demo.moment`."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from demo.job import Job
from demo.moment import Caught, Condition, Database, Transaction, caught
from oncely.testing.processes import name_of
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres

_PATIENCE = 120.0  # seconds until a commit is caught
_LAST_WORDS = 3.0


@dataclass
class Fault:
    """One fault as it happened.

    Attributes:
        at: seconds since the job's first start.
        kind: a key of KINDS.
        target: what was hit, in words.
        open_transaction: whether a transaction of the job that was writing rows was seen open
            while the job stood still and the fault was fired.
        seen: that transaction.
        postgres_said: the server's own words on that session afterwards.
        also: more that was seen at the moment.
    """

    at: float
    kind: str
    target: str
    open_transaction: bool
    seen: dict[str, Any] = field(default_factory=dict)
    postgres_said: str = ""
    also: str = ""

    def shown(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "at": round(self.at, 2)}


@dataclass(frozen=True)
class Servers:
    """What the jobs run on."""

    broker: Broker
    postgres: Postgres


After = Callable[[], None]
Fire = Callable[[Job, Servers, Database, Caught], tuple[str, After]]
"""Fires while the job stands still; returns the target and what is left to do afterwards."""


def _nothing() -> None:
    """All is done."""


def kill_driver(job: Job, processes: list[psutil.Process]) -> str:
    """Kill the driver and its JVM, of a job that stands still; returns the target."""
    driver = job.driver
    # The Python workers are not killed: they wake up with their open transactions and find the
    # JVM gone, as after a crash of the JVM.
    machines = [p for p in _standing(processes) if name_of(p) == "java"]
    for process in (driver, *machines):
        process.kill()
    pids = ", ".join(str(process.pid) for process in machines)
    return f"driver {driver.pid} and JVM {pids}"


def _kill_driver(job: Job, _: Servers, __: Database, moment: Caught) -> tuple[str, After]:
    return kill_driver(job, moment.processes), _nothing


def _kill_worker(_: Job, __: Servers, ___: Database, moment: Caught) -> tuple[str, After]:
    found = workers(moment.processes)
    if moment.owner in found:
        moment.owner.kill()
        return f"Python worker {moment.owner.pid}, which held the session", _nothing
    # A writer in the JVM: of the workers that feed it, the one that has worked most.
    busiest = max(found, key=lambda p: sum(p.cpu_times()[:2]), default=None)
    if busiest is None:
        return "", _nothing
    busiest.kill()
    return f"Python worker {busiest.pid}, which fed the JVM", _nothing


def workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Children of Spark's daemon of Python workers that stand still."""
    standing = _standing(processes)
    daemons = {p.pid for p in standing if "pyspark.worker" in p.cmdline()}
    return [p for p in standing if p.ppid() in daemons]


def _standing(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there; stopped as they are, they can't end while we look."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


def _terminate(_: Job, __: Servers, database: Database, moment: Caught) -> tuple[str, After]:
    session = moment.transaction.session
    database.query("SELECT pg_terminate_backend(%s)", session)
    return f"session {session} ({moment.transaction.application})", _nothing


def _restart_postgres(_: Job, servers: Servers, __: Database, ___: Caught) -> tuple[str, After]:
    # A fast shutdown: sessions are ended, transactions rolled back. restart() waits for its end.
    pid = servers.postgres.pid
    psutil.Process(pid).send_signal(signal.SIGINT)
    return f"PostgreSQL {pid}", servers.postgres.restart


def _restart_broker(_: Job, servers: Servers, __: Database, ___: Caught) -> tuple[str, After]:
    pid = servers.broker.pid
    psutil.Process(pid).send_signal(signal.SIGTERM)
    return f"Kafka broker {pid}", servers.broker.restart


def _stop(job: Job, _: Servers, __: Database, ___: Caught) -> tuple[str, After]:
    job.ask_to_stop()
    return f"driver {job.driver.pid}", _nothing


KINDS: dict[str, tuple[str, Fire]] = {
    "kill_worker": ("SIGKILL of a Python worker", _kill_worker),
    "terminate_session": ("pg_terminate_backend of the writing session", _terminate),
    "kill_driver": ("SIGKILL of the driver with its JVM", _kill_driver),
    "restart_postgres": ("PostgreSQL restarted", _restart_postgres),
    "restart_broker": ("Kafka broker restarted", _restart_broker),
    "stop": ("ordinary stop (SIGTERM)", _stop),
}
"""What is done to a job, in this order: kind, in words, how."""


def fire(
    kind: str, job: Job, servers: Servers, database: Database, condition: Condition | None = None
) -> Fault:
    """Wait for a commit, fire, and let the job go on.

    Raises:
        JobEnded: the job was done before.
        Missed: no commit was caught.
        JobFailed: it can't be kept running.
    """
    log = servers.postgres.directory / "postgres.log"
    with caught(job, database, _PATIENCE, condition) as moment:
        at, said_before = job.seconds, log.stat().st_size
        target, afterwards = KINDS[kind][1](job, servers, database, moment)
        fault = Fault(at, kind, target, bool(target), moment.transaction.shown())
        if not target:
            fault.target = "nothing: the job has no such process"
    afterwards()
    if kind not in ("restart_broker", "stop"):  # their transactions may well end in COMMIT
        fault.postgres_said = _last_words(database, log, said_before, moment.transaction)
    return fault


def _last_words(database: Database, log: Path, begin: int, gone: Transaction) -> str:
    """What the server's log says about the end of a session."""
    deadline = time.monotonic() + _LAST_WORDS
    while _is_there(database, gone) and time.monotonic() < deadline:
        time.sleep(0.02)
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    # An ERROR is about a statement, and the session lives on.
    line = re.compile(rf"\[{gone.session}\] .*?(?:LOG|FATAL):\s+(.+)")
    return "; ".join(dict.fromkeys(line.findall(text)))


def _is_there(database: Database, transaction: Transaction) -> bool:
    sql = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND application_name = %s"
    return bool(database.query(sql, transaction.session, transaction.application))
