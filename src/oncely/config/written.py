"""How a value is written in the pipeline file, where its Python type does not tell.

A parser of such values is marked with a form, from which the JSON Schema and the reference of the
file are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_FILLED = r"\$\{"  # a text with ${NAME} may become anything


class Form(NamedTuple):
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

TIME = Form("time", _TIME, _seconds)
SIZE = Form(
    "size",
    _or_number(_text(r"^\s*[0-9]+(\.[0-9]+)?\s*([kKmMgG][iI]?)?[bB]\s*$"), 0),
    lambda value: f"{value >> 20} MiB",
)
SHARE = Form("share, or number of records", _or_number(_text(r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$"), 0))
INTERVAL = Form("number of records, or time", _or_number(_TIME, 1))
RATE = Form("number of records in a time", _text(r"^\s*[0-9_,]+ (in|per) .+$"))
START = Form(
    "`earliest`, `latest`, or a time (ISO 8601)",
    _text(r"^(earliest|latest)$|^[0-9]{4}-[0-9]{2}-[0-9]{2}"),
)
TABLE = Form(
    "table, or schema.table",
    {"type": "string", "minLength": 1},
    lambda value: ".".join(part for part in value if part),
)
PATH = Form("file name", {"type": "string", "minLength": 1})
NAMES = Form(
    "text, or list of texts",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)
GROUP = Form("text, or false", {"anyOf": [{"type": "string"}, {"const": False}]})
MASTER = Form("Spark's master URL", _text(r"^(local|(spark|k8s)://\S+$|yarn$)"))
PROPERTIES = Form("table of properties", {"type": "object"})  # names with dots become tables

_FORM = "__oncely_form__"


def written(form: Form, limits: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a parser with the form of the values that it reads, and with their limits in words."""
    type_ = f"{form.type}, {limits}" if limits else form.type

    def mark(parser: Callable[P, T]) -> Callable[P, T]:
        setattr(parser, _FORM, form._replace(type=type_))
        return parser

    return mark


def form_of(parser: object) -> Form | None:
    """The form that a parser is marked with."""
    form: Form | None = getattr(parser, _FORM, None)
    return form
