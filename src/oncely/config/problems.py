"""Problems of settings and arguments, as sentences that name the key, the value, and the way out.

Those of settings are pydantic's errors, with an example of each key that has neither choices nor a
useful default. A wrong argument of a public function is refused before anything happens: an
annotation refuses nothing in Python, and most wrong values would have a meaning: a text is true
where ``execute`` is asked for, and is a sequence of topics."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from oncely.config.base import KIND, URL_EXAMPLE, Section, shown
from oncely.config.pipeline import keys, tables
from oncely.config.sink import sink_kinds
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


# -- examples of keys -----------------------------------------------------------------------

EXAMPLES: Mapping[str, str] = {
    "name": 'name = "flights"',
    "delivery": 'delivery = "at_least_once"',
    "commit_interval": 'commit_interval = "5 seconds"',
    "processes": "processes = 2",
    "source": "[source]",
    "source.brokers": 'brokers = "127.0.0.1:9092"',
    "source.topics": 'topics = ["flights"]',
    "source.start": 'start = "2026-01-01T00:00:00Z"',
    "source.group": 'group = "flights-lag"',
    "source.kafka": 'kafka = { "security.protocol" = "SSL", "ssl.ca.location" = "ca.pem" }',
    "decode": '[decode], format = "json"',
    "decode.format": 'format = "json"',
    "decode.schema": 'schema = "id BIGINT, name STRING"',
    "decode.schema_file": 'schema_file = "order.avsc"',
    "decode.schema_registry": 'schema_registry = "https://registry:8081"',
    "decode.schema_registry_user_info": 'schema_registry_user_info = "user:${PASSWORD}"',
    "decode.schema_registry_ca": 'schema_registry_ca = "ca.pem"',
    "decode.columns": 'columns = ["key", "value", "timestamp", "headers"]',
    "decode.unwrap": 'unwrap = "payload"',
    "decode.key.unwrap": 'unwrap = "payload"',
    "decode.key.json": "json = true",
    "decode.metadata.topic": 'topic = "source"',
    "decode.metadata.partition": 'partition = "source_partition"',
    "decode.metadata.offset": 'offset = "source_offset"',
    "decode.metadata.timestamp": 'timestamp = "sent_at"',
    "decode.metadata.key": 'key = "customer"',
    "decode.metadata.headers": 'headers = { trace = "trace_id", "ce.type" = "event_type" }',
    "decode.key.format": 'format = "string"',
    "decode.key.schema": 'schema = "id BIGINT"',
    "decode.key.column": 'column = "id"',
    "decode.key.type": 'type = "BIGINT"',
    "decode.key.schema_file": 'schema_file = "order.avsc"',
    "decode.key.schema_registry": 'schema_registry = "https://registry:8081"',
    "decode.key.schema_registry_user_info": 'schema_registry_user_info = "user:${PASSWORD}"',
    "decode.key.schema_registry_ca": 'schema_registry_ca = "ca.pem"',
    "filter.drop": "drop = \"key = 'test'\"",
    "filter.expire": 'expire = "1 hour"',
    "filter.delay": 'delay = "10 seconds"',
    "filter.throttle": 'throttle = "1000 in 1 second"',
    "transform.sql": 'sql = "SELECT *, dep_delay > 15 AS late FROM input"',
    "transform.python": 'python = "flights_rules:late"',
    "transform.spark": 'spark = "flights_rules:by_carrier"',
    "sink": "[sink]",
    "sink.keys": 'keys = ["id"]',
    "sink.version": 'version = "changed_at"',
    "sink.keep_source": "keep_source = true",
    "sink.rejects_topic": 'rejects_topic = "flights.rejects"',
    "sink.kafka": 'kafka = { "compression.type" = "zstd" }',
    "sink.s3.endpoint": 'endpoint = "https://minio:9000"',
    "sink.s3.region": 'region = "eu-central-1"',
    "sink.s3.access_key": 'access_key = "${S3_KEY}"',
    "sink.s3.secret_key": 'secret_key = "${S3_SECRET}"',
    "sink.s3.session_token": 'session_token = "${S3_TOKEN}"',
    "offsets.store": 'store = "kafka"',
    "offsets.group": 'group = "flights-positions"',
    "offsets.path": 'path = "offsets"',
    "offsets.path of zookeeper": 'path = "/oncely"',
    "offsets.url": 'url = "redis://:${PASSWORD}@host:6379/0"',
    "offsets.url of sql": URL_EXAMPLE,
    "offsets.hosts": 'hosts = "zk-1:2181,zk-2:2181,zk-3:2181"',
    "spark.conf": 'conf = { "spark.executor.memory" = "4g" }',
    "worker.group": 'group = "flights-workers"',
    "worker.protocol": 'protocol = "consumer"',
    "worker.instance": 'instance = "worker-${HOSTNAME}"',
    "worker.buffer": 'buffer = "256 MiB"',
    "worker.session_timeout": 'session_timeout = "10 seconds"',
}
"""By dotted name; with "of" and the value of the selector if it is for one form of the table."""


def example(key: str, form: str = "") -> str:
    """An example of a key as a line of TOML; empty if there is none.

    Args:
        key: its dotted name.
        form: the value of its table's selector, if it is known.
    """
    return _all().get(f"{key} of {form}", _all().get(key, ""))


@cache
def _all() -> Mapping[str, str]:
    """The examples, with those of the kinds; of a key that several have, the first one's."""
    found = {"sink.kind": f'kind = "{next(iter(sink_kinds()))}"', **EXAMPLES}
    for kind, section in sink_kinds().items():
        for key, line in section.examples.items():
            found.setdefault(f"sink.{key}", line)
            found[f"sink.{key} of {kind}"] = line
    return found


