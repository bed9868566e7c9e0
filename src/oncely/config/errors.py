"""Problems of a check: the key, the value, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic_core import PydanticCustomError

from oncely.secrets import redact

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
