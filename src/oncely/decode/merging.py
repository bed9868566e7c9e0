"""Two schemas become one that both resolve to, or a reason why not.

=====================================  ===========================================
missing here, known there              known; a field is null where it is missing
INT, BIGINT, DOUBLE; FLOAT, DOUBLE     the wider one; FLOAT and a whole number: DOUBLE
BIGINT with numbers beyond 2^53        so is BIGINT then; DOUBLE and FLOAT: a :class:`Conflict`
two structs                            field by field, the first one's fields first
two lists                              their items' types merged
null, an empty list, an empty struct   not known yet: whatever the other says
anything else that differs             a :class:`Conflict`
=====================================  ===========================================

These are the steps that "Schema Resolution" of Avro 1.11 takes from the writer's schema to the
reader's, so what was written by either schema can be read by the merged one. Up to the order of
fields it does not matter in which order schemas are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from oncely.decode.shapes import (
    BIGINT,
    DOUBLE,
    FLOAT,
    INT,
    LARGE,
    Leaf,
    ListOf,
    Settled,
    Shape,
    Struct,
    schema_of,
    settled,
    shape_of,
    step,
)
from oncely.errors import ConfigError

DEEPEST = 32
"""More than this no reader of ours takes, see :mod:`oncely.decode.avro_schema`."""


class CannotMerge(Exception):
    """Two schemas, or a schema and a record, don't become one; the text says why."""


class Conflict(CannotMerge):
    """A field has two types that have no common one.

    Attributes:
        path: of the field, names joined by points, ``[]`` for the items of a list.
        known: the type that came first, in Spark's words.
        found: the other one.
    """

    def __init__(self, path: str, known: str, found: str) -> None:
        super().__init__(f"{path}: it is {known}, found {found}")
        self.path, self.known, self.found = path, known, found


class TooMuch(CannotMerge):
    """The merged schema is larger than :class:`Caps` allow."""


@dataclass(frozen=True)
class Caps:
    """What a schema may grow to; so that nobody's records can make it useless for the others.

    Attributes:
        fields: how many, at all levels.
        depth: how many types lie in one another; a plain column is 1. At most 32.
        name: characters of a field's name.
        text: about how many characters of Avro schema, so that it fits into a Kafka message.

    Raises:
        ConfigError: a cap below 1, or a depth beyond 32; keys are ``decode.max_...``.
    """

    fields: int = 2_000
    depth: int = DEEPEST
    name: int = 255
    text: int = 700_000

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"decode.max_{key}", f"{value} is less than 1")
        if self.depth > DEEPEST:
            raise ConfigError("decode.max_depth", f"{self.depth} is more than {DEEPEST}")

    def check(self, grown: Settled, known: Struct) -> None:
        """Look at what a schema has grown to; what is there already may stay.

        Raises:
            TooMuch: it is too large in one way, or has a new name that is too long.
        """
        longest = max(grown.names, key=len, default="")
        columns = grown.columns
        if len(longest) > self.name:
            raise TooMuch(
                f"a name has {len(longest)} characters, it may have {self.name}: {longest[:20]}…"
            )
        sizes = (
            ("{} fields", columns.count, self.fields, known.count),
            ("a depth of {}", columns.depth - 1, self.depth, known.depth - 1),
            ("{} characters of Avro", columns.text, self.text, known.text),
        )
        for what, size, most, before in sizes:
            if size > max(most, before):
                raise TooMuch(f"the schema would have {what.format(size)}; it may have {most}")


NO_CAPS = Caps(fields=1 << 62, name=1 << 62, text=1 << 62)
"""For what has been looked at before, such as schemas that are known already."""


def merge(known: pa.Schema, found: pa.Schema, caps: Caps = NO_CAPS) -> pa.Schema:
    """The schema that both resolve to, with the fields of ``known`` first.

    What is not known yet is left out. When ``found`` brings nothing new, the result is ``known``
    itself; what is there already is not looked at by the caps.

    Raises:
        Conflict: they have none.
        TooMuch: it would be larger than the caps allow.
    """
    if known is found:
        return known
    columns = shape_of(known)
    merged = settled(join(columns, shape_of(found)), columns)
    if merged.columns is columns:
        return known
    caps.check(merged, columns)
    return schema_of(merged.columns)


def join(known: Struct, found: Struct) -> Struct:
    """The shape of columns that both resolve to; ``known`` itself when nothing is new.

    Raises:
        Conflict: there is none.
    """
    return _structs(known, found, "")


def _join(known: Shape | None, found: Shape | None, path: str) -> Shape | None:
    if found is None or known is found:
        return known
    if known is None:
        return found
    if isinstance(known, Struct) and isinstance(found, Struct):
        return _structs(known, found, path)
    if isinstance(known, ListOf) and isinstance(found, ListOf):
        item = _join(known.item, found.item, f"{path}[]")
        return known if item is known.item else ListOf(item)
    if isinstance(known, Leaf) and isinstance(found, Leaf):
        wider = wider_number(known, found)
        if wider is not None:
            return wider
    raise Conflict(path, str(known), str(found))


def _structs(known: Struct, found: Struct, path: str) -> Struct:
    changed: dict[str, Shape] = {}
    for name, field in found.fields.items():
        before = known.fields.get(name)
        after = _join(before, field, step(path, name))
        if after is not None and after is not before:
            changed[name] = after
    return Struct({**known.fields, **changed}, (known, changed)) if changed else known


def wider_number(known: Leaf, found: Leaf) -> Leaf | None:
    """The narrowest number type that holds what both hold; None when there is none."""
    if known is found:
        return known
    pair = {known, found}
    if not pair <= {INT, BIGINT, LARGE, FLOAT, DOUBLE}:
        return None
    if pair <= {INT, BIGINT, LARGE}:
        return LARGE if LARGE in pair else BIGINT
    return None if LARGE in pair else DOUBLE
