"""Dead letters as messages: the rejected record unchanged, and the reason in headers.

Key, value and headers are those of the record. Oncely's data are in additional headers at the end,
whose names begin with ``oncely.``, and ``oncely.pipeline`` is the first of these: a record that was
a dead letter before may contain such headers of its own. Behind them are the headers by which other
tools show dead letters, and send them to their topic again; Oncely does not read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oncely.core.batch import Reject
from oncely.core.claim import Fence
from oncely.core.ranges import TopicPartition
from oncely.kafka.records import KafkaRecord
from oncely.kafka.transaction import Message
from oncely.sinks.kafka.messages import batch_size

_FIRST = "oncely.pipeline"
_LONGEST = 2000  # characters of a reason


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter that was read from the topic.

    Attributes:
        reject: the record and the reason.
        epoch: the epoch of the run that read the record.
        left_out: the parts that were omitted because of their size; None: the dead letter is
            complete.
    """

    reject: Reject
    epoch: int
    left_out: str | None = None

    @property
    def origin(self) -> tuple[TopicPartition, int]:
        """Topic-partition and offset of the record."""
        return self.reject.partition, self.reject.offset

    @property
    def shown(self) -> Reject:
        """The reject for display: its reason mentions omitted parts."""
        if self.left_out is None:
            return self.reject
        return replace(self.reject, reason=f"{self.reject.reason} ({self.left_out})")


def dead_letter(reject: Reject, limit: int, fence: Fence) -> Message:
    """The message for the rejects' topic.

    For a record that is too large even for that topic the headers for other tools are left out; if
    that is not sufficient the reason is shortened; then it is stored without its value, then
    without its key and headers: its offset identifies it, and the omitted parts are noted.

    Args:
        reject: the record.
        limit: the topic's ``max.message.bytes``.
        fence: the pipeline and the epoch of the run that read it.
    """
    headers = [*reject.headers, *_about(reject, fence)]
    told = Message(reject.value, reject.key, [*headers, *_for_tools(reject)])
    if batch_size(told) <= limit:
        return told
    whole = Message(reject.value, reject.key, headers)
    over = batch_size(whole) - limit
    if over <= 0:
        return whole
    if 0 < over < len(reject.reason[:_LONGEST].encode()):
        short = reject.reason[:_LONGEST].encode()[:-over].decode(errors="ignore")
        about = _about(replace(reject, reason=short), fence)
        return Message(reject.value, reject.key, [*reject.headers, *about])
    return _without(reject, limit, fence, _lengths(reject))


def again(of: DeadLetter, limit: int, pipeline: str) -> Message:
    """The dead letter of a record that a replay could not write either."""
    fence = Fence(pipeline, of.epoch)
    if of.left_out is None:
        return dead_letter(of.reject, limit, fence)
    return _without(of.reject, limit, fence, of.left_out)


def dead_letters(rejects: Sequence[Reject], limit: int, fence: Fence) -> list[Message]:
    """The dead letters of all rejects, in order."""
    return [dead_letter(one, limit, fence) for one in rejects]


def opened(record: KafkaRecord, pipeline: str) -> DeadLetter | None:
    """A record of the rejects' topic as a dead letter of this pipeline; None if it is not."""
    headers = list(record.headers)
    at = next((i for i in reversed(range(len(headers))) if headers[i][0] == _FIRST), None)
    if at is None or headers[at][1] != pipeline.encode():
        return None
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[at:]}
    try:
        partition = TopicPartition(own["oncely.topic"], int(own["oncely.partition"]))
        when = own["oncely.timestamp_ms"]
        reject = Reject(
            partition,
            int(own["oncely.offset"]),
            int(when) if when else None,
            record.key,
            record.value,
            headers[:at],
            own["oncely.stage"],
            own["oncely.reason"],
        )
        return DeadLetter(reject, int(own["oncely.epoch"]), own.get("oncely.left_out"))
    except (KeyError, ValueError):  # written by another program
        return None


def _about(reject: Reject, fence: Fence) -> list[tuple[str, bytes]]:
    about = [
        (_FIRST, fence.pipeline),
        ("oncely.epoch", str(fence.epoch)),
        ("oncely.topic", reject.partition.topic),
        ("oncely.partition", str(reject.partition.partition)),
        ("oncely.offset", str(reject.offset)),
        ("oncely.timestamp_ms", "" if reject.timestamp_ms is None else str(reject.timestamp_ms)),
        ("oncely.stage", reject.stage),
        ("oncely.reason", reject.reason[:_LONGEST]),
    ]
    if reject.value is None:
        about.append(("oncely.tombstone", "true"))
    return [(name, text.encode()) for name, text in about]


def _for_tools(reject: Reject) -> list[tuple[str, bytes]]:
    """The headers of Karafka's dead letters, and of those of Spring Cloud Stream."""
    about = [
        ("source_topic", reject.partition.topic),
        ("source_partition", str(reject.partition.partition)),
        ("source_offset", str(reject.offset)),
        ("x-original-topic", reject.partition.topic),
        ("x-exception-message", reject.reason[:_LONGEST]),
    ]
    return [(name, text.encode()) for name, text in about]


def _without(reject: Reject, limit: int, fence: Fence, left_out: str) -> Message:
    own = [*_about(reject, fence), ("oncely.left_out", left_out.encode())]
    without = Message(None, reject.key, [*reject.headers, *own])
    return without if batch_size(without) <= limit else Message(None, None, own)


def _lengths(reject: Reject) -> str:
    return (
        f"too large for this topic: key {len(reject.key or b'')} bytes,"
        f" value {len(reject.value or b'')} bytes, {len(reject.headers)} headers"
    )
