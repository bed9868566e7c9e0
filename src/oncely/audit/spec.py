"""Two datasets to compare, named on the command line or in a TOML file.

The plain form is ``FORMAT:PLACE?OPTION=VALUE&OPTION=VALUE``; percent-encoded characters of values
are decoded. A value may refer to a secret by ``${NAME}`` or ``${file:/path}``; a secret itself is
refused, because every user of the machine can read the command lines of all processes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from pydantic import ValidationError

from oncely.config.base import passwords, shown
from oncely.config.problems import explain, joined
from oncely.config.runtimes import SparkSettings, is_secret
from oncely.config.secrecy import Filling, written
from oncely.config.source import broker_list, topic_name
from oncely.errors import ConfigError, WrongInput
from oncely.kafka import properties
from oncely.kafka.properties import SECRET
from oncely.secrets import Secrets, scope

SideName = Literal["left", "right"]
Value = Literal["json", "text"]

_FORM = re.compile(r"([A-Za-z][\w.-]*):(.+)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{[^{}]+\}")
_JDBC = frozenset(
    {
        "dbtable", "query", "user", "password", "driver", "fetchsize", "partitioncolumn",
        "lowerbound", "upperbound", "numpartitions", "preparequery", "querytimeout",
        "sessioninitstatement", "customschema", "pushdownpredicate", "keytab", "principal",
        "refreshkrb5config", "connectionprovider", "prefertimestampntz", "hint",
    }
)  # fmt: skip
"""Options of Spark's JDBC reader, in lower case; the rest of a URL's query belongs to the URL."""

_KEYS = ("format", "path", "topic", "brokers", "schema", "value", "kafka", "options")
_TOP = ("left", "right", "spark", "id", "id_left", "id_right", "by", "source_columns")
_WAY_OUT = (
    'write "kafka:TOPIC?brokers=HOST:9092", "jdbc:postgresql://HOST/DB?dbtable=TABLE",'
    ' "parquet:/PATH" (or json, csv, orc, delta), or a TOML file with [left] and [right]'
)


@dataclass(frozen=True)
class Dataset:
    """One side of a comparison.

    Attributes:
        side: left or right, for messages.
        format: a format that Spark reads.
        path: what Spark's reader loads; None if options name it.
        options: the reader's options. May contain secrets.
        topics: of a Kafka side; empty for other formats.
        brokers: of a Kafka side.
        kafka: librdkafka's properties. May contain secrets.
        value: how a Kafka record's value is read.
        schema: the columns of the value or of the files, as DDL; None: Spark infers them.
    """

    side: SideName
    format: str
    path: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    topics: tuple[str, ...] = ()
    brokers: str = ""
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)
    value: Value = "json"
    schema: str | None = None

    @property
    def name(self) -> str:
        """A name for people, without secrets."""
        if self.topics:
            return f"kafka:{','.join(self.topics)}"
        options = {key.lower(): value for key, value in self.options.items()}
        if self.format == "jdbc":
            return f"jdbc:{options.get('dbtable', 'a query')}"
        return f"{self.format}:{self.path or options.get('path', '')}"


@dataclass(frozen=True)
class Expressions:
    """How records of both sides are matched and grouped.

    Attributes:
        id_left, id_right: Spark SQL expressions of the id; None: by offset.
        by: the expression of the group; None: no groups.
        source_columns: columns of the right side with topic, partition and offset.
    """

    id_left: str | None = None
    id_right: str | None = None
    by: str | None = None
    source_columns: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Pair:
    """Two datasets, and how they are compared."""

    left: Dataset
    right: Dataset
    match: Expressions
    spark: SparkSettings = field(default_factory=SparkSettings)
    secrets: Secrets = field(default_factory=Secrets, repr=False)

    @property
    def name(self) -> str:
        """A name for people."""
        return f"{self.left.name} and {self.right.name}"


def is_pair(file: Path) -> bool:
    """True if a TOML file describes two datasets, and not a pipeline."""
    try:
        return bool({"left", "right"} & tomllib.loads(file.read_text("utf-8")).keys())
    except (OSError, ValueError):
        return False


def parse_pair(
    left: str | Path, right: str | Path, given: Mapping[str, Any], conf: Sequence[str] = ()
) -> Pair:
    """Read the two sides and the expressions.

    Args:
        left, right: the plain form, or a TOML file, of which the table of this name is used.
        given: the keys ``id``, ``id_left``, ``id_right``, ``by`` and ``source_columns``; values
            that are None are taken from the file.
        conf: settings of Spark as ``KEY=VALUE``.

    Raises:
        ConfigError: names the side and the key, and the way out.
    """
    fillings: list[Filling] = []
    raw: dict[str, Any] = {}
    secrets = Secrets()
    for side, spec in (("left", left), ("right", right)):
        table, top, base = _table(side, spec)
        filling = Filling(base)
        fillings.append(filling)
        raw |= {key: filling.fill(value, key) for key, value in top.items()}
        raw[side] = _filled(filling, side, table)
        found = [*filling.secrets, *written(raw), *_kafka_secrets(raw[side])]
        secrets |= Secrets.of(found)
    raw |= {key: value for key, value in given.items() if value is not None}
    raw = _with_conf(raw, conf)
    with scope(secrets):
        if problems := [one for filling in fillings for one in filling.problems]:
            raise joined(problems, "the two datasets")
        return Pair(
            _dataset("left", raw["left"]),
            _dataset("right", raw["right"]),
            _expressions(raw),
            _spark(raw.get("spark", {})),
            secrets,
        )


# -- the texts ------------------------------------------------------------------------------------


def _table(side: str, spec: str | Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """A side's table, the other keys of its file, and the base of relative paths."""
    path = Path(spec)
    if path.suffix != ".toml" and not isinstance(spec, Path):
        return plain(side, str(spec)), {}, Path()
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--{side}", f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--{side}", f"{path} is not TOML: {error}") from None
    if strange := [key for key in raw if key not in _TOP]:
        raise ConfigError(strange[0], f"unknown key; allowed: {', '.join(_TOP)}")
    table = raw.get(side)
    if not isinstance(table, dict):
        raise ConfigError(side, f"{path} has no such table", way_out=f"add [{side}]")
    top = {key: value for key, value in raw.items() if key not in ("left", "right")}
    return table, top, path.parent


