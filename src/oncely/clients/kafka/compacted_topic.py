"""A topic with one partition, read from its first offset to its end, and incrementally after that.

There are two kinds of ends. As committed readers see it now, the log ends at the last stable
offset: an open transaction hides all messages from its first record on. Settled means everything
that was in the log at the time of the request: such a reader waits for the end of every transaction
that was open then.
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
    """The progress of one reader. Used by one thread at a time.

    Args:
        topic: its name.
        what: its description in messages, as "the ledger topic".
        admin: returns its first and last offset.
        brokers: for messages.
        timeout: seconds without progress after which a reading fails.
        take: called with every message, in order.
        forget: called if the topic is another one of the same name: all messages so far are void.
    """

    def __init__(
        self,
        topic: str,
        what: str,
        admin: KafkaAdmin,
        *,
        brokers: str,
        timeout: float,
        take: Callable[[Any], None],
        forget: Callable[[], None],
    ) -> None:
        self._here = ck.TopicPartition(topic, 0)
        self._what, self._admin, self._brokers, self._timeout = what, admin, brokers, timeout
        self._take, self._forget = take, forget
        self.next = 0
        self._last: Any = None
        self._expected: Mark | None = None

    def mark(self) -> Mark | None:
        """The mark of the last message that was taken; None if there was none."""
        return None if self._last is None else (self._last.offset(), _digest(self._last))

    def resume(self, mark: Mark) -> None:
        """Continue from a copy of the messages; ``mark`` is that of the last one.

        The next reading compares it with the log. If it differs, everything is forgotten and read
        from the first offset.
        """
        self.next, self._expected = mark[0], mark

    def bounds(self, *, stable: bool) -> tuple[int, int]:
        """First offset of the topic, and its high watermark or last stable offset."""
        return self._bound(OffsetSpec.earliest(), stable), self._bound(OffsetSpec.latest(), stable)

    def _bound(self, spec: Any, stable: bool) -> int:
        level = ck.IsolationLevel.READ_UNCOMMITTED if stable else ck.IsolationLevel.READ_COMMITTED
        answer = self._admin.one(
            f"read the bounds of {self._what}",
            lambda client, wait: client.list_offsets(
                {self._here: spec}, isolation_level=level, request_timeout=wait
            ),
        )
        return int(answer[self._here].offset)

    def read(self, consumer: Callable[[], Any], *, stable: bool) -> None:
        """Read to the end.

        Args:
            consumer: returns a consumer without assignment; called only if there are messages to
                read.
            stable: read all present messages, waiting for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        end = self._bound(OffsetSpec.latest(), stable)
        # Another topic of the same name, or one that has lost its end.
        if end < self.next or (self._expected is not None and end == self.next):
            self._restart()
        if end > self.next and not self._read_to(end, consumer()):
            self._restart()
            self._read_to(end, consumer())

    def _restart(self) -> None:
        self._forget()
        self.next, self._last, self._expected = 0, None, None

    def _read_to(self, end: int, consumer: Any) -> bool:
        """Read to an offset; False if the messages so far are not from this log."""
        if not self.next:
            # This also returns the topic's leader. A client that is connected already looks for the
            # leader of a new topic only once a second.
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
                else:  # the end for now: the next offset
                    self.next = max(self.next, message.offset())
                if self.next >= end:
                    break
        finally:
            consumer.unassign()
        return True

    def _differs(self, message: Any) -> bool:
        """True if the first message after :meth:`resume` contradicts the mark."""
        expected, self._expected = self._expected, None
        if expected is None:
            return False
        if message.error() is not None:
            return True
        # A later offset: the message was compacted away, because its key has a newer one.
        return bool(message.offset() == expected[0] and _digest(message) != expected[1])

    def _silent(self) -> Unavailable:
        return Unavailable(
            f"read {self._what} {self._here.topic!r}: an open transaction"
            f" or a silent broker hides the messages from offset {self.next} on",
            way_out="the transaction ends by its timeout, at the latest",
        )


def _digest(message: Any) -> bytes:
    """Digest of key, value and time: another message at the same offset would have a different
    one."""
    found = hashlib.sha256()
    for part in (message.key(), message.value(), repr(message.timestamp()).encode()):
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.digest()
