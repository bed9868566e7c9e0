"""The base of all sections, the problems that checks find, and the types of values other than texts
and numbers, such as URLs of databases.

A section is strict and frozen, refuses unknown keys, and hides secrets.

A parser of values whose Python type does not tell how they are written is marked with a form, from
which the JSON Schema and the reference of the file are generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, Self, TypeVar
from urllib.parse import unquote

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    InstanceOf,
    PlainSerializer,
    PrivateAttr,
    SecretStr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from oncely.kafka.start import Start, StartTime, parse_moment
from oncely.secrets import MASK, Secrets, redact
from oncely.stores.sql.connection import TableName

P = ParamSpec("P")
T = TypeVar("T")

_FILLED = r"\$\{"  # a text with ${NAME} may become anything


class ValueForm(NamedTuple):
    """The form of a value.

    Attributes:
        type: its name in the reference.
        schema: its JSON Schema.
        shown: converts a default into the text of the file.
    """

    type: str
    schema: Mapping[str, Any]
    shown: Callable[[Any], object] = str


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"{pattern}|{_FILLED}"}


def _or_number(text: Mapping[str, Any], least: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "integer", "minimum": least}, text]}


def _seconds(value: float) -> str:
    for size, name in ((3600, "hour"), (60, "minute")):
        if value >= size and value % size == 0:
            count = int(value) // size
            return f"{count} {name}{'s' * (count > 1)}"
    return f"{value:g} second{'s' * (value != 1)}"


_TIME = _text(r"^\s*[0-9]+(\.[0-9]+)?\s*[A-Za-z]+\s*$")

TIME = ValueForm("time", _TIME, _seconds)
SIZE = ValueForm(
    "size",
    _or_number(_text(r"^\s*[0-9]+(\.[0-9]+)?\s*([kKmMgG][iI]?)?[bB]\s*$"), 0),
    lambda value: f"{value >> 20} MiB",
)
SHARE = ValueForm(
    "share, or number of records", _or_number(_text(r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$"), 0)
)
INTERVAL = ValueForm("number of records, or time", _or_number(_TIME, 1))
RATE = ValueForm("number of records in a time", _text(r"^\s*[0-9_,]+ (in|per) .+$"))
START = ValueForm(
    "`earliest`, `latest`, or a time (ISO 8601)",
    _text(r"^(earliest|latest)$|^[0-9]{4}-[0-9]{2}-[0-9]{2}"),
)
TABLE = ValueForm(
    "table, or schema.table",
    {"type": "string", "minLength": 1},
    lambda value: ".".join(part for part in value if part),
)
PATH = ValueForm("file name", {"type": "string", "minLength": 1})
NAMES = ValueForm(
    "text, or list of texts",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)
GROUP = ValueForm("text, or false", {"anyOf": [{"type": "string"}, {"const": False}]})
MASTER = ValueForm("Spark's master URL", _text(r"^(local|(spark|k8s)://\S+$|yarn$)"))
PROPERTIES = ValueForm("table of properties", {"type": "object"})  # names with dots become tables

_FORM = "__oncely_form__"


def written(form: ValueForm, limits: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a parser with the form of the values that it reads, and with their limits in words."""
    type_ = f"{form.type}, {limits}" if limits else form.type

    def mark(parser: Callable[P, T]) -> Callable[P, T]:
        setattr(parser, _FORM, form._replace(type=type_))
        return parser

    return mark


def form_of(parser: object) -> ValueForm | None:
    """The form that a parser is marked with."""
    form: ValueForm | None = getattr(parser, _FORM, None)
    return form


KIND = "oncely"


class Problem(NamedTuple):
    """A problem at or below the key that is being checked.

    Attributes:
        below: the rest of the dotted key; empty for the key itself.
        text: the value and the allowed values; never a secret.
        way_out: the recommended action.
    """

    below: str
    text: str
    way_out: str = ""


def invalid(text: str, way_out: str = "", *, below: str = "") -> PydanticCustomError:
    """The error that a pydantic validator raises for one problem."""
    return all_invalid([Problem(below, text, way_out)])


def all_invalid(problems: Iterable[Problem]) -> PydanticCustomError:
    """The error that a pydantic validator raises for several problems at once."""
    found = tuple(problems)
    text = "; ".join(problem.text for problem in found)
    return PydanticCustomError(KIND, "{text}", {"text": text, "problems": found})


