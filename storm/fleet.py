"""The workers of a storm, and what is done to them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from oncely.testing.servers.process import Process

_STEP = 1.0, 2.0  # seconds between two events
_PAUSES = 0.5, 20.0  # seconds; longer ones exceed the session timeout
_ENDING = 60.0


class MemberFailed(Exception):
    """A worker ended by itself."""


@dataclass
class _Member:
    number: int
    process: Process
    wakes: float | None = None
    """When it is paused: the time at which it continues."""


class Fleet:
    """Starts and hurts workers of one pipeline; each writes an event log of its own.

    Args:
        file: the pipeline file.
        most: the greatest number of workers at a time.
        random: the source of chance.
    """

    def __init__(self, file: Path, most: int, random: Random) -> None:
        self._file, self._most, self._random = file, most, random
        self._members: list[_Member] = []
        self._leaving: list[_Member] = []
        self.started = self.kills = self.pauses = 0
        self.logs: list[Path] = []

    def storm(self, seconds: float) -> None:
        """Something happens every second or two.

        Raises:
            MemberFailed: a worker ended that nobody has ended.
        """
        end = time.monotonic() + seconds
        self._start()
        while time.monotonic() < end:
            time.sleep(self._random.uniform(*_STEP))
            self._look()
            self._event()()

    def calm(self) -> None:
        """No more faults: paused workers continue, and at least two are there."""
        for member in self._members:
            self._wake(member)
        while len(self._members) < 2:
            self._start()

    def close(self) -> None:
        """Ask all workers to end, and wait for it.

        Raises:
            MemberFailed: a worker ended with an error.
        """
        for member in self._members:
            self._wake(member)
            member.process.send(signal.SIGTERM)
        self._leaving += self._members
        self._members = []
        for member in self._leaving:
            member.process.wait(_ENDING)
        self._look()
        if self._leaving:
            raise MemberFailed(f"worker {self._leaving[0].number} did not end in {_ENDING} s")

    def kill(self) -> None:
        """End all workers at once."""
        for member in [*self._members, *self._leaving]:
            member.process.kill()

    def _event(self) -> Callable[[], None]:
        """What happens next; workers are added as long as there are few."""
        awake = [one for one in self._members if one.wakes is None]
        if len(self._members) < 2 or not awake:
            return self._start
        choices = [self._leave, self._kill, self._pause]
        if len(self._members) < self._most:
            choices += [self._start] * 3
        return self._random.choice(choices)

    def _start(self) -> None:
        self.started += 1
        log = self._file.with_name(f"{self._file.stem}-{self.started}.jsonl")
        self.logs.append(log)
        process = Process(
            f"worker {self.started}",
            [sys.executable, "-m", "oncely.cli", "work", str(self._file), "--events", str(log)],
            directory=self._file.parent,
            log=log.with_suffix(".log"),
            environment={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._members.append(_Member(self.started, process))

    def _leave(self) -> None:
        member = self._one()
        member.process.send(signal.SIGTERM)
        self._members.remove(member)
        self._leaving.append(member)

    def _kill(self) -> None:
        member = self._one()
        self.kills += 1
        member.process.kill()
        self._members.remove(member)

    def _pause(self) -> None:
        member = self._one()
        self.pauses += 1
        member.process.send(signal.SIGSTOP)
        member.wakes = time.monotonic() + self._random.uniform(*_PAUSES)

    def _one(self) -> _Member:
        return self._random.choice([one for one in self._members if one.wakes is None])

    def _wake(self, member: _Member) -> None:
        if member.wakes is not None:
            member.process.send(signal.SIGCONT)
            member.wakes = None

    def _look(self) -> None:
        """Continue workers whose pause is over; refuse those that ended by themselves."""
        for member in self._members:
            if member.wakes is not None and time.monotonic() > member.wakes:
                self._wake(member)
        for member in [*self._members, *self._leaving]:
            if member.process.running:
                continue
            # A process that is still starting has no handler of SIGTERM yet.
            fine = 0, -signal.SIGTERM
            if member in self._members or member.process.returncode not in fine:
                code, tail = member.process.returncode, member.process.log_tail()
                raise MemberFailed(f"worker {member.number} ended with code {code}\n{tail}")
            self._leaving.remove(member)
