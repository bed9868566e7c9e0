"""JSON records to inferred columns, by scope.

The scope of a record is the values of a few plain members, which are read before all others. The
fast decoders of known columns are cached across calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count, islice, pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from oncely.core.batch import Rejection
from oncely.decode.base import InvalidRecord
from oncely.decode.columns import Piece, Positions, Slice, from_dicts, read_each, shortened, slices
from oncely.decode.json import Path, TypedJson, matchable
from oncely.decode.merging import (
    CAPS,
    NOTHING,
    Caps,
    Grown,
    ListOf,
    Struct,
    Tree,
    grow,
    schema_of,
    tree_of,
    widen,
)
from oncely.decode.reference import Number, Whole, parse_object, show
from oncely.decode.schema import SchemaKey, same_schema
from oncely.per_process import no_gc

_SECTION_BYTES = 128 * 1024 * 1024
"""Parts are concatenated at the end of a section; this keeps a column's texts below 2 GiB."""
_FIRST_QUOTA, _MORE = 4, 8
"""The number of records of a scope that are read alone before the others are tried again, and the
factor by which it grows each time."""

Judge = Callable[[Mapping[str, Any]], str | None]
"""See :class:`InferringJson`."""


class ScopeRows(NamedTuple):
    """Rows of one scope.

    Attributes:
        scope: the scope.
        schema: their columns: the scope's columns after the last of its records.
        rows: in record order.
        row_record: the index of each row's record, ascending.
    """

    scope: Scope
    schema: pa.Schema
    rows: pa.Table
    row_record: pa.Int64Array


class Inferred(NamedTuple):
    """The outcome of some records: each is a row of one part, or a rejection.

    Attributes:
        parts: rows by scope, in order of the scopes' first rows. Very large input yields several
            parts of a scope, in the records' order.
        rejections: the refused records, ascending.
        known: the given schemas in their extended form, and the new ones.
    """

    parts: list[ScopeRows]
    rejections: list[Rejection]
    known: dict[Scope, pa.Schema]


@dataclass(frozen=True)
class InferringJson:
    """Decodes records that are one JSON object each, and infers their columns.

    :class:`oncely.decode.json.JsonDecoder` defines valid JSON and the types. Each record has a
    scope, the values of ``scope_columns``, and every scope has a schema of its own:

    - A member's type is that of its first value: a text is a STRING (also one that looks like a
      date), true is a BOOLEAN, a number without point and exponent a BIGINT, any other number a
      DOUBLE, an object a STRUCT, an array an ARRAY.
    - Null, an empty array and an object of such members have no type: such a member is no column
      until another record has a value there, and this record's row has null there.
    - A BIGINT that meets a number with a point becomes a DOUBLE, from that record on, unless it has
      held a number beyond 2^53: not all of these equal a DOUBLE, and none is ever rounded. For the
      same reason a DOUBLE takes a whole number only if that equals a DOUBLE.
    - A whole number beyond 64 bits is refused unless its column is a DOUBLE by then.
    - A value of another type than its column's is a conflict: the record is refused, and the schema
      stays as it is. So the first record counts, not the majority.
    - A record that ``judge`` refuses does not change the schema either: it will be no row.
    - A record is a row of the schema after it. When the schema would be larger than the caps, the
      record is refused. So is an object without any value before a column is known.

    The division of records into calls affects only the extent of a part's schema. So a record that
    fits the *present* schema may be decoded before an earlier one that does not: it fits every
    schema that extends it, its row is the same when widened, and it adds nothing to the schema.

    Attributes:
        scope_columns: names of members; if empty, all records have the scope ``()``.
        caps: the largest schema.
        judge: returns the reason why a record cannot be written although it can be decoded, or
            None. It is called only for records that would extend a schema.
    """

    scope_columns: tuple[str, ...] = ()
    caps: Caps = CAPS
    judge: Judge | None = None

    def infer(self, values: pa.ChunkedArray, known: Mapping[Scope, pa.Schema]) -> Inferred:
        """Decode every record: a row or a rejection.

        Args:
            values: binary or large_binary, the records.
            known: schemas by scope, of types that :func:`oncely.decode.avro_schema.storable` gives.
        """
        found = Inferred([], [], dict(known))
        self._plans.forget()
        with no_gc():
            for section in _sections(values):
                run = _Run(self, found.known)
                for part in section:
                    run.add(part)
                found.parts.extend(run.parts())
                found.rejections.extend(sorted(run.rejections))
                found.known.update(run.grown())
        return found

    @cached_property
    def _scopes(self) -> ScopeReader:
        return ScopeReader(self.scope_columns)

    @cached_property
    def _plans(self) -> Plans:
        return Plans()

    def __getstate__(self) -> dict[str, Any]:
        # msgspec's types are created at run time and cannot be pickled; each process creates its
        # own.
        return {name: getattr(self, name) for name in ("scope_columns", "caps", "judge")}


