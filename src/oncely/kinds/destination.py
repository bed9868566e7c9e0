"""The port of destinations: creation, inspection and checks of a sink, outside of commits.

An inspection collects problems, so that all of them are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from oncely.core.batch import Reject
from oncely.core.change import RewriteKind
from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.errors import Denied, OncelyError, TableMismatch, WrongInput
from oncely.kinds.rows import Form
from oncely.secrets import redact
from oncely.stores.document import same_cluster, same_topics
from oncely.stores.offsets.base import SAY_WHERE

if TYPE_CHECKING:
    from oncely.kinds.base import ReplaysDeadLetters, RewritesRecords, RewritesTogether, Sink
    from oncely.runtimes.spark.session import Slots
    from oncely.stores.sql.tables import Activity

Check = tuple[str, Callable[[], object]]
"""The key of the pipeline file for a check, and the check, which raises its problem.

`plan` collects the errors of a destination's checks; a run executes the same checks before it
starts, and ends at the first error.
"""

Which = Callable[[Reject], bool]
Discard = Callable[[Which, bool, Callable[[], None]], Mapping[str, int]]
"""See :meth:`Destination.discarding`."""

PROBED = (
    "a probe was written below sink.url and removed: this is the only way to check write permission"
)
"""The note of a plan for destinations with a root."""


@dataclass(frozen=True)
class PlanProblem:
    """A reason why a pipeline cannot run.

    Attributes:
        key: the key of the pipeline file.
        message: the problem.
        way_out: the recommended action.
        wrong_input: False if a server did not answer, which may be temporary.
    """

    key: str
    message: str
    way_out: str = ""
    wrong_input: bool = True


@dataclass
class Inspection:
    """The results of `plan` so far.

    Attributes:
        problems: the reasons why the pipeline can't run.
        notes: information for the user.
        slots: the concurrent tasks of Spark; None if Spark was not started.
        denied: the broker denies something for the lack of a right.
    """

    problems: list[PlanProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slots: Slots | None = None
    denied: bool = False

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Add an error of the block as a problem of ``key``, and continue after the block."""
        try:
            yield
        except OncelyError as error:
            self.denied |= isinstance(error, Denied)
            wrong = isinstance(error, WrongInput)
            # The error may come from a thread without the pipeline's secrets.
            problem, way_out = redact(error.problem), redact(error.way_out)
            self._add(PlanProblem(error.key or key, problem, way_out, wrong))

    def collect(self, checks: Iterable[Check]) -> None:
        """Execute all checks, and add their errors as problems."""
        for key, check in checks:
            with self.about(key):
                check()

    def add(self, key: str, message: str, way_out: str = "") -> None:
        """Add a problem."""
        self._add(PlanProblem(key, redact(message), redact(way_out)))

    def _add(self, problem: PlanProblem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


LOST_WAY_OUT = f"restore it; or {SAY_WHERE}"


@dataclass(frozen=True)
class LedgerState:
    """The ledger's state of a pipeline; empty before its first start.

    Attributes:
        epoch: the last epoch; 0 for a pipeline that never ran.
        cluster_id: Kafka's cluster id of the source; None before the first start.
        positions: the next offset to read of each partition.
        topic_ids: Kafka's ids of the source's topics.
        rejects: number of dead letters.
        leaders: noted leader epochs of the source's partitions.
        activity: the newest commits; None if the ledger does not store their times.
        lost: the reason why this empty ledger is not that of a first start; empty if it may be.
        refused: the reason why the next start refuses the destination that is there now.
        notice: what is lost of the ledger, and how the next start goes on; empty if nothing is.
        time_limits: settings by which the destination's server ends a long commit, and their
            seconds.
    """

    epoch: int = 0
    cluster_id: str | None = None
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    rejects: int = 0
    leaders: Mapping[TopicPartition, int] = field(default_factory=dict)
    activity: Activity | None = None
    lost: str = ""
    refused: str = ""
    notice: str = ""
    time_limits: Mapping[str, float] = field(default_factory=dict)

    def refuse_another_source(self, now: SourceIdentity, pipeline: str) -> None:
        """Compare the ids of cluster and topics; before the first start there are none.

        Raises:
            SourceMismatch: the topic was deleted and recreated, or it is another cluster.
        """
        if self.cluster_id is not None:
            same_cluster(self.cluster_id, now, pipeline)
            same_topics(self.topic_ids, now, pipeline)


def refusal(check: Callable[[], None]) -> str:
    """The reason for which a check refuses the destination; empty if it does not."""
    try:
        check()
    except TableMismatch as error:
        return error.message
    return ""


@dataclass(frozen=True)
class SinkFacts:
    """The present state of the destination, and the types of its columns.

    Attributes:
        kind: ``table`` or ``topic``.
        endpoint: the server.
        table: the table's or the topic's name.
        exists: True if it exists.
        columns: name, the rows' Arrow type, and the destination: the table's type (as created if it
            is missing), or the part of a Kafka record.
    """

    kind: str
    endpoint: str
    table: str
    exists: bool
    columns: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Connections:
    """The maximum number of database connections of a run."""

    tasks: int
    driver: int
    room: Room | None

    @property
    def total(self) -> int:
        """Tasks and driver."""
        return self.tasks + self.driver


@dataclass(frozen=True)
class TopicPlan:
    """A topic of the destination.

    Attributes:
        name: its name.
        exists: False: the first start creates it.
        partitions, replicas, min_insync: its layout, or that with which it is created; None: not
            known.
    """

    name: str
    exists: bool
    partitions: int | None
    replicas: int | None
    min_insync: int | None


@dataclass(frozen=True)
class SinkPlan:
    """The result of inspecting the destination.

    Attributes:
        facts: None if no server answered.
        connections: None if they need not be counted.
        statements: DDL, or commands of Kafka's tools, that create missing objects.
        acls: ``kafka-acls`` commands.
        topics: the topics that hold state, and those that the first start creates.
    """

    facts: SinkFacts | None = None
    connections: Connections | None = None
    statements: tuple[str, ...] = ()
    acls: tuple[str, ...] = ()
    topics: tuple[TopicPlan, ...] = ()


NO_COLUMNS = pa.schema([])
"""The columns of rows that are not known."""


class Destination(Protocol):
    """A kind of sink, as configured by a pipeline."""

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns that reach the sink for a row transform with ``schema``.

        Raises:
            ConfigError: they clash with columns that the sink adds.
        """

    def sink(self, schema: pa.Schema = NO_COLUMNS) -> Sink:
        """The sink for rows of these columns; without columns for operations on the ledger only."""

    def form(self, schema: pa.Schema) -> Form:
        """What records become, for rows of these columns.

        Raises:
            TableMismatch: the destination does not accept the rows.
        """

    def look(self) -> LedgerState:
        """Read the ledger; empty if it was never created.

        Raises:
            WrongInput: the server refuses the login.
            Unavailable: no answer.
        """

    def wrote(self) -> str:
        """The place of rows that may be the pipeline's; empty if there are none, or none can be
        asked for. Called for a ledger elsewhere that is empty. Raises the errors of :meth:`look`.
        """

    def check(self, schema: pa.Schema) -> None:
        """Refuse a destination that does not accept the rows; writes nothing.

        Raises:
            TableMismatch, ConfigError: the error names the mismatch.
        """

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first pending, or discarded, dead letters, and their total number.

        Raises the errors of :meth:`look`, and for ``discarded`` those of :meth:`discarding`.
        """

    def discarding(self) -> Discard:
        """A function that removes the content of pending dead letters, in one transaction; each
        still accounts for its record.

        It takes a function that chooses dead letters, called once for each, whether to write:
        otherwise they are only counted, and a function that is called when all are chosen, before
        the commit: if it raises, nothing is discarded. It returns their masked reasons with the
        number of dead letters of each, and raises PositionMoved or Unavailable if it must be
        repeated. A dead letter that a replay takes at the same time is replayed or discarded, not
        both.

        Raises:
            ConfigError: dead letters can't be changed there; the error names the way out.
        """

    @property
    def late_delete(self) -> str | None:
        """The reason why a tombstone among the dead letters is not replayed; None if it is."""

    def check_replay(self) -> None:
        """Refuse a replay if old records would replace newer ones; writes nothing.

        Raises:
            ConfigError: the error names the setting, and the way out.
        """

    def replaying(self, schema: pa.Schema) -> AbstractContextManager[ReplaysDeadLetters]:
        """Begin a replay of the present dead letters, for rows of these columns.

        Raises:
            TableMismatch: the destination does not accept the rows.
        """

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> Mapping[str, str]:
        """Refuse a repair or backfill, for rows of these columns; writes nothing. What a first
        start creates may be missing.

        Returns:
            The kinds of damage that can't be repaired (lost, duplicated, altered, unexpected), each
                with the reason.

        Raises:
            ConfigError: the destination can't tell which rows a record has produced, or can't
                remove them.
            WrongInput: a rewrite would do something else there.
        """

    def rewriting(
        self, schema: pa.Schema, kind: RewriteKind
    ) -> AbstractContextManager[RewritesRecords | RewritesTogether]:
        """Begin a repair or backfill that :meth:`check_rewrite` permits.

        Raises:
            TableMismatch: the destination does not accept the rows.
        """

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect the destination as far as possible, without columns the ledger.

        Problems and notes go to ``inspection``.
        """


@dataclass(frozen=True)
class Room:
    """Connections of a database.

    Attributes:
        limit: the maximum for this user.
        used: the present number, of all users.
    """

    limit: int
    used: int
