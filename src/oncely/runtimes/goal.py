"""The goal of a run until the latest records: the ends that the topics had at its start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import DataLost
from oncely.kafka.source import KafkaSource

log = logging.getLogger(__name__)
_LOOK_SECONDS = 30.0  # a broker that has lost its leadership may answer for less than that


@dataclass
class EndOffsets:
    """The ends that are to be reached.

    Attributes:
        source: the topics.
        on_gap: ``fail`` or ``record``.
        ends: last stable offsets.
        clock: seconds.
    """

    source: KafkaSource
    on_gap: str
    ends: dict[TopicPartition, Position]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._look_at = self.clock() + _LOOK_SECONDS
        self._short: frozenset[TopicPartition] = frozenset()  # at the last look

    def look(self) -> None:
        """While there is nothing to read: a log that ends before the goal at two looks in a row was
        cut, and may never grow so far again. The run ends where the log ends now.

        High watermarks are compared: an open transaction is waited for.

        Raises:
            DataLost: a log was cut, and ``on_gap`` is ``fail``.
            The errors of the source.
        """
        if self.clock() < self._look_at:
            return
        self._look_at = self.clock() + _LOOK_SECONDS
        highs = {tp: mark.high for tp, mark in self.source.watermarks().items()}
        short = frozenset(tp for tp, high in highs.items() if high < self.ends.get(tp, 0))
        for tp in sorted(short & self._short):
            said = (
                f"{tp} ends at {highs[tp]}, and has ended at {self.ends[tp]} when the run began:"
                " its last records are gone from the topic, and were not read"
            )
            if self.on_gap == "fail":
                raise DataLost(
                    said,
                    way_out="start again to read what the topic has now; with source.on_gap ="
                    ' "record" a run goes on without them',
                )
            log.warning("%s", said)
            self.ends[tp] = highs[tp]
        self._short = short
