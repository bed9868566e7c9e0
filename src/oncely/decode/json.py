"""JSON records to columns: the rules, and the order of fast path and reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from oncely.decode.columns import BytesDecoder, Piece, from_dicts, read_each
from oncely.decode.native import NativeJson
from oncely.decode.reference import JsonRules, read_record
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
      :mod:`oncely.decode.times`; without an offset a TIMESTAMP is UTC. Digits of a second beyond
      microseconds are refused unless they are zeros; with ``rounding`` they are cut off.
    - A column of type JSON takes any value, as JSON without spaces; numbers keep their spelling,
      and of a repeated name the last counts.
    - BINARY is base64 (RFC 4648 section 4) with padding.
    - With ``unwrap`` the columns are members of the object in the member of that name, which must
      be there, as ``payload`` in the JSON with schemas of Kafka Connect.
    - A ``\\u0000`` in a text is an ordinary character; a database may refuse it later.

    :func:`oncely.decode.reference.read_record` implements these rules record by record. Most
    records take a fast path: :class:`oncely.decode.native.NativeJson`, if ``oncely-native`` is
    installed, and :class:`oncely.decode.typed.TypedJson` create columns from records that they
    decode with certainty. All others are passed to the reference, and only the reference rejects.
    """

    strict: bool = True
    rounding: bool = False
    unwrap: str = ""

    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        pieces: list[Piece] = []
        unsure = np.arange(len(values))
        for fast in self._fast:
            if not len(unsure):
                break
            chosen = values if len(unsure) == len(values) else values.take(pa.array(unsure))
            found, left = fast.decode(chosen)
            pieces += [(unsure[at], batch) for at, batch in found]
            unsure = unsure[left]
        refused: dict[int, str] = {}
        if len(unsure):
            read = partial(read_record, schema=self._read, what=self.column, rules=self._rules)
            rows, good, refused = read_each((values[at].as_py() for at in unsure.tolist()), read)
            pieces.append((unsure[good], from_dicts(self._read, rows)))
        if self.unwrap:
            pieces = [(at, self._unwrapped(batch)) for at, batch in pieces]
        return pieces, {int(unsure[at]): why for at, why in refused.items()}

    def _unwrapped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(batch.column(0).flatten(), schema=self.schema)

    @cached_property
    def _read(self) -> pa.Schema:
        """The members of a record that are read."""
        if not self.unwrap:
            return self.schema
        return pa.schema([pa.field(self.unwrap, pa.struct(list(self.schema)), nullable=False)])

    @cached_property
    def _rules(self) -> JsonRules:
        return JsonRules(self.strict, self.rounding)

    @cached_property
    def _fast(self) -> list[NativeJson | TypedJson]:
        """The fast paths in their order; each gets the records of which those before are unsure."""
        made = (
            NativeJson.make(self._read, self._rules),
            TypedJson.make(self._read, rounding=self.rounding),
        )
        return [fast for fast in made if fast is not None]
