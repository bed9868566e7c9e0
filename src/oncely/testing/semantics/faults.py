"""Faults at the ports: the database's connection and Kafka's producer end their own pipeline.

They are injected through ``Parts.connect`` and ``Parts.kafka_connect``, are sent to the tasks
with the sink, and do nothing until they are armed. Then the first call that reaches the kill point
kills driver, JVM and worker by SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.kafka.client import ErrorState, make
from oncely.kafka.sender import Producer
from oncely.stores.sql.connection import (
    Answer,
    Connection,
    Dialect,
    RowByRow,
    Statement,
    TableName,
    connect,
)
from oncely.testing.processes import kill_self
from oncely.testing.semantics.cells import BEFORE, COMMIT, INSIDE, POSITION, RECORDS

ARRIVING = 10.0  # seconds for half of a commit's records to arrive


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
        armed: false until a batch that may be killed.
    """

    pipeline: str
    point: str
    delivery: str
    driver: int
    jvm: int = 0
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
        kill_self()

    def committed(self, *, records: bool, position: bool) -> None:
        """Handle the commit of records, of the position, or of both."""
        if self.together and records and position:
            self.at(COMMIT)
        elif records:
            self.at(RECORDS)
        elif position:
            self.at(POSITION)


@dataclass
class KillingSessions:
    """``Parts.connect`` for a SQL sink."""

    killer: Killer

    def __call__(self, dialect: Dialect, application: str) -> Any:
        """Open a session with the fault."""
        return _Session(connect(dialect, application), self.killer)


class _Session:
    """A database session that tracks the step."""

    def __init__(self, inner: Connection, killer: Killer) -> None:
        self._inner, self._first = inner, killer
        self._records = self._position = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def _killer(self) -> Killer:
        return self._first.now

    def begin(self) -> None:
        self._records = self._position = False
        self._inner.begin()

    def copy(
        self, table: TableName, rows: pa.Table, then: Sequence[str] = (), *, of_rows: bool = True
    ) -> Sequence[Answer]:
        if not self._killer.position_first:
            self._killer.at(BEFORE)
        if self._killer.wants(INSIDE):
            self._inner.copy(table, rows.slice(0, rows.num_rows // 2))
            self._killer.end()
        answers = self._inner.copy(table, rows, then, of_rows=of_rows)
        self._records = True
        if self._killer.together:
            self._killer.at(RECORDS)
        return answers

    def execute_all(self, statements: Sequence[Statement]) -> None:
        """Of a commit: the positions move, and the history is written."""
        if self._killer.position_first:
            self._killer.at(BEFORE)
        self._inner.execute_all(statements)
        self._position = True
        if self._killer.together:
            self._killer.at(POSITION)

    def commit(self) -> None:
        self._inner.commit()
        self._killer.committed(records=self._records, position=self._position)

    def insert_each(self, into: RowByRow, rows: pa.Table) -> list[tuple[int, str]]:
        """Insert rows separately."""
        self._records = True
        return self._inner.insert_each(into, rows)


@dataclass
class KillingClients:
    """``Parts.kafka_connect`` for a Kafka sink.

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
