"""What a pipeline does with its sink beside committing to it: make it, look at it, check it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from oncely.core.batch import Reject
from oncely.core.topics import Position, TopicPartition
from oncely.pipeline.problems import Problems
from oncely.runtimes.spark.probe import Slots
from oncely.sinks.base import Sink
from oncely.sinks.replaying import Judge, Tried
from oncely.sinks.sql.privileges import Room


@dataclass(frozen=True)
class Known:
    """What the ledger knows of a pipeline; nothing at all before its first start.

    Attributes:
        epoch: given out last; 0 for a pipeline that never ran.
        cluster_id: of the source that it was written for; None before the first start.
        positions: the next offset to read of each partition.
        topic_ids: of the source's topics.
        rejects: dead letters that wait.
        leaders: leader epochs of the source's partitions, where they were noted.
    """

    epoch: int = 0
    cluster_id: str | None = None
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    rejects: int = 0
    leaders: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SinkFacts:
    """The destination as it is now, and what its columns take.

    Attributes:
        kind: ``table`` or ``topic``.
        endpoint: the server.
        table: the table's or the topic's name.
        exists: whether it is there.
        columns: name, the rows' Arrow type, and what becomes of it: the table's own type (as
            created when it is missing), or the part of a Kafka record.
    """

    kind: str
    endpoint: str
    table: str
    exists: bool
    columns: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Connections:
    """Connections to the database that a run takes at most."""

    tasks: int
    driver: int
    room: Room | None

    @property
    def total(self) -> int:
        """Tasks and driver."""
        return self.tasks + self.driver


@dataclass(frozen=True)
class SinkPlan:
    """What a look at the destination has found.

    Attributes:
        facts: None when nobody could be asked.
        connections: None where they are not worth counting.
        statements: for whoever may create what is missing: DDL, or commands of Kafka's tools.
        acls: ``kafka-acls`` commands.
    """

    facts: SinkFacts | None = None
    connections: Connections | None = None
    statements: tuple[str, ...] = ()
    acls: tuple[str, ...] = ()


class Replaying(Protocol):
    """A replay of dead letters under way."""

    def step(self, limit: int, judge: Judge) -> Tried | None:
        """Try up to ``limit`` dead letters in one transaction; None: no more are left.

        Raises:
            WrongInput: what passes may not be written there.
            Stopped: a row of a Spark transform can't be written; nothing was changed.
            Unavailable: the outcome is unknown; ask again.
        """


class Destination(Protocol):
    """One kind of sink, as a pipeline describes it."""

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns that reach the sink when a row transform makes ``schema``.

        Raises:
            ConfigError: they clash with columns that the sink adds.
        """

    def sink(self, schema: pa.Schema) -> Sink:
        """The sink for rows of these columns."""

    @property
    def bare_sink(self) -> Sink:
        """The sink for work on the ledger alone: it does not know the rows' columns."""

    def look(self) -> Known:
        """Read the ledger; one that was never created knows nothing.

        Raises:
            WrongInput: the server does not let us in.
            Unavailable: no answer.
        """

    def check(self, schema: pa.Schema) -> None:
        """Refuse a destination that doesn't take the rows; writes nothing.

        Raises:
            TableMismatch, ConfigError: naming what doesn't fit.
        """

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and how many there are. Raises as :meth:`look` does."""

    @property
    def late_delete(self) -> str | None:
        """Why a tombstone among the dead letters stays one; None: it has no meaning here."""

    def check_replay(self) -> None:
        """Refuse a replay where old records would do harm; writes nothing.

        Raises:
            ConfigError: naming the setting, and the way out.
        """

    def replaying(self, schema: pa.Schema) -> AbstractContextManager[Replaying]:
        """Begin a replay of the dead letters that wait now, for rows of these columns.

        Raises:
            TableMismatch: the destination doesn't take the rows.
        """

    def plan(
        self, schema: pa.Schema | None, findings: Problems, notes: list[str], slots: Slots | None
    ) -> SinkPlan:
        """Look at everything that can be looked at; problems go to ``findings``."""
