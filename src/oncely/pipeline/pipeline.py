"""A pipeline as a value: the settings, and the operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Literal

from oncely.config import PipelineSettings, load
from oncely.kafka.client import at_start
from oncely.pipeline.parts import Parts, hiding

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import SparkSession

    from oncely.audit.report import Finding
    from oncely.audit.report import Report as AuditReport
    from oncely.core import events
    from oncely.core.progress import RunResult
    from oncely.core.ranges import OffsetRange, TopicPartition
    from oncely.kafka.reset import Verb
    from oncely.pipeline.offsets import PartitionOffsets, Reset
    from oncely.pipeline.planning import Plan
    from oncely.pipeline.rejects import Discarded, RejectFilter, Rejects
    from oncely.pipeline.repair import Repaired
    from oncely.pipeline.running import Http
    from oncely.pipeline.standby import OnFenced
    from oncely.pipeline.status import Status
    from oncely.threads import StopSignal
    from oncely.verify.report import Report as VerifyReport


def _ignore(_: events.Event) -> None:
    """The listener that ignores events."""


class Pipeline(Parts):
    """Moves records from Kafka into a SQL table, topics or files, exactly once.

        from oncely import Pipeline

        pipeline = Pipeline.from_file("flights.toml")
        if pipeline.run(until="latest"):        # the records of now are committed
            print(pipeline.status().lag)
        found = pipeline.audit().findings       # what is lost, duplicated, altered, unexpected
        pipeline.repair(found, execute=True)

    All methods refuse wrong arguments by :class:`oncely.ConfigError`, and hide the secrets of the
    pipeline in the errors that they raise.

    Args:
        settings: the settings of a pipeline file: :func:`oncely.load`, :func:`oncely.parse`.
    """

    def __init__(self, settings: PipelineSettings) -> None:
        super().__init__(settings)

    @classmethod
    def from_file(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file.

        Raises:
            ConfigError: names every invalid key, and the way out.
        """
        return cls(load(Path(path)))

    def __repr__(self) -> str:
        source, sink = self.settings.source, self.settings.sink
        reads = shorten(", ".join(source.topics), 80, placeholder=" …")
        return f"<Pipeline {self.settings.name!r}: {reads} into {sink.kind}>"

    @hiding
    def run(
        self,
        until: Literal["latest"] | None = None,
        *,
        stop: StopSignal | None = None,
        listener: events.Listener = _ignore,
        events: str | Path | None = None,
        http: Http | None = None,
        on_fenced: OnFenced = "end",
        spark: SparkSession | None = None,
    ) -> RunResult:
        """Run until stopped, or until the present records are committed.

        Args:
            until: ``"latest"`` ends when the last stable offsets of the start are committed.
            stop: ends the run, from another thread or a signal handler.
            listener: called with the events of the run.
            events: a file to which they are appended as JSON lines (docs/events.md).
            http: the address of its probes for a supervisor (docs/probes.md); None: there are none.
            on_fenced: ``"wait"``: stand by while another replica runs, and take over when it has
                gone; ``"end"``: take over at once, and end when a newer run takes over.
            spark: the session. By default that of this process; if there is none, a new one, which
                is stopped at the end.

        Returns:
            Counts, and how it ended: true in a condition if it ended by itself, with all of these
            records committed, and false if it was stopped before.

        Raises:
            ConfigError: names a wrong argument; so do all methods.
            WrongInput: the pipeline cannot run as configured; nothing was written.
            Fenced: a newer run has taken over.
            Stopped: an operator's decision is needed.
            Unavailable: a server did not return within the retries.
        """
        from oncely.pipeline.running import RunOptions, run
        from oncely.threads import StopSignal

        stop = stop or StopSignal()
        return run(self, RunOptions(until, stop, listener, events, http, on_fenced, spark))

    @hiding
    def work(
        self,
        until: Literal["latest"] | None = None,
        *,
        stop: StopSignal | None = None,
        listener: events.Listener = _ignore,
        events: str | Path | None = None,
        http: Http | None = None,
        on_fenced: OnFenced = "end",
    ) -> RunResult:
        """Work as a member of a consumer group, without Spark, until stopped.

        The other members are other processes that do the same. With ``until`` the records of other
        members count, too. Arguments and result are those of :meth:`run`, and:

        Args:
            on_fenced: ``"wait"``: stand by while replicas of a run on Spark are there.

        Raises the errors of :meth:`run`.
        """
        from oncely.pipeline.running import RunOptions
        from oncely.pipeline.working import work
        from oncely.threads import StopSignal

        stop = stop or StopSignal()
        return work(self, RunOptions(until, stop, listener, events, http, on_fenced))

    # -- asking and mending ----------------------------------------------------------------

    @hiding
    @at_start()
    def status(self) -> Status:
        """Position, end and lag of every partition, rejects, epoch; writes nothing.

        Raises:
            WrongInput: a topic is missing, or a server refuses the login.
            Unavailable: a server does not answer.
        """
        from oncely.pipeline import status

        return status.status(self)

    @hiding
    @at_start()
    def plan(self, *, use_spark: bool | None = None, sample: int = 0) -> Plan:
        """Check the pipeline without writing, and describe the effects of a run.

        Args:
            use_spark: start Spark to get a Spark transform's columns and to check the imports of
                the executors; by default only if needed.
            sample: the number of records to decode and transform, for ``Plan.sample``.

        Problems of the pipeline are not raised, but returned in ``Plan.problems``.
        """
        from oncely.pipeline import planning

        return planning.plan(self, use_spark, sample)

    @hiding
    @at_start()
    def partition_offsets(self) -> list[PartitionOffsets]:
        """First offset, position, end and mirrored offset of every partition.

        Raises the errors of :meth:`status`.
        """
        from oncely.pipeline import offsets

        return offsets.partition_offsets(self)

    @hiding
    def reset(
        self,
        verb: Verb,
        topics: Sequence[str] = (),
        *,
        execute: bool = False,
        events: str | Path | None = None,
    ) -> Reset:
        """Plan new positions and, with ``execute``, take a new epoch and write them.

        Args:
            verb: where to: :class:`oncely.Verb`.
            topics: ``topic`` or ``topic:0,1``: only these partitions.
            execute: write; otherwise a dry run.
            events: the event log of the pipeline, to which an executed reset is appended.

        Raises:
            WrongInput: no such partition, or the ledger belongs to another topic or cluster.
            Fenced: another run opened at the same moment.
            Unavailable: a server does not answer.
        """
        from oncely.pipeline import offsets

        return offsets.reset(self, verb, topics, execute=execute, path=events)

    @hiding
    def rejects(
        self, limit: int = 100, which: RejectFilter | None = None, *, discarded: bool = False
    ) -> Rejects:
        """The first dead letters, their reasons, and their total number.

        Args:
            limit: the number of dead letters to return.
            which: only dead letters that it chooses.
            discarded: those that were discarded, instead of those that are pending.

        Raises the errors of :meth:`status`, and for ``discarded`` those of :meth:`discard`.
        """
        from oncely.pipeline import rejects

        return rejects.rejects(self, limit, which, discarded=discarded)

    @hiding
    def discard(
        self, which: RejectFilter, *, execute: bool = False, shown: str | None = None
    ) -> Discarded:
        """Remove key, value and headers of pending dead letters, in one transaction.

        A discarded dead letter is not replayed. Topic, partition, offset, timestamp and the reason,
        without quoted values and numbers, remain: audits count it as before.

        Args:
            which: only dead letters that it chooses.
            execute: write; otherwise a dry run.
            shown: that of a dry run: discard the dead letters that it has found, or nothing.

        Raises:
            ConfigError: the destination can't change dead letters (topics, files).
            WrongInput: others are chosen now than are ``shown``.
            Unavailable: the server did not return.
        """
        from oncely.pipeline import rejects

        return rejects.discard(self, which, execute=execute, shown=shown)

    @hiding
    def audit(
        self,
        *,
        limit: int = 100_000,
        before: datetime | None = None,
        download: bool = False,
    ) -> AuditReport:
        """Compare the topics with the destination. Writes nothing; the pipeline may run.

        Args:
            limit: the findings of each kind that the report lists.
            before: compare only records before this time.
            download: read the rows of files and Delta tables, whose number is compared otherwise.

        Raises:
            ConfigError: this pipeline can't be audited.
            WrongInput: a topic or table is missing, or may not be read.
            Unavailable: a server does not answer.
        """
        from oncely.audit import audit

        return audit(self, limit=limit, until=before, download=download)

    @hiding
    def verify(self, logs: Sequence[str | Path] = ()) -> VerifyReport:
        """Check that every step of ledger, manifest and event logs follows from the one before it.

        A broken step is no damage to a record: :meth:`audit` finds what :meth:`repair` can mend.

        Args:
            logs: the event logs of the pipeline's runs.

        Raises:
            WrongInput: a log or the ledger can't be read.
            Unavailable: a server does not answer.
        """
        from oncely.verify.check import verify

        return verify(self.settings, [Path(one) for one in logs])

    @hiding
    def repair(
        self,
        found: Sequence[Finding],
        *,
        execute: bool = False,
        max_removed: int = 100,
        progress: Callable[[int], None] = lambda _: None,
        events: str | Path | None = None,
    ) -> Repaired:
        """Write lost records again, and remove or replace what must not be there.

        Args:
            found: the findings of :meth:`audit`: all, or some of them.
            execute: write; otherwise a dry run.
            max_removed: the rows, and the dead letters, that may be removed without a replacement.
            progress: called with the number of offsets after every transaction.
            events: the event log of the pipeline, to which executed transactions are appended.

        Raises:
            WrongInput: the destination can't be repaired, the findings are of another state, or
                more would be removed; nothing was written.
            Unavailable: the server did not return.
        """
        from oncely.pipeline import repair as repairs

        return repairs.repair(
            self, found, execute=execute, max_removed=max_removed, progress=progress, events=events
        )

    @hiding
    def backfill(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        *,
        execute: bool = False,
        progress: Callable[[int], None] = lambda _: None,
        events: str | Path | None = None,
    ) -> Repaired:
        """Replace what ranges have produced by what the present transform makes of their records.

        Args:
            ranges: offsets by partition; what is beyond the position is left to the pipeline.
            execute, progress, events: as in :meth:`repair`.

        Raises:
            DataLost: the topic no longer has all of the records.
            WrongInput: the destination can't be backfilled.
            Stopped: the pipeline was reset meanwhile.
            Unavailable: the server did not return.
        """
        from oncely.pipeline import repair as repairs

        return repairs.backfill(self, ranges, execute=execute, progress=progress, events=events)

    @hiding
    def replay(
        self,
        *,
        spark: SparkSession | None = None,
        progress: Callable[[int, int], None] = lambda _, __: None,
    ) -> tuple[int, int]:
        """Decode all dead letters again and write the valid ones.

        Args:
            spark: a session for a Spark transform; a new one by default.
            progress: called with (moved, kept) after every transaction.

        Returns:
            The numbers of moved and of remaining rejects.

        Raises:
            WrongInput: an upsert without a version column or a compacted topic, where old records
                would replace newer ones; or the destination does not accept the rows.
            Stopped: a row of the Spark transform cannot be written.
            Unavailable: the server did not return.
        """
        from oncely.pipeline import rejects

        return rejects.replay(self, spark=spark, progress=progress)