def plain(side: str, spec: str) -> dict[str, Any]:
    """The plain form as a table. Raises :class:`ConfigError`."""
    match = _FORM.fullmatch(spec)
    if match is None:
        raise ConfigError(f"--{side}", f"found {shown(spec)}; it names no format", way_out=_WAY_OUT)
    kind, rest = match[1].lower(), match[2]
    place, _, query = rest.partition("?")
    encoded = dict(_pairs(side, query))
    options = {key: unquote(value) for key, value in encoded.items()}
    if not all(_REFERENCE.fullmatch(one) for one in passwords(spec)):
        raise _on_command_line(side, "a URL with a password")
    for key, value in options.items():
        if _is_secret_key(key) and not _REFERENCE.fullmatch(value):
            raise _on_command_line(side, f"the value of {key}")
    if kind == "kafka":
        return _kafka(place, options)
    if kind == "jdbc":
        return _jdbc(place, options, encoded)
    schema = options.pop("schema", None)
    return {"format": kind, "path": unquote(place), "schema": schema, "options": options}


def _pairs(side: str, query: str) -> list[tuple[str, str]]:
    found = []
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"--{side}",
                f"the option {shown(key)} has no value",
                way_out="write OPTION=VALUE; & and ? in a value are %26 and %3F",
            )
        found.append((unquote(key), value))
    return found


