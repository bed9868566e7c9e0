"""How ``oncely semantics`` tries a kind of destination: pipelines die at each step of a commit, and
readers of their own count what took effect.

Faults are at the ports: clients of the pipeline, as :class:`oncely.kinds.kind.Parts` names them,
end it. They are sent to the tasks with the sink, and do nothing until they are armed. Then the
first call that reaches the kill point kills driver, JVM and worker by SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEFORE, INSIDE, RECORDS, POSITION, COMMIT = STEPS = (
    "before the first step",
    "half of the records sent",
    "after the records",
    "after the position",
    "after the commit",
)
"""Kill points. Only exactly once has one commit; otherwise each step commits separately."""

ARRIVING = 10.0  # seconds for half of a commit's records to arrive


@dataclass(frozen=True)
class Place:
    """The servers of the trials.

    Attributes:
        brokers: ``host:port`` of the broker.
        url: the database. Contains its password: never shown.
        folder: for files; each trial has one of its own below it.
        messages: all committed messages of a topic, by a plain reader.
    """

    brokers: str
    url: str = field(repr=False)
    folder: Path
    messages: Callable[[str], Sequence[Any]]


_newest: dict[str, Killer] = {}
"""The newest instance by pipeline, in a worker."""


@dataclass
class Killer:
    """Ends the pipeline at one point. Picklable.

    Attributes:
        pipeline: its name.
        point: the kill point.
        delivery: the semantics of the pipeline, which determine the first step and the commits.
        driver, jvm: processes to kill beside the one at the kill point.
        files: the number of files of one batch, where rows are in files.
        armed: false until a batch that may be killed.
    """

    pipeline: str
    point: str
    delivery: str
    driver: int
    jvm: int = 0
    files: int = 0
    armed: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _newest[self.pipeline] = self

    @property
    def now(self) -> Killer:
        """The instance of the newest task: a worker keeps its clients across batches."""
        return _newest.get(self.pipeline, self)

    @property
    def together(self) -> bool:
        """True if records and position share a transaction."""
        return self.delivery == "exactly_once"

    @property
    def position_first(self) -> bool:
        """True if the position is the first step."""
        return self.delivery == "at_most_once"

    def wants(self, point: str) -> bool:
        """True if the process should be killed at this point."""
        return self.armed and self.point == point

    def at(self, point: str) -> None:
        """Kill if this is the kill point."""
        if self.wants(point):
            self.end()

    def end(self) -> None:
        """Kill all processes, this one last."""
        for pid in (self.jvm, self.driver):
            if pid not in (0, os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def committed(self, *, records: bool, position: bool) -> None:
        """Handle the commit of records, of the position, or of both."""
        if self.together and records and position:
            self.at(COMMIT)
        elif records:
            self.at(RECORDS)
        elif position:
            self.at(POSITION)


@dataclass(frozen=True)
class Trial:
    """A kind in the trials. Readers share no code with the pipeline.

    Attributes:
        title: the heading of its table in the report.
        points: its kill points, in the order of a batch.
        sink: ``[sink]`` of a pipeline with this name.
        faulty: the clients with the fault, by ports of a pipeline; takes ``[sink]``.
        found: how often each id has taken effect, of the pipeline with this name.
        in_files: its rows are in files, one for each value of the column ``team``.
        one_commit: the kill points that exactly once does not have: its commit has no middle.
        note: a paragraph of the report; empty if it needs none.
    """

    title: str
    points: tuple[str, ...]
    sink: Callable[[Place, str], dict[str, Any]]
    faulty: Callable[[Killer, Mapping[str, Any]], dict[str, Any]]
    found: Callable[[Place, str], Counter[int]]
    in_files: bool = False
    one_commit: tuple[str, ...] = ()
    note: str = ""
