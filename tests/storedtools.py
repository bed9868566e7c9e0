"""Messages for tests of the readers of stored formats, without a broker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tests.golden.compare import FILES


@dataclass(frozen=True)
class Message:
    """A message as confluent-kafka's consumer returns it."""

    _offset: int
    _key: bytes | None
    _value: bytes | None
    _headers: Sequence[tuple[str, bytes | None]] = ()
    _topic: str = "topic"

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return list(self._headers) or None

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000


def golden(name: str) -> list[Message]:
    """The messages of a golden file: key, value, and headers if there are any."""
    lines = (FILES / f"{name}.jsonl").read_text().splitlines()
    found = []
    for offset, line in enumerate(lines):
        key, value, *headers = json.loads(line)
        pairs = [(header, _bytes(text)) for header, text in headers]
        found.append(Message(offset, _bytes(key), _bytes(value), pairs))
    return found


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
