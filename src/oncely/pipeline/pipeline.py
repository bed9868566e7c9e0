"""A pipeline as a value: the settings, the parts created from them, and the operations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import pyarrow as pa

from oncely.clients.delta import DeltaConnect
from oncely.clients.delta import connect as connect_delta
from oncely.clients.files.store import Connect as FilesConnect
from oncely.clients.files.store import connect as connect_files
from oncely.clients.kafka import properties
from oncely.clients.kafka.client import at_start, make
from oncely.clients.per_process import said
from oncely.clients.sql.connection import Connect, connect
from oncely.commit.run import Interval
from oncely.config import (
    DeltaSinkSettings,
    FilesSinkSettings,
    HandlersSinkSettings,
    PipelineSettings,
    SqlSinkSettings,
    load,
)
from oncely.config.arguments import checked
from oncely.core import events
from oncely.errors import ConfigError, OncelyError, SchemaChanged
from oncely.extras import require
from oncely.ledgers.topic.cluster import Connect as KafkaConnect
from oncely.pipeline.sql_destination import SqlDestination
from oncely.pipeline.stored_destination import store_of
from oncely.runtimes.stop import StopSignal
from oncely.secrets import Secrets, scope
from oncely.sources.kafka import KafkaSource
from oncely.sources.start import Moment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.commit.delivery import Order
    from oncely.core.ranges import OffsetRange, TopicPartition
    from oncely.decode.base import Decoder
    from oncely.ledgers.stores.ledger import StoreLedger
    from oncely.pipeline.destination import Destination, LedgerState
    from oncely.pipeline.expected import PipelineExpected
    from oncely.pipeline.offsets import PartitionOffsets, Reset
    from oncely.pipeline.planning import Plan
    from oncely.pipeline.rejects import Discarded, RejectFilter, Rejects
    from oncely.pipeline.repair import Found, Repaired
    from oncely.pipeline.running import Http
    from oncely.pipeline.standby import OnFenced
    from oncely.pipeline.status import Status
    from oncely.runtimes.batches.commit import PartitionCommit, RangeCommit
    from oncely.runtimes.chunks import Bounds
    from oncely.runtimes.dropping import Drops
    from oncely.runtimes.jobs.base import Jobs
    from oncely.runtimes.row_transform import RowTransform
    from oncely.runtimes.spark.batch_commit import BatchCommit, Transform
    from oncely.sinks.base import Sink
    from oncely.sinks.handlers.sink import Handler
    from oncely.sources.reset import Verb

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def _ignore(_: events.Event) -> None:
    """The listener that ignores events."""


def _hiding(method: Callable[Concatenate[Pipeline, P], T]) -> Callable[Concatenate[Pipeline, P], T]:
    """Refuse wrong arguments, and redact the pipeline's secrets in errors that leave ``method``."""
    told = checked(method)

    @wraps(method)
    def wrapped(self: Pipeline, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with scope(self.secrets):
            try:
                return told(self, *args, **kwargs)
            except OncelyError as error:
                error.hide(self.secrets)  # it may come from a thread or an executor
                raise

    return wrapped


@dataclass(frozen=True)
class Pipeline:
    """Moves records from Kafka into a SQL table, topics or files, exactly once.

    Attributes:
        settings: the settings of the pipeline file.
        connect: opens database sessions; tests inject faults here.
        kafka_connect: creates the clients of a Kafka or files sink; tests inject faults here.
        files_connect: opens the root of a files sink; tests inject faults here.
        delta_connect: loads and commits to a Delta table; tests inject faults here.
        handlers: the functions of a ``handlers`` sink, by topic; see :class:`oncely.Worker`.
        drops: likewise, functions that drop records.
        threads: the number of threads of each topic's partitions, for topics with several.
    """

    settings: PipelineSettings
    connect: Connect = connect
    kafka_connect: KafkaConnect = make
    files_connect: FilesConnect = connect_files
    delta_connect: DeltaConnect = connect_delta
    handlers: Mapping[str, Handler] | None = None
    drops: Mapping[str, Drops] | None = None
    threads: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file.

        Raises:
            ConfigError: names every invalid key, and the way out.
        """
        return cls(load(Path(path)))

    @cached_property
    def secrets(self) -> Secrets:
        """The secret values, which must not be in any text about this pipeline."""
        kafka = self.settings.source.kafka_properties()
        return self.settings.secrets | properties.secrets(kafka)

    # -- parts -----------------------------------------------------------------------------

    @cached_property
    def source(self) -> KafkaSource:
        """The topics."""
        source = self.settings.source
        return KafkaSource(source.brokers, source.topics, source.kafka_properties())

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder of records; those of ``filter.drop`` are dropped."""
        from oncely.pipeline.decoding import decoder_of
        from oncely.runtimes.dropping import Condition, DroppingDecoder, Functions

        settings, rounding = self.settings, self.settings.sink.rounding == "allow"
        decoder = decoder_of(settings.decode, settings.source.topics, rounding=rounding)
        if self.drops:
            decoder = DroppingDecoder(decoder, Functions(self.drops))
        if self.settings.filter.drop is None:
            return decoder
        drop = Condition(self.settings.filter.drop)
        drop.check()
        return DroppingDecoder(decoder, drop)

    def with_newest_schema(self, run: Callable[[], T]) -> T:
        """Run; when records of a newer schema have come, begin again as a restart does.

        Raises:
            WrongInput: the destination does not accept the columns of the newest schema.
            The errors of ``run``, but for :class:`SchemaChanged`.
        """
        while True:
            try:
                return run()
            except SchemaChanged as changed:
                log.warning("%s: beginning again", changed.message)
                self.__dict__.pop("decoder", None)
                self.preflight()

    @property
    def expiring_decoder(self) -> Decoder:
        """The decoder of a run, which also drops records that have expired by now."""
        from oncely.runtimes.dropping import DroppingDecoder

        expire = self.settings.filter.expire
        return self.decoder if expire is None else DroppingDecoder(self.decoder, expire=expire)

    @property
    def spark_path(self) -> str | None:
        """``package.module:function`` of the Spark transform, or None."""
        transform = self.settings.transform
        return transform.spark if transform is not None else None

    @cached_property
    def spark_transform(self) -> Transform | None:
        """The Spark transform, from DataFrame to DataFrame, or None.

        Raises:
            ConfigError: the function cannot be imported.
        """
        from oncely.runtimes.row_transform import load_function

        path = self.spark_path
        return load_function("transform.spark", path) if path is not None else None

    @cached_property
    def row_transform(self) -> RowTransform:
        """The row transform; the identity if there is none. Only tables have a type for JSON."""
        from oncely.runtimes.row_transform import KeepsKeys, PlainTexts, Unchanged

        made, sink = self._row_transform(), self.settings.sink
        if (keys := self.settings.tombstone_keys) and not isinstance(made, Unchanged):
            made = KeepsKeys(made, keys, "sink.key" if hasattr(sink, "key") else "sink.keys")
        return made if sink.kind == "sql" else PlainTexts(made)

    def _row_transform(self) -> RowTransform:
        from oncely.runtimes.row_transform import PythonTransform, SqlTransform, Unchanged

        transform = self.settings.transform
        if transform is not None and transform.sql is not None:
            return SqlTransform(transform.sql)
        if transform is not None and transform.python is not None:
            return PythonTransform(transform.python)
        return Unchanged()

    @_hiding
    def row_schema(self, spark: SparkSession | None = None) -> pa.Schema:
        """The columns that reach the sink; for a Spark transform a session is needed.

        Raises:
            ConfigError: the transform fails on the decoder's columns.
        """
        if self.spark_transform is not None:
            return self._made_by_spark(spark or self.start_spark(), self.spark_transform)
        return self.destination.row_schema(self.transformed_schema())

    def transformed_schema(self) -> pa.Schema:
        """The columns of the rows of a row transform.

        Raises:
            ConfigError: the transform fails on the decoder's columns.
        """
        return self.row_transform.output(self.decoder.schema)

    def _made_by_spark(self, spark: SparkSession, transform: Transform) -> pa.Schema:
        from oncely.pipeline.running import spark_has_died
        from oncely.runtimes.spark.batch_commit import output_schema

        try:
            return output_schema(spark, transform, self.decoder.schema)
        except OncelyError:
            raise
        except Exception as error:  # the user's own code: it may raise any exception
            if spark_has_died(error):
                raise
            text = said(error).splitlines()[0]
            raise ConfigError(
                "transform.spark",
                f"{self.spark_path} fails on a DataFrame without rows: {text}",
                way_out="it gets the columns of decode: "
                + ", ".join(f"{one.name} {one.type}" for one in self.decoder.schema),
            ) from None

    def require_packages(self) -> None:
        """Refuse a sink or a store whose packages are not installed; asks no server.

        Raises:
            ConfigError: names the extra to install.
        """
        sink = self.settings.sink
        sqlite = isinstance(sink, SqlSinkSettings) and sink.dialect == "sqlite"
        if isinstance(sink, SqlSinkSettings | HandlersSinkSettings) and not sqlite:
            require("sql", "sink.url", "PostgreSQL")
        elif sink.kind in ("files", "delta"):
            require(sink.kind, "sink.kind", sink.kind)
        self.store  # noqa: B018 - made here for the first time, and not connected

    @cached_property
    def destination(self) -> Destination:
        """The destination, by the kind of the sink.

        Its module is imported here: commands of other kinds need not wait for its packages.
        """
        self.require_packages()
        given = self.settings.sink
        inner: Destination
        if isinstance(given, SqlSinkSettings):
            inner = SqlDestination(self.settings, given, self.connect)
        elif isinstance(given, HandlersSinkSettings):
            from oncely.pipeline.handlers_destination import HandlersDestination

            name = self.settings.name
            inner = HandlersDestination(name, given, self.handlers, self.connect, self.threads)
        elif isinstance(given, FilesSinkSettings):
            from oncely.pipeline.files_destination import FilesDestination

            inner = FilesDestination(
                self.settings, given, self.source, self.kafka_connect, self.files_connect
            )
        elif isinstance(given, DeltaSinkSettings):
            from oncely.pipeline.delta_destination import DeltaDestination

            inner = DeltaDestination(self.settings, given, self.files_connect, self.delta_connect)
        else:
            from oncely.pipeline.kafka_destination import KafkaDestination

            inner = KafkaDestination(self.settings, given, self.source, self.kafka_connect)
        if self.store is None:
            return inner
        from oncely.pipeline.stored_destination import StoredDestination

        return StoredDestination(
            self.settings, inner, self.store.store, self.source, self.mirror_group
        )

    @cached_property
    def store(self) -> StoreLedger | None:
        """The ledger of the positions, if it is not the sink's own.

        Raises:
            ConfigError: the client's package is not installed.
        """
        from oncely.ledgers.stores.ledger import StoreLedger

        store = store_of(self.settings.offsets, self.settings.name, self.source)
        return None if store is None else StoreLedger(store, self.settings.name)

    def sink(self, schema: pa.Schema) -> Sink:
        """The destination and the ledger beside it, for rows of these columns."""
        return self.destination.sink(schema)

    @property
    def mirror_group(self) -> str | None:
        """The group to which positions are mirrored; None if they are not.

        If the group itself is the store of the positions, a mirror would erase their metadata.
        """
        store = self.settings.offsets.store
        in_topic = self.settings.sink.kind in ("kafka", "files")
        in_group = store == "kafka" or (store == "ledger" and in_topic)
        return None if in_group else self.settings.mirror_group

    @_hiding
    def start_spark(self, log: IO[bytes] | None = None) -> SparkSession:
        """The Spark session of the pipeline.

        Args:
            log: the file of Spark's own output; None for stderr.
        """
        from oncely.runtimes.spark import session

        spark = self.settings.spark
        return session.start(self.settings.name, spark.master, spark.spark_conf(), log=log)

    def batches(self, jobs: Jobs) -> PartitionCommit | BatchCommit | RangeCommit:
        """The commit of batches, by the kind of the transform and of the sink."""
        from oncely.runtimes.batches.commit import PartitionCommit, RangeCommit
        from oncely.runtimes.spark.batch_commit import BatchCommit
        from oncely.runtimes.spark.jobs import SparkJobs

        spark = jobs.session if isinstance(jobs, SparkJobs) else None
        schema, budget = self.row_schema(spark), self.settings.sink.max_rejects
        common: dict[str, Any] = {
            "jobs": jobs,
            "sink": self.sink(schema),
            "source": self.source,
            "decoder": self.expiring_decoder,
            "topics": tuple(self.settings.source.topics),
            "max_rejects_share": budget.share,
            "max_rejects_count": budget.count,
            "store": self.store,
            "order": self._order,
            "interval": self._interval,
        }
        if self.spark_transform is not None:
            return BatchCommit(transform=self.spark_transform, **common)
        if isinstance(self.settings.sink, FilesSinkSettings):
            layout = self.settings.sink.layout
            return RangeCommit(transform=self.row_transform, layout=layout, **common)
        if isinstance(self.settings.sink, DeltaSinkSettings):
            return RangeCommit(transform=self.row_transform, **common)
        return PartitionCommit(transform=self.row_transform, bounds=self._bounds(), **common)

    @property
    def _order(self) -> Order:
        """The order in which records and positions take effect."""
        orders: dict[str, Order] = {
            "exactly_once": "together",
            "at_most_once": "position_first",
        }
        return orders.get(self.settings.delivery, "records_first")

    @property
    def _interval(self) -> Interval | None:
        """The interval of the position timer, if there is one."""
        given = self.settings.commit_interval
        if self.settings.delivery != "none":
            return None
        return Interval() if given is None else Interval(given.seconds, given.records)

    def _bounds(self) -> Bounds:
        """The maximum size of one commit of a task."""
        from oncely.runtimes.chunks import Bounds

        interval, usual = self.settings.commit_interval, Bounds()
        if interval is None or self.settings.delivery == "none":
            return usual
        return Bounds(
            min(interval.records or usual.records, usual.records),
            usual.bytes,
            min(interval.seconds or usual.seconds, usual.seconds),
        )

    @_hiding
    def preflight(self) -> None:
        """Check the pipeline before Spark's start, which takes seconds; writes nothing.

        Raises:
            WrongInput: a topic is missing, the table does not accept the rows, or similar.
            Unavailable: a server does not answer.
        """
        self.require_packages()
        self.source.check_properties()
        self.source.identity()
        if self.spark_transform is None:
            self.destination.check(self.row_schema())
        self.refuse_keep_source()
        self.refuse_future_start()

    def refuse_future_start(self, known: LedgerState | None = None) -> None:
        """Refuse a first start at a time that has not come, which would begin at the end.

        Args:
            known: the state of the ledger; read if it is needed.

        Raises:
            ConfigError: ``source.start``.
        """
        start = self.settings.source.start
        if not isinstance(start, Moment) or start.timestamp_ms <= time.time() * 1000:
            return
        if not (known or self.destination.look()).positions:
            raise ConfigError(
                "source.start",
                f"{start} is in the future: a first start would begin at the end of the topics",
                way_out='write "latest" if that is meant, or a time that has passed',
            )

    def refuse_keep_source(self) -> None:
        """Refuse ``keep_source`` for rows without an origin.

        Raises:
            ConfigError: ``sink.keep_source`` with a Spark transform.
        """
        given = self.settings.sink
        without = FilesSinkSettings | HandlersSinkSettings
        keeps = not isinstance(given, without) and given.keep_source
        if self.spark_path is not None and keeps:
            raise ConfigError(
                "sink.keep_source",
                "a row of a Spark transform comes from no single record",
                way_out="remove it; where a row needs its origin, use transform.sql or .python",
            )

    @property
    def expected(self) -> PipelineExpected | None:
        """Recomputes the rows of records, for an audit; None with a Spark transform, whose rows
        belong to no single record, and if records expire: when a record was read is not stored."""
        from oncely.pipeline.expected import PipelineExpected

        settings = self.settings
        unknown = settings.by_spark or settings.filter.expire is not None
        return None if unknown else PipelineExpected(self)

    # -- running ---------------------------------------------------------------------------

    @_hiding
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
    ) -> bool:
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
            True if it ended by itself, with all of these committed; False if it was stopped before.

        Raises:
            ConfigError: names a wrong argument; so do all methods.
            WrongInput: the pipeline cannot run as configured; nothing was written.
            Fenced: a newer run has taken over.
            Stopped: an operator's decision is needed.
            Unavailable: a server did not return within the retries.
        """
        from oncely.pipeline import running

        return running.run(
            self, until, stop or StopSignal(), listener, spark, events, http, on_fenced
        )

    @_hiding
    def work(
        self,
        until: Literal["latest"] | None = None,
        *,
        stop: StopSignal | None = None,
        listener: events.Listener = _ignore,
        events: str | Path | None = None,
        http: Http | None = None,
        on_fenced: OnFenced = "end",
    ) -> bool:
        """Work as a member of a consumer group, without Spark, until stopped.

        The other members are other processes that do the same. With ``until`` the records of other
        members count, too. Arguments and result are those of :meth:`run`, and:

        Args:
            on_fenced: ``"wait"``: stand by while replicas of a run on Spark are there.

        Raises the errors of :meth:`run`.
        """
        from oncely.pipeline import working

        return working.work(self, until, stop or StopSignal(), listener, events, http, on_fenced)

    # -- asking and mending ----------------------------------------------------------------

    @_hiding
    @at_start()
    def status(self) -> Status:
        """Position, end and lag of every partition, rejects, epoch; writes nothing.

        Raises:
            WrongInput: a topic is missing, or a server refuses the login.
            Unavailable: a server does not answer.
        """
        from oncely.pipeline import status

        return status.status(self)

    @_hiding
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

    @_hiding
    @at_start()
    def partition_offsets(self) -> list[PartitionOffsets]:
        """First offset, position, end and mirrored offset of every partition.

        Raises the errors of :meth:`status`.
        """
        from oncely.pipeline import offsets

        return offsets.partition_offsets(self)

    @_hiding
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
            verb: one of :mod:`oncely.sources.reset`.
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

    @_hiding
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

    @_hiding
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

    @_hiding
    def repair(
        self,
        found: Sequence[Found],
        *,
        execute: bool = False,
        max_removed: int = 100,
        progress: Callable[[int], None] = lambda _: None,
        events: str | Path | None = None,
    ) -> Repaired:
        """Write lost records again, and remove or replace what must not be there.

        Args:
            found: the findings of an audit.
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

    @_hiding
    def end_refusal(self, refused: str) -> None:
        """Accept a destination that the next start would refuse, and to which a repair had nothing
        to write.

        Args:
            refused: the reason, read before an audit that is clean.
        """
        from oncely.sinks.delta.rewrite import DeltaRewrites

        with self.destination.rewriting(self.row_schema()) as rewrites:
            if isinstance(rewrites, DeltaRewrites):
                rewrites.end_refusal(refused)

    @_hiding
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

    @_hiding
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
