"""A validator of JSON Schema, for the words that the schema of pipeline files has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str, date, datetime, time),  # TOML's times are texts in JSON
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_REMARKS = {"title", "description", "default", "examples", "format", "writeOnly"}
_TOP = {"$schema", "$defs"}


def problems(value: Any, schema: Mapping[str, Any], top: Mapping[str, Any]) -> Iterator[str]:
    """What a schema does not allow in a value."""
    for word, given in schema.items():
        if word not in _REMARKS and word not in _TOP and word != "required":
            yield from _WORDS[word](value, given, schema, top)
    for key in schema.get("required", ()):
        if isinstance(value, dict) and key not in value:
            yield f"{key} is missing"


def _type(value: Any, given: str, *_: Any) -> Iterator[str]:
    if not isinstance(value, _TYPES[given]) or (isinstance(value, bool) and given != "boolean"):
        yield f"{value!r} is no {given}"


def _properties(value: Any, given: Mapping[str, Any], schema: Any, top: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in given:
            yield from (f"{key}: {one}" for one in problems(inner, given[key], top))


def _additional(value: Any, given: bool, schema: Any, top: Any) -> Iterator[str]:
    if isinstance(value, dict) and not given:
        yield from (f"{key} is unknown" for key in value.keys() - schema["properties"].keys())


def _pattern(value: Any, given: str, *_: Any) -> Iterator[str]:
    if isinstance(value, str) and not re.search(given, value):
        yield f"{value!r} does not match {given}"


def _bound(value: Any, high: Any, low: Any) -> Iterator[str]:
    if isinstance(value, int | float) and high < low:
        yield f"{value} is out of bounds"


def _count(value: Any, given: list[Any], top: Any) -> int:
    return sum(not list(problems(value, one, top)) for one in given)


def _items(value: Any, given: Any, schema: Any, top: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else ():
        yield from problems(one, given, top)


_WORDS: dict[str, Any] = {
    "$ref": lambda value, given, _, top: problems(
        value, top["$defs"][given.rpartition("/")[2]], top
    ),
    "type": _type,
    "properties": _properties,
    "additionalProperties": _additional,
    "pattern": _pattern,
    "items": _items,
    "const": lambda value, given, *_: [] if value == given else [f"{value!r} is not {given!r}"],
    "enum": lambda value, given, *_: [] if value in given else [f"{value!r} is none of {given}"],
    "anyOf": lambda value, given, _, top: (
        [] if _count(value, given, top) else [f"{value!r} fits nothing of {given}"]
    ),
    "oneOf": lambda value, given, _, top: (
        [] if _count(value, given, top) == 1 else [f"{value!r} fits not exactly one form"]
    ),
    "minimum": lambda value, given, *_: _bound(value, value, given),
    "maximum": lambda value, given, *_: _bound(value, given, value),
    "minLength": lambda value, given, *_: ["too short"] if len(str(value)) < given else [],
}
