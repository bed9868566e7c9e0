"""JSON records to columns: the rules, and the order of fast path and reference."""

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

    The rules for a record to become a row; any other record is a rejection with place and reason:

    - Strict JSON (RFC 8259) in UTF-8 without a byte order mark: ONE object, white space around it,
      nothing else. A blank or null value, ``NaN``, ``Infinity``, a comma too many, half a surrogate
      pair, a raw line break or another control character in a text are refused, also inside what
      the schema doesn't name. Line breaks between tokens are white space.
    - At most 128 nested arrays and objects.
    - A member is matched by its exact, case-sensitive name. Unknown members are ignored. Of a
      repeated name, the last counts.
    - A missing member and ``null`` are NULL, and refused if the column is NOT NULL.
    - A STRING takes any scalar, as Spark's ``from_json`` does: a number or boolean keeps its text,
      ``1.50`` is ``1.50``. With ``strict`` it takes texts only. A slower path reads such records.
    - Other types are never converted: a text is no number (but for DECIMAL), 1 no BOOLEAN. Integers
      are written without point and exponent (``1.0`` is no INT) and fit their
      width.
    - FLOAT and DOUBLE take any number and round it to the nearest one they have; a number that
      would become infinite is refused. A whole number ``-0`` is 0; ``-0.0`` keeps its sign.
    - DECIMAL takes any number that it holds exactly: ``1.50`` fits DECIMAL(3,1), ``1.25`` not. It
      takes a text that is a decimal number in the same way, since amounts of money are sent so:
      ``"1.50"``, also with ``+``, leading zeros or an exponent, and without white space.
    - DATE, TIMESTAMP and TIMESTAMP_NTZ are ISO 8601 texts by the rule of
      :mod:`oncely.decode.times`; without an offset a TIMESTAMP is UTC.
    - A column of type JSON takes any value, as JSON without spaces; numbers keep their spelling,
      and of a repeated name the last counts.
    - BINARY is base64 (RFC 4648 section 4) with padding.
    - A ``\\u0000`` in a text is an ordinary character; a database may refuse it later.

    :func:`oncely.decode.reference.read_record` implements these rules record by record. Most
    records take the fast path: :class:`oncely.decode.typed.TypedJson` creates columns from records
    that it decodes with certainty. All others are passed to the reference, and only the reference
    rejects.
    """

    strict: bool = True

    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        pieces: list[Piece] = []
        unsure = np.arange(len(values))
        if self._typed is not None:
            pieces, unsure = self._typed.decode(values)
        read = partial(read_record, schema=self.schema, what=self.column, strict=self.strict)
        rows, good, refused = read_each((values[at].as_py() for at in unsure.tolist()), read)
        pieces.append((unsure[good], from_dicts(self.schema, rows)))
        return pieces, {int(unsure[at]): why for at, why in refused.items()}

    @cached_property
    def _typed(self) -> TypedJson | None:
        return TypedJson.make(self.schema)
