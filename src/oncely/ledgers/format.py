"""The format of a stored JSON document: absent for the first one, refused if another version wrote
it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from oncely.errors import NewerFormat, OlderFormat


class _Stored(msgspec.Struct):
    format: int = 1


def require_known_format(document: bytes, known: int, what: str) -> None:
    """Refuse a document of a newer format, before its other fields are parsed.

    Args:
        document: JSON; anything but an object with a number as ``format`` is the parser's.
        known: the newest format of this version.
        what: the document, for the message.

    Raises:
        NewerFormat: a newer version of Oncely has written it.
    """
    try:
        found = msgspec.json.decode(document, type=_Stored).format
    except msgspec.DecodeError:
        return
    if found > known:
        raise NewerFormat(what, found, known)


def refuse_lacking(error: msgspec.DecodeError, what: str, fields: Iterable[str]) -> None:
    """Refuse a document without a field that every version since the first release writes.

    Args:
        error: of the parser.
        what: the document, for the message.
        fields: those that versions before it did not write.

    Raises:
        OlderFormat: the error is that one of them is missing.
    """
    if any(f"missing required field `{name}`" in str(error) for name in fields):
        raise OlderFormat(what) from None
