"""Types for the members of JSON objects, proposed from the values that a sample contains.

Unlike :mod:`oncely.decode.infer`, whose schema must hold for each record that it has accepted, this
is a proposal that a person reads: texts that are all dates become a DATE, and a member whose values
have no common type is named as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from oncely.decode.reference import MOST_DIGITS, Number, Whole
from oncely.decode.times import is_too_fine, parse_date, parse_timestamp

VARIES = "JSON"
"""The type of a column whose values have no other type in common."""
_LONG = 1 << 63
_MOST_DIGITS = 38  # of a DECIMAL
_MILLIS_DIGITS = 13
_AS_MAP = 50  # names of an object whose names are values themselves
_SCALARS = {bool, Whole, Number, str}
_KINDS = {bool: "true or false", Whole: "number", Number: "number with a point", str: "text",
          dict: "object", list: "array"}  # fmt: skip


@dataclass
class Seen:
    """The values of one member over all objects that were seen.

    Attributes:
        present: the number of values, those that are null not counted.
        kinds: the number of values by their JSON type.
        members: the members of values that are objects.
        items: the items of values that are arrays.
    """

    present: int = 0
    kinds: Counter[type] = field(default_factory=Counter)
    members: dict[str, Seen] = field(default_factory=dict)
    items: Seen | None = None
    _digits: int = 0
    _long: bool = True
    _millis: bool = True
    _text: set[str] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """Count a value of :func:`oncely.decode.reference.parse_object`."""
        if value is None:
            return
        kind = type(value)
        self.present += 1
        self.kinds[kind] += 1
        if kind is dict:
            for name, inner in value.items():
                self.members.setdefault(name, Seen()).add(inner)
        elif kind is list:
            self.items = self.items or Seen()
            for inner in value:
                self.items.add(inner)
        elif kind is Whole:
            self._whole(value)
        elif kind is str:
            self._text.add(_kind_of_text(value))

    def _whole(self, value: Whole) -> None:
        self._digits = max(self._digits, len(value.lstrip("-")))
        self._millis = self._millis and len(value) == _MILLIS_DIGITS and value[0] != "-"
        self._long = self._long and len(value) <= MOST_DIGITS and -_LONG <= int(value) < _LONG

    @property
    def is_millis(self) -> bool:
        """True if all values may be milliseconds since 1970, of the years 2001 to 2286."""
        return {*self.kinds} == {Whole} and self._millis

    @property
    def varies(self) -> bool:
        """True if no type holds all of the values."""
        return self.ddl_type is None and not self.unknown

    @property
    def unknown(self) -> bool:
        """True if no value tells a type: nulls, empty arrays, objects of such members."""
        if {*self.kinds} == {dict}:
            return all(one.unknown for one in self.members.values())
        if {*self.kinds} == {list}:
            return self.items is None or self.items.unknown
        return not self.kinds

    @property
    def ddl_type(self) -> str | None:
        """Spark's DDL of a type that holds all values; None if there is none, or no value."""
        kinds = {*self.kinds}
        if self.unknown:
            return None
        if kinds == {dict}:
            return self._object_type()
        if kinds == {list}:
            inside = self.items and self.items.ddl_type
            return f"ARRAY<{inside}>" if inside else None
        return self._scalar_type(kinds) if kinds <= _SCALARS else None

    def _scalar_type(self, kinds: set[type]) -> str | None:
        if kinds == {bool}:
            return "BOOLEAN"
        if kinds == {Whole}:
            return self._whole_type()
        if kinds <= {Whole, Number}:
            return "DOUBLE"
        return self._text_type() if kinds == {str} else "STRING"

    def _whole_type(self) -> str | None:
        if self._long:
            return "BIGINT"
        return f"DECIMAL({_MOST_DIGITS}, 0)" if self._digits <= _MOST_DIGITS else None

    def _text_type(self) -> str:
        if self._text == {"DATE"}:
            return "DATE"
        if "TIMESTAMP" in self._text and self._text <= {"TIMESTAMP", "TIMESTAMP_NTZ", "DATE"}:
            return "TIMESTAMP"
        if "TIMESTAMP_NTZ" in self._text and self._text <= {"TIMESTAMP_NTZ", "DATE"}:
            return "TIMESTAMP_NTZ"
        return "STRING"

    def _object_type(self) -> str | None:
        known = {name: one.ddl_type for name, one in self.members.items() if not one.unknown}
        types = {*known.values()}
        if None in types or "" in known:
            return None
        if len(known) > _AS_MAP and len(types) == 1:
            return f"MAP<STRING, {types.pop()}>"
        return f"STRUCT<{', '.join(f'{_name(name)}: {kind}' for name, kind in known.items())}>"

    def told(self) -> str:
        """The kinds of values, the most frequent first: ``text 12, number 3``."""
        return ", ".join(f"{_KINDS[kind]} {count:,}" for kind, count in self.kinds.most_common())


def columns(members: Mapping[str, Seen]) -> Iterator[tuple[str, str]]:
    """Name and proposed type of each member that has a value: the columns of a schema."""
    for name, one in members.items():
        if one.present and name:
            yield name, one.ddl_type or VARIES


def ddl(name: str, kind: str) -> str:
    """A column as Spark's DDL, such as ``id BIGINT``."""
    return f"{_name(name)} {kind}"


def _name(name: str) -> str:
    plain = name.isascii() and name.isidentifier()
    return name if plain else "`" + name.replace("`", "``") + "`"


def _kind_of_text(text: str) -> str:
    if parse_date(text) is not None:
        return "DATE"
    if is_too_fine(text):  # a TIMESTAMP would not keep all digits
        return "STRING"
    if parse_timestamp(text, zoned=False) is not None:
        return "TIMESTAMP_NTZ"
    return "STRING" if parse_timestamp(text, zoned=True) is None else "TIMESTAMP"
