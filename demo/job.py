"""A job under test: a child process that is started again whenever it ends too early."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from oncely.testing.servers.process import Process

ROOT = Path(__file__).resolve().parent.parent
_FENCED = 3  # exit code: a newer run holds the ledger, a supervisor must not restart
_WRONG_INPUT = 2
_MOST_RESTARTS = 12
_ENDING = 10.0


class JobFailed(Exception):
    """The job ended in a way that no restart helps."""


@dataclass(frozen=True)
class JobPlan:
    """What is run and how its database sessions are recognised.

    Attributes:
        name: ``oncely``, ``control`` or ``files``.
        command: program and arguments, run in the repository's root.
        environment: added to ours.
        log: where its output goes.
        url: of its database, if it writes into one.
        applications: LIKE pattern of its sessions' application names.
        statement: the first word of the statement that writes rows.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    log: Path
    url: str = field(default="", repr=False)
    applications: str = ""
    statement: str = ""


@dataclass
class Restart:
    """The job ended and was started again.

    Attributes:
        at: seconds since the first start.
        exit_code: negative: the signal that ended it.
    """

    at: float
    exit_code: int


class Job:
    """Runs a plan to its end, through as many processes as that takes."""

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self.restarts: list[Restart] = []
        self.began = 0.0
        self.ended: float | None = None
        self._process: Process | None = None
        self._asked = False
        self._known: set[psutil.Process] = set()

    @property
    def seconds(self) -> float:
        """Since the first start; stands still at the end."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def driver(self) -> psutil.Process:
        """The job's own process, the Spark driver."""
        if self._process is None:
            raise JobFailed(f"{self.plan.name} was not started")
        return psutil.Process(self._process.pid)

    def start(self) -> None:
        """Start it for the first time."""
        self.began = time.monotonic()
        self.plan.log.parent.mkdir(parents=True, exist_ok=True)
        self.plan.log.write_text("")
        self._launch()

    def tend(self) -> bool:
        """Return whether the job is done; start it again if it ended before that.

        Raises:
            JobFailed: it is fenced, its input is wrong, or it ends again and again.
        """
        if self.ended is not None:
            return True
        if self._process is None or self._process.running:
            return False
        code = self._process.returncode or 0
        if code == 0 and not self._asked:
            self.ended = time.monotonic()
            return True
        if code in (_FENCED, _WRONG_INPUT) or len(self.restarts) >= _MOST_RESTARTS:
            raise JobFailed(f"{self.plan.name} ended with code {code}\n{self._process.log_tail()}")
        self.restarts.append(Restart(self.seconds, code))
        self._launch()
        return False

    def ask_to_stop(self) -> None:
        """SIGTERM, the ordinary end; it will be started again."""
        self._asked = True
        self.driver.send_signal(signal.SIGTERM)

    def tree(self) -> list[psutil.Process]:
        """The driver and everything below it: JVM, Python daemon, Python workers."""
        try:
            driver = self.driver
            found = [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._known.update(found)
        return found

    def close(self) -> None:
        """End every process of the job that is still there."""
        self.tree()
        if self._process is not None:
            self._process.kill()
        for process in self._known:
            # psutil compares start times: a pid that is somebody else's by now is left alone.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._known, timeout=_ENDING)

    def _launch(self) -> None:
        self._asked = False
        self._process = Process(
            self.plan.name,
            self.plan.command,
            directory=ROOT,
            log=self.plan.log,
            environment={**os.environ, "PYTHONUNBUFFERED": "1", **self.plan.environment},
        )