def _sections(values: pa.ChunkedArray) -> Iterator[list[Slice]]:
    section: list[Slice] = []
    size = 0
    for part in slices(values):
        if section and size + part.values.nbytes > _SECTION_BYTES:
            yield section
            section, size = [], 0
        section.append(part)
        size += part.values.nbytes
    yield section


class _Scope:
    """The schema of one scope, and those of its records that were read alone.

    Attributes:
        plan: the fast decoder of the schema; None before the first row.
        columns: the present schema; ahead of ``plan`` until :meth:`settle`.
        tried: the stamp of the plan that the slice's pending records were last tried with.
        records, rows: records that were read alone, and their rows.
    """

    def __init__(self, plan: DecodePlan | None) -> None:
        self.plan = plan
        self.columns = plan.columns if plan else NOTHING
        self.tried = 0
        self.records: list[int] = []
        self.rows: list[dict[str, Any]] = []

    def settle(self, plans: Plans) -> DecodePlan | None:
        """The plan of the present schema."""
        if self.columns is not (self.plan.columns if self.plan else NOTHING):
            self.plan = plans.grown(self.columns, self.plan)
            self.columns = self.plan.columns
        return self.plan

    def grow(self, grown: Grown) -> bool:
        """Take over the columns after a record; True if rows of the fast decoder become invalid.

        This happens when a member that had no value has become a column: an earlier row may contain
        an empty array there, which is no column's value before, and a value or a conflict after.
        """
        before, self.columns = self.columns, grown.columns
        if grown.columns is not before:
            return self.plan is not None and self.plan.concerns(before, grown.columns)
        if self.plan is not None and self.plan.columns is before:
            self.plan.learn(grown.members)
        return False


class _Rows(NamedTuple):
    """Rows of several scopes that share a plan: their records, scopes and columns."""

    records: Positions
    codes: Positions
    rows: pa.RecordBatch

    def taken(self, positions: Positions) -> _Rows:
        if len(positions) == len(self.records):
            return self
        rows = self.rows.take(pa.array(positions))
        return _Rows(self.records[positions], self.codes[positions], rows)


