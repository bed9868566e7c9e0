"""The whole pipeline file as one typed, frozen value."""

from __future__ import annotations

import re
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
from oncely.config.decode import DecodeSettings, key_columns
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
from oncely.config.wrong import Problem, all_wrong, shown, wrong

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
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
    """A pipeline: from which topics, through what, into which table or topics.

    Attributes:
        name: the ledger's key.
        delivery: the guarantee.
        commit_interval: how much one commit holds at most, or how often a timer saves positions;
            None for what is good for speed.
        offsets: where positions live.
        source: Kafka.
        decode: bytes to columns.
        transform: rows to rows, or None.
        sink: the table, or the topics.
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
    sink: Annotated[SqlSinkSettings | KafkaSinkSettings, Field(discriminator="kind")]
    spark: SparkSettings = Field(default_factory=SparkSettings)

    @property
    def mirror_group(self) -> str | None:
        """The consumer group that shows the position to lag tools; None when switched off.

        A Kafka sink commits positions to it in its transactions.
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
        else:
            found = _topic_problems(self, self.sink)
        found += _offsets_problems(self)
        if found:
            raise all_wrong(found)
        return self


def _topic_problems(pipeline: PipelineSettings, sink: KafkaSinkSettings) -> list[Problem]:
    found = [
        Problem("sink.topic", f"writes to {name}, which source.topics reads: it would never end",
                "write to another topic")
        for name in sink.topics
        if name in pipeline.source.topics
    ]  # fmt: skip
    if sink.headers and pipeline.transform is not None and pipeline.transform.kind == "spark":
        found.append(
            Problem("sink.headers", "a row of a Spark transform comes from no single record",
                    "remove it, or use transform.sql or .python")
        )  # fmt: skip
    by_spark = pipeline.transform is not None and pipeline.transform.kind == "spark"
    if by_spark and sink.staging is None and not pipeline.spark.is_local:
        found.append(
            Problem("sink.staging", f"is missing; with spark.master {pipeline.spark.master} tasks"
                    " leave records where the driver can read them",
                    'add staging = "s3://bucket/staging", or a folder that all machines share')
        )  # fmt: skip
    if not pipeline.source.group and pipeline.source.group is not None:
        found.append(
            Problem("source.group", "is switched off, and this sink commits offsets to the group",
                    "remove it, or name a group")
        )  # fmt: skip
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
