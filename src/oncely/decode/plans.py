"""The fast decoders of known columns, cached across calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import count, islice
from typing import Any

import pyarrow as pa

from oncely.decode.columns import Piece, Positions
from oncely.decode.merging import ListOf, Struct, Tree, schema_of, tree_of
from oncely.decode.schema import SchemaKey, same_schema
from oncely.decode.typed import Path, TypedJson, matchable

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
