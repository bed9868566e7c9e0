"""Dead letters: a rejected record as it was, and beside it why it is none of the others.

Key, value and headers are the record's own. What Oncely adds stands in headers of its own, the
names of which begin with ``oncely.``.
"""

from __future__ import annotations

from collections.abc import Sequence

from oncely.sinks.base import Reject
from oncely.sinks.kafka.messages import batch_size
from oncely.sinks.kafka.transaction import Message

_LONGEST = 2000  # characters of a reason


def letter(reject: Reject, limit: int) -> Message:
    """The message for the rejects' topic.

    A record that is too large even for that topic is kept without its value, then without its
    key and headers; it is named by its offset, and what was left out is told.
    """
    about = [
        ("oncely.topic", reject.partition.topic),
        ("oncely.partition", str(reject.partition.partition)),
        ("oncely.offset", str(reject.offset)),
        ("oncely.timestamp_ms", "" if reject.timestamp_ms is None else str(reject.timestamp_ms)),
        ("oncely.stage", reject.stage),
        ("oncely.reason", reject.reason[:_LONGEST]),
    ]
    if reject.value is None:
        about.append(("oncely.tombstone", "true"))
    own = [(name, text.encode()) for name, text in about]
    whole = Message(reject.value, reject.key, [*reject.headers, *own])
    if batch_size(whole) <= limit:
        return whole
    left_out = [*own, ("oncely.left_out", _lengths(reject).encode())]
    without = Message(None, reject.key, [*reject.headers, *left_out])
    return without if batch_size(without) <= limit else Message(None, None, left_out)


def letters(rejects: Sequence[Reject], limit: int) -> list[Message]:
    """All of them, in order."""
    return [letter(one, limit) for one in rejects]


def _lengths(reject: Reject) -> str:
    return (
        f"too large for this topic: key {len(reject.key or b'')} bytes,"
        f" value {len(reject.value or b'')} bytes, {len(reject.headers)} headers"
    )
