"""A dead letter as it is stored, of every kind of destination."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any, NamedTuple

from oncely.core.topics import TopicPartition


class Letter(NamedTuple):
    """A dead letter as it is stored.

    Attributes:
        content: a digest of each of the record's parts, so that the dead letters of a whole topic
            fit into memory.
    """

    of: TopicPartition
    offset: int
    stage: str
    reason: str
    content: tuple[bytes, ...]


def content_of(timestamp: object, key: object, value: object, headers: Any) -> tuple[bytes, ...]:
    """The content of a record; headers are pairs, or a text of them as databases store it."""
    if not isinstance(headers, str):
        headers = json.dumps(
            [
                (name, None if v is None else base64.b64encode(v).decode())
                for name, v in headers or ()
            ]
        )
    parts = (timestamp, key, value, headers)
    return tuple(hashlib.blake2b(repr(one).encode(), digest_size=16).digest() for one in parts)
