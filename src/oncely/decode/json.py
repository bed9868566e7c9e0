"""JSON records to columns: the rules; and the fast path before the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from oncely.decode.collector import BytesDecoder, read_each
from oncely.decode.columns import Piece, from_dicts
from oncely.decode.reference import read_record
from oncely.decode.typed import TypedJson


@dataclass(frozen=True)
class JsonDecoder(BytesDecoder):
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
    """

    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        pieces: list[Piece] = []
        unsure = np.arange(len(values))
        if self._typed is not None:
            pieces, unsure = self._typed.decode(values)
        read = partial(read_record, schema=self.schema, what=self.column)
        rows, good, refused = read_each((values[at].as_py() for at in unsure.tolist()), read)
        pieces.append((unsure[good], from_dicts(self.schema, rows)))
        return pieces, {int(unsure[at]): why for at, why in refused.items()}

    @cached_property
    def _typed(self) -> TypedJson | None:
        return TypedJson.make(self.schema)
