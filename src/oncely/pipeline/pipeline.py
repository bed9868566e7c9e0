"""A pipeline as a value: settings become parts, and parts are run, asked or reset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, cast

import pyarrow as pa

from oncely.clients.files.filesystem import Connect as FilesConnect
from oncely.clients.files.filesystem import connect as connect_files
from oncely.clients.kafka import security
from oncely.clients.kafka.client import make
from oncely.clients.sql.connection import Connect, connect
from oncely.commit.delivery import Order
from oncely.commit.timer import Interval
from oncely.config import FilesSinkSettings, PipelineSettings, SqlSinkSettings, load
from oncely.core import events
from oncely.decode.base import Decoder
from oncely.errors import ConfigError, OncelyError
from oncely.ledgers.stores.ledger import StoreLedger
from oncely.ledgers.topic.cluster import Connect as KafkaConnect
from oncely.pipeline import offsets, planning, rejects, running, status
from oncely.pipeline.decoding import decoder_of
from oncely.pipeline.destination import Destination
from oncely.pipeline.files_destination import FilesDestination
from oncely.pipeline.kafka_destination import KafkaDestination
from oncely.pipeline.offsets import PartitionOffsets, Reset
from oncely.pipeline.planning import Plan
from oncely.pipeline.rejects import Rejects
from oncely.pipeline.sql_destination import SqlDestination
from oncely.pipeline.status import Status
from oncely.pipeline.stored_destination import StoredDestination
from oncely.pipeline.stores import store_of
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.row_transform import (
    PythonTransform,
    RowTransform,
    SqlTransform,
    Unchanged,
    load_function,
)
from oncely.runtimes.spark import session
from oncely.runtimes.spark.batch_commit import BatchCommit, Transform, output_schema
from oncely.runtimes.spark.partition_commit import PartitionCommit
from oncely.runtimes.spark.range_commit import RangeCommit
from oncely.runtimes.stop import StopSignal
from oncely.secrets import Secrets, scope
from oncely.sinks.base import Sink
from oncely.sources.kafka import KafkaSource
from oncely.sources.reset import Verb

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


F = TypeVar("F", bound=Callable[..., Any])


def _ignore(_: events.Event) -> None:
    """Nobody listens."""


def _hiding(method: F) -> F:
    """Keep the pipeline's secrets out of the texts of errors that leave ``method``."""

    @wraps(method)
    def wrapped(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        with scope(self.secrets):
            try:
                return method(self, *args, **kwargs)
            except OncelyError as error:
                error.hide(self.secrets)  # it may come from a thread or an executor
                raise

    return cast("F", wrapped)


@dataclass(frozen=True)
class Pipeline:
    """Moves records from Kafka into a SQL table, topics or files, exactly once.

    Attributes:
        settings: what the pipeline file says.
        connect: how database sessions are opened; a test puts faults here.
        kafka_connect: how the clients of a Kafka or files sink are made; a test puts faults here.
        files_connect: how a files sink reaches its root; a test puts faults here.
    """

    settings: PipelineSettings
    connect: Connect = connect
    kafka_connect: KafkaConnect = make
    files_connect: FilesConnect = connect_files

    @classmethod
    def from_file(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file.

        Raises:
            ConfigError: names every key that is wrong, and the way out.
        """
        return cls(load(Path(path)))

    @cached_property
    def secrets(self) -> Secrets:
        """The values that no text about this pipeline may show."""
        kafka = self.settings.source.kafka_properties()
        return self.settings.secrets | security.secrets(kafka)

    # -- parts -----------------------------------------------------------------------------

    @cached_property
    def source(self) -> KafkaSource:
        """The topics."""
        source = self.settings.source
        return KafkaSource(source.brokers, source.topics, source.kafka_properties())

    @cached_property
    def decoder(self) -> Decoder:
        """Bytes to rows."""
        return decoder_of(self.settings.decode, self.settings.source.topics)

    @property
    def spark_path(self) -> str | None:
        """``package.module:function`` of the Spark transform, when there is one."""
        transform = self.settings.transform
        return transform.spark if transform is not None else None

    @cached_property
    def spark_transform(self) -> Transform | None:
        """DataFrame to DataFrame.

        Raises:
            ConfigError: the function can't be imported.
        """
        path = self.spark_path
        return load_function("transform.spark", path) if path is not None else None

    @cached_property
    def row_transform(self) -> RowTransform:
        """Rows to rows; unchanged where there is none."""
        transform = self.settings.transform
        if transform is not None and transform.sql is not None:
            return SqlTransform(transform.sql)
        if transform is not None and transform.python is not None:
            return PythonTransform(transform.python)
        return Unchanged()

    @_hiding
    def row_schema(self, spark: SparkSession | None = None) -> pa.Schema:
        """The columns that reach the sink; a Spark transform needs a session to tell.

        Raises:
            ConfigError: the transform can't work on the decoder's columns.
        """
        if self.spark_transform is not None:
            return self._made_by_spark(spark or self.start_spark(), self.spark_transform)
        return self.destination.row_schema(self.row_transform.output(self.decoder.schema))

    def _made_by_spark(self, spark: SparkSession, transform: Transform) -> pa.Schema:
        try:
            return output_schema(spark, transform, self.decoder.schema)
        except OncelyError:
            raise
        except Exception as error:  # the user's own code: it may raise anything
            if running.spark_has_died(error):
                raise
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise ConfigError(
                "transform.spark",
                f"{self.spark_path} fails on a DataFrame without rows: {said}",
                way_out="it gets the columns of decode: "
                + ", ".join(f"{one.name} {one.type}" for one in self.decoder.schema),
            ) from None

    @cached_property
    def destination(self) -> Destination:
        """What the sink is, by its kind."""
        given = self.settings.sink
        inner: SqlDestination | KafkaDestination | FilesDestination
        if isinstance(given, SqlSinkSettings):
            inner = SqlDestination(self.settings, given, self.connect)
        elif isinstance(given, FilesSinkSettings):
            inner = FilesDestination(
                self.settings, given, self.source, self.kafka_connect, self.files_connect
            )
        else:
            inner = KafkaDestination(self.settings, given, self.source, self.kafka_connect)
        if self.store is None:
            return inner
        return StoredDestination(self.settings, inner, self.store.store)

    @cached_property
    def store(self) -> StoreLedger | None:
        """Where positions live, when it is not the sink's own ledger.

        Raises:
            ConfigError: the client's package is not installed.
        """
        store = store_of(self.settings.offsets, self.settings.name, self.source)
        return None if store is None else StoreLedger(store, self.settings.name)

    def sink(self, schema: pa.Schema) -> Sink:
        """The destination and the ledger beside it, for rows of these columns."""
        return self.destination.sink(schema)

    @property
    def mirror_group(self) -> str | None:
        """The group that positions are mirrored to; None where there is nothing to mirror.

        Where positions live in the group itself, a mirror would erase their stamps.
        """
        store = self.settings.offsets.store
        in_group = store == "kafka" or (store == "ledger" and self.settings.sink.kind != "sql")
        return None if in_group else self.settings.mirror_group

    @_hiding
    def start_spark(self, log: IO[bytes] | None = None) -> SparkSession:
        """The Spark session of the pipeline.

        Args:
            log: where Spark's own lines go; to our stderr when it is None.
        """
        spark = self.settings.spark
        return session.start(self.settings.name, spark.master, spark.spark_conf(), log=log)

    def batches(
        self, spark: SparkSession | None = None
    ) -> PartitionCommit | BatchCommit | RangeCommit:
        """How a micro-batch takes effect: by the kind of the transform, and of the sink."""
        schema, budget = self.row_schema(spark), self.settings.sink.max_rejects
        common: dict[str, Any] = {
            "sink": self.sink(schema),
            "source": self.source,
            "decoder": self.decoder,
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
        return PartitionCommit(transform=self.row_transform, bounds=self._bounds(), **common)

    @property
    def _order(self) -> Order:
        """In which order records and positions take effect."""
        orders: dict[str, Order] = {
            "exactly_once": "together",
            "at_most_once": "position_first",
        }
        return orders.get(self.settings.delivery, "records_first")

    @property
    def _interval(self) -> Interval | None:
        """When positions move that follow a timer."""
        given = self.settings.commit_interval
        if self.settings.delivery != "none":
            return None
        return Interval() if given is None else Interval(given.seconds, given.records)

    def _bounds(self) -> Bounds:
        """How much one commit of a task holds at most."""
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
        """Find out what is wrong before Spark's start takes its seconds; writes nothing.

        Raises:
            WrongInput: a topic is missing, the table doesn't take the rows, and the like.
            Unavailable: a server doesn't answer.
        """
        self.source.identity()
        if self.spark_transform is None:
            self.destination.check(self.row_schema())
        self.refuse_keep_source()

    def refuse_keep_source(self) -> None:
        """Refuse to write the origin of rows that have none.

        Raises:
            ConfigError: ``sink.keep_source`` with a Spark transform.
        """
        given = self.settings.sink
        if self.spark_path is not None and isinstance(given, SqlSinkSettings) and given.keep_source:
            raise ConfigError(
                "sink.keep_source",
                "a row of a Spark transform comes from no single record",
                way_out="remove it; where a row needs its origin, use transform.sql or .python",
            )

    # -- running ---------------------------------------------------------------------------

    @_hiding
    def run(
        self,
        until: Literal["latest"] | None = None,
        *,
        stop: StopSignal | None = None,
        listener: events.Listener = _ignore,
        spark: SparkSession | None = None,
    ) -> bool:
        """Run until asked to stop, or until what is readable now is committed.

        Args:
            until: ``"latest"`` ends when the last stable offsets of the start are committed.
            stop: how to ask for the end from another thread or a signal handler.
            listener: hears what happens.
            spark: a session to use. By default the one that exists in this process; where there
                is none, one of our own, which is stopped at the end.

        Returns:
            True when it ended by itself, with all of that committed; False when it was asked to
            stop before.

        Raises:
            WrongInput: the pipeline can't run as it is described; nothing was written.
            Fenced: a newer run has taken over.
            Stopped: a person must decide.
            Unavailable: a server did not come back for as long as retries last.
        """
        return running.run(self, until, stop or StopSignal(), listener, spark)

    # -- asking and mending ----------------------------------------------------------------

    @_hiding
    def status(self) -> Status:
        """Position, end and lag of every partition, rejects, epoch; writes nothing.

        Raises:
            WrongInput: a topic is missing, or a server does not let us in.
            Unavailable: a server does not answer.
        """
        return status.status(self)

    @_hiding
    def plan(self, *, use_spark: bool | None = None) -> Plan:
        """Check everything that can be checked without writing, and say what a run would do.

        Args:
            use_spark: start Spark to see a Spark transform's columns and whether the executors
                can import what they need; by default only where that is in question.

        Never raises for what is wrong with the pipeline: that is in ``Plan.problems``.
        """
        return planning.plan(self, use_spark)

    @_hiding
    def standings(self) -> list[PartitionOffsets]:
        """First offset, position, end and mirrored offset of every partition.

        Raises as :meth:`status` does.
        """
        return offsets.standings(self)

    @_hiding
    def reset(self, verb: Verb, topics: Sequence[str] = (), *, execute: bool = False) -> Reset:
        """Plan new positions and, with ``execute``, take a new epoch and write them.

        Args:
            verb: one of :mod:`oncely.sources.reset`.
            topics: ``topic`` or ``topic:0,1``: only these partitions.
            execute: without it nothing is written.

        Raises:
            WrongInput: no such partition, or the ledger belongs to another topic or cluster.
            Fenced: another run opened at the same moment.
            Unavailable: a server does not answer.
        """
        return offsets.reset(self, verb, topics, execute=execute)

    @_hiding
    def rejects(self, limit: int = 100) -> Rejects:
        """The first dead letters, and how many there are.

        Raises as :meth:`status` does.
        """
        return rejects.rejects(self, limit)

    @_hiding
    def replay(
        self,
        *,
        spark: SparkSession | None = None,
        progress: Callable[[int, int], None] = lambda _, __: None,
    ) -> tuple[int, int]:
        """Decode all dead letters again and write those that pass now.

        Args:
            spark: a session for a Spark transform; one of our own by default.
            progress: told (moved, kept) after every transaction.

        Returns:
            How many were moved, and how many stay rejects.

        Raises:
            WrongInput: an upsert without a version column or a compacted topic, where old records
                would win; or the destination doesn't take the rows.
            Stopped: a row of the Spark transform can't be written.
            Unavailable: the server did not come back.
        """
        return rejects.replay(self, spark=spark, progress=progress)
