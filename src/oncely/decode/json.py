"""JSON records to columns: the rules, the fast path, and its order with native code and reference.

On the fast path msgspec decodes each record into a typed struct, Arrow each column.
Records are decoded separately, so no record can shift into the place of another, for any input.
msgspec's rules equal the reference's except for those that :meth:`TypedJson.decode` guards. The
fast path never rejects: a record that it refuses, or might accept wrongly, is returned as unsure.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.columns import (
    BytesDecoder,
    ColumnLeaf,
    Columns,
    Misfits,
    Piece,
    Positions,
    Values,
    fit,
    from_dicts,
    read_each,
    read_native,
)
from oncely.decode.reference import (
    DEEPEST,
    EXACT,
    JsonRules,
    from_base64,
    json_text,
    nesting,
    parse_json,
    read_record,
)
from oncely.decode.schema import is_json, is_large
from oncely.decode.times import bad_timestamps, dates, timestamps
from oncely.extras import native


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
      :mod:`oncely.decode.reference`; without an offset a TIMESTAMP is UTC. Digits of a second
      beyond microseconds are refused unless they are zeros; with ``rounding`` they are cut off.
    - A column of type JSON takes any value, as JSON without spaces; numbers keep their spelling,
      and of a repeated name the last counts.
    - BINARY is base64 (RFC 4648 section 4) with padding.
    - With ``unwrap`` the columns are members of the object in the member of that name, which must
      be there, as ``payload`` in the JSON with schemas of Kafka Connect.
    - A ``\\u0000`` in a text is an ordinary character; a database may refuse it later.

    :func:`oncely.decode.reference.read_record` implements these rules record by record. Most
    records take a fast path: :class:`oncely.decode.json.NativeJson`, if ``oncely-native`` is
    installed, and :class:`oncely.decode.json.TypedJson` create columns from records that they
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


# -- the fast path --------------------------------------------------------------------------


@dataclass(frozen=True)
class NativeJson:
    """Decodes slices of JSON records, as :class:`oncely.decode.json.TypedJson` does."""

    schema: pa.Schema
    rules: JsonRules

    @classmethod
    def make(cls, schema: pa.Schema, rules: JsonRules) -> NativeJson | None:
        """A decoder for these columns, or None without the package."""
        return None if native() is None else cls(schema, rules)

    def decode(self, values: pa.Array) -> tuple[list[Piece], Positions]:
        """Decode a slice of binary or large_binary: rows, and the positions of unsure records."""
        return read_native(self.schema, values, lambda module: module.json_rows, *self.rules)


Path = tuple[str, ...]
"""The names that lead to a member, from the record's own object."""
_UNMATCHABLE = re.compile(r'["\\\x00-\x1f]')
_SHORT = 38  # characters; so at most as many digits as a DECIMAL has
_NO_ITEMS = Annotated[list[Any], msgspec.Meta(max_length=0)]
_PLAIN_DECIMAL = re.compile(r"[+-]?[0-9]+(?:[.][0-9]+)?")


@dataclass(frozen=True)
class TypedJson:
    """Decodes whole slices of records; see :meth:`make`."""

    schema: pa.Schema
    _decode: Callable[[bytes], Any]
    _lists: Callable[[Sequence[Any]], tuple[list[Any], ...]]
    _columns: Columns

    @classmethod
    def make(
        cls, schema: pa.Schema, empty: Collection[Path] | None = None, *, rounding: bool = False
    ) -> TypedJson | None:
        """A decoder for these columns, or None if msgspec cannot match one of their names.

        Args:
            schema: the columns.
            empty: None: members that are not in the schema are ignored. Else a record with such a
                member is unsure, unless the member's path and its parents' paths are in the set,
                and its value is null, an empty array or an object of such members.
            rounding: cut off digits that a TIMESTAMP does not keep; else the record is unsure.
        """
        try:
            row = _struct(schema, empty)
        except ValueError:  # a name with a quote, backslash or control character in it
            return None
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            row, strict=True, float_hook=_plain_decimal
        )
        lists = _lists_of(
            *((len(schema),) if (one := _sole(schema)) is None else (len(one), "f0."))
        )
        return cls(schema, decoder.decode, lists, _by_slot(rounding))

    def decode(self, values: pa.Array) -> tuple[list[Piece], Positions]:
        """Decode a slice of binary or large_binary.

        msgspec does not check the UTF-8 of texts that it skips, and the depth that it accepts
        depends on the caller's stack; both are checked here. Values for which Arrow is less strict
        than the rules are checked by the leaves below.

        Returns:
            Rows in pieces, ascending as a whole; and the positions of unsure records, ascending.
        """
        data = values.to_pylist()
        tiny = _tiny(values) if any(_FLOAT.search(str(one.type)) for one in self.schema) else ()
        for index in (*_not_utf8(values, data), *_deep(values, data), *tiny):
            data[index] = None  # which every decoder refuses
        unsure: dict[int, str] = {}
        try:
            rows, good = list(map(self._decode, data)), np.arange(len(data))
        except Exception:  # for any error, the reference decides
            rows, good, unsure = read_each(data, self._decode, Exception)
        del data
        pieces, misfits = fit(rows, good, self._batch)
        return pieces, np.sort(np.array([*unsure, *misfits], np.int64))

    def _batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        sole = _sole(self.schema)
        schema = self.schema if sole is None else sole
        columns = [
            _json_texts(field, values) if is_json(field) else values
            for field, values in zip(schema, self._lists(rows), strict=True)
        ]
        batch = self._columns.batch(schema, columns)
        if sole is None:
            return batch
        whole = pa.StructArray.from_arrays(batch.columns, fields=list(sole))
        return pa.RecordBatch.from_arrays([whole], schema=self.schema)