def _kafka(place: str, options: dict[str, str]) -> dict[str, Any]:
    names = ("brokers", "schema", "value")
    own: dict[str, str] = {key: options.pop(key) for key in names if key in options}
    if "kafka.bootstrap.servers" in options:
        own["brokers"] = options.pop("kafka.bootstrap.servers")
    kafka = {key.removeprefix("kafka."): value for key, value in options.items()}
    return {"format": "kafka", "topic": unquote(place), "kafka": kafka, **own}


def _jdbc(place: str, options: dict[str, str], encoded: dict[str, str]) -> dict[str, Any]:
    own = {key: value for key, value in options.items() if key.lower() in _JDBC}
    rest = "&".join(f"{key}={value}" for key, value in encoded.items() if key not in own)
    url = f"jdbc:{place}" + (f"?{rest}" if rest else "")
    return {"format": "jdbc", "options": {"url": url, **own}}


def _is_secret_key(key: str) -> bool:
    return key.removeprefix("kafka.") in SECRET or is_secret(key)


def _on_command_line(side: str, secret: str) -> ConfigError:
    return ConfigError(
        f"--{side}",
        f"{secret} would be readable by every user of this machine",
        way_out="refer to it: '...&password=${DB_PASSWORD}' in single quotes, or write a TOML file"
        " with [left] and [right]",
    )


# -- the values -----------------------------------------------------------------------------------


