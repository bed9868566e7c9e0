"""Converts pydantic's errors into sentences that name the key, the value, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from oncely.config.base import KIND, Section, shown
from oncely.config.examples import example
from oncely.config.pipeline import keys, tables
from oncely.errors import ConfigError

_SECRET = frozenset({"sink.url", "offsets.url", "decode.schema_registry_user_info"})
_EXPECTED: Mapping[str, str] = {
    "string_type": "a text",
    "secret_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "tuple_type": "a list of texts",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "path_type": "a file's name",
    "string_too_short": "a text that is not empty",
}

GONE: Mapping[str, str] = {
    "decode.max_fields": "remove the line: an inferred schema has up to 2,000 fields",
    "decode.max_depth": "remove the line: an inferred schema has up to 32 levels",
    "decode.max_name": "remove the line: names of an inferred schema have up to 255 characters",
    "sink.s3.path_style": "remove the line: objects are addressed as endpoint/bucket/key",
    "sink.staging": "remove the line: nothing is staged in a folder",
}
"""Keys that earlier versions had: by dotted name, the way out of a file that has them."""


def is_secret_field(key: str) -> bool:
    """True if the whole value of a dotted key is secret; of a URL only a part is secret."""
    table, _, name = key.rpartition(".")
    fields = (one.model_fields.get(name) for one in _sections(table).values())
    return name != "url" and any(one and "SecretStr" in str(one.annotation) for one in fields)


def known_keys(table: str, chosen: object = None) -> list[str]:
    """The keys that are allowed in a table of the file, in the file's spelling; none for other
    tables.

    Args:
        table: its dotted name.
        chosen: its ``format`` (or ``kind``); None for the keys of all.
    """
    return sorted(
        {
            key
            for tag, section in _sections(table).items()
            if chosen in (None, tag or None)
            for key in keys(section)
        }
    )


def _sections(table: str) -> Mapping[str, type[Section]]:
    """The sections of a table by the value of its selector; none for other tables."""
    return tables()[table].sections if table in tables() else {}


def _tag(table: str) -> str:
    """The key that selects among the sections of a table."""
    return tables()[table].selector if table in tables() else "format"


def explain(error: ValidationError, raw: Mapping[str, Any]) -> list[ConfigError]:
    """Every problem that pydantic reports for ``raw``, in the order of the file's tables."""
    found: list[ConfigError] = []
    for details in error.errors(include_url=False):
        steps = _steps(details["loc"], raw)
        if details["type"] == "extra_forbidden":
            found.append(_unknown(steps, raw))
        else:
            found += _explain(details, ".".join(steps))
    return found


def joined(found: Iterable[ConfigError], of: str) -> ConfigError:
    """One error for all problems: a single one unchanged, several as a list."""
    problems = list({(one.message, one.way_out): one for one in found}.values())
    if len(problems) == 1:
        return problems[0]
    lines = [
        f"\n  {one.message}" + (f"\n    way out: {one.way_out}" if one.way_out else "")
        for one in problems
    ]
    return ConfigError(of, f"{len(problems)} problems" + "".join(lines))


def _steps(loc: Sequence[int | str], raw: Mapping[str, Any]) -> list[str]:
    """Pydantic's location as the parts of a dotted key: without the names of formats and types."""
    parts: list[str] = []
    at: Any = raw
    chosen: set[str] = set()  # tables whose selector was met; a key below may have the same name
    for step in loc:
        table = ".".join(parts)
        if isinstance(step, int):
            parts[-1] += f"[{step}]"
            at = None
        elif (
            isinstance(at, Mapping)
            and table in tables()
            and tables()[table].selector
            and table not in chosen
            and step == at.get(_tag(table))
        ):
            chosen.add(table)  # the name of the chosen format; its table follows
        elif at is None and parts:
            continue  # the name of a type in a union, below a value
        else:
            parts.append(step)
            at = at.get(step) if isinstance(at, Mapping) else None
    return parts


def _explain(details: ErrorDetails, key: str) -> list[ConfigError]:
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == KIND:
        return [
            ConfigError(".".join(filter(None, (key, p.below))), p.text, way_out=p.way_out)
            for p in context["problems"]
        ]
    match kind:
        case "missing":
            line = example(key, value.get(_tag(key.rpartition(".")[0]), ""))
            return [ConfigError(key, "is missing", way_out=f"add {line}" if line else "")]
        case "union_tag_not_found":
            line = example(f"{key}.{_tag(key)}") or 'format = "json"'
            return [ConfigError(f"{key}.{_tag(key)}", "is missing", way_out=f"add {line}")]
        case "union_tag_invalid":
            found = shown(context.get("tag"))
            allowed = ", ".join(_sections(key))
            return [ConfigError(f"{key}.{_tag(key)}", f"found {found}; allowed: {allowed}")]
        case "literal_error":
            allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
            way_out = _nearest(value, allowed.split(", "))
            return [ConfigError(key, f"found {shown(value)}; allowed: {allowed}", way_out=way_out)]
        case "greater_than_equal":
            least = context["ge"]
            return [ConfigError(key, f"found {shown(value)}; allowed: {least} or more")]
        case "less_than_equal":
            most = context["le"]
            return [ConfigError(key, f"found {shown(value)}; allowed: {most} or less")]
    expected = _EXPECTED.get(kind, details["msg"])
    return [ConfigError(key, f"found {_type_shown(key, value)}; allowed: {expected}")]


def _type_shown(key: str, value: object) -> str:
    """The value that has the wrong type; of a secret only its type."""
    if isinstance(value, SecretStr) or key in _SECRET:
        return {"int": "a number", "float": "a number", "bool": "true or false"}.get(
            type(value).__name__, "something else"
        )
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)


def _unknown(steps: Sequence[str], raw: Mapping[str, Any]) -> ConfigError:
    *above, name = steps
    table, key = ".".join(above), ".".join(steps)
    if key in GONE:
        return ConfigError(key, "is gone: there is no such setting any more", way_out=GONE[key])
    chosen = _at(above, raw).get(_tag(table))
    known = known_keys(table, chosen)
    near = difflib.get_close_matches(name, known, 1, 0.6)
    formats = [tag for tag, one in _sections(table).items() if tag and name in keys(one)]
    elsewhere = [
        f"{t}.{name}".lstrip(".") for t in tables() if t != table and name in known_keys(t)
    ]
    if formats:
        way_out = f'it belongs to {_tag(table)} = "{formats[0]}"'
    elif near:
        way_out = f"did you mean {near[0]}?"
    elif elsewhere:
        way_out = f"it belongs elsewhere: {' or '.join(elsewhere)}"
    else:
        way_out = "remove it"
    return ConfigError(key, f"unknown key; allowed here: {', '.join(known)}", way_out=way_out)


def _at(steps: Iterable[str], raw: Mapping[str, Any]) -> Mapping[str, Any]:
    for step in steps:
        raw = raw[step]
    return raw


def _nearest(value: object, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, allowed, 1, 0.5) if isinstance(value, str) else []
    return f"did you mean {near[0]}?" if near else ""