def _sole(schema: pa.Schema) -> pa.Schema | None:
    """The members of the only column, if that is a struct and NOT NULL: an envelope. They are read
    as columns, which may be JSON; members of other structs are not."""
    if len(schema) != 1 or schema.field(0).nullable or not pa.types.is_struct(schema.field(0).type):
        return None
    return pa.schema(list(schema.field(0).type)) if len(schema.field(0).type) else None


def _json_texts(field: pa.Field, values: Values) -> Values:
    """The texts of a JSON column.

    Raises:
        Misfits: some of them need the reference.
    """

    def text(raw: msgspec.Raw) -> str | None:
        found = parse_json(bytes(raw))
        if found is None and not field.nullable:
            raise ValueError("null")
        return None if found is None else json_text(found)

    texts, _, refused = read_each(values, text, ValueError)
    if refused:
        raise Misfits(np.array([*refused], np.int64), f"{field.name}: not JSON")
    return texts


def _not_utf8(values: pa.Array, data: list[bytes | None]) -> list[int]:
    large = pa.types.is_large_binary(values.type)
    try:
        pc.cast(values, pa.large_string() if large else pa.string())
    except pa.ArrowInvalid:
        _, _, bad = read_each((record or b"" for record in data), bytes.decode, UnicodeDecodeError)
        return [*bad]
    return []


def _deep(values: pa.Array, data: list[bytes | None]) -> list[int]:
    """Indices of records that are nested too deeply; most are too short for it."""
    longest = pc.max(pc.binary_length(values)).as_py() or 0
    if longest <= DEEPEST:
        return []
    return [
        index
        for index, record in enumerate(data)
        if record is not None
        and len(record) > DEEPEST
        and record.count(b"[") + record.count(b"{") > DEEPEST
        and nesting(record.decode("latin-1")) > DEEPEST
    ]


def _tiny(values: pa.Array) -> list[int]:
    """Indices of records with a number that may be so close to 0 that msgspec makes 0 of it."""
    found: list[int] = pc.indices_nonzero(pc.match_substring_regex(values, _TINY)).to_pylist()
    return found


_FLOAT = re.compile("float|double")
_TINY = r"[:,\[\s]-?[0-9]+(?:\.[0-9]+)?[eE]-0*[1-9][0-9]{2}|0{200}"
"""A number with an exponent below -99, or with that many zeros: 5e-324 is the least double."""


def matchable(name: str) -> bool:
    """True if msgspec can match a member of this name."""
    return _UNMATCHABLE.search(name) is None


def _struct(columns: Iterable[pa.Field], empty: Collection[Path] | None) -> type:
    """A struct with the slots f0, f1, ... for members of any name."""
    slots: list[tuple[Any, ...]] = []
    names: dict[str, str] = {}
    for index, column in enumerate(columns):
        names[f"f{index}"] = column.name
        if is_json(column):
            missing = (msgspec.Raw(b"null"),) if column.nullable else ()
            slots.append((f"f{index}", msgspec.Raw, *missing))
            continue
        kind = _type(column, None if empty is None else _below(empty, column.name))
        slots.append((f"f{index}", kind | None, None) if column.nullable else (f"f{index}", kind))
    taken = set(names.values())
    for index, name in enumerate(sorted({path[0] for path in empty or ()} - taken)):
        nothing = _struct([], _below(empty or (), name))
        slots.append((f"e{index}", nothing | _NO_ITEMS | None, None))
        names[f"e{index}"] = name
    # gc=False: a row never refers to itself.
    return msgspec.defstruct(
        "Row",
        slots,
        rename=names,
        kw_only=True,
        gc=False,
        forbid_unknown_fields=empty is not None,
    )


def _below(empty: Collection[Path], name: str) -> set[Path]:
    """The paths that lead through a member, starting below it."""
    return {path[1:] for path in empty if len(path) > 1 and path[0] == name}


