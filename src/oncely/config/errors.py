"""How a check says what is wrong: a key, what was found, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic_core import PydanticCustomError

from oncely.secrets import redact

KIND = "oncely"


class Problem(NamedTuple):
    """One thing that is wrong below the key that is being checked.

    Attributes:
        below: the rest of the dotted key; empty for the key itself.
        text: what was found and what is allowed; never a secret.
        way_out: what to do.
    """

    below: str
    text: str
    way_out: str = ""


def wrong(text: str, way_out: str = "", *, below: str = "") -> PydanticCustomError:
    """The error that a pydantic validator raises for one problem."""
    return all_wrong([Problem(below, text, way_out)])


def all_wrong(problems: Iterable[Problem]) -> PydanticCustomError:
    """The error that a pydantic validator raises for several problems at once."""
    found = tuple(problems)
    text = "; ".join(problem.text for problem in found)
    return PydanticCustomError(KIND, "{text}", {"text": text, "problems": found})


def shown(value: object) -> str:
    """A found value in a sentence: short, and with the type's plain name."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            text = redact(value)  # before it is cut or quoted: afterwards it looks different
            return repr(text if len(text) <= 80 else text[:77] + "...")
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
        case _:
            return str(value)
