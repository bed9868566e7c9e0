"""Records as JSON lines, for shells: ``{"key", "value", "headers"}`` and their position.

Bytes are the UTF-8 text that they are, or ``{"base64": …}``. On input any other JSON value stands
for its own text: numbers are not rounded.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from oncely.clients.kafka.records import KafkaRecord
from oncely.clients.kafka.sender import Message
from oncely.core.ranges import TopicPartition
from oncely.errors import WrongInput

MEMBERS = frozenset({"key", "value", "headers"})
"""The members of a record to be written."""

Members = Mapping[str, msgspec.Raw]


def shown(value: bytes | None) -> Any:
    """Bytes as a JSON-able value."""
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value or b"").decode()}


def in_words(value: Any) -> str | None:
    """The result of :func:`shown` as a text."""
    return f"base64: {value['base64']}" if isinstance(value, dict) else value


def as_json(tp: TopicPartition, offset: int, record: KafkaRecord) -> dict[str, Any]:
    """A record as JSON-able values; ``headers`` only if it has some."""
    found = {
        "topic": tp.topic,
        "partition": tp.partition,
        "offset": offset,
        "timestamp": _timestamp(record.timestamp_ms),
        "key": shown(record.key),
        "value": shown(record.value),
    }
    if record.headers:
        found["headers"] = [[name, shown(value)] for name, value in record.headers]
    return found


def members(line: bytes | str, where: str, allowed: Collection[str] | None = None) -> Members:
    """The members of a line's object.

    Args:
        line: the line.
        where: its place, for messages.
        allowed: the names of members; by default any.

    Raises:
        WrongInput: it is no object, or has other members.
    """
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise WrongInput(f"{where}: found {_start(line)}", way_out=_way_out(allowed)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WrongInput(f"{where}: no JSON: {error}", way_out=_way_out(allowed)) from None
    if allowed is not None and (others := found.keys() - set(allowed)):
        raise WrongInput(f"{where}: found {sorted(others)[0]!r}", way_out=_way_out(allowed))
    return found


def message_of(given: Members, where: str) -> Message:
    """The record of a line's members.

    Raises:
        WrongInput: key, value or headers cannot be written.
    """
    return Message(
        content_of(given.get("value"), where),
        content_of(given.get("key"), where),
        _headers(given.get("headers"), where),
    )


def content_of(raw: msgspec.Raw | None, where: str) -> bytes | None:
    """The bytes for which a JSON value stands: a text's UTF-8, the bytes of ``{"base64": …}``, None
    for null, and any other value as it is written.

    Raises:
        WrongInput: no base64.
    """
    text = b"null" if raw is None else bytes(raw).strip()
    if text[:1] == b'"':
        return msgspec.json.decode(text, type=str).encode()
    if text == b"null":
        return None
    if text[:1] == b"{" and len(found := msgspec.json.decode(text)) == 1 and "base64" in found:
        try:
            return base64.b64decode(found["base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise WrongInput(f"{where}: no base64: {error}") from None
    return text


def _headers(raw: msgspec.Raw | None, where: str) -> list[tuple[str, bytes | None]]:
    """Headers as an object, or as pairs, whose names may repeat."""
    if raw is None:
        return []
    try:
        pairs: Any = msgspec.json.decode(
            raw, type=dict[str, msgspec.Raw] | list[tuple[str, msgspec.Raw]] | None
        )
    except msgspec.DecodeError:
        raise WrongInput(
            f"{where}: headers are an object of names and texts, or a list of such pairs"
        ) from None
    items = pairs.items() if isinstance(pairs, dict) else pairs or ()
    return [(name, content_of(value, where)) for name, value in items]


def _timestamp(millis: int | None) -> str | int | None:
    """ISO 8601 in UTC; None if there is none, and the number beyond the years 1 to 9999."""
    if millis is None:
        return None
    try:
        at = datetime.fromtimestamp(millis / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return millis
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _start(line: bytes | str) -> str:
    return (line.decode(errors="replace") if isinstance(line, bytes) else line)[:60]


def _way_out(allowed: Collection[str] | None) -> str:
    return f"an object of {sorted(allowed)}" if allowed else "a JSON object in each line"
