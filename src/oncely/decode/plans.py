"""How records whose columns are known are decoded fast; kept from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.decode.gather import Records
from oncely.decode.schema import SchemaKey, same_schema
from oncely.decode.shapes import ListOf, Shape, Struct, schema_of, shape_of
from oncely.decode.typed import Empty, TypedJson, matchable

_MOST_EMPTY = 64  # members without a value that a plan remembers, and how deep, how long
_DEEPEST_EMPTY = 4
_LONGEST_EMPTY = 255
_CELLS = 4_000_000  # values that exist as Python objects at a time
_FEW = 16  # records that are not worth making a decoder for
_MOST_PLANS = 4_096

_stamps = count(1)
Mutable = dict[str, Any]


class Plan:
    """One schema, which many scopes may share.

    Attributes:
        schema, columns: the same thing twice.
        empty: members that records of this schema had without a value: null, an empty array, an
            object of nothing else. They are no columns, but no reason to look at each record.
        stamp: changes whenever the plan would decode differently; unlike any other plan's.
    """

    def __init__(self, schema: pa.Schema, columns: Struct, empty: Mutable) -> None:
        self.schema, self.columns, self.empty = schema, columns, empty
        self.stamp = next(_stamps)
        self._typed: TypedJson | None = None
        self._made = False

    def decode(
        self, values: pa.Array, at: Records
    ) -> tuple[list[tuple[Records, pa.RecordBatch]], list[Records]]:
        """Decode records that bring nothing new.

        Args:
            values: a slice of records.
            at: which of them, ascending.

        Returns:
            Rows with their records; and records that must be looked at one by one. The columns
            may be some of the plan's only: then no row has a value in the others.
        """
        typed = self._decoder(len(at))
        if typed is None:
            return [], [at]
        rows: list[tuple[Records, pa.RecordBatch]] = []
        unsure: list[Records] = []
        step = max(_FEW, _CELLS // max(1, self.columns.count))
        for first in range(0, len(at), step):
            some = at[first : first + step]
            chosen = values if len(some) == len(values) else values.take(pa.array(some))
            pieces, left = typed.decode(chosen)
            rows += [(some[good], batch) for good, batch in pieces if len(good)]
            unsure.append(some[np.array(left, np.int64)])
        return rows, unsure

    def _decoder(self, records: int) -> TypedJson | None:
        if not self._made and records >= _FEW:
            self._made = True
            shape = _matchable(self.columns)
            if isinstance(shape, Struct):
                empty = _unknown(self.empty, self.columns, shape)
                self._typed = TypedJson.make(schema_of(shape), empty)
        return self._typed

    def learn(self, members: Mapping[str, Any]) -> None:
        """Look at a record that was a row without being new: why was the decoder unsure?"""
        if _size(self.empty) < _MOST_EMPTY and _learn(self.empty, members, self.columns, 1):
            self.remember()

    def remember(self, empty: Empty | None = None) -> None:
        """Take over what another plan has learned; the decoder is made anew."""
        if empty is not None and not _union(self.empty, empty):
            return
        self.stamp, self._typed, self._made = next(_stamps), None, False

    def concerns(self, before: Struct, after: Struct) -> bool:
        """Whether a member that had no value has become a column."""
        return _concerns(self.empty, before, after)


class Plans:
    """All plans, by their schemas."""

    def __init__(self) -> None:
        self._by_schema: dict[Any, Plan] = {}
        self._by_object: dict[Any, tuple[pa.Schema, Plan]] = {}

    def forget(self) -> None:
        """To be called between calls: keep memory in bounds."""
        for plans in (self._by_schema, self._by_object):
            if len(plans) > _MOST_PLANS:
                plans.clear()

    def of(self, schema: pa.Schema) -> Plan:
        """The plan of a schema. Most scopes share one schema object: hashing costs more."""
        seen = self._by_object.get(id(schema))
        if seen is not None:
            return seen[1]
        key = SchemaKey(schema)
        plan = self._by_schema.get(key)
        if plan is None:
            columns = shape_of(schema)
            clean = schema_of(columns)
            plan = Plan(schema if same_schema(schema, clean) else clean, columns, {})
            self._by_schema[key] = plan
        self._by_object[id(schema)] = (schema, plan)  # which keeps the object, so its id too
        return plan

    def grown(self, columns: Struct, before: Plan | None) -> Plan:
        """The plan of a schema that was another one a moment ago."""
        plan = self.of(schema_of(columns))
        if before is not None:
            plan.remember(_unknown(before.empty, columns, columns))
        return plan


def _matchable(shape: Shape | None) -> Shape | None:
    """What the fast decoder can match; records with more go the slow way."""
    if isinstance(shape, ListOf):
        item = _matchable(shape.item)
        return None if item is None else shape if item is shape.item else ListOf(item)
    if isinstance(shape, Struct):
        inside = {name: _matchable(f) for name, f in shape.fields.items() if matchable(name)}
        known = {name: field for name, field in inside.items() if field is not None}
        same = len(known) == len(shape.fields) and all(
            shape.fields[name] is field for name, field in known.items()
        )
        return shape if same else Struct(known) if known else None
    return shape


def _unknown(empty: Empty, known: Struct, matched: Struct) -> Mutable:
    """The members that are no columns to this day: a column that can't be matched is one too."""
    still: Mutable = {}
    for name, inside in empty.items():
        field, same = known.fields.get(name), matched.fields.get(name)
        if field is None:
            still[name] = dict(inside)
        elif isinstance(field, Struct) and isinstance(same, Struct):
            below = _unknown(inside, field, same)
            still |= {name: below} if below else {}
    return still


def _learn(empty: Mutable, members: Mapping[str, Any], known: Shape | None, depth: int) -> bool:
    """Add names of members without a value; whether there was one."""
    fields = known.fields if isinstance(known, Struct) else {}
    new = False
    for name, value in members.items():
        field = fields.get(name)
        if (field is not None and not isinstance(field, Struct)) or not _fit(name, depth):
            continue
        if field is None and name not in empty:
            empty[name] = {}
            new = True
        if value and isinstance(value, dict):
            inside = empty.get(name, {})
            if _learn(inside, value, field, depth + 1):
                empty[name] = inside
                new = True
        if new and _size(empty) >= _MOST_EMPTY:
            break
    return new


def _fit(name: str, depth: int) -> bool:
    return depth <= _DEEPEST_EMPTY and len(name) <= _LONGEST_EMPTY and matchable(name)


def _size(empty: Empty) -> int:
    return len(empty) + sum(map(_size, empty.values()))


def _union(into: Mutable, other: Empty) -> bool:
    new = False
    for name, inside in other.items():
        if name not in into:
            into[name] = {}
            new = True
        new |= _union(into[name], inside)
    return new


def _concerns(empty: Empty, before: Struct, after: Struct) -> bool:
    for name, inside in empty.items():
        then, now = before.fields.get(name), after.fields.get(name)
        if then is now:
            continue
        if then is None:
            return True
        if isinstance(then, Struct) and isinstance(now, Struct) and _concerns(inside, then, now):
            return True
    return False
