"""Turns what pydantic found into sentences that name the key, the value, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from oncely.config.decode import AvroDecode, AvroKey, JsonDecode, JsonKey, RawDecode, TextKey
from oncely.config.errors import KIND, shown
from oncely.config.files_sink import FilesSinkSettings, S3Settings
from oncely.config.kafka_sink import KafkaSinkSettings
from oncely.config.offsets import (
    FileOffsets,
    KafkaOffsets,
    LedgerOffsets,
    RedisOffsets,
    SqlOffsets,
    ZooKeeperOffsets,
)
from oncely.config.pipeline import PipelineSettings, TransformSettings
from oncely.config.sink import SqlSinkSettings
from oncely.config.source import SourceSettings
from oncely.config.spark import SparkSettings
from oncely.errors import ConfigError

_TABLES: Mapping[str, Sequence[type[Any]]] = {
    "": (PipelineSettings,),
    "source": (SourceSettings,),
    "decode": (JsonDecode, AvroDecode, RawDecode),
    "decode.key": (JsonKey, AvroKey, TextKey),
    "transform": (TransformSettings,),
    "sink": (SqlSinkSettings, KafkaSinkSettings, FilesSinkSettings),
    "sink.s3": (S3Settings,),
    "offsets": (
        LedgerOffsets,
        KafkaOffsets,
        FileOffsets,
        SqlOffsets,
        RedisOffsets,
        ZooKeeperOffsets,
    ),
    "spark": (SparkSettings,),
}
_EXAMPLES: Mapping[str, str] = {
    "name": 'name = "flights"',
    "source": "[source]",
    "source.brokers": 'brokers = "127.0.0.1:9092"',
    "source.topics": 'topics = ["flights"]',
    "decode": '[decode]\nformat = "json"'.replace("\n", ", "),
    "decode.format": 'format = "json"',
    "decode.schema": 'schema = "id BIGINT, name STRING"',
    "decode.key.format": 'format = "string"',
    "decode.key.schema": 'schema = "id BIGINT"',
    "decode.key.column": 'column = "id"',
    "sink": "[sink]",
    "offsets.store": 'store = "kafka"',
    "offsets.path": 'path = "offsets"',
    "offsets.url": 'url = "redis://:${PASSWORD}@host:6379/0"',
    "offsets.hosts": 'hosts = "zk-1:2181,zk-2:2181,zk-3:2181"',
    "sink.kind": 'kind = "sql"',
    "sink.url": 'url = "postgresql://user:${PASSWORD}@host:5432/database"',
    "sink.manifest_topic": 'manifest_topic = "events.manifest"',
    "sink.table": 'table = "public.flights"',
}
_TAGS: Mapping[str, str] = {"sink": "kind", "offsets": "store"}
"""The key that chooses among the tables of one name; ``format`` where nothing else is said."""
_CHOICES = {
    "decode": "json, avro, raw",
    "decode.key": "json, avro, string",
    "sink": "sql, kafka, files",
    "offsets": "ledger, kafka, file, sql, redis, zookeeper",
}
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


def is_secret_field(key: str) -> bool:
    """Whether a dotted key names a field whose whole value is secret; of a URL only a part is."""
    table, _, name = key.rpartition(".")
    fields = (one.model_fields.get(name) for one in _TABLES.get(table, ()))
    return name != "url" and any(one and "SecretStr" in str(one.annotation) for one in fields)


def known_keys(table: str, chosen: object = None) -> list[str]:
    """The keys that may stand in a table of the file, as the file spells them; none in others.

    Args:
        table: its dotted name.
        chosen: the ``format`` (or ``kind``) in it; None for the keys of all.
    """
    return sorted(
        {
            field.alias or name
            for one in _TABLES.get(table, ())
            if chosen in (None, _tag_of(one, table))
            for name, field in one.model_fields.items()
        }
    )


def _tag(table: str) -> str:
    return _TAGS.get(table, "format")


def _tag_of(section: type[Any], table: str) -> str | None:
    field = section.model_fields.get(_tag(table))
    return field.annotation.__args__[0] if field else None


def explain(error: ValidationError, raw: Mapping[str, Any]) -> list[ConfigError]:
    """Every problem that pydantic found in ``raw``, in the order of the file's tables."""
    found: list[ConfigError] = []
    for details in error.errors(include_url=False):
        key = _dotted(details["loc"], raw)
        if details["type"] == "extra_forbidden":
            found.append(_unknown(key, raw))
        else:
            found += _explain(details, key)
    return found