def shown(value: object) -> str:
    """A value as shown in a sentence: short, and with the plain name of its type."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            text = redact(value)  # before it is cut or quoted, which changes the text
            return repr(text if len(text) <= 80 else text[:77] + "...")
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
        case _:
            return str(value)


class Section(BaseModel):
    """One table of the pipeline file.

    Secrets have a type of their own, which hides them. A value from ``${...}``, or a URL's
    password, may occur in any other field as well, so a repr and a JSON dump also redact all
    secrets of the file.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    _secrets: Secrets = PrivateAttr(default=Secrets())

    @model_validator(mode="after")
    def _take_secrets(self, info: ValidationInfo) -> Self:
        self._secrets = (info.context or {}).get("secrets", Secrets())
        return self

    @property
    def secrets(self) -> Secrets:
        """The secrets of the pipeline file that contains this section."""
        return self._secrets

    def __eq__(self, other: object) -> bool:
        """True if the settings are equal, regardless of their files."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # some of them are tables

    def __repr__(self) -> str:
        return self._secrets.redact(super().__repr__())

    def __str__(self) -> str:
        return self._secrets.redact(super().__str__())

    @model_serializer(mode="wrap")
    def _serialize(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        done: dict[str, Any] = handler(self)
        return _redacted(done, self._secrets) if info.mode == "json" else done


def as_tuple(value: object) -> object:
    """TOML has lists, but no tuples."""
    return tuple(value) if isinstance(value, list) else value


@written(PATH)
def file_name(value: object, info: ValidationInfo) -> object:
    """A path; a relative one is relative to the folder of the pipeline file."""
    if not isinstance(value, str) or not value.strip():
        return value
    base = (info.context or {}).get("base", Path())
    return Path(base, value)


def _flat(value: object, found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots, which TOML parses into nested tables, joined again."""
    if not isinstance(value, Mapping):
        raise invalid(f"found {shown(value)}; allowed: a table")
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            _flat(inner, found, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = inner
    return found


def plain_table(value: object) -> dict[str, Any]:
    """A table of settings with dotted names, flat, secrets as plain texts.

    Raises a problem if the value is no table.
    """
    return {
        key: inner.get_secret_value() if isinstance(inner, SecretStr) else inner
        for key, inner in _flat(value, {}).items()
    }


def revealed(values: Mapping[str, str | SecretStr]) -> dict[str, str]:
    """The unredacted values, for the client that needs them. Not to be shown."""
    return {
        key: value.get_secret_value() if isinstance(value, SecretStr) else value
        for key, value in values.items()
    }


def _redacted(value: Any, secrets: Secrets) -> Any:
    match value:
        case str():
            return secrets.redact(value)
        case dict():
            return {key: _redacted(inner, secrets) for key, inner in value.items()}
        case list():
            return [_redacted(inner, secrets) for inner in value]
        case _:
            return value


Rounding = Literal["refuse", "allow"]


@dataclass(frozen=True)
class RejectBudget:
    """The number of records that may be rejected: a share of the records that were read, or a
    number.

    Attributes:
        share: between 0 and 1; exact, because 29 of 100 is within 29%.
        count: a number of records.
    """

    share: Fraction | None = None
    count: int | None = None

    def __str__(self) -> str:
        return f"{float(self.share * 100):g}%" if self.share is not None else str(self.count)

    @property
    def unlimited(self) -> bool:
        """True for 100%."""
        return self.share is not None and self.share >= 1

    def allowed(self, records: int) -> int:
        """The number of rejects among ``records`` records that is still within the budget."""
        if self.share is None:
            return self.count or 0
        return records * self.share.numerator // self.share.denominator


_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")


@written(SHARE)
def parse_budget(value: object) -> RejectBudget:
    """Parse ``"1%"`` or ``100``. Raises a problem for any other value."""
    if isinstance(value, RejectBudget):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return RejectBudget(count=value)
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or Fraction(match[1]) > 100:
        raise invalid(
            f"found {shown(value)}; allowed: a share from 0% to 100%, or a number of records",
            'write "1%", "0.5%" or 100; "100%" never stops the pipeline',
        )
    return RejectBudget(share=Fraction(match[1]) / 100)


def filled(way_out: str) -> Callable[[str], str]:
    """A check that a text is not blank."""

    def check(value: str) -> str:
        if not value.strip():
            raise invalid("is empty", way_out)
        return value

    return check


Budget = Annotated[
    InstanceOf[RejectBudget],
    BeforeValidator(parse_budget),
    PlainSerializer(str, when_used="json"),
]


_WORDS = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_UNITS = {
    **_WORDS,
    **{f"{word}s": seconds for word, seconds in _WORDS.items()},
    **{"ms": 0.001, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0},
}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([a-z]+)")


@written(TIME)
def parse_seconds(value: object) -> float:
    """Parse ``"1 second"``, ``"500 ms"``, ``"2 minutes"`` as seconds."""
    match = _DURATION.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise invalid(
            f"found {shown(value)}; allowed: a number with ms, seconds, minutes or hours",
            'write "1 second", "500 ms" or "2 minutes"',
        )
    return float(match[1]) * unit


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kmg]?i?b)")
_BYTES = {"b": 1, **{f"{unit}b": 1000**n for n, unit in enumerate("kmg", 1)},
          **{f"{unit}ib": 1024**n for n, unit in enumerate("kmg", 1)}}  # fmt: skip


