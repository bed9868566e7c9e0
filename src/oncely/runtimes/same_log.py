"""Checks that the source's log was not truncated, whenever a partition has a new leader.

The ledger keeps a leader epoch for each partition, no older than the record before the position.
The driver notes it before tasks commit a planned batch: every record of a planned range was in the
log when the epoch was requested, so none has a later epoch. While the epoch is the same the log was
not truncated, because a leader never truncates its own. If the epoch has changed, the broker is
queried for the end of the old epoch's records (KIP-320), and only then the new epoch is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from oncely.commit.run import OpenRun
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import SourceMismatch, Unavailable
from oncely.sources.kafka import KafkaSource


def refuse_cut(
    log: KafkaSource,
    now: Mapping[TopicPartition, int],
    positions: Mapping[TopicPartition, Position],
    noted: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Refuse a log that was truncated before a position.

    Args:
        log: the source.
        now: its leader epochs.
        positions: the ledger's positions that are still in the log.
        noted: the leader epochs that the ledger has noted.

    Returns:
        The leader epochs that differ from the noted ones.

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
            way_out="restore the topic, or set the positions with `oncely offsets reset`; an"
            " unclean leader election does this (unclean.leader.election.enable), or a broker"
            " that has lost its disk",
        )
    return changed


class SameLog:
    """Compares leader epochs across batches.

    Args:
        log: the source.
        run: notes leader epochs in its ledger.
    """

    def __init__(self, log: KafkaSource, run: OpenRun[Any, Any]) -> None:
        self._log, self._run = log, run
        self._known: dict[TopicPartition, int] | None = None
        self._noted: dict[TopicPartition, int] | None = None

    def forget(self) -> None:
        """Read the ledger again: it was opened, or partitions were added."""
        self._known = self._noted = None

    def check(
        self,
        positions: Callable[[], Mapping[TopicPartition, Position]],
        now: Mapping[TopicPartition, int] | None = None,
        *,
        passed: Collection[TopicPartition] = (),
    ) -> None:
        """Refuse a log that was truncated before a position; called before tasks read.

        Args:
            positions: returns the ledger's positions; called only if a leader is new.
            now: the source's leader epochs.
            passed: the partitions whose log begins behind the position. The record before their
                next position was deleted and may have had any epoch up to the present one, so that
                is noted, and nothing is compared.

        Raises:
            SourceMismatch: records that were read are gone.
            Fenced: a newer run has opened.
            Unavailable: no answer.
        """
        now = self._log.leader_epochs() if now is None else now
        if now == self._known:
            return
        if self._noted is None:
            self._noted = dict(self._run.leader_epochs())
        noted = self._noted
        compared = {tp: epoch for tp, epoch in noted.items() if tp not in passed}
        changed = refuse_cut(self._log, now, positions(), compared)
        try:
            if changed:
                self._run.note_leader_epochs(changed)
        except Unavailable:
            # A position without an epoch is not compared. A position that moves under an older
            # epoch would be refused later, although its log is complete.
            if changed.keys() & noted.keys():
                raise
            return
        noted |= changed
        self._known = dict(now)