# -- arguments of public functions ----------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")


class Rule(NamedTuple):
    """The values that an argument may have.

    Attributes:
        allows: true for them.
        named: their names for an error.
    """

    allows: Callable[[Any], bool]
    named: str


def one_of(*values: object) -> Rule:
    """One of these values."""
    allowed = [(type(one), one) for one in values]
    return Rule(lambda it: (type(it), it) in allowed, " or ".join(map(repr, values)))


def _made(name: str) -> Rule:
    """An object of a class of this name, which is not imported for that."""
    return Rule(lambda it: name in {one.__name__ for one in type(it).__mro__}, f"of type {name}")


def _count(it: object) -> bool:
    return isinstance(it, int) and not isinstance(it, bool) and it >= 0


def _list_of(rule: Rule, named: str) -> Rule:
    def allows(it: Any) -> bool:
        of = isinstance(it, Sequence) and not isinstance(it, str | bytes)
        return of and all(map(rule.allows, it))

    return Rule(allows, named)


_CALLED = Rule(callable, "a function")
_COUNT = Rule(_count, "a number from 0 on")
_PATH = Rule(lambda it: isinstance(it, str | os.PathLike), "a path")
_TEXT = Rule(lambda it: isinstance(it, str), "a text")
_TEXTS = _list_of(_TEXT, 'a list of texts, as in ["one"]')
_YES = one_of(True, False)
_RULES: Mapping[str, Rule] = {
    "until": one_of("latest"),
    "on_fenced": one_of("end", "wait"),
    "stop": _made("StopSignal"),
    "http": _made("Http"),
    "spark": _made("SparkSession"),
    "verb": _made("Verb"),
    "which": _made("RejectFilter"),
    "listener": _CALLED,
    "progress": _CALLED,
    "events": _PATH,
    "path": _PATH,
    "checkpoint": _PATH,
    "execute": _YES,
    "discarded": _YES,
    "create": _YES,
    "use_spark": _YES,
    "sample": _COUNT,
    "limit": _COUNT,
    "max_removed": _COUNT,
    "topics": _TEXTS,
    "keys": _TEXTS,
    "name": _TEXT,
    "key": _TEXT,
    "df": Rule(lambda it: hasattr(it, "isStreaming"), "a streaming DataFrame"),
    "raw": Rule(lambda it: isinstance(it, Mapping), "a mapping, as a TOML file has"),
    "ranges": Rule(
        lambda it: (
            isinstance(it, Mapping) and all(_made("OffsetRange").allows(one) for one in it.values())
        ),
        "a mapping of TopicPartition to OffsetRange",
    ),
    "before": _made("datetime"),
    "download": _YES,
    "logs": _list_of(_PATH, "a list of paths"),
    "found": _list_of(_made("Finding"), "a list of the findings of an audit"),
}
"""By name: an argument has the same meaning in all functions. None is allowed where it is the
default."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which refuses wrong arguments.

    Its wrapper raises:
        ConfigError: names the argument, and what it may be.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            rule, none = _RULES.get(name), signature.parameters[name].default is None
            if rule is None or (none and value is None) or rule.allows(value):
                continue
            raise ConfigError(
                name,
                f"found {shown(value)}; allowed: {rule.named}{' or None' * none}",
                way_out=f"correct the argument of {function.__qualname__}",
            )
        return function(*args, **kwargs)

    return wrapped