def joined(found: Iterable[ConfigError], of: str) -> ConfigError:
    """One error for all: a single one as it is, several as a list."""
    problems = list(dict.fromkeys((e.key, e.message, e.way_out) for e in found))
    if len(problems) == 1:
        key, message, way_out = problems[0]
        return ConfigError(key, message.removeprefix(f"{key}: "), way_out=way_out)
    lines = [
        f"\n  {message}" + (f"\n    way out: {way_out}" if way_out else "")
        for _, message, way_out in problems
    ]
    return ConfigError(of, f"{len(problems)} problems" + "".join(lines))


def _dotted(loc: Sequence[int | str], raw: Mapping[str, Any]) -> str:
    """Pydantic's place as a dotted key: without the names of formats and types in between."""
    parts: list[str] = []
    at: Any = raw
    chosen: set[str] = set()  # tables whose choice was met; a key below may have the same name
    for step in loc:
        table = ".".join(parts)
        if isinstance(step, int):
            parts[-1] += f"[{step}]"
            at = None
        elif (
            isinstance(at, Mapping)
            and table in _CHOICES
            and table not in chosen
            and step == at.get(_tag(table))
        ):
            chosen.add(table)  # the name of the chosen format; its table goes on below
        elif at is None and parts:
            continue  # the name of a type in a union, below a value
        else:
            parts.append(step)
            at = at.get(step) if isinstance(at, Mapping) else None
    return ".".join(parts)


def _explain(details: ErrorDetails, key: str) -> list[ConfigError]:
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == KIND:
        return [
            ConfigError(".".join(filter(None, (key, p.below))), p.text, way_out=p.way_out)
            for p in context["problems"]
        ]
    match kind:
        case "missing":
            example = _EXAMPLES.get(key)
            return [ConfigError(key, "is missing", way_out=f"add {example}" if example else "")]
        case "union_tag_not_found":
            example = _EXAMPLES.get(f"{key}.{_tag(key)}", 'format = "json"')
            return [ConfigError(f"{key}.{_tag(key)}", "is missing", way_out=f"add {example}")]
        case "union_tag_invalid":
            found = shown(context.get("tag"))
            return [ConfigError(f"{key}.{_tag(key)}", f"found {found}; allowed: {_CHOICES[key]}")]
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
    """What was found instead of another type; of a secret only its type."""
    if isinstance(value, SecretStr) or key in _SECRET:
        return {"int": "a number", "float": "a number", "bool": "true or false"}.get(
            type(value).__name__, "something else"
        )
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)


def _unknown(key: str, raw: Mapping[str, Any]) -> ConfigError:
    table, _, name = key.rpartition(".")
    chosen = _at(table, raw).get(_tag(table))
    known = known_keys(table, chosen)
    near = difflib.get_close_matches(name, known, 1, 0.6)
    owners = [one for one in _TABLES[table] if name in one.model_fields]
    formats = [f for one in owners if (f := _tag_of(one, table)) and len(_TABLES[table]) > 1]
    elsewhere = [f"{t}.{name}".lstrip(".") for t in _TABLES if t != table and name in known_keys(t)]
    if formats:
        way_out = f'it belongs to {_tag(table)} = "{formats[0]}"'
    elif near:
        way_out = f"did you mean {near[0]}?"
    elif elsewhere:
        way_out = f"it belongs elsewhere: {' or '.join(elsewhere)}"
    else:
        way_out = "remove it"
    return ConfigError(key, f"unknown key; allowed here: {', '.join(known)}", way_out=way_out)


def _at(table: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    for step in filter(None, table.split(".")):
        raw = raw[step]
    return raw


def _nearest(value: object, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, allowed, 1, 0.5) if isinstance(value, str) else []
    return f"did you mean {near[0]}?" if near else ""
