"""The format of a pipeline's files: their columns, encoding and directories; and the receipts of
tasks that write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa

from oncely.decode.infer import InferringJson
from oncely.decode.merging import CAPS
from oncely.kinds.partitions import EventTime, PartitionColumn

Format = Literal["avro", "parquet"]
Scope = tuple[str | None, ...]


class SourceRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets ``[start, end)`` of a topic-partition that contain all records of a file."""

    topic: str
    partition: int
    start: int
    end: int


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that a task has written, complete and closed.

    Attributes:
        path: the path below the root, ``/`` between the parts, values percent-encoded.
        rows: the number of rows, at least one.
        bytes: the size in bytes.
        sha256: the SHA-256 of its bytes, in hex.
        partition: the values of the directories: name to the value's text, None for no value.
        event_time: first and last instant of the column of ``date`` and ``hour``, in microseconds
            since 1970 UTC; None without such a column or without a value.
        ranges: the source ranges of its records; empty if a Spark transform mixed them.
        scope: the scope of its schema.
        schema: the id of the file's own schema, see ``schemas`` of :class:`Receipt`.
    """

    path: str
    rows: int
    bytes: int
    sha256: str
    partition: dict[str, str | None]
    event_time: tuple[int, int] | None
    ranges: list[SourceRange]
    scope: Scope
    schema: str


class Receipt(msgspec.Struct, frozen=True):
    """The message of a task to the driver about its files.

    Attributes:
        files: the files that it has written.
        schemas: the schemas of its files, and extended schemas, id to Avro schema in JSON.
        grown: the scopes whose schema the task has extended, and the id of the extended schema.
        batch: the number of the batch in its run.
    """

    files: list[WrittenFile]
    schemas: dict[str, str]
    grown: list[tuple[Scope, str]] = []
    batch: int = 0


def encode(what: msgspec.Struct) -> bytes:
    """As JSON."""
    return msgspec.json.encode(what)


def read_receipt(text: str) -> Receipt:
    """Parse the receipt of a task."""
    return msgspec.json.decode(text, type=Receipt)


VALUE = "value"
"""The single column of rows whose columns are inferred: the record's bytes."""


@dataclass(frozen=True)
class FileFormat:
    """Attributes of the files of a pipeline.

    Attributes:
        format: the format of each file.
        columns: the columns that determine a row's directory.
        schema: the schema of every row; None: inferred by scope.
        target_bytes: the target size of a file, in bytes.
    """

    format: Format
    columns: tuple[PartitionColumn, ...]
    schema: pa.Schema | None
    target_bytes: int = 64 << 20

    @property
    def scope_columns(self) -> tuple[str, ...]:
        """The columns whose values select a schema; empty if the schema is fixed."""
        if self.schema is not None:
            return ()
        return tuple(one.column for one in self.columns if one.kind == "column")

    def inferring(self) -> InferringJson:
        """The decoder that infers columns, if :attr:`schema` is None."""
        times = {one.column for one in self.columns if one.kind != "column"}
        return InferringJson(self.scope_columns, CAPS, *map(EventTime, times))
