"""JSON records to columns: the rules, and who is asked when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.decode.base import Decoded
from oncely.decode.columns import Columns
from oncely.decode.gather import Gather, Records, Slice, no_gc, slices
from oncely.decode.reference import Refused, read_record
from oncely.decode.typed import TypedJson


@dataclass(frozen=True)
class JsonDecoder:
    """Decodes records that are one JSON object each.

    What a record must be to become a row; all else is a rejection that says where and what:

    - Strict JSON (RFC 8259) in UTF-8 without a byte order mark: ONE object, white space around
      it, nothing else. A blank or null value, ``NaN``, ``Infinity``, a comma too many, half a
      surrogate pair, a raw line break or another control character in a text are refused, also
      inside what the schema doesn't name. Line breaks between tokens are white space.
    - At most 128 arrays and objects in one another.
    - A member is found by its exact name, case and all. Unknown ones are ignored. Of a name that
      is there twice, the last counts.
    - A missing member and ``null`` are NULL, and refused where the schema says NOT NULL.
    - Types are never bent: a text is no number (but for DECIMAL), a number no text, 1 no BOOLEAN.
      Integers are written without point and exponent (``1.0`` is no INT) and fit their width.
    - FLOAT and DOUBLE take any number and round it to the nearest one they have; what would
      become infinite is refused. A whole number ``-0`` is 0; ``-0.0`` keeps its sign.
    - DECIMAL takes any number that it holds exactly: ``1.50`` fits DECIMAL(3,1), ``1.25`` not. It
      takes a text that is a decimal number in the same way, since that is how money is sent:
      ``"1.50"``, also with ``+``, leading zeros or an exponent, and without white space.
    - DATE, TIMESTAMP and TIMESTAMP_NTZ are ISO 8601 texts by the rule of
      :mod:`oncely.decode.times`; without an offset a TIMESTAMP is UTC.
    - BINARY is base64 (RFC 4648 section 4) with padding.
    - A ``\\u0000`` in a text is a character like another; a database may refuse it later.

    :func:`oncely.decode.reference.read_record` says the same in code, record by record. Most
    records never get there: :class:`oncely.decode.typed.TypedJson` makes columns of what it is
    sure of. Whatever it is not sure of is given to the reference, and only the reference rejects.

    Attributes:
        schema: the columns; see :func:`oncely.decode.schema.parse_schema`.
        column: which bytes of the record are read, ``value`` or ``key``.
    """

    schema: pa.Schema
    column: str = "value"

    @property
    def needs(self) -> frozenset[str]:
        """The columns of the records that are read."""
        return frozenset({self.column})

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record: a row or a rejection."""
        gather = Gather(self.schema)
        with no_gc():
            for part in slices(records[self.column]):
                self._decode_slice(part, gather)
        return gather.decoded()

    def _decode_slice(self, part: Slice, gather: Gather) -> None:
        pieces: list[tuple[Records, pa.RecordBatch]] = []
        unsure: Iterable[int] = range(len(part.values))
        if self._typed is not None:
            pieces, unsure = self._typed.decode(part.values)
        rows: list[dict[str, Any]] = []
        known: list[int] = []
        for index in unsure:
            data = part.values[index].as_py()
            try:
                rows.append(read_record(data, self.schema, what=self.column))
                known.append(index)
            except Refused as refused:
                gather.reject(part.first + index, str(refused))
        pieces.append((np.array(known, np.int64), _batch(self.schema, rows)))
        gather.rows([(part.first + records, batch) for records, batch in pieces])

    @cached_property
    def _typed(self) -> TypedJson | None:
        return TypedJson.make(self.schema)

    def __getstate__(self) -> dict[str, Any]:
        # msgspec's types are made at run time and can't be pickled; each process makes its own.
        return {"schema": self.schema, "column": self.column}


_BY_NAME = Columns(pick=lambda _, name: lambda members: members[name])


def _batch(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """What the reference read, as columns; its values fit by its own checks."""
    return _BY_NAME.batch(schema, [[row[name] for row in rows] for name in schema.names])
