"""The whole pipeline file as one typed, frozen value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    model_validator,
)

from oncely.config.base import Section
from oncely.config.decode import DecodeSettings, JsonDecode, key_columns
from oncely.config.errors import Problem, all_wrong, shown, wrong
from oncely.config.files_sink import FilesSinkSettings
from oncely.config.kafka_sink import KafkaSinkSettings
from oncely.config.offsets import (
    KafkaOffsets,
    LedgerOffsets,
    OffsetsSettings,
    RedisOffsets,
    SqlOffsets,
)
from oncely.config.sink import SqlSinkSettings
from oncely.config.source import SourceSettings
from oncely.config.spark import SparkSettings
from oncely.config.values import CommitInterval, parse_interval

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_RECORDS_A_FLUSH = 5_000_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise wrong(
            f"found {shown(value)}; allowed: 1 to 100 letters, digits, underscores, dots, dashes",
            "use a short name: it is the ledger's key",
        )
    return value


Delivery = Literal["none", "at_most_once", "at_least_once", "exactly_once"]


class TransformSettings(Section):
    """``[transform]``: exactly one of three.

    Attributes:
        sql: row-wise SQL over ``input``.
        python: ``package.module:function``, Arrow batch to Arrow batch.
        spark: ``package.module:function``, DataFrame to DataFrame.
    """

    sql: str | None = None
    python: str | None = None
    spark: str | None = None

    @property
    def kind(self) -> Literal["sql", "python", "spark"]:
        """Which of the three is given."""
        return "sql" if self.sql is not None else "python" if self.python is not None else "spark"

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("sql", "python", "spark") if getattr(self, name) is not None]
        if len(given) != 1:
            raise wrong(
                f"has {' and '.join(given) or 'nothing'}; allowed: exactly one of sql, python, "
                "spark",
                "keep one, or remove [transform] to write the decoded rows as they are",
            )
        text = getattr(self, given[0])
        if given[0] == "sql" and not text.strip():
            raise wrong("is empty", 'write sql = "SELECT * FROM input"', below="sql")
        if given[0] != "sql" and not _FUNCTION.fullmatch(text):
            raise wrong(
                f"found {shown(text)}; allowed: package.module:function",
                f'write {given[0]} = "my_package.my_module:my_function"',
                below=given[0],
            )
        return self


class PipelineSettings(Section):
    """A pipeline: from which topics, through what, into which table, topics or files.

    Attributes:
        name: the ledger's key.
        delivery: the guarantee.
        commit_interval: how much one commit holds at most, or how often a timer saves positions;
            None for what is good for speed.
        offsets: where positions live.
        source: Kafka.
        decode: bytes to columns.
        transform: rows to rows, or None.
        sink: the table, the topics, or the files.
        spark: where and how it runs.
    """

    name: Annotated[str, AfterValidator(_name)]
    delivery: Delivery = "exactly_once"
    commit_interval: (
        Annotated[
            InstanceOf[CommitInterval],
            BeforeValidator(parse_interval),
            PlainSerializer(str, when_used="json"),
        ]
        | None
    ) = None
    offsets: OffsetsSettings = Field(default_factory=LedgerOffsets)
    source: SourceSettings
    decode: DecodeSettings
    transform: TransformSettings | None = None
    sink: Annotated[
        SqlSinkSettings | KafkaSinkSettings | FilesSinkSettings, Field(discriminator="kind")
    ]
    spark: SparkSettings = Field(default_factory=SparkSettings)

    @property
    def mirror_group(self) -> str | None:
        """The consumer group that shows the position to lag tools; None when switched off.

        A Kafka or files sink commits positions to it in its transactions.
        """
        group = self.source.group
        if group is None:
            return f"oncely-{self.name}"
        return group or None

    @property
    def shown_group(self) -> str | None:
        """The group that lag tools look at: of the mirror, or that in which positions live."""
        if isinstance(self.offsets, KafkaOffsets):
            return self.offsets.group_of(self.name)
        return self.mirror_group

    @property
    def by_spark(self) -> bool:
        """A Spark transform mixes the records."""
        return self.transform is not None and self.transform.kind == "spark"

    @property
    def trigger_seconds(self) -> float:
        """The pause between micro-batches' starts."""
        if isinstance(self.sink, FilesSinkSettings):
            return self.sink.flush_interval
        return self.spark.trigger

    @property
    def max_records_per_batch(self) -> int:
        """Offsets that a micro-batch spans at most; many more where a batch makes files."""
        given = "max_records_per_batch" in self.spark.model_fields_set
        if isinstance(self.sink, FilesSinkSettings) and not given:
            return _RECORDS_A_FLUSH
        return self.spark.max_records_per_batch

    def describe(self) -> dict[str, Any]:
        """All settings as JSON-able values, without a secret."""
        done: dict[str, Any] = self.model_dump(mode="json")
        if isinstance(self.sink, SqlSinkSettings):
            done["sink"]["url"] = self.sink.url_for_display
        if isinstance(self.offsets, SqlOffsets | RedisOffsets):
            done["offsets"]["url"] = self.offsets.url_for_display
        done["source"]["group"] = self.mirror_group
        return done

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.sink, SqlSinkSettings):
            found = [*_master_problems(self, self.sink), *_key_problems(self, self.sink)]
        elif isinstance(self.sink, KafkaSinkSettings):
            found = [*_topic_problems(self, self.sink.topics, "sink.topic"),
                     *_kafka_problems(self, self.sink)]  # fmt: skip
        else:
            found = [*_topic_problems(self, self.sink.topics, "sink.manifest_topic"),
                     *_files_problems(self)]  # fmt: skip
        found += _offsets_problems(self)
        found += _infer_problems(self)
        if found:
            raise all_wrong(found)
        return self


