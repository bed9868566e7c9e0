"""When a contender began, and when its last record became visible: one clock for all.

*End.* The output topics have ``message.timestamp.type=LogAppendTime``, so the broker stamps each
record batch with the time at which it was appended. A transaction's end marker is a batch too
(KIP-98), and a ``read_committed`` reader sees the records in front of it from then on. The latest
stamp in the topic's log is therefore the moment at which the whole result was visible, with or
without transactions, to the millisecond, and nobody had to watch while the run went on. It is
read from the broker's own files, because clients are not shown markers.

*Begin.* The first stamp in the output would be wrong: who gathers much before he writes would
have that time for nothing. So each contender tells when it was ready to consume: for Spark's sink
the session's ``onQueryStarted``, for Oncely's run the takeover of its positions (both before the
first batch is planned), for Oncely's worker the group's assignment (before its takeover and its
first fetch), for quixstreams and Kafka Streams the moment at which the first record was in their
hands. Starting a process, connecting, joining a group and taking over transactional ids are in
front of it for everybody, the planning of batches and the start of Spark's tasks are behind it.
Both JVMs are warm: they live through all rounds, and the first round is not counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_HEADER = struct.Struct(">qiibIhiqq")
"""Base offset, length of what follows it, leader epoch, magic, CRC, attributes, last offset
delta, first and largest timestamp: the head of a record batch of magic 2 (KIP-98)."""
_BEFORE_LENGTH = 12
_APPEND_TIME = 0x08
_MAGIC = 2


def appended(data: Path, topic: str) -> tuple[float, float]:
    """When the first and the last batch of a topic were appended, markers included.

    Args:
        data: the broker's directory of log segments.
        topic: with ``message.timestamp.type=LogAppendTime``.

    Returns:
        Seconds since 1970; two zeros for an empty topic.

    Raises:
        ValueError: a batch has another format or another kind of timestamp.
    """
    stamps = [
        stamp
        for segment in data.glob(f"{topic}-[0-9]*/*.log")
        if segment.parent.name.removeprefix(f"{topic}-").isdecimal()
        for stamp in _stamps(segment)
    ]
    return (min(stamps) / 1000, max(stamps) / 1000) if stamps else (0.0, 0.0)


def _stamps(segment: Path) -> Iterator[int]:
    with segment.open("rb") as file:
        while head := _head(file):
            length, magic, attributes, stamp = head[1], head[3], head[5], head[8]
            if magic != _MAGIC or not attributes & _APPEND_TIME:
                raise ValueError(f"{segment}: a batch of magic {magic}, attributes {attributes}")
            yield stamp
            file.seek(length - (_HEADER.size - _BEFORE_LENGTH), 1)


def _head(file: IO[bytes]) -> tuple[int, ...] | None:
    """The next batch's head; None at the end of the segment."""
    read = file.read(_HEADER.size)
    return _HEADER.unpack(read) if len(read) == _HEADER.size else None
