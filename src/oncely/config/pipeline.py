"""The whole pipeline file as one typed, frozen value; and its tables, by a walk over its types."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from oncely.config.base import (
    CommitInterval,
    Problem,
    Section,
    all_invalid,
    invalid,
    parse_interval,
    shown,
)
from oncely.config.decode import DecodeSettings, JsonDecode, key_columns
from oncely.config.runtimes import SparkSettings, WorkerSettings
from oncely.config.sink import ByKind, SinkSettings, sink_kinds
from oncely.config.source import (
    FilterSettings,
    KafkaOffsets,
    LedgerOffsets,
    OffsetsSettings,
    SourceSettings,
)

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise invalid(
            f"found {shown(value)}; allowed: 1 to 100 letters, digits, underscores, dots, dashes",
            "use a short name: it is the ledger's key",
        )
    return value


Delivery = Literal["none", "at_most_once", "at_least_once", "exactly_once"]


class TransformSettings(Section):
    """``[transform]``: exactly one of three kinds.

    Attributes:
        sql: a SELECT over ``input`` that works row by row.
        python: ``package.module:function``, a function from an Arrow table to an Arrow table.
        spark: ``package.module:function``, a function from a DataFrame to a DataFrame. Not with
            ``oncely work``.
    """

    sql: str | None = None
    python: str | None = None
    spark: str | None = None

    @property
    def kind(self) -> Literal["sql", "python", "spark"]:
        """The kind of transform that is given."""
        return "sql" if self.sql is not None else "python" if self.python is not None else "spark"

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("sql", "python", "spark") if getattr(self, name) is not None]
        if len(given) != 1:
            raise invalid(
                f"has {' and '.join(given) or 'nothing'}; allowed: exactly one of sql, python, "
                "spark",
                "keep one, or remove [transform] to write the decoded rows as they are",
            )
        text = getattr(self, given[0])
        if given[0] == "sql" and not text.strip():
            raise invalid("is empty", 'write sql = "SELECT * FROM input"', below="sql")
        if given[0] != "sql" and not _FUNCTION.fullmatch(text):
            raise invalid(
                f"found {shown(text)}; allowed: package.module:function",
                f'write {given[0]} = "my_package.my_module:my_function"',
                below=given[0],
            )
        return self


class PipelineSettings(Section):
    """A pipeline: source topics, decoding, transform, and destination table, topics or files.

    Attributes:
        name: the name of the pipeline, the key of its positions. A pipeline that is renamed is a
            new one.
        delivery: the guarantee. With all but ``none`` it holds across crashes.
        commit_interval: the maximum size of one commit; with ``delivery = "none"`` the interval in
            which a timer saves positions. By default the fastest.
        offsets: the store of the positions; by default the ledger in the sink, which
            ``exactly_once`` requires.
        source: the Kafka topics.
        decode: the conversion of a record's bytes to columns.
        transform: the transform of the rows; without it the decoded rows are written as they are.
        sink: the destination: a table, topics, files, or functions of yours.
        runtime: where ``oncely run`` runs tasks: on Spark, or on processes of this machine, without
            Java, for all but a Spark transform.
        processes: their number; by default one for each processor.
        spark: the settings of Spark. ``trigger`` and ``max_records_per_batch`` are for both
            runtimes.
        filter: records that are dropped, or wait, before they are decoded.
        worker: the consumer group of `oncely work`.
    """

    model_config = ConfigDict(defer_build=True)  # the kinds import this package

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
    sink: Annotated[SinkSettings, ByKind()]
    runtime: Literal["spark", "processes"] = "spark"
    processes: Annotated[int, Field(ge=1)] | None = None
    spark: SparkSettings = Field(default_factory=SparkSettings)
    filter: FilterSettings = Field(default_factory=FilterSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)

    @property
    def group(self) -> str:
        """The consumer group of the pipeline; a Kafka or files sink commits positions to it."""
        return self.source.group or f"oncely-{self.name}"

    @property
    def target(self) -> str:
        """The destination in a few words."""
        return f"{self.sink.kind} {self.sink.target}"

    @property
    def worker_group(self) -> str:
        """The consumer group of the workers."""
        return self.worker.group or self.group

    @property
    def standby_group(self) -> str:
        """The consumer group of runs that stand by, and of the one that is elected."""
        return f"{self.group}.standby"

    @property
    def mirror_group(self) -> str | None:
        """The consumer group that shows the position to lag tools; None if it is disabled."""
        return None if self.source.group == "" else self.group

    @property
    def shown_group(self) -> str | None:
        """The group for lag tools: the mirror's, or the group in which positions are stored."""
        if isinstance(self.offsets, KafkaOffsets):
            return self.offsets.group_of(self.name)
        return self.mirror_group

    @property
    def by_spark(self) -> bool:
        """True if a Spark transform mixes the records."""
        return self.transform is not None and self.transform.kind == "spark"

    @property
    def on_cluster(self) -> bool:
        """True if tasks run on several machines."""
        return self.runtime == "spark" and not self.spark.is_local

    @property
    def tombstone_keys(self) -> tuple[str, ...]:
        """The columns of the destination's key that tombstones have."""
        key, keys = self.decode.key, getattr(self.sink, "keys", ())
        columns = () if key is None else key_columns(key) or keys
        return tuple(one for one in keys if one in columns)

    @property
    def process_count(self) -> int:
        """The number of processes of ``runtime = "processes"``."""
        return self.processes or _usable_processors()

    @property
    def trigger_seconds(self) -> float:
        """The seconds between the starts of batches."""
        own = self.sink.batch_seconds
        return self.spark.trigger if own is None else own

    @property
    def max_records_per_batch(self) -> int:
        """Maximum offsets of a batch; many more if a batch creates files."""
        given, own = "max_records_per_batch" in self.spark.model_fields_set, self.sink.batch_records
        return self.spark.max_records_per_batch if given or own is None else own

    def describe(self) -> dict[str, Any]:
        """All settings as JSON-able values, without secrets."""
        done: dict[str, Any] = self.model_dump(mode="json")
        done["source"]["group"] = self.mirror_group
        return done

    @model_validator(mode="after")
    def _fits(self) -> Self:
        found = self.sink.problems(self)
        found += _runtime_problems(self)
        found += _offsets_problems(self)
        found += _infer_problems(self)
        if self.by_spark and self.filter.drops:
            found.append(
                Problem("filter", "drops records before they are decoded, and those of a Spark"
                        " transform are counted after that", "write a WHERE in the transform")
            )  # fmt: skip
        if found:
            raise all_invalid(found)
        return self


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _runtime_problems(pipeline: PipelineSettings) -> list[Problem]:
    found = []
    if pipeline.runtime == "processes" and pipeline.by_spark:
        found.append(
            Problem("runtime", 'found "processes"; transform.spark needs Spark',
                    "remove it, or use transform.sql or .python")
        )  # fmt: skip
    if pipeline.runtime == "spark" and pipeline.processes is not None:
        found.append(
            Problem("processes", "has no meaning on Spark: spark.master determines the tasks",
                    'remove it, or write runtime = "processes"')
        )  # fmt: skip
    return found


