"""Is the source's log still the one that was read? Looked at when a partition has a new leader.

The ledger keeps a leader epoch for each partition, no older than the record before the position.
The driver notes it before tasks commit what was planned: every record of a planned range was in
the log when the epoch was asked for, so none has a later one. While the epoch is the same the log
was not cut, as a leader never cuts its own. When it is another one, the broker is asked where the
records of the old epoch end (KIP-320), and only then the new epoch is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from oncely.core.topics import Position, TopicPartition
from oncely.errors import SourceMismatch, Unavailable


class Log(Protocol):
    """The source, as far as it is asked here."""

    def leader_epochs(self) -> dict[TopicPartition, int]:
        """The leader epoch of every partition, as it is now; unknown ones are left out."""

    def truncated(
        self, positions: Mapping[TopicPartition, tuple[Position, int]]
    ) -> dict[TopicPartition, str]:
        """The partitions that have lost records before a position, and why it is known."""


class Notes(Protocol):
    """The ledger, as far as it is asked here."""

    def leader_epochs(self) -> Mapping[TopicPartition, int]:
        """What was noted."""

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int]) -> None:
        """Note the epochs of these partitions."""


def refuse_cut(
    log: Log,
    now: Mapping[TopicPartition, int],
    positions: Mapping[TopicPartition, Position],
    noted: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Refuse a log that was cut before a position.

    Args:
        log: the source.
        now: its leader epochs.
        positions: the ledger's, of partitions whose log still holds them.
        noted: the leader epochs that the ledger has noted.

    Returns:
        The leader epochs that are not the noted ones.

    Raises:
        SourceMismatch: records that were read are gone.
        Unavailable: no answer.
    """
    changed = {tp: one for tp, one in now.items() if tp in positions and noted.get(tp) != one}
    asked = {tp: (positions[tp], noted[tp]) for tp in changed if tp in noted}
    for tp, why in sorted(log.truncated(asked).items()):
        raise SourceMismatch(
            f"{tp}: the topic has gone back: its log was cut before position {positions[tp]}, and"
            f" other records have taken the place of those that were read ({why})",
            way_out="restore the topic, or say where to go on with `oncely offsets reset`; an"
            " unclean leader election does this (unclean.leader.election.enable), or a broker"
            " that has lost its disk",
        )
    return changed


class SameLog:
    """Compares leader epochs from batch to batch.

    Args:
        log: the source.
        notes: the ledger.
    """

    def __init__(self, log: Log, notes: Notes) -> None:
        self._log, self._notes = log, notes
        self._known: dict[TopicPartition, int] | None = None
        self._noted: dict[TopicPartition, int] | None = None

    def forget(self) -> None:
        """Ask the ledger again: it was opened, or partitions were added."""
        self._known = self._noted = None

    def check(self, positions: Callable[[], Mapping[TopicPartition, Position]]) -> None:
        """Refuse a log that was cut before a position; asked before tasks read.

        Args:
            positions: the ledger's, of partitions whose log still holds them; asked for only when
                a leader is new.

        Raises:
            SourceMismatch: records that were read are gone.
            Fenced: a newer run has opened.
            Unavailable: no answer.
        """
        now = self._log.leader_epochs()
        if now == self._known:
            return
        if self._noted is None:
            self._noted = dict(self._notes.leader_epochs())
        noted = self._noted
        changed = refuse_cut(self._log, now, positions(), noted)
        try:
            if changed:
                self._notes.note_leader_epochs(changed)
        except Unavailable:
            # A position without an epoch is not compared. One that moves on under an older epoch
            # would be refused later, though its log is whole.
            if changed.keys() & noted.keys():
                raise
            return
        noted |= changed
        self._known = now