class _Run:
    """Reads records in their order, slice by slice: schemas grow, rows are collected.

    A record is identified by its index among all records, a scope by its code.
    """

    def __init__(self, decoder: InferringJson, known: Mapping[Scope, pa.Schema]) -> None:
        self._reader, self._plans = decoder._scopes, decoder._plans
        self._caps, self._judge, self._known = decoder.caps, decoder.judge, known
        self._codes: dict[Scope, int] = {}
        self._scopes: list[_Scope] = []
        self._rows: list[_Rows] = []
        self.rejections: list[Rejection] = []

    def add(self, part: Slice) -> None:
        """Process the next records.

        Records that fit the schema use the fast decoder, and may overtake the others;
        :class:`InferringJson` explains why the result is the same. The others are read alone, in
        order within their scope. After a few of them the rest is tried again with the extended
        schema.
        """
        found = self._reader.read(part.values)
        for index, why in found.refused.items():
            self._refuse(part.first + index, why)
        for known in self._scopes:
            known.tried = 0
        own = np.array([self._code(scope) for scope in found.scopes] or [0], np.int64)
        codes = np.where(found.codes < 0, -1, own[found.codes])
        pending = np.flatnonzero(codes >= 0)
        quota = _FIRST_QUOTA
        begun = len(self._rows)
        while len(pending):
            unsure = self._fast(part, codes, pending)
            pending = self._slow(part, codes, unsure, quota, begun)
            quota *= _MORE

    def _refuse(self, record: int, why: str) -> None:
        self.rejections.append(Rejection(record, "decode", shortened(why)))

    def _code(self, scope: Scope) -> int:
        code = self._codes.setdefault(scope, len(self._scopes))
        if code == len(self._scopes):
            schema = self._known.get(scope)
            self._scopes.append(_Scope(None if schema is None else self._plans.of(schema)))
        return code

    def _fast(self, part: Slice, codes: Positions, pending: Positions) -> Positions:
        """Decode the records that fit, and return the others, ascending."""
        plans: dict[int, DecodePlan] = {}
        used, inverse = np.unique(codes[pending], return_inverse=True)
        stamps = np.zeros(len(used), np.int64)
        for index, code in enumerate(used.tolist()):
            scope = self._scopes[code]
            plan = scope.settle(self._plans)
            if plan is not None and plan.stamp != scope.tried:
                scope.tried = stamps[index] = plan.stamp
                plans[plan.stamp] = plan
        unsure: list[Positions] = []
        for stamp, positions in _groups(stamps[inverse]):
            at = pending[positions]
            pieces, left = plans[stamp].decode(part.values, at) if stamp else ([], [at])
            self._rows += [_Rows(part.first + some, codes[some], rows) for some, rows in pieces]
            unsure += left
        return _ascending(unsure)

    def _slow(
        self, part: Slice, codes: Positions, unsure: Positions, quota: int, begun: int
    ) -> Positions:
        """Read some records of each scope alone, and return the remaining ones, ascending."""
        left: list[int] = []
        void: list[Positions] = []
        seen: dict[int, int] = {}
        for index, code in zip(unsure.tolist(), codes[unsure].tolist(), strict=True):
            count = seen.get(code, 0)
            if count >= quota:
                left.append(index)
                continue
            seen[code] = count + 1
            record = part.first + index
            grown = self._grown(record, code, part.values[index].as_py())
            if grown is not None and self._scopes[code].grow(grown):
                void.append(self._take_back(code, record, begun) - part.first)
                seen[code] = quota  # the rows that were taken back come first
        return _ascending([np.array(left, np.int64), *void])

    def _grown(self, record: int, code: int, data: bytes) -> Grown | None:
        """Read a record alone: keep its row, or refuse it."""
        scope = self._scopes[code]
        try:
            grown = grow(scope.columns, data, self._caps)
        except InvalidRecord as error:
            self._refuse(record, str(error))
            return None
        if self._judge is not None and grown.columns is not scope.columns:
            why = self._judge(grown.members)
            if why is not None:
                self.rejections.append(Rejection(record, "write", shortened(why)))
                return None
        scope.records.append(record)
        scope.rows.append(grown.row)
        return grown

    def _take_back(self, code: int, record: int, begun: int) -> Positions:
        """Drop the rows of a scope after a record, and return their records, ascending."""
        found: list[Positions] = []
        for index in range(begun, len(self._rows)):
            rows = self._rows[index]
            again = (rows.codes == code) & (rows.records > record)
            if again.any():
                found.append(rows.records[again])
                self._rows[index] = rows.taken(np.flatnonzero(~again))
        self._scopes[code].tried = 0
        return _ascending(found)

    def grown(self) -> dict[Scope, pa.Schema]:
        """The schemas of the scopes that have one."""
        plans = zip(self._codes, (each.settle(self._plans) for each in self._scopes), strict=True)
        return {scope: plan.schema for scope, plan in plans if plan is not None}

    def parts(self) -> list[ScopeRows]:
        """The rows, by scope."""
        names = list(self._codes)
        plans = [scope.settle(self._plans) for scope in self._scopes]
        stamps = np.array([plan.stamp if plan else 0 for plan in plans], np.int64)
        by_stamp = {plan.stamp: plan.schema for plan in plans if plan}
        of: dict[int, list[_Rows]] = {}
        for rows in self._rows:
            for stamp, positions in _groups(stamps[rows.codes]):
                of.setdefault(stamp, []).append(rows.taken(positions))
        for stamp, codes in _groups(np.where([bool(s.rows) for s in self._scopes], stamps, 0)):
            if stamp:
                of.setdefault(stamp, []).extend(self._alone(by_stamp[stamp], codes.tolist()))
        parts = [
            (code, ScopeRows(names[code], by_stamp[stamp], table, pa.array(records)))
            for stamp, some in of.items()
            for code, table, records in _by_scope(by_stamp[stamp], some)
        ]
        return [part for _, part in sorted(parts, key=lambda found: found[0])]

    def _alone(self, schema: pa.Schema, codes: list[int]) -> Iterator[_Rows]:
        """The rows of records that were read alone; a missing value is null."""
        scopes = [self._scopes[code] for code in codes]
        rows = [row for scope in scopes for row in scope.rows]
        records = np.array([record for scope in scopes for record in scope.records], np.int64)
        of = np.repeat(np.array(codes, np.int64), [len(scope.rows) for scope in scopes])
        step = max(1, CELLS // max(1, len(schema)))
        for first in range(0, len(rows), step):
            some = slice(first, first + step)
            yield _Rows(records[some], of[some], from_dicts(schema, rows[some]))


def _ascending(positions: list[Positions]) -> Positions:
    return np.sort(np.concatenate([np.empty(0, np.int64), *positions]))


def _groups(keys: Positions) -> Iterator[tuple[int, Positions]]:
    """The distinct keys, and the positions of each, ascending."""
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    for positions in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        yield int(keys[positions[0]]), positions


def _by_scope(schema: pa.Schema, of: list[_Rows]) -> Iterator[tuple[int, pa.Table, Positions]]:
    """Rows of one schema, cut by scope."""
    records = np.concatenate([each.records for each in of])
    codes = np.concatenate([each.codes for each in of])
    table = pa.concat_tables([widen(pa.Table.from_batches([each.rows]), schema) for each in of])
    order = np.lexsort((records, codes))
    if (order[1:] < order[:-1]).any():
        table = table.combine_chunks().take(pa.array(order))
        records, codes = records[order], codes[order]
    for start, end in pairwise([0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]):
        yield int(codes[start]), table.slice(start, end - start), records[start:end]


# -- the scope of a record ------------------------------------------------------------------

Scope = tuple[str | None, ...]
"""Each scope column's value in the form of :func:`scope_value`; None if there is none."""

LONGEST = 4_096
"""Maximum bytes of a value. It is part of keys and messages of Kafka, so its length is limited."""
_LIMIT = 1 << 63
_INT64 = Annotated[int, msgspec.Meta(ge=-_LIMIT, le=_LIMIT - 1)]


def scope_value(value: str | int | bool) -> str:
    """A value as part of a scope: its text, and its type unless it is a text.

    Texts are used unchanged. ``1`` and ``"1"`` are ``1::BIGINT`` and ``1::STRING``: no scope has
    the value ``1``.
    """
    if isinstance(value, bool):
        return f"{'true' if value else 'false'}::BOOLEAN"
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"{value}::STRING" if _UNPLAIN.fullmatch(value) else value


def typed(texts: Sequence[str | None], columns: Sequence[str], schema: pa.Schema) -> Scope:
    """The scope of rows: the texts of the values in some columns, whose types are in the schema."""
    return tuple(map(partial(_typed, schema), columns, texts))


def is_untyped(scope: Scope) -> bool:
    """True if a value has no type, although :func:`scope_value` would have given it one."""
    return any(text and _UNTYPED.fullmatch(text) for text in scope)


def _typed(schema: pa.Schema, column: str, text: str | None) -> str | None:
    if text is None:
        return None
    arrow = schema.field(column).type if column in schema.names else pa.string()
    if pa.types.is_boolean(arrow):
        return scope_value(text == "true")
    return scope_value(int(text) if pa.types.is_integer(arrow) else text)


_UNTYPED = re.compile(r"-?[0-9]{1,19}|true|false")
_UNPLAIN = re.compile(_UNTYPED.pattern + r"|.*::(?:STRING|BIGINT|BOOLEAN)", re.DOTALL)


class Scoped(NamedTuple):
    """The scopes of some records.

    Attributes:
        scopes: the distinct scopes, in order of their first records.
        codes: for each record the index of its scope, -1 if it has none.
        refused: the reasons of records without a scope, by their index.
    """

    scopes: list[Scope]
    codes: Positions
    refused: dict[int, str]


@dataclass(frozen=True)
class ScopeReader:
    """Reads scopes of JSON records.

    A text, a whole number of 64 bits, true and false are values; a missing member and null are
    None. A record with any other value has no scope.
    """

    columns: tuple[str, ...]

    def read(self, values: pa.Array) -> Scoped:
        """The scopes of a slice of binary or large_binary."""
        if not self.columns:
            return Scoped([()], np.zeros(len(values), np.int64), {})
        data = values.to_pylist()
        try:
            rows, good = list(map(self._fast, data)), np.arange(len(data))
            refused: dict[int, str] = {}
        except Exception:  # for any error, each record is read alone
            rows, good, refused = read_each(data, self._one)
        scopes, of_row = _coded(rows)
        codes = np.full(len(data), -1, np.int64)
        codes[good] = of_row
        for code, scope in enumerate(scopes):
            longest = max((len(text.encode()) for text in scope if text), default=0)
            if longest > LONGEST:
                why = f"a partition's value has {longest:,} bytes; it may have {LONGEST:,} bytes"
                refused.update(dict.fromkeys(np.flatnonzero(codes == code).tolist(), why))
        codes[list(refused)] = -1
        return Scoped(scopes, codes, refused)

    @cached_property
    def _fast(self) -> Callable[[bytes | None], tuple[Any, ...]]:
        slots = [(f"f{i}", str | _INT64 | bool | None, None) for i in range(len(self.columns))]
        names = {f"f{index}": name for index, name in enumerate(self.columns)}
        # ValueError for a name with a quote, backslash or control character in it
        row = msgspec.defstruct("Scope", slots, rename=names, kw_only=True, gc=False)
        decode, values = msgspec.json.Decoder(row).decode, msgspec.structs.astuple
        return lambda record: values(decode(record))  # type: ignore[arg-type]

    def _one(self, record: bytes | None) -> tuple[Any, ...]:
        try:
            return self._fast(record)
        except Exception:  # the reference decides
            members = parse_object(record)
        return tuple(_read(name, members.get(name)) for name in self.columns)


def _read(name: str, value: Any) -> Any:
    if value is None or type(value) is str or isinstance(value, bool):
        return value
    if isinstance(value, Whole):
        number = int(value) if len(value) <= 20 else _LIMIT
        if -_LIMIT <= number < _LIMIT:
            return number
        raise InvalidRecord(f"{name}: {show(value)} is out of range of BIGINT")
    kind = "a number with a point or exponent, " if isinstance(value, Number) else ""
    raise InvalidRecord(
        f"{name}: files are partitioned by texts, whole numbers and booleans, found "
        f"{kind}{show(value)}"
    )


def _coded(rows: list[tuple[Any, ...]]) -> tuple[list[Scope], Positions]:
    """The distinct scopes of rows of values, and the index of each row's scope."""
    keys = rows
    if not set(map(type, chain.from_iterable(rows))) <= {str, type(None)}:
        keys = [(*map(type, row), *row) for row in rows]  # 1 equals True
    codes: dict[tuple[Any, ...], int] = {}
    of_row = [codes.setdefault(key, len(codes)) for key in keys]
    width = len(rows[0]) if rows else 0
    scopes = [tuple(map(_text, key[-width:])) for key in codes]
    return scopes, np.array(of_row, np.int64)


def _text(value: str | int | bool | None) -> str | None:
    return None if value is None else scope_value(value)


# -- decoders of known columns --------------------------------------------------------------

CELLS = 4_000_000
"""Maximum number of values that exist as Python objects at a time."""
_MOST_EMPTY = 64  # members without a value that a plan remembers; their depth and length
_DEEPEST_EMPTY = 4
_LONGEST_EMPTY = 255
_FEW = 16  # records for which no decoder is created
_MOST_PLANS = 4_096

_stamps = count(1)


class DecodePlan:
    """The fast decoder of one schema, which many scopes may share.

    Attributes:
        schema, columns: the same columns as Arrow fields and as a tree.
        empty: paths of members that had no value in records of this schema: null, an empty array,
            or an object of such members. They are no columns, and no reason to read each record
            alone.
        stamp: a unique number that changes whenever the plan would decode differently.
    """

    def __init__(self, schema: pa.Schema, columns: Struct) -> None:
        self.schema, self.columns = schema, columns
        self.empty: set[Path] = set()
        self.stamp = next(_stamps)
        self._typed: TypedJson | None = None
        self._made = False

    def decode(self, values: pa.Array, at: Positions) -> tuple[list[Piece], list[Positions]]:
        """Decode records that do not extend the schema.

        Args:
            values: a slice of records.
            at: the positions of some of them, ascending.

        Returns:
            Rows after the positions of their records; and the positions of records that must be
            read alone. A row may have only some of the plan's columns; it has no value in the
                others.
        """
        typed = self._decoder(len(at))
        if typed is None:
            return [], [at]
        rows: list[Piece] = []
        unsure: list[Positions] = []
        step = max(_FEW, CELLS // max(1, self.columns.size.fields))
        for first in range(0, len(at), step):
            some = at[first : first + step]
            chosen = values if len(some) == len(values) else values.take(pa.array(some))
            pieces, left = typed.decode(chosen)
            rows += [(some[good], batch) for good, batch in pieces if len(good)]
            unsure.append(some[left])
        return rows, unsure

    def _decoder(self, records: int) -> TypedJson | None:
        if not self._made and records >= _FEW:
            self._made = True
            columns = _matchable(self.columns)
            if isinstance(columns, Struct):
                empty = _not_columns(self.empty, self.columns, columns)
                self._typed = TypedJson.make(schema_of(columns), empty)
        return self._typed

    def learn(self, members: Mapping[str, Any]) -> None:
        """Remember the empty members of a record that was unsure and did not extend the schema."""
        found = (path for path in _empty(members, self.columns, ()) if path not in self.empty)
        self.remember(list(islice(found, max(0, _MOST_EMPTY - len(self.empty)))))

    def remember(self, empty: Collection[Path]) -> None:
        """Add paths of empty members; the decoder is recreated if any is new."""
        if not self.empty.issuperset(empty):
            self.empty.update(empty)
            self.stamp, self._typed, self._made = next(_stamps), None, False

    def concerns(self, before: Struct, after: Struct) -> bool:
        """True if a member that had no value has become a column."""
        return any(_at(before, path) is None and _at(after, path) for path in self.empty)


class Plans:
    """All plans, by schema."""

    def __init__(self) -> None:
        self._by_schema: dict[Any, DecodePlan] = {}
        self._by_object: dict[Any, tuple[pa.Schema, DecodePlan]] = {}

    def forget(self) -> None:
        """Bound the memory; to be called between calls of ``infer``."""
        for plans in (self._by_schema, self._by_object):
            if len(plans) > _MOST_PLANS:
                plans.clear()

    def of(self, schema: pa.Schema) -> DecodePlan:
        """The plan of a schema. Lookup is by object first: hashing a schema is expensive."""
        seen = self._by_object.get(id(schema))
        if seen is not None:
            return seen[1]
        key = SchemaKey(schema)
        plan = self._by_schema.get(key)
        if plan is None:
            columns = tree_of(schema)
            clean = schema_of(columns)
            plan = DecodePlan(schema if same_schema(schema, clean) else clean, columns)
            self._by_schema[key] = plan
        self._by_object[id(schema)] = (schema, plan)  # keeps the object, and so its id
        return plan

    def grown(self, columns: Struct, before: DecodePlan | None) -> DecodePlan:
        """The plan of columns that extend ``before``."""
        plan = self.of(schema_of(columns))
        if before is not None:
            plan.remember(_not_columns(before.empty, columns, columns))
        return plan


def _matchable(tree: Tree | None) -> Tree | None:
    """The branches that the fast decoder can match; records with other branches are read alone."""
    if isinstance(tree, ListOf):
        item = _matchable(tree.item)
        return None if item is None else tree if item is tree.item else ListOf(item)
    if isinstance(tree, Struct):
        inside = {name: _matchable(f) for name, f in tree.fields.items() if matchable(name)}
        known = {name: field for name, field in inside.items() if field is not None}
        same = len(known) == len(tree.fields) and all(
            tree.fields[name] is field for name, field in known.items()
        )
        return tree if same else Struct(known) if known else None
    return tree


def _not_columns(empty: set[Path], known: Struct, matched: Struct) -> set[Path]:
    """The paths that are no columns yet; a column that cannot be matched is treated so, too."""

    def leads_on(path: Path) -> bool:
        here: tuple[Tree | None, Tree | None] = known, matched
        for name in path:
            if not isinstance(here[0], Struct) or not isinstance(here[1], Struct):
                return False
            here = here[0].fields.get(name), here[1].fields.get(name)
            if here[0] is None:
                return True
        return False

    return {path for path in empty if leads_on(path)}


def _empty(members: Mapping[str, Any], known: Tree | None, path: Path) -> Iterator[Path]:
    """The paths of the members that are no columns, if the fast decoder can match them."""
    for name, value in members.items():
        field = known.fields.get(name) if isinstance(known, Struct) else None
        if field is not None and not isinstance(field, Struct):
            continue
        if len(path) < _DEEPEST_EMPTY and len(name) <= _LONGEST_EMPTY and matchable(name):
            if field is None:
                yield (*path, name)
            if isinstance(value, dict):
                yield from _empty(value, field, (*path, name))


def _at(tree: Tree | None, path: Path) -> Tree | None:
    for name in path:
        tree = tree.fields.get(name) if isinstance(tree, Struct) else None
    return tree
