"""The secret values of a pipeline file, determined by their fields.

Passwords, tokens and key material are secret; names, addresses and sizes are not, regardless of
their origin. A value of ``${...}`` in a text of unknown meaning (SQL, an unknown key, one of
Spark's settings) is secret, unless its key names an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from oncely.clients.kafka.properties import ACCEPTED, SECRET, secret_values
from oncely.config import urls
from oncely.config.problems import is_secret_field, known_keys
from oncely.config.spark import is_secret

_URL = re.compile(r"\s*[A-Za-z][\w+.-]*://")
_ADDRESS = re.compile(r"(?:endpoint|hosts?|address|port|region|master)$", re.IGNORECASE)
_FREE_TEXT = frozenset({"transform.sql"})
_SHOWN = re.compile(r"name|source\.topics|sink\.(table|topic)|source\.kafka\.sasl\.username")


class Filled(NamedTuple):
    """A ``${...}`` of the file.

    Attributes:
        token: its text in the file.
        name: the name of the variable, or ``file:`` and a path.
        value: the value that has replaced it.
    """

    token: str
    name: str
    value: str


def hidden(key: str, template: str, done: str, filled: Sequence[Filled]) -> set[str]:
    """The values filled into one text that must not be shown.

    Args:
        key: the dotted key of the text.
        template: the text before filling.
        done: the text after filling.
        filled: the values in their order.
    """
    every = {one.value for one in filled}
    key = key.partition("[")[0]
    if _holds_secret(key):
        return every
    named = {one.value for one in filled if is_secret(one.name)}
    if _URL.match(done):
        return named | _in_url(template, filled)
    return named if _is_public(key) else every


def written(raw: Any, key: str = "") -> Iterator[str]:
    """The secrets of a filled file: values of secret fields, and the password of every URL."""
    match raw:
        case Mapping():
            for name, inner in raw.items():
                yield from written(inner, f"{key}.{name}" if key else str(name))
        case list() | tuple():
            for inner in raw:
                yield from written(inner, key)
        case str() | int() | float():
            text = str(raw)
            yield from urls.passwords(text)
            if _holds_secret(key):
                yield from secret_values({key.removeprefix("source.kafka."): text})
                yield text
                if key.endswith("user_info"):
                    yield text.partition(":")[2]


def public(raw: Any, key: str = "") -> Iterator[str]:
    """Values that messages show: they cannot be distinguished from an equal password."""
    match raw:
        case Mapping():
            for name, inner in raw.items():
                yield from public(inner, f"{key}.{name}" if key else str(name))
        case list():
            for inner in raw:
                yield from public(inner, key)
        case str() if _SHOWN.fullmatch(key):
            yield raw
        case str() if key in ("sink.url", "offsets.url"):
            yield from re.split(r"[/:@,]+", urls.without_password(raw).partition("?")[0])


def _holds_secret(key: str) -> bool:
    """True if the whole value of a key is secret."""
    if key.startswith("source.kafka."):
        name = key.removeprefix("source.kafka.")
        return name in SECRET or (name not in ACCEPTED and is_secret(name))
    return is_secret_field(key) or is_secret(key)


def _is_public(key: str) -> bool:
    """True if no value of a key is secret."""
    table, _, name = key.rpartition(".")
    if key.startswith("source.kafka."):
        return key.removeprefix("source.kafka.") in ACCEPTED
    if key.startswith("spark.conf."):
        return _ADDRESS.search(name) is not None
    return key not in _FREE_TEXT and name in known_keys(table)


def _in_url(template: str, filled: Sequence[Filled]) -> set[str]:
    """The values in a URL's password or query."""
    marked = template
    for at, one in enumerate(filled):
        marked = marked.replace(one.token, f"filled-{at}-", 1)
    query = marked.partition("?")[2]
    places = [*urls.passwords(marked), query]
    return {
        one.value
        for at, one in enumerate(filled)
        if any(f"filled-{at}-" in place for place in places)
    }
