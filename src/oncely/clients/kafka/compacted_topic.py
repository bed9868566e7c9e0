"""A topic with one partition, read from its first offset to its end, and later on from there.

Two ends can be meant. As committed readers see it now, the log ends at the last stable offset:
an open transaction hides what follows its first record. Settled means all that was in the log
when it was asked for: who reads so far has waited for the end of every transaction that was
open then.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import OffsetSpec

from oncely.clients.kafka.client import KafkaAdmin, stay_connected
from oncely.clients.kafka.polling import polled
from oncely.errors import Unavailable

Mark = tuple[int, bytes]
"""Offset and digest of a message."""


class TopicLog:
    """How far one reader has read. Used by one thread at a time.

    Args:
        topic: its name.
        what: what it is called in messages, as "the ledger topic".
        asker: tells where it begins and ends.
        brokers: for messages.
        timeout: seconds without progress after which a reading fails.
        take: is given every message, in order.
        forget: is called when the topic is another one by the same name: what was taken is void.
    """

    def __init__(
        self,
        topic: str,
        what: str,
        asker: KafkaAdmin,
        *,
        brokers: str,
        timeout: float,
        take: Callable[[Any], None],
        forget: Callable[[], None],
    ) -> None:
        self._here = ck.TopicPartition(topic, 0)
        self._what, self._asker, self._brokers, self._timeout = what, asker, brokers, timeout
        self._take, self._forget = take, forget
        self.next = 0
        self._last: Any = None
        self._expected: Mark | None = None

    def mark(self) -> Mark | None:
        """Tells the last message that was taken; None: none was."""
        return None if self._last is None else (self._last.offset(), _digest(self._last))

    def resume(self, mark: Mark) -> None:
        """Go on from a copy of what was taken, the last message of which this was.

        The next reading compares it with the log. When it differs, everything is forgotten and
        read from the first offset.
        """
        self.next, self._expected = mark[0], mark

    def bounds(self, *, stable: bool) -> tuple[int, int]:
        """First offset of the topic, and its high watermark or last stable offset."""
        return self._bound(OffsetSpec.earliest(), stable), self._bound(OffsetSpec.latest(), stable)

    def _bound(self, spec: Any, stable: bool) -> int:
        level = ck.IsolationLevel.READ_UNCOMMITTED if stable else ck.IsolationLevel.READ_COMMITTED
        answer = self._asker.one(
            f"look at {self._what}",
            lambda client, wait: client.list_offsets(
                {self._here: spec}, isolation_level=level, request_timeout=wait
            ),
        )
        return int(answer[self._here].offset)

    def read(self, consumer: Callable[[], Any], *, stable: bool) -> None:
        """Read on to the end.

        Args:
            consumer: one without assignment, asked for only if there is something to read.
            stable: to all that is there now, waiting for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        end = self._bound(OffsetSpec.latest(), stable)
        # Another topic by the same name, or one that has lost its end.
        if end < self.next or (self._expected is not None and end == self.next):
            self._restart()
        if end > self.next and not self._read_to(end, consumer()):
            self._restart()
            self._read_to(end, consumer())

    def _restart(self) -> None:
        self._forget()
        self.next, self._last, self._expected = 0, None, None

    def _read_to(self, end: int, consumer: Any) -> bool:
        """False: what was taken so far is not of this log."""
        if not self.next:
            # It also tells where the topic's leader is. A client that is connected already finds
            # the leader of a topic that is new to it once a second only.
            with contextlib.suppress(ck.KafkaException):
                stay_connected(consumer, self._here.topic, self._timeout)
        consumer.assign([ck.TopicPartition(self._here.topic, 0, self.next)])
        doing = f"read {self._what}"
        try:
            for message in polled(
                consumer, doing, self._brokers, self._timeout, silent=self._silent
            ):
                if self._differs(message):
                    return False
                if message.error() is None:
                    self._take(message)
                    self._last = message
                    self.next = message.offset() + 1
                else:  # the end for now: the offset that comes next
                    self.next = max(self.next, message.offset())
                if self.next >= end:
                    break
        finally:
            consumer.unassign()
        return True

    def _differs(self, message: Any) -> bool:
        """Whether the first message after :meth:`resume` contradicts it."""
        expected, self._expected = self._expected, None
        if expected is None:
            return False
        if message.error() is not None:
            return True
        # A later offset: the message was compacted away, as its key has a newer one.
        return bool(message.offset() == expected[0] and _digest(message) != expected[1])

    def _silent(self) -> Unavailable:
        return Unavailable(
            f"read {self._what} {self._here.topic!r}: an open transaction"
            f" or a silent broker hides what follows offset {self.next}",
            way_out="the transaction ends by its timeout, at the latest",
        )


def _digest(message: Any) -> bytes:
    """Of key, value and time: what another message at the same offset would not share."""
    found = hashlib.sha256()
    for part in (message.key(), message.value(), repr(message.timestamp()).encode()):
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.digest()
