"""Secret values, and their redaction in texts.

Drivers quote their arguments in error texts (a password with an ``@`` becomes "could not translate
host name"), so hiding a field is not enough: texts are searched for the values themselves. Secrets
belong to the settings or the connection that contains them, never to the process: a password of one
pipeline is an ordinary word to all others.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar
from urllib.parse import quote, quote_plus, unquote

Items = TypeVar("Items")
T = TypeVar("T")

MASK = "***"
_SHORTEST = 3  # shorter values are searched for in logins only
_LONGEST_WORD = 15


@dataclass(frozen=True)
class Secrets:
    """The secret values of one pipeline or connection. Immutable, picklable.

    A value is replaced in these places:

    - anywhere, unless it is a plain word or number, which occur in ordinary sentences;
    - a plain word or number in the place of a value: the whole text, quoted, after ``=`` or ``:``,
      or before ``@``;
    - only in a login (``:value@``, ``password=value``) when it is shorter than three characters, or
      when the settings show the same value in another place, such as the user's name.

    Attributes:
        values: the values in each spelling: verbatim, and escaped for URLs, JSON, Python, Basic.
        public: values that the same settings show openly.
    """

    values: frozenset[str] = field(default=frozenset(), repr=False)
    public: frozenset[str] = field(default=frozenset(), repr=False)

    @classmethod
    def of(cls, values: Iterable[str | None], public: Iterable[str | None] = ()) -> Secrets:
        """Secrets from values as they are written; None and empty values are ignored."""
        spellings = {s for v in values if v for s in _spellings(v) if s}
        return cls(frozenset(spellings), frozenset(filter(None, public)))

    def __or__(self, other: Secrets) -> Secrets:
        return Secrets(self.values | other.values, self.public | other.public)

    def redact(self, text: str) -> str:
        """Return ``text`` with every secret replaced by ``***``."""
        if not self.values:
            return text
        if text in self.values and text not in self.public and len(text) >= _SHORTEST:
            return MASK
        return self._pattern.sub(MASK, text)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # The longest alternative first: one secret may be part of another.
        values = sorted(self.values, key=len, reverse=True)
        return re.compile("|".join(self._searched(value) for value in values))

    def _searched(self, value: str) -> str:
        literal = re.escape(value)
        if len(value) < _SHORTEST or value in self.public:
            return rf"(?<=:){literal}(?=@)|(?i:(?<=password=)|(?<=password=[\"'])){literal}(?!\w)"
        if len(value) <= _LONGEST_WORD and (value.isalpha() or value.isdigit()):
            return rf"(?<=[\"'`=:]){literal}(?!\w)|(?<!\w){literal}(?=[\"'`@])"
        return literal


def _spellings(value: str) -> Iterator[str]:
    """The value verbatim, and as URLs, JSON, Python and HTTP's Basic write it."""
    for one in {value, unquote(value)}:
        for quoted in (quote(one, safe=""), quote(one), quote_plus(one)):
            yield from (quoted, re.sub("%..", lambda hit: hit[0].lower(), quoted))
        for text in (json.dumps(one), json.dumps(one, ensure_ascii=False), repr(one), ascii(one)):
            yield text[1:-1]
        yield from (one, b64encode(one.encode(errors="replace")).decode())


_NONE = Secrets()
_scope: ContextVar[Secrets] = ContextVar("secrets", default=_NONE)  # immutable


@contextmanager
def scope(secrets: Secrets) -> Iterator[None]:
    """Make :func:`redact` replace these values within the block, in this thread."""
    token = _scope.set(secrets)
    try:
        yield
    finally:
        _scope.reset(token)


def carried(work: Callable[[Items], Iterator[T]]) -> Callable[[Items], Iterator[T]]:
    """Wrap ``work`` for a task in another process, so that it runs within the current scope."""
    return partial(_iterate, _scope.get(), work)


def _iterate(secrets: Secrets, work: Callable[[Items], Iterator[T]], items: Items) -> Iterator[T]:
    with scope(secrets):
        yield from work(items)


def redact(text: str) -> str:
    """Return ``text`` without the secrets of the current scope."""
    return _scope.get().redact(text)