@written(SIZE)
def parse_size(value: object) -> int:
    """Parse ``"64 MiB"``, ``"100 MB"`` or a number as bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    unit = _BYTES.get(match[2]) if match else None
    if match is None or unit is None:
        raise invalid(
            f"found {shown(value)}; allowed: a number with KiB, MiB, GiB, KB, MB or GB",
            'write "64 MiB"',
        )
    return int(Fraction(match[1]) * unit)


N = TypeVar("N", int, float)


def between(
    parse: Callable[[object], N], least: float, most: float, limits: str, way_out: str
) -> Callable[[object], N]:
    """A parser that refuses what is outside of limits.

    Args:
        parse: :func:`parse_seconds` or :func:`parse_size`.
        least, most: the limits, which are allowed themselves.
        limits: the same in words.
        way_out: of the error.
    """

    def parser(value: object) -> N:
        found = parse(value)
        if not least <= found <= most:
            raise invalid(f"found {shown(value)}; allowed: {limits}", way_out)
        return found

    form = form_of(parse)
    return written(form, limits)(parser) if form else parser


@dataclass(frozen=True)
class CommitInterval:
    """The greatest distance between records and positions, or the size of one transaction.

    Attributes:
        records: maximum number of offsets.
        seconds: maximum number of seconds.
    """

    records: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.records is not None:
            return f"{self.records:,} records"
        return f"{self.seconds:g} seconds"


@written(INTERVAL)
def parse_interval(value: object) -> CommitInterval:
    """Parse ``10_000`` (records) or ``"5 seconds"``. Raises a problem for any other value."""
    if isinstance(value, CommitInterval):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return CommitInterval(records=value)
    if isinstance(value, str) and (seconds := parse_seconds(value)) > 0:
        return CommitInterval(seconds=seconds)
    raise invalid(
        f"found {shown(value)}; allowed: a number of records, or a time",
        'write 10_000 or "5 seconds"',
    )


@written(START)
def parse_start(value: object) -> Start:
    """Parse ``earliest``, ``latest`` or a time."""
    if isinstance(value, StartTime):
        return value
    words: tuple[Literal["earliest", "latest"], ...] = ("earliest", "latest")
    for word in words:
        if value == word:
            return word
    try:
        if isinstance(value, str | date):
            return parse_moment(value)
    except ValueError:
        pass
    raise invalid(
        f"found {shown(value)}; allowed: earliest, latest, or an ISO 8601 time",
        'write "earliest", or a time like "2024-05-31T18:00:00Z" (UTC without an offset)',
    )


_PART = r'"(?:[^"]|"")+"|[A-Za-z_\u0080-\uffff][\w$]*'
_TABLE = re.compile(rf"\s*(?:({_PART})\s*\.\s*)?({_PART})\s*")


@written(TABLE)
def parse_table(value: object) -> TableName:
    """Parse ``table`` or ``schema.table`` as SQL does: a name in double quotes may be any text."""
    if isinstance(value, TableName):
        return value
    match = _TABLE.fullmatch(value) if isinstance(value, str) else None
    if match is None or "\0" in match[0]:
        raise invalid(
            f"found {shown(value)}; allowed: a table, or schema.table",
            """quote a name with other characters: 'public."my table"'""",
        )
    schema, name = (_unquoted(part) if part else None for part in match.groups())
    return TableName(schema, name or "")


def folded(value: object) -> list[str]:
    """The unquoted names of a table with capitals, which PostgreSQL folds to lower case."""
    match = _TABLE.fullmatch(value) if isinstance(value, str) else None
    parts = [part for part in match.groups() if part] if match else []
    return [part for part in parts if not part.startswith('"') and part != part.lower()]


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def quoted(table: TableName) -> str:
    """A table in the form that :func:`parse_table` reads."""
    parts = [part for part in table if part]
    plain = re.compile(r"[a-z_][a-z0-9_$]*")
    return ".".join(p if plain.fullmatch(p) else '"' + p.replace('"', '""') + '"' for p in parts)


Table = Annotated[
    InstanceOf[TableName],
    BeforeValidator(parse_table),
    PlainSerializer(quoted, when_used="json"),
]

# A password may contain an unescaped @, / or ?: then everything up to the last @ is treated as the
# password, since hiding too much is the safer error. The part before the first @ is a secret as
# well.
_LOGIN = re.compile(r"(?P<head>[A-Za-z][\w+.-]*://[^:@/?\s]*):(?P<password>\S*)@")
_SHORT_LOGIN = re.compile(r"://[^:@/?\s]*:(?P<password>[^@\s]*)@")
_QUERY = re.compile(r"(?P<head>[?&](?:password|sslpassword)=)(?P<password>[^&\s]*)", re.IGNORECASE)
_PATTERNS = (_LOGIN, _SHORT_LOGIN, _QUERY)
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]\s]*)(?::\d*)?")


def passwords(text: str) -> list[str]:
    """Every password of a URL in ``text``, verbatim and URL-decoded."""
    found = [m["password"] for p in _PATTERNS for m in p.finditer(text)]
    return [spelling for one in found if one for spelling in (one, unquote(one))]


def without_password(url: str) -> str:
    """The URL with every password replaced by ``***``."""
    masked = _LOGIN.sub(rf"\g<head>:{MASK}@", url)
    return _QUERY.sub(rf"\g<head>{MASK}", masked)


def _for_display(url: SecretStr) -> str:
    return without_password(url.get_secret_value())


Url = Annotated[SecretStr, PlainSerializer(_for_display, when_used="json")]
"""A URL whose password is never shown; in JSON it is ``***``."""

URL_EXAMPLE = 'url = "postgresql://user:${PASSWORD}@host:5432/database"'
"""An example of the URL of a database, as a line of the file."""


def dialect_of(url: str) -> Literal["postgresql", "sqlite"]:
    """The kind of database of a ``sink.url``. Raises a problem for all others."""
    scheme, separator, rest = url.partition("://")
    match scheme.lower():
        case "postgresql" | "postgres" if separator and rest:
            _check_login(rest)
            return "postgresql"
        case "sqlite" if separator:
            _check_sqlite(rest)
            return "sqlite"
    raise invalid(
        "not a URL of a database that can be written to; allowed: postgresql://, sqlite:///",
        'write "postgresql://user:${PASSWORD}@host:5432/database" or "sqlite:///file.db"',
    )


def _check_login(rest: str) -> None:
    """The login must end where libpq ends it, at the first @."""
    login, _, behind = rest.partition("?")[0].rpartition("@")
    hosts = behind.partition("/")[0].split(",")
    wrong_login = re.search(r"[@/\s]|%(?![0-9A-Fa-f]{2})", login)
    if wrong_login or not all(_HOST.fullmatch(host) for host in hosts):
        raise invalid(
            "its login, host and port are ambiguous",
            "write postgresql://user:password@host:port/database; in user and password, also when "
            "they are filled in, write @ as %40, / as %2F, ? as %3F, % as %25, a space as %20",
        )
    for host in hosts:
        port = host.rpartition("]")[2].partition(":")[2]
        if port and not 0 < int(port) < 65_536:
            raise invalid(f"{shown(port)} is no port", "ports are 1 to 65535")


def _check_sqlite(rest: str) -> None:
    if not rest.startswith("/"):
        raise invalid("a SQLite URL has no host", 'write three slashes: "sqlite:///file.db"')
    path, _, query = rest[1:].partition("?")
    if not path.strip("/") or ":memory:" in path or "mode=memory" in query:
        raise invalid(
            "a SQLite database in memory ends with its connection, and the ledger with it",
            'name a file: "sqlite:///file.db" (relative) or "sqlite:////var/data/file.db"',
        )