def _filled(filling: Filling, side: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with its references filled in, under the keys that tell which are secret."""
    names = {"kafka": "source.kafka"}
    return {
        key: filling.fill(value, names.get(key, f"{side}.{key}")) for key, value in table.items()
    }


def _kafka_secrets(table: Mapping[str, Any]) -> list[str]:
    kafka = table.get("kafka")
    return properties.secret_values(_flat(kafka)) if isinstance(kafka, Mapping) else []


def _dataset(side: SideName, raw: Mapping[str, Any]) -> Dataset:
    for key in raw:
        if key not in _KEYS:
            raise ConfigError(f"{side}.{key}", f"unknown key; allowed: {', '.join(_KEYS)}")
    for key in ("kafka", "options"):
        if not isinstance(raw.get(key, {}), Mapping):
            raise ConfigError(f"{side}.{key}", f"found {shown(raw[key])}; allowed: a table")
    kind = _text(side, raw, "format")
    if kind is None:
        raise ConfigError(f"{side}.format", "is missing", way_out='add format = "kafka"')
    schema = _text(side, raw, "schema")
    if kind == "kafka":
        return _kafka_dataset(side, raw, schema)
    strange = [key for key in ("topic", "brokers", "value", "kafka") if raw.get(key)]
    if strange:
        raise ConfigError(f"{side}.{strange[0]}", f'has no meaning with format = "{kind}"')
    options = {key: _option(side, key, one) for key, one in _flat(raw.get("options", {})).items()}
    path = _text(side, raw, "path")
    _complete(side, kind, path, options)
    return Dataset(side, kind, path, options, schema=schema)


def _complete(side: str, kind: str, path: str | None, options: Mapping[str, str]) -> None:
    names = {key.lower() for key in options}
    if kind == "jdbc":
        if "url" not in names:
            raise ConfigError(f"{side}.options.url", "is missing")
        if len(names & {"dbtable", "query"}) != 1:
            raise ConfigError(
                f"{side}.options.dbtable",
                "is missing, or stands beside a query",
                way_out="add dbtable=TABLE or query=SELECT ...",
            )
    elif path is None and not options:
        raise ConfigError(f"{side}.path", "is missing")


def _kafka_dataset(side: SideName, raw: Mapping[str, Any], schema: str | None) -> Dataset:
    topic, brokers = _text(side, raw, "topic"), _text(side, raw, "brokers")
    if not topic:
        raise ConfigError(f"{side}.topic", "is missing", way_out="write kafka:TOPIC?brokers=...")
    if not brokers:
        raise ConfigError(
            f"{side}.brokers", "is missing", way_out=f'write "kafka:{topic}?brokers=HOST:9092"'
        )
    if raw.get("path") or raw.get("options"):
        raise ConfigError(
            f"{side}.options", "has no meaning for Kafka", way_out=f"write it in [{side}.kafka]"
        )
    topics = tuple(_valid(f"{side}.topic", topic_name, one) for one in topic.split(","))
    value = _text(side, raw, "value") or "json"
    if value not in ("json", "text"):
        raise ConfigError(f"{side}.value", f"found {shown(value)}; allowed: json, text")
    if value == "text" and schema:
        raise ConfigError(f"{side}.schema", 'has no meaning with value = "text"')
    kafka = {key: str(one) for key, one in _flat(raw.get("kafka", {})).items()}
    if found := properties.problems(kafka):
        raise joined([_of_side(side, one) for one in found], side)
    return Dataset(
        side,
        "kafka",
        topics=topics,
        brokers=_valid(f"{side}.brokers", broker_list, brokers),
        kafka=kafka,
        value="text" if value == "text" else "json",
        schema=schema,
    )


def _of_side(side: str, error: ConfigError) -> ConfigError:
    key = error.key.replace("source.kafka", f"{side}.kafka")
    return ConfigError(key, error.problem, way_out=error.way_out)


def _valid(key: str, check: Any, value: str) -> str:
    try:
        return str(check(value))
    except ValueError as error:
        problem = error.context["problems"][0]  # type: ignore[attr-defined]
        raise ConfigError(key, problem.text, way_out=problem.way_out) from None


def _text(side: str, raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{side}.{key}", f"found {shown(value)}; allowed: a text")


def _option(side: str, key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{side}.options.{key}", f"found {shown(value)}; allowed: a text or a number")


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys, which TOML parses into nested tables, joined again."""
    done: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            done |= _flat(value, f"{prefix}{key}.")
        else:
            done[f"{prefix}{key}"] = value
    return done


def _expressions(raw: Mapping[str, Any]) -> Expressions:
    for key in ("id", "id_left", "id_right", "by"):
        if not isinstance(raw.get(key), str | None):
            raise ConfigError(key, f"found {shown(raw[key])}; allowed: a Spark SQL expression")
    left, right = raw.get("id_left") or raw.get("id"), raw.get("id_right") or raw.get("id")
    columns = raw.get("source_columns")
    if isinstance(columns, str):
        columns = [one.strip() for one in columns.split(",")]
    if columns is not None:
        if left or right:
            raise WrongInput("--id and --source-columns are two ways to compare", way_out="use one")
        if not isinstance(columns, list) or len(columns) != 3 or not all(columns):
            raise ConfigError(
                "--source-columns",
                "three columns are needed",
                way_out="write --source-columns topic,partition,offset with the right side's names",
            )
        return Expressions(by=raw.get("by"), source_columns=(columns[0], columns[1], columns[2]))
    if not left or not right:
        raise WrongInput(
            "two datasets need an id, or columns with offsets",
            way_out="add --id EXPR (or --id-left and --id-right), or --source-columns"
            " topic,partition,offset",
        )
    return Expressions(left, right, raw.get("by"))


def _with_conf(raw: dict[str, Any], conf: Sequence[str]) -> dict[str, Any]:
    if not conf:
        return raw
    added: dict[str, str] = {}
    for one in conf:
        key, equals, value = one.partition("=")
        if not equals:
            raise ConfigError("--conf", f"found {shown(one)}; allowed: KEY=VALUE")
        if is_secret(key):
            raise _on_command_line("conf", f"the value of {key}")
        added[key] = value
    spark = raw.get("spark", {})
    return {**raw, "spark": {**spark, "conf": {**_flat(spark.get("conf", {})), **added}}}


def _spark(raw: Mapping[str, Any]) -> SparkSettings:
    try:
        return SparkSettings.model_validate(raw)
    except ValidationError as error:
        raise joined(explain(error, raw), "spark") from None