def _type(field: pa.Field, empty: Collection[Path] | None = None) -> Any:
    """The type for msgspec: the JSON type, and the width of integers. The leaves check the rest.

    If columns are inferred (``empty`` is not None), a number that may not keep its value is left to
    the reference: a first one beyond 2^53, and in a DOUBLE column every such number, which Arrow
    refuses as long as it is an int.
    """
    arrow = field.type
    if pa.types.is_integer(arrow):
        limit = 1 << arrow.bit_width - 1
        if empty is not None and arrow == pa.int64() and not is_large(field):
            limit = EXACT
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    if pa.types.is_struct(arrow):
        return _struct(arrow, empty)
    if pa.types.is_list(arrow):
        inside: Collection[Path] | None = None if empty is None else ()
        return list[_type(arrow.value_field, inside) | None]  # type: ignore[misc]
    if pa.types.is_map(arrow):
        return dict[str, _type(arrow.item_field) | None]  # type: ignore[misc]
    if pa.types.is_boolean(arrow):
        return bool
    if pa.types.is_floating(arrow):
        return float if empty is None else int | float
    # msgspec's own Decimal accepts other texts, too. An untyped number with a point goes through
    # float_hook; _decimals accepts int, Decimal and str.
    return Any if pa.types.is_decimal(arrow) else str


def _lists_of(count: int, inside: str = "") -> Callable[[Sequence[Any]], tuple[list[Any], ...]]:
    """A function that turns rows into one list for each slot.

    The expression is generated, because a comprehension over a literal attribute is three times as
    fast as ``map(attrgetter)``, which would be a fifth of all decoding.
    """
    lists = "".join(f"[row.{inside}f{index} for row in rows]," for index in range(count))
    made: Callable[[Sequence[Any]], tuple[list[Any], ...]]
    made = eval(f"lambda rows: ({lists})")  # noqa: S307 - made of names of slots alone
    return made


def _float32(values: Values, arrow: pa.DataType) -> pa.Array:
    column = pa.array(values, arrow)
    zero = pc.equal(column, 0)
    lost = pc.any(zero).as_py() and pc.any(pc.filter(pa.array(values, pa.float64()), zero)).as_py()
    if lost or pc.any(pc.is_inf(column)).as_py():  # JSON has no infinity: Arrow made it
        raise pa.ArrowInvalid("a number is out of range of FLOAT")
    return column


def _plain_decimal(text: str) -> Decimal:
    """A number for a DECIMAL, if it is short and has no exponent.

    Arrow returns wrong results, without an error, for an extreme scale: it turned 1.000... with
    2,000 zeros into 0.00. So such numbers are left to the reference.
    """
    if len(text) > _SHORT or "e" in text or "E" in text:
        raise ValueError("not a plain decimal")
    return Decimal(text)


def _decimals(values: Values, arrow: pa.DataType) -> pa.Array:
    """Numbers, and texts that are plain decimal numbers."""
    kinds = set(map(type, values))
    if str not in kinds:
        return pa.array(values, arrow)
    if kinds <= {str, type(None)}:
        texts = _texts(values)
        # Arrow's cast doesn't notice digits before the point that the type has no room for.
        whole = f"^[+-]?0*[0-9]{{0,{arrow.precision - arrow.scale}}}([.]|$)"
        plain = pc.and_(_plain(texts), pc.match_substring_regex(texts, whole))
        if pc.all(plain).as_py() is False:
            raise pa.ArrowInvalid("not a plain decimal")
        return pc.cast(texts, arrow)
    return pa.array([_of_text(v) if type(v) is str else v for v in values], arrow)


def _of_text(text: str) -> Decimal:
    if _PLAIN_DECIMAL.fullmatch(text) is None:
        raise ValueError("not a plain decimal")
    return _plain_decimal(text)


def _bad_decimals(values: Values, arrow: pa.DataType) -> list[int]:
    """Texts that are not plain, at Arrow's speed; only if there are none, each text separately."""
    texts = pa.array([value if type(value) is str else None for value in values], pa.string())
    strange: list[int] = pc.indices_nonzero(pc.invert(_plain(texts))).to_pylist()
    return strange or ColumnLeaf(_decimals).one_by_one(values, arrow)


def _plain(texts: pa.Array) -> pa.Array:
    """True for decimal numbers without exponent that are short; see :func:`_plain_decimal`."""
    short = pc.less_equal(pc.binary_length(texts), _SHORT)
    return pc.and_(short, pc.match_substring_regex(texts, f"^(?:{_PLAIN_DECIMAL.pattern})$"))


def _binary(values: Values, arrow: pa.DataType) -> pa.Array:
    return pa.array([None if v is None else from_base64(v) for v in values], arrow)


def _texts(values: Values) -> pa.Array:
    return pa.array(values, pa.string())


def _by_slot(rounding: bool) -> Columns:
    return Columns(
        pick=lambda index, _: operator.attrgetter(f"f{index}"),
        leaves={
            pa.float32().id: ColumnLeaf(_float32),
            pa.decimal128(1).id: ColumnLeaf(_decimals, _bad_decimals),
            pa.binary().id: ColumnLeaf(_binary),
            pa.date32().id: ColumnLeaf(lambda values, _: dates(_texts(values))),
            pa.timestamp("us").id: ColumnLeaf(
                lambda values, arrow: timestamps(_texts(values), arrow, rounding=rounding),
                lambda values, arrow: bad_timestamps(_texts(values), arrow, rounding=rounding),
            ),
        },
    )
