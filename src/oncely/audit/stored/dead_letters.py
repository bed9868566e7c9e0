"""Dead letters in a rejects' topic: the rejected record, and its origin in headers at the end.

A dead letter is never removed from the topic. It waits until the position of replays is behind it
(then its record has rows, was filtered, or has a newer dead letter), or until a reset makes the
pipeline read its record again.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncely.audit.stored.log import Topics
from oncely.audit.stored.topic_ledger import TopicLedger
from oncely.core.ranges import TopicPartition
from oncely.kafka.records import headers_of


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


_FIRST = "oncely.pipeline"


@dataclass(frozen=True)
class StoredLetter:
    """A dead letter of one pipeline.

    Attributes:
        of: topic-partition of the rejected record.
        offset: its offset.
        epoch: the run that rejected it.
        stage, reason: why.
        at: the dead letter's own topic-partition and offset.
        waits: True unless it was replayed, or a reset has made it void.
        content: as of :class:`Letter`; None if parts of the record were left out.
    """

    of: TopicPartition
    offset: int
    epoch: int
    stage: str
    reason: str
    at: tuple[TopicPartition, int]
    waits: bool = True
    content: tuple[bytes, ...] | None = None

    @property
    def kept(self) -> Letter | None:
        """Its content; None if it is not complete, or does not wait."""
        if self.content is None or not self.waits:
            return None
        return Letter(self.of, self.offset, self.stage, self.reason, self.content)


def read_letters(
    topics: Topics, rejects_topic: str, pipeline: str, ledger: TopicLedger
) -> Iterator[StoredLetter]:
    """The dead letters of a pipeline; those of other pipelines in the topic are left out.

    Args:
        topics: the cluster.
        rejects_topic: the topic; it may be missing.
        pipeline: the pipeline's name.
        ledger: tells which dead letters wait. Read before, it may take replayed ones for waiting.

    Raises:
        Unavailable: a transaction stayed open, or no answer.
    """
    topic_id, ends = topics.topic_id(rejects_topic), topics.ends(rejects_topic)
    replayed = {tp: one.position for tp, one in ledger.replayed.items() if one.topic_id == topic_id}
    for message in topics.read({tp: one.high for tp, one in ends.items()}):
        found = letter(message, pipeline, replayed, ledger)
        if found is not None:
            yield found


def letter(
    message: Any, pipeline: str, replayed: Mapping[TopicPartition, int], ledger: TopicLedger
) -> StoredLetter | None:
    """A message of confluent-kafka as a dead letter; None if it is no dead letter of the pipeline.

    Args:
        replayed: the positions of replays in the rejects' topic.
    """
    headers = headers_of(message)
    at = max((i for i, (name, _) in enumerate(headers) if name == _FIRST), default=None)
    if at is None or headers[at][1] != pipeline.encode():
        return None
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[at:]}
    try:
        of = TopicPartition(own["oncely.topic"], int(own["oncely.partition"]))
        offset, epoch = int(own["oncely.offset"]), int(own["oncely.epoch"])
        when = own.get("oncely.timestamp_ms")
        at_ms = int(when) if when else None
    except (KeyError, ValueError):  # written by another program
        return None
    here, number = TopicPartition(message.topic(), message.partition()), message.offset()
    waits = number >= replayed.get(here, 0) and not ledger.undone(of, epoch, offset)
    stage, reason = own.get("oncely.stage", ""), own.get("oncely.reason", "")
    content = None
    if "oncely.left_out" not in own:
        content = content_of(at_ms, message.key(), message.value(), headers[:at])
    return StoredLetter(of, offset, epoch, stage, reason, (here, number), waits, content)
