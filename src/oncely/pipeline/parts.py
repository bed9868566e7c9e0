"""The parts of a pipeline by its settings: source, decoder, transform, destination, batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import IO, TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import pyarrow as pa

from oncely.config import (
    AvroDecode,
    AvroKey,
    DecodeSettings,
    JsonDecode,
    JsonKey,
    PipelineSettings,
    RawDecode,
    TextKey,
)
from oncely.config.problems import checked
from oncely.core.claim import Budget
from oncely.decode.schema import parse_schema
from oncely.errors import ConfigError, InvariantViolation, OncelyError, SchemaChanged
from oncely.extras import require
from oncely.kafka import properties
from oncely.kafka.source import KafkaSource
from oncely.kafka.start import StartTime
from oncely.kinds.kind import Kind, kind_of
from oncely.secrets import Secrets, scope

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.commit.path import Order
    from oncely.commit.run import CommitContext, Interval, OpenLedger
    from oncely.core.events import Listener
    from oncely.decode.avro import AvroDecoder
    from oncely.decode.base import Decoder
    from oncely.kinds.base import Sink
    from oncely.kinds.destination import Destination, LedgerState
    from oncely.kinds.handlers.sink import Handler
    from oncely.pipeline.expected import PipelineExpected
    from oncely.runtimes.batches.run import CommitsBatches
    from oncely.runtimes.chunks import ChunkBounds
    from oncely.runtimes.dropping import Drops
    from oncely.runtimes.jobs import Jobs
    from oncely.runtimes.row_transform import RowTransform
    from oncely.runtimes.spark.batch_commit import Transform
    from oncely.runtimes.takeover import Takeovers
    from oncely.stores.delta import DeltaConnect
    from oncely.stores.objects.store import Connect as FilesConnect
    from oncely.stores.offsets.base import StoreLedger
    from oncely.stores.sql.connection import Connect
    from oncely.stores.topic.cluster import Connect as KafkaConnect

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Parts")
AnySink = TypeVar("AnySink", bound="Sink")
_ORDERS: dict[str, Order] = {"exactly_once": "together", "at_most_once": "position_first"}


def hiding(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Refuse wrong arguments, and redact the pipeline's secrets in errors that leave ``method``."""
    told = checked(method)

    @wraps(method)
    def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with scope(self.secrets):
            try:
                return told(self, *args, **kwargs)
            except OncelyError as error:
                error.hide(self.secrets)  # it may come from a thread or an executor
                raise

    return wrapped


