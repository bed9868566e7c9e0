"""The conversion of rows to records: the column of the key, the encoding of the value, the topic.

Static problems are refused before a pipeline runs; problems of single rows (a missing topic, a size
above the topic's limit) are rejects.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import fastavro
import pyarrow as pa
import pyarrow.types as pt
from fastavro.validation import ValidationError

from oncely.core.digest import Kind, Recipe
from oncely.errors import TableMismatch
from oncely.kinds.kafka import arrow_json

_BYTES = (
    pt.is_binary,
    pt.is_large_binary,
    pt.is_fixed_size_binary,
    pt.is_string,
    pt.is_large_string,
)

_NONE = pa.nulls(0, pa.large_binary())

CONTENT = Recipe.of({"key": Kind("raw"), "value": Kind("raw")}, offset=False)
"""The content of a record in digests."""

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_SHOWN = 60  # characters
_INTERNAL = frozenset(
    {
        "__cluster_metadata", "__consumer_offsets", "__remote_log_metadata",
        "__share_group_state", "__transaction_state",
    }
)  # fmt: skip

SOURCE_HEADER = "oncely.source"
"""The header of ``keep_source``: topic, partition and offset of the source's record, as a JSON
array."""


@dataclass(frozen=True)
class RawValue:
    """The value is one column's bytes, or its text in UTF-8; a null is a tombstone."""

    column: str


@dataclass(frozen=True)
class RecordFormat:
    """The contents of a record.

    Attributes:
        schema: the rows' columns.
        value: ``"json"``: an object of all columns except those below; Avro; or a column.
        topic: the topic of every record; None with ``topic_column``.
        topic_column: a text column that names each record's topic.
        key: the key's column: bytes, a text (UTF-8), a whole number or a bool (as JSON writes it);
            None: records without a key.
        keep_source: add the header :data:`SOURCE_HEADER` with the origin of each record.
        decimals: the form of decimals in JSON.
        source_timestamp: keep the timestamp of the source's record; else it is that of the write.
        own_topics: the topics of the pipeline's own state, to which no row may go.
    """

    schema: pa.Schema
    value: Literal["json"] | AvroValue | RawValue = "json"
    topic: str | None = None
    topic_column: str | None = None
    key: str | None = None
    keep_source: bool = False
    decimals: arrow_json.Decimals = "text"
    source_timestamp: bool = False
    own_topics: frozenset[str] = frozenset()

    @property
    def target(self) -> str:
        """The destination, as stored in the ledger."""
        return self.topic if self.topic is not None else f"column {self.topic_column}"

    @property
    def value_columns(self) -> list[str]:
        """The columns of a JSON or Avro value; it includes the key."""
        return [n for n in self.schema.names if n != self.topic_column]

    @property
    def recipe(self) -> Recipe:
        """Of its digest: the content, its topic if that is a column's, and its origin."""
        named = {} if self.topic_column is None else {"topic": Kind("text")}
        return Recipe.of(dict(CONTENT.columns) | named, offset=self.keep_source)

    def bind(self) -> None:
        """Refuse columns that cannot be written.

        Raises:
            TableMismatch: a column is missing or has an unsupported type.
        """
        if (self.topic is None) == (self.topic_column is None):
            raise TableMismatch("one of topic and topic_column, and not both", key="sink")
        self._column("topic_column", self.topic_column, (pt.is_string, pt.is_large_string))
        self._column("key", self.key, (*_BYTES, pt.is_integer, pt.is_boolean))
        if isinstance(self.value, RawValue):
            self._column("value", self.value.column, _BYTES)
            return
        columns = pa.schema([self.schema.field(name) for name in self.value_columns])
        if isinstance(self.value, AvroValue):
            self.value.bind(columns)
        elif unfit := arrow_json.unfit(columns):
            name, reason = next(iter(unfit.items()))
            raise TableMismatch(
                f"column {name!r} can't be written as JSON: {reason}",
                key="sink.value",
                way_out="cast it in the transform, or leave it out",
            )

    def values(self, rows: pa.Table) -> pa.LargeBinaryArray:
        """The value of each row."""
        if isinstance(self.value, RawValue):
            return as_bytes(rows.column(self.value.column))
        shown = rows.select(self.value_columns)
        if isinstance(self.value, AvroValue):
            return pa.array(self.value.encoded(shown), pa.large_binary())
        return arrow_json.encoded(shown, self.decimals)

    def keys(self, rows: pa.Table) -> pa.LargeBinaryArray:
        """The key of each row, or of each deleted key."""
        if self.key is None:
            return pa.nulls(rows.num_rows, pa.large_binary())
        return as_bytes(rows.column(self.key))

    def topics(self, rows: pa.Table) -> list[str | None]:
        """The topic of each row; None if the column is null."""
        if self.topic_column is None:
            return [self.topic] * rows.num_rows
        found: list[str | None] = rows.column(self.topic_column).to_pylist()
        return found

    def refused_topic(self, name: str | None) -> str:
        """The reason for which ``topic_column`` may not name this topic; empty if it may."""
        if not name:
            return f"sink.topic_column is {'null' if name is None else 'empty'}"
        if not _TOPIC.fullmatch(name) or name in (".", ".."):
            return f"sink.topic_column is not the name of a topic: {name[:_SHOWN]!r}"
        if name in _INTERNAL or name in self.own_topics:
            whose = "Kafka" if name in _INTERNAL else "the pipeline"
            return f"sink.topic_column names {name}, a topic of {whose} itself"
        return ""

    def _column(self, setting: str, name: str | None, kinds: Any) -> None:
        if name is None:
            return
        if self.schema.names.count(name) != 1:
            raise TableMismatch(
                f"the rows have no column {name!r}",
                key=f"sink.{setting}",
                way_out=f"they have: {', '.join(self.schema.names)}",
            )
        type_ = self.schema.field(name).type
        if not any(kind(type_) for kind in kinds):
            raise TableMismatch(
                f"column {name!r} is {type_}",
                key=f"sink.{setting}",
                way_out="cast it in the transform",
            )


