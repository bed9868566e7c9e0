"""The port of every ledger: epochs and positions of one pipeline.

Most sink interfaces have no equivalent of ``positions``. A sink that cannot report its committed
position supports at-least-once delivery only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from oncely.core.claim import Claim, Counts, Fence, Notes, Opened, Positions, Takeover
from oncely.core.ledger import Entry
from oncely.core.ranges import SourceIdentity, TopicPartition


class MovesPositions(Protocol):
    """The part of a ledger that tasks use. Picklable; connects lazily, separately in each
    process."""

    @property
    def one_store(self) -> bool:
        """True when records and positions can only go back together, in a failover or restore.

        Then a ledger that is behind earlier commits gives the position to continue from. Otherwise
        the sink may contain records that the ledger does not.
        """

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The committed positions.

        Args:
            fence: the calling run.
            of: the partitions that are needed, all if empty. The answer may include others.
            settled: include all commits before this call, of any process. Otherwise the result may
                lag slightly behind, which the compare-and-set of a commit detects.

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

        With ``takeover.partitions`` only for these partitions, and holders of others are not
        affected.

        Raises:
            Fenced: another run has opened since ``takeover.expected``, or another one has taken
                all partitions since ``takeover.since``.
            SourceMismatch: the ledger was written for another cluster or topic.
            TableMismatch: it was written for another destination.
            Stopped: the pipeline has written before, and its position is lost.
            Unavailable: no answer.
        """

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions for partitions that were discovered during the run.

        A run of some partitions takes others over by :meth:`open`.

        Raises:
            Fenced: a newer run has opened.
        """

    def note(self, fence: Fence, notes: Notes) -> None:
        """Store notes beside the positions.

        A run of some partitions notes leader epochs of those that it still holds.

        Raises:
            Fenced: a newer run has opened, for a run of some partitions at all of them; nothing
                was noted.
            Unavailable: the outcome is unknown; it can be repeated.
        """

    def tidy(self, fence: Fence) -> None:
        """Housekeeping between batches; may fail, and is repeated later."""

    def close(self) -> None:
        """Close connections; never raises. The next call connects again."""