def _infer_problems(pipeline: PipelineSettings) -> list[Problem]:
    """Problems of inferred columns: few sinks accept columns that are not known in advance."""
    decode = pipeline.decode
    if not isinstance(decode, JsonDecode) or not decode.inferred:
        return []
    found = []
    if not pipeline.sink.infers:
        infer = " and ".join(kind for kind, sink in sink_kinds().items() if sink.infers)
        found.append(
            Problem("decode.schema", f"infer is for {infer}; a {pipeline.sink.kind} sink needs a "
                    "schema", 'write schema = "id BIGINT, name STRING"')
        )  # fmt: skip
    if pipeline.transform is not None:
        found.append(
            Problem("transform", "works on columns, which are not known before the records"
                    ' are read if decode.schema = "infer"',
                    "remove it, or write the schema out")
        )  # fmt: skip
    found += [
        Problem(f"decode.{name}", 'has no meaning with decode.schema = "infer"', way_out)
        for name, way_out in (
            ("key", "remove it"),
            ("metadata", "remove it, or write the schema out"),
        )
        if getattr(decode, name) is not None
    ]
    return found


def _offsets_problems(pipeline: PipelineSettings) -> list[Problem]:
    """Problems of a pair of sink and offset store that cannot keep its promise."""
    offsets, found = pipeline.offsets, []
    if pipeline.delivery == "exactly_once" and offsets.store != "ledger":
        found.append(
            Problem(
                "offsets.store",
                f"found {shown(offsets.store)}: no transaction covers both the sink and this store,"
                " and a crash between the two would lose or duplicate records",
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


class SettingsTable(NamedTuple):
    """A table of the file.

    Attributes:
        selector: the key that selects among the sections, such as ``kind``; empty if there is one.
        sections: its forms, by the value of the selector; by an empty text if there is one.
    """

    selector: str
    sections: Mapping[str, type[Section]]


@cache
def tables() -> Mapping[str, SettingsTable]:
    """Every table by its dotted name, in the order of the file; the top of the file has none."""
    return dict(_below("", SettingsTable("", {"": PipelineSettings})))


def keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section in the file's spelling, with the fields that hold them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _below(name: str, table: SettingsTable) -> Iterator[tuple[str, SettingsTable]]:
    yield name, table
    done: set[str] = set()
    for section in table.sections.values():
        for key, field in keys(section).items():
            found = _table(field)
            if found is not None and key not in done:
                done.add(key)
                yield from _below(f"{name}.{key}".lstrip("."), found)


def _table(field: FieldInfo) -> SettingsTable | None:
    """The table that a field holds, if it holds one."""
    by_kind = any(isinstance(one, ByKind) for one in field.metadata)
    annotation = ByKind.annotation() if by_kind else field.annotation
    found = {one: None for one in _types(annotation) if issubclass(one, Section)}
    if not found:
        return None
    selector = _selector(field) or _selector_within(annotation)
    return SettingsTable(selector, {_value(one, selector): one for one in found})


def _types(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _types(inner)


def _selector(field: FieldInfo) -> str:
    return field.discriminator if isinstance(field.discriminator, str) else ""


def _selector_within(annotation: Any) -> str:
    """The selector of ``Annotated[A | B, Field(discriminator=…)] | None``."""
    for inner in (annotation, *typing.get_args(annotation)):
        for one in getattr(inner, "__metadata__", ()):
            if isinstance(one, FieldInfo) and (found := _selector(one)):
                return found
    return ""


def _value(section: type[Section], selector: str) -> str:
    if not selector:
        return ""
    value: str = typing.get_args(section.model_fields[selector].annotation)[0]
    return value