def as_bytes(column: pa.ChunkedArray) -> pa.LargeBinaryArray:
    """Bytes unchanged, texts in UTF-8, numbers and bools as JSON writes them."""
    if not any(kind(column.type) for kind in _BYTES):
        column = column.cast(pa.string())
    elif pt.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    # Cast to a type with wider offsets first: then the parts fit together at any size.
    parts = column.cast(pa.large_binary()).chunks
    return parts[0] if len(parts) == 1 else pa.concat_arrays([_NONE, *parts])


def header_lists(column: pa.ChunkedArray) -> list[list[tuple[str, bytes | None]]]:
    """Headers in the form of Spark's source, in order; a name may repeat."""
    return [[(one["key"], one["value"]) for one in of or ()] for of in column.to_pylist()]


# -- values in Avro ------------------------------------------------------------------------


_MAGIC = b"\0"


@dataclass(frozen=True)
class AvroValue:
    """The value is an Avro record (1.11).

    Attributes:
        schema: the writer's schema, as JSON; a record with a field for each column.
        schema_id: its id in a registry, for Confluent's framing (a zero byte and the id in four
            bytes before the data); None: the data alone.
    """

    schema: str
    schema_id: int | None = None

    def bind(self, columns: pa.Schema) -> None:
        """Compare the columns with the schema's fields.

        Raises:
            TableMismatch: it is not a record, or fields and columns differ.
        """
        try:
            parsed = json.loads(self.schema)
            _parsed(self.schema)
        except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException) as error:
            raise TableMismatch(f"not an Avro schema: {error!r}", key="sink.value") from None
        if not isinstance(parsed, dict) or parsed.get("type") != "record":
            raise TableMismatch("the Avro schema is not a record", key="sink.value")
        fields = {f["name"] for f in parsed["fields"]}
        if extra := sorted(set(columns.names) - fields):
            raise TableMismatch(f"the Avro schema has no field for {extra}", key="sink.value")
        bare = {f["name"] for f in parsed["fields"] if "default" not in f}
        if missing := sorted(bare - set(columns.names)):
            raise TableMismatch(f"no column for the Avro fields {missing}", key="sink.value")

    def encoded(self, rows: pa.Table) -> list[bytes]:
        """One record for each row.

        Raises:
            ValueError, TypeError: a value that does not fit the schema.
        """
        parsed = _parsed(self.schema)
        head = b"" if self.schema_id is None else _MAGIC + self.schema_id.to_bytes(4, "big")
        done = []
        for row in rows.to_pylist():
            buffer = io.BytesIO()
            buffer.write(head)
            # The writer alone would write a number of any size into an int.
            try:
                fastavro.validate(row, parsed, raise_errors=True)
            except ValidationError as error:
                raise ValueError(" ".join(str(error).split())) from None
            fastavro.schemaless_writer(buffer, parsed, row, strict_allow_default=True)
            done.append(buffer.getvalue())
        return done


@lru_cache(maxsize=16)
def _parsed(schema: str) -> Any:
    return fastavro.parse_schema(json.loads(schema))
