"""Mirrors positions to the Kafka consumer group, for lag tools.

For display only, never read back, always after the commit. It has a thread of its own: a slow
broker must not slow commits, and a failure to mirror is only logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import OncelyError, Unavailable
from oncely.kafka.source import KafkaSource
from oncely.per_process import Thread

log = logging.getLogger(__name__)


class GroupOffsetPublisher:
    """Sends the newest positions; those that arrive during a request replace the waiting ones."""

    def __init__(self, source: KafkaSource, group: str | None) -> None:
        # Separate clients, which it may discard independently of other threads.
        self._source = KafkaSource(source.brokers, source.topics, source.kafka)
        self._group = group or ""
        self._condition = threading.Condition()
        self._waiting: dict[TopicPartition, Position] = {}
        self._ending = False
        self._thread: Thread | None = None

    def start(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Begin, with the start positions of the run (a reset may have moved them back)."""
        if not self._group:
            return
        self._ending = False
        self._thread = Thread(self._send_all, "mirror")
        self._thread.start()
        self.put(positions)

    def put(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Mirror these positions soon. Raises the error with which the thread has ended."""
        if self._thread is not None:
            self._thread.check()
        with self._condition:
            self._waiting.update(positions)
            self._condition.notify()

    def finish(self) -> None:
        """Send the waiting positions, then end."""
        with self._condition:
            self._ending = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout=15)
            self._thread = None

    def _send_all(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._ending)
                positions, self._waiting = self._waiting, {}
            if not positions:
                return
            self._send(positions)

    def _send(self, positions: Mapping[TopicPartition, Position]) -> None:
        try:
            try:
                self._source.mirror(self._group, positions)
            except Unavailable:
                # After a broker's restart an old client may never reconnect to the coordinator.
                self._source.close()
                self._source.mirror(self._group, positions)
        except OncelyError as error:
            log.warning("positions were not mirrored to group %s: %s", self._group, error.message)
