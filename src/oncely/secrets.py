"""Values that must never be shown, and the one function that takes them out of a text.

Drivers put what they were given into their error texts (a password with an ``@`` becomes
"could not translate host name"), so hiding a field is not enough: every text that leaves
Oncely goes through :func:`redact`, which knows the values themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

MASK = "***"
_SHORTEST = 3  # a one-letter password would blank out every text
_known: set[str] = set()


def remember(values: Iterable[str]) -> None:
    """Mark values as secret for the rest of the process, as given and as URLs spell them."""
    for value in values:
        for spelling in (value, quote(value, safe=""), unquote(value)):
            if len(spelling) >= _SHORTEST:
                _known.add(spelling)


def redact(text: str) -> str:
    """Return ``text`` with every remembered secret replaced by ``***``."""
    for secret in sorted(_known, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, MASK)
    return text
