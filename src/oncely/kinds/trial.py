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

from oncely.kafka.client import ErrorState, make
from oncely.kafka.sender import Producer
from oncely.stores.objects.root import S3Options
from oncely.stores.objects.store import Bytes, FileSystem, connect

BEFORE, INSIDE, RECORDS, POSITION, COMMIT = STEPS = (
    "before the first step",
    "half of the records sent",
    "after the records",
    "after the position",
    "after the commit",
)
"""Kill points. Only exactly once has one commit; otherwise each step commits separately."""

WRITING, WRITTEN, STAGED = STAGING = (
    "before the first file",
    "after the first file",
    "after all files",
)
"""Those of files, which a task stages before the commit begins in the driver."""

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

    def root(self, kind: str, name: str) -> Path:
        """The folder of a pipeline's files."""
        return self.folder / kind / name


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


@dataclass
class KillingStores:
    """``Parts.files_connect``: kills from a worker, where tasks stage files."""

    killer: Killer

    def __call__(self, url: str, s3: S3Options | None) -> FileSystem:
        """Open the store; its writes have the fault."""
        return _Place(connect(url, s3), self.killer)


class _Place:
    """A store that tracks the progress of a task's files."""

    def __init__(self, inner: FileSystem, killer: Killer) -> None:
        self._inner, self._first = inner, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, path: str, data: Bytes) -> None:
        self._first.now.at(WRITING)
        self._inner.write(path, data)
        self._first.now.at(WRITTEN)

    def sync(self) -> None:
        self._inner.sync()
        self._first.now.at(STAGED)


@dataclass
class KillingClients:
    """``Parts.kafka_connect`` for a sink of topics.

    Attributes:
        killer: the fault.
        topic: the topic of the records; all other messages belong to the position.
    """

    killer: Killer
    topic: str

    def __call__(
        self,
        kind: Any,
        brokers: str,
        kafka: Mapping[str, object],
        error_state: ErrorState,
        **own: Any,
    ) -> Any:
        """Create a client; producers have the fault."""
        made = make(kind, brokers, kafka, error_state, **own)
        return self.producer(made) if issubclass(kind, Producer) else made

    def producer(self, made: Any) -> KillingProducer:
        """The producer with the fault."""
        return KillingProducer(made, self.killer, self.topic)


class KillingProducer:
    """A producer that tracks the step."""

    def __init__(self, inner: Any, killer: Killer, topic: str) -> None:
        self._inner, self._of, self._topic = inner, killer, topic
        self._records = self._position = False

    @property
    def _killer(self) -> Killer:
        return self._of.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def produce_batch(self, topic: str, messages: Sequence[dict[str, object]]) -> Any:
        """Queue records."""
        return self._send(topic, messages, lambda part: self._inner.produce_batch(topic, part))

    def _send(
        self,
        topic: str,
        messages: Sequence[dict[str, object]],
        send: Callable[[Sequence[dict[str, object]]], Any],
    ) -> Any:
        if topic != self._topic:
            return send(messages)
        if not self._killer.position_first:
            self._killer.at(BEFORE)
        if self._killer.wants(INSIDE):
            send(messages[: len(messages) // 2])
            self._inner.flush(ARRIVING)
            self._killer.end()
        sent = send(messages)
        self._records = True
        if self._killer.together and self._killer.wants(RECORDS):
            self._inner.flush(ARRIVING)
            self._killer.end()
        return sent

    def flush(self, *timeout: float) -> Any:
        """Wait for queued messages: without transactions this is the end of a step."""
        left = self._inner.flush(*timeout)
        if not self._killer.together:
            self._killer.committed(records=self._records, position=False)
        return left

    def send_offsets_to_transaction(self, *args: Any) -> Any:
        """Add the position to the transaction."""
        if self._killer.position_first:
            self._killer.at(BEFORE)
        sent = self._inner.send_offsets_to_transaction(*args)
        self._position = True
        if self._killer.together:
            self._killer.at(POSITION)
        return sent

    def commit_transaction(self, *args: Any) -> Any:
        """Commit the transaction."""
        done = self._inner.commit_transaction(*args)
        self._killer.committed(records=self._records, position=self._position)
        return done