def _topic_problems(pipeline: PipelineSettings, topics: Sequence[str], key: str) -> list[Problem]:
    """Of a sink that writes to the source's cluster."""
    found = [
        Problem(key, f"writes to {name}, which source.topics reads: it would never end",
                "write to another topic")
        for name in topics
        if name in pipeline.source.topics
    ]  # fmt: skip
    if not pipeline.source.group and pipeline.source.group is not None:
        found.append(
            Problem("source.group", "is switched off, and this sink commits offsets to the group",
                    "remove it, or name a group")
        )  # fmt: skip
    return found


def _kafka_problems(pipeline: PipelineSettings, sink: KafkaSinkSettings) -> list[Problem]:
    found = []
    if sink.headers and pipeline.by_spark:
        found.append(
            Problem("sink.headers", "a row of a Spark transform comes from no single record",
                    "remove it, or use transform.sql or .python")
        )  # fmt: skip
    if pipeline.by_spark and sink.staging is None and not pipeline.spark.is_local:
        found.append(
            Problem("sink.staging", f"is missing; with spark.master {pipeline.spark.master} tasks"
                    " leave records where the driver can read them",
                    'add staging = "s3://bucket/staging", or a folder that all machines share')
        )  # fmt: skip
    return found


def _files_problems(pipeline: PipelineSettings) -> list[Problem]:
    found = []
    if "trigger" in pipeline.spark.model_fields_set:
        found.append(
            Problem("spark.trigger", "has no meaning for files: sink.flush_interval says how often"
                    " they are written", "remove it")
        )  # fmt: skip
    return found


def _infer_problems(pipeline: PipelineSettings) -> list[Problem]:
    """Columns that are not known before the records are read have few places to go to."""
    decode = pipeline.decode
    if not isinstance(decode, JsonDecode) or not decode.inferred:
        return []
    found = []
    if pipeline.sink.kind != "files":
        found.append(
            Problem("decode.schema", f"infer is for files; a {pipeline.sink.kind} sink needs to"
                    " know its columns", 'write schema = "id BIGINT, name STRING"')
        )  # fmt: skip
    if pipeline.transform is not None:
        found.append(
            Problem("transform", "works on columns, and with decode.schema = \"infer\" nobody"
                    " knows them before the records are read",
                    "remove it, or write the schema out")
        )  # fmt: skip
    if decode.key is not None:
        found.append(
            Problem("decode.key", 'has no meaning with decode.schema = "infer"', "remove it")
        )
    return found


def _offsets_problems(pipeline: PipelineSettings) -> list[Problem]:
    """A pair of sink and store that can't keep its promise."""
    offsets, found = pipeline.offsets, []
    if pipeline.delivery == "exactly_once" and offsets.store != "ledger":
        found.append(
            Problem(
                "offsets.store",
                f"found {shown(offsets.store)}: no transaction covers both the sink and this store,"
                " and a crash between the two would lose records or double them",
                "remove [offsets]: the sink's own ledger is exactly once; or say"
                ' delivery = "at_least_once"',
            )
        )
    if offsets.one_machine and not pipeline.spark.is_local:
        found.append(
            Problem(
                "offsets.store",
                f"it is on one machine, and spark.master is {pipeline.spark.master}: tasks save"
                " positions from wherever they run",
                'use kafka, redis, zookeeper or PostgreSQL; or master = "local[*,4]"',
            )
        )
    return found


def _master_problems(pipeline: PipelineSettings, sink: SqlSinkSettings) -> list[Problem]:
    if sink.dialect != "sqlite" or pipeline.spark.is_local:
        return []
    return [
        Problem(
            "sink.url",
            f"SQLite is one file on one machine, and spark.master is {pipeline.spark.master}",
            'use PostgreSQL, or master = "local[*,4]"',
        )
    ]


def _key_problems(pipeline: PipelineSettings, sink: SqlSinkSettings) -> list[Problem]:
    """An upsert's keys come out of the record's key, or a tombstone could not delete."""
    key = pipeline.decode.key
    if sink.mode != "upsert":
        return []
    if key is None:
        return [
            Problem(
                "decode.key",
                'is missing; with mode = "upsert" a record without a value deletes by its key',
                'add [decode.key], such as format = "string", column = "id"',
            )
        ]
    columns = key_columns(key)
    if columns is None or set(columns) == set(sink.keys):
        return []
    return [
        Problem(
            "sink.keys",
            f"found {', '.join(sink.keys)}, but decode.key gives {', '.join(columns)}",
            "name the same columns in both",
        )
    ]
