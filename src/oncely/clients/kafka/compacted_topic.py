"""A partition of a topic, read from its first offset to its end, and incrementally after that.

There are two kinds of ends. As committed readers see it now, the log ends at the last stable
offset: an open transaction hides all messages from its first record on. Settled means everything
that was in the log at the time of the request: such a reader waits for the end of every transaction
that was open then.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import OffsetSpec

from oncely.clients.kafka.client import KafkaAdmin, classify_error, stay_connected
from oncely.clients.kafka.inbox import Inbox
from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable

_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_MANY, _SIZE = 2_000, 16 << 20  # messages that are taken at once, and their bytes

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
        partition: returns its number; after a change of it :meth:`restart` is called.
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
        partition: Callable[[], int] = int,
    ) -> None:
        self._topic, self._partition = topic, partition
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
        here = ck.TopicPartition(self._topic, self._partition())
        answer = self._admin.one(
            f"read the bounds of {self._what}",
            lambda client, wait: client.list_offsets(
                {here: spec}, isolation_level=level, request_timeout=wait
            ),
        )
        return int(answer[here].offset)

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
            self.restart()
        if end > self.next and not self._read_to(end, consumer()):
            self.restart()
            self._read_to(end, consumer())

    def restart(self) -> None:
        """Forget all messages so far."""
        self._forget()
        self.next, self._last, self._expected = 0, None, None

    def _read_to(self, end: int, consumer: Any) -> bool:
        """Read to an offset; False if the messages so far are not from this log."""
        if not self.next:
            # This also returns the topic's leader. A client that is connected already looks for the
            # leader of a new topic only once a second.
            with contextlib.suppress(ck.KafkaException):
                stay_connected(consumer, self._topic, self._timeout)
        here = TopicPartition(self._topic, self._partition())
        consumer.assign([ck.TopicPartition(*here, self.next)])
        inbox, deadline = Inbox(consumer, _MANY, _SIZE), time.monotonic() + self._timeout
        try:
            while self.next < end:
                polled = inbox.poll(_STEP)
                for error in [*polled.errors, *polled.failed.values()]:
                    raise classify_error(error, f"read {self._what}", self._brokers)
                if here in polled.messages or here in polled.ends:
                    if not self._received(polled.messages.get(here, ()), end):
                        return False
                    # Behind the last message there may be a marker; messages behind the end were
                    # not taken.
                    self.next = max(self.next, min(end, polled.ends.get(here, 0)))
                    deadline = time.monotonic() + self._timeout
                elif time.monotonic() > deadline:
                    raise self._silent()
        finally:
            consumer.unassign()
        return True

    def _received(self, messages: Sequence[Any], end: int) -> bool:
        """Take messages up to an offset; False if they contradict those before.

        A message behind the end belongs to a transaction that has ended since the end was asked.
        With a part of its messages the log would be in a state that it never had.
        """
        if self._differs(messages):
            return False
        for message in messages:
            if message.offset() >= end:
                self.next = end
                break
            self._take(message)
            self._last = message
            self.next = message.offset() + 1
        return True

    def _differs(self, messages: Sequence[Any]) -> bool:
        """True if what comes first after :meth:`resume` contradicts the mark."""
        expected, self._expected = self._expected, None
        if expected is None:
            return False
        if not messages:  # the end of the log
            return True
        message = messages[0]
        # A later offset: the message was compacted away, because its key has a newer one.
        return bool(message.offset() == expected[0] and _digest(message) != expected[1])

    def _silent(self) -> Unavailable:
        return Unavailable(
            f"read {self._what} {self._topic!r}: an open transaction"
            f" or a silent broker hides the messages from offset {self.next} on",
            way_out="the transaction ends by its timeout, at the latest, and the broker's next look"
            " for expired ones (10 s); pipelines with a sink.ledger_topic of their own, or with"
            " another partition of it, do not wait for each other: docs/worker.md",
        )


def _digest(message: Any) -> bytes:
    """Digest of key, value and time: another message at the same offset would have a different
    one."""
    found = hashlib.sha256()
    for part in (message.key(), message.value(), repr(message.timestamp()).encode()):
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.digest()