@dataclass(frozen=True, repr=False)
class Parts:
    """The parts of a pipeline, as its operations use them; not for users, who have ``Pipeline``.

    Attributes:
        settings: the settings of the pipeline file.
        connect: opens database sessions; None: as users do, as of the next ones. Tests inject
            faults here.
        kafka_connect: creates the clients of a Kafka or files sink.
        files_connect: opens the root of a files sink.
        delta_connect: loads and commits to a Delta table.
        handlers: the functions of a ``handlers`` sink, by topic; see :class:`oncely.Worker`.
        drops: likewise, functions that drop records.
        threads: the number of threads of each topic's partitions, for topics with several.
    """

    settings: PipelineSettings
    connect: Connect | None = None
    kafka_connect: KafkaConnect | None = None
    files_connect: FilesConnect | None = None
    delta_connect: DeltaConnect | None = None
    handlers: Mapping[str, Handler] | None = None
    drops: Mapping[str, Drops] | None = None
    threads: Mapping[str, int] = field(default_factory=dict)

    def replaced(self, **fields: Any) -> Self:
        """The same pipeline with fields of this class replaced, and with clients of its own."""
        made = object.__new__(type(self))
        own = {name: getattr(self, name) for name in Parts.__dataclass_fields__}
        Parts.__init__(made, **own | fields)
        return made

    @cached_property
    def secrets(self) -> Secrets:
        """The secret values, which must not be in any text about this pipeline."""
        kafka = self.settings.source.kafka_properties()
        return self.settings.secrets | properties.secrets(kafka)

    @cached_property
    def source(self) -> KafkaSource:
        """The topics."""
        source = self.settings.source
        return KafkaSource(source.brokers, source.topics, source.kafka_properties())

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder of records; those of ``filter.drop`` are dropped."""
        settings, rounding = self.settings, self.settings.sink.rounding == "allow"
        decoder = decoder_of(settings.decode, settings.source.topics, rounding=rounding)
        if not self.drops and settings.filter.drop is None:
            return decoder
        from oncely.runtimes.dropping import DropCondition, DroppingDecoder, Functions

        if self.drops:
            decoder = DroppingDecoder(decoder, Functions(self.drops))
        if settings.filter.drop is None:
            return decoder
        drop = DropCondition(settings.filter.drop)
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
    def kind(self) -> Kind:
        """The kind of the destination."""
        return kind_of(self.settings.sink.kind)

    @property
    def expiring_decoder(self) -> Decoder:
        """The decoder of a run, which also drops records that have expired by now."""
        expire = self.settings.filter.expire
        if expire is None:
            return self.decoder
        from oncely.runtimes.dropping import DroppingDecoder

        return DroppingDecoder(self.decoder, expire=expire)

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
        return made if self.kind.has_json else PlainTexts(made)

    def _row_transform(self) -> RowTransform:
        from oncely.runtimes.row_transform import PythonTransform, SqlTransform, Unchanged

        transform = self.settings.transform
        if transform is not None and transform.sql is not None:
            return SqlTransform(transform.sql)
        if transform is not None and transform.python is not None:
            return PythonTransform(transform.python)
        return Unchanged()

    @hiding
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
        from oncely.runtimes.spark import session
        from oncely.runtimes.spark.batch_commit import output_schema

        try:
            return output_schema(spark, transform, self.decoder.schema)
        except OncelyError:
            raise
        except Exception as error:  # the user's own code: it may raise any exception
            from oncely.users_function import said

            if session.death(error):
                raise
            text = said(error).splitlines()[0]
            raise ConfigError(
                "transform.spark",
                f"{self.spark_path} fails on a DataFrame without rows: {text}",
                way_out="it gets the columns of decode: "
                + ", ".join(f"{one.name} {one.type}" for one in self.decoder.schema),
            ) from None

    def require_packages(self) -> None:
        """Refuse a sink, a store or a registry whose packages are not installed; asks no server.

        Raises:
            ConfigError: names the extra to install.
        """
        self.kind.require(self.settings.sink)
        for key, one in {"": self.settings.decode, "key.": self.settings.decode.key}.items():
            if getattr(one, "schema_registry", None):
                require("registry", f"decode.{key}schema_registry", "a schema registry")
        self.store  # noqa: B018 - made here for the first time, and not connected

    @cached_property
    def destination(self) -> Destination:
        """The destination, by the kind of the sink.

        Its module is imported here: commands of other kinds need not wait for its packages.
        """
        self.require_packages()
        inner = self.kind.destination(self)
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
        if self.settings.offsets.store == "ledger":
            return None
        from oncely.pipeline.stored_destination import store_of
        from oncely.stores.offsets.base import StoreLedger

        store = store_of(self.settings.offsets, self.settings.name, self.source)
        return StoreLedger(store, self.settings.name)

    def sink(self, schema: pa.Schema) -> Sink:
        """The destination and the ledger beside it, for rows of these columns."""
        return self.destination.sink(schema)

    @property
    def mirror_group(self) -> str | None:
        """The group to which positions are mirrored; None if they are not.

        If the group itself is the store of the positions, a mirror would erase their metadata.
        """
        store = self.settings.offsets.store
        in_group = store == "kafka" or (store == "ledger" and self.kind.ledger == "source")
        return None if in_group else self.settings.mirror_group

    @hiding
    def start_spark(self, log: IO[bytes] | None = None) -> SparkSession:
        """The Spark session of the pipeline.

        Args:
            log: the file of Spark's own output; None for stderr.
        """
        from oncely.runtimes.spark import session

        spark = self.settings.spark
        return session.start(self.settings.name, spark.master, spark.spark_conf(), log=log)

    def batches(self, jobs: Jobs) -> CommitsBatches:
        """The commit of batches, by the kind of the transform and of the sink."""
        from oncely.commit.run import OpenLedger
        from oncely.kinds.base import CommitsChunks, StagesBatches
        from oncely.runtimes.batches.commit import PartitionCommit, RangeCommit

        if self.spark_transform is not None:
            return self._batches_on_spark(jobs, self.spark_transform)
        sink = self.sink(self.row_schema())
        if self.kind.commits == "ranges" and isinstance(sink, StagesBatches):
            layout = getattr(self.settings.sink, "layout", RangeCommit.layout)
            context = self.context(sink)
            return RangeCommit(OpenLedger(context), self.row_transform, jobs, layout=layout)
        if isinstance(sink, CommitsChunks):
            ledger = OpenLedger(self.context(sink))
            return PartitionCommit(ledger, self.row_transform, jobs, self._bounds())
        raise InvariantViolation(f"no commit of batches into {type(sink).__name__}")

    def _batches_on_spark(self, jobs: Jobs, transform: Transform) -> CommitsBatches:
        from oncely.commit.run import OpenLedger
        from oncely.kinds.base import PacksRows, StagesBatches
        from oncely.runtimes.spark.batch_commit import BatchCommit
        from oncely.runtimes.spark.jobs import SparkJobs

        if isinstance(jobs, SparkJobs):
            schema = self.row_schema(jobs.session)
            self.destination.check(schema)  # the columns were not known before
            sink = self.sink(schema)
            if isinstance(sink, PacksRows | StagesBatches):
                return BatchCommit(OpenLedger(self.context(sink)), transform, jobs)
        raise InvariantViolation(f"no Spark transform on {type(jobs).__name__}")

    def context(self, sink: AnySink) -> CommitContext[AnySink]:
        """What a run commits with, into this sink."""
        from oncely.commit.run import CommitContext

        budget, order = self.settings.sink.max_rejects, _ORDERS.get(self.settings.delivery)
        return CommitContext(
            sink, self.source, self.expiring_decoder, Budget(budget.share, budget.count),
            self.store, order or "records_first", self._interval,
        )  # fmt: skip

    def takeovers(self, ledger: OpenLedger[Sink], listener: Listener) -> Takeovers:
        """What takes the positions of a run over."""
        from oncely.runtimes.takeover import Takeovers

        name, given = self.settings.name, self.settings.source
        return Takeovers(ledger, self.source, name, given.start, given.on_gap, listener)

    @property
    def _interval(self) -> Interval | None:
        """The interval of the position timer, if there is one."""
        from oncely.commit.run import Interval

        given = self.settings.commit_interval
        if self.settings.delivery != "none":
            return None
        return Interval() if given is None else Interval(given.seconds, given.records)

    def _bounds(self) -> ChunkBounds:
        """The maximum size of one commit of a task."""
        from oncely.runtimes.chunks import ChunkBounds

        interval, usual = self.settings.commit_interval, ChunkBounds()
        if interval is None or self.settings.delivery == "none":
            return usual
        return ChunkBounds(
            min(interval.records or usual.records, usual.records),
            usual.bytes,
            min(interval.seconds or usual.seconds, usual.seconds),
        )

    @hiding
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
        if not isinstance(start, StartTime) or start.timestamp_ms <= time.time() * 1000:
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
        keeps = getattr(self.settings.sink, "keep_source", None)
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

    @hiding
    def end_refusal(self, refused: str) -> None:
        """Accept a destination that the next start would refuse, and to which a repair had nothing
        to write.

        Args:
            refused: the reason, read before an audit that is clean.
        """
        from oncely.kinds.base import EndsRefusals

        with self.destination.rewriting(self.row_schema(), "repair") as rewrites:
            if isinstance(rewrites, EndsRefusals):
                rewrites.end_refusal(refused)


# -- the decoder ----------------------------------------------------------------------------


def decoder_of(decode: DecodeSettings, topics: Sequence[str], *, rounding: bool = False) -> Decoder:
    """The decoder of the settings.

    Args:
        decode: the section of the pipeline file.
        topics: the source's topics.
        rounding: values may lose digits that their columns do not keep.

    Raises:
        ConfigError: the schema does not fit the records' format.
        Unavailable: the schema registry does not answer.
    """
    from oncely.decode.metadata import RawDecoder, WithKey, WithMetadata

    if isinstance(decode, JsonDecode) and decode.inferred:
        from oncely.kinds.data_file import VALUE

        return RawDecoder((VALUE,))  # the sink infers the columns
    made = _decoder(decode, "value", "decode", topics, rounding)
    if decode.key is not None:
        made = WithKey(made, _decoder(decode.key, "key", "decode.key", topics, rounding))
    return made if decode.metadata is None else WithMetadata(made, decode.metadata.parts)


def _decoder(
    settings: DecodeSettings | JsonKey | AvroKey | TextKey,
    column: Literal["value", "key"],
    path: str,
    topics: Sequence[str],
    rounding: bool,
) -> Decoder:
    from oncely.decode.metadata import RawDecoder, TextDecoder

    match settings:
        case RawDecode():
            return RawDecoder(settings.columns)
        case TextKey():
            unwrap, is_json = settings.unwrap or "", settings.json_value
            return TextDecoder(_key_schema(settings), column, rounding, unwrap, is_json)
        case JsonDecode() | JsonKey():
            from oncely.decode.json import JsonDecoder

            schema = parse_schema(settings.schema_ddl, key=f"{path}.schema")
            strict, unwrap = settings.strict, settings.unwrap or ""
            return JsonDecoder(schema, column, strict, rounding, unwrap)
        case AvroDecode() | AvroKey():
            return _avro(settings, column, path, topics)


def _key_schema(key: TextKey) -> pa.Schema:
    """The column of a key that is a text."""
    kind = parse_schema(f"x {key.type}").field(0).type
    return pa.schema({key.column: kind})


def _avro(avro: AvroDecode | AvroKey, column: str, path: str, topics: Sequence[str]) -> AvroDecoder:
    from oncely.decode.avro import Registry, avro_decoder, latest_avro_decoder
    from oncely.decode.avro_schema import Definition

    key = f"{path}.schema"
    if avro.schema_file is None:
        registry = Registry(_registry(avro), f"{path}.schema_registry")
        return latest_avro_decoder(registry, topics, column=column, key=key)
    try:
        text = avro.schema_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"can't read the schema file {avro.schema_file}: {error}"
        raise ConfigError(key, problem) from None
    return avro_decoder(Definition(text), column=column, key=key)


def _registry(avro: AvroDecode | AvroKey) -> dict[str, Any]:
    """The settings of confluent-kafka's SchemaRegistryClient."""
    settings: dict[str, Any] = {"url": avro.schema_registry}
    if avro.schema_registry_user_info is not None:
        settings["basic.auth.user.info"] = avro.schema_registry_user_info.get_secret_value()
    if avro.schema_registry_ca is not None:
        settings["ssl.ca.location"] = str(avro.schema_registry_ca)
    return settings
