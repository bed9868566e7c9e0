"""The port of every ledger: epochs and positions of one pipeline.

``positions`` is what most sink interfaces lack. Whoever can't be asked "what have you
committed?" can promise at-least-once only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from oncely.core.claim import Claim, Counts, Fence, Notes, Opened, Positions, Takeover
from oncely.core.ledger import Entry
from oncely.core.topics import SourceIdentity, TopicPartition


class MovesPositions(Protocol):
    """The half of a ledger that tasks use. Picklable; connects lazily, anew in each process."""

    @property
    def one_store(self) -> bool:
        """True when records and positions can only go back together, in a failover or restore.

        A ledger that is behind what was committed then tells where to go on. Otherwise records
        are there that it does not know.
        """

    def positions(self, fence: Fence, *, settled: bool = False) -> dict[TopicPartition, Entry]:
        """What has been committed.

        Args:
            fence: the run that asks.
            settled: all that was committed before this call, by whichever process. Otherwise the
                answer may lag a little behind: a commit that is decided on it finds out.

        Raises:
            Unavailable: no answer, or a commit has begun and does not end.
        """

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions alone, and keep the ranges in the history.

        Raises:
            PositionMoved: nothing was moved; read the ledger and decide again.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """


class Ledger(MovesPositions, Protocol):
    """Epochs, positions and notes of one pipeline."""

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch, end older sessions, and settle a position for EVERY partition.

        Raises:
            Fenced: another run has opened since ``takeover.expected``.
            SourceMismatch: the ledger was written for another cluster or topic.
            TableMismatch: it was written for another destination.
            Stopped: the pipeline has written before, and its position is nowhere to be found.
            Unavailable: no answer.
        """

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Give partitions that were found while running their position.

        Raises:
            Fenced: a newer run has opened.
        """

    def note(self, fence: Fence, notes: Notes) -> None:
        """Keep notes beside the positions.

        Raises:
            Fenced: a newer run has opened; nothing was noted.
            Unavailable: nobody knows; it can be noted again.
        """

    def tidy(self, fence: Fence) -> None:
        """Housekeeping between batches; may fail, and is tried again later."""

    def close(self) -> None:
        """End what is open; never raises. The next call connects again."""
