"""Arrow rows as Avro records, bare or framed for a schema registry."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import fastavro
import pyarrow as pa
from fastavro.validation import ValidationError

from oncely.errors import TableMismatch

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
            raise TableMismatch(f"sink.value: not an Avro schema: {error!r}") from None
        if not isinstance(parsed, dict) or parsed.get("type") != "record":
            raise TableMismatch("sink.value: the Avro schema is not a record")
        fields = {f["name"] for f in parsed["fields"]}
        if extra := sorted(set(columns.names) - fields):
            raise TableMismatch(f"sink.value: the Avro schema has no field for {extra}")
        bare = {f["name"] for f in parsed["fields"] if "default" not in f}
        if missing := sorted(bare - set(columns.names)):
            raise TableMismatch(f"sink.value: no column for the Avro fields {missing}")

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
