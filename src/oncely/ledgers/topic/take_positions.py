"""Giving positions an epoch, each by the one transactional id that may move it.

A position moves by compare-and-set: initialise its mover's id, read the position, write, commit; an
instance that initialised the id in between has fenced this one. The mover follows from the position
(:meth:`LedgerKeys.mover`), so it is guessed first, and guessed again if the position belongs to
another id. Of two ids that take turns both are initialised: a worker may move the position between
the guess and the reading. Two instances that read the same position thus always have the same id,
and one of them fences the other, for any runs and modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from oncely.clients.kafka.limits import TOGETHER
from oncely.clients.kafka.transaction import InstanceFenced, Transaction
from oncely.core.claim import Fence
from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.errors import Unavailable
from oncely.ledgers.topic.cluster import Cluster
from oncely.ledgers.topic.compare_and_set import run_concurrently, write_moves
from oncely.ledgers.topic.records import FIRST, PositionRecord, RunMode, StoredPosition

_TRIES = 5

Positions = dict[TopicPartition, Position]


@dataclass(frozen=True)
class PositionTakeover:
    """Writes our epoch and mode to positions.

    Attributes:
        cluster: the open clients.
        fence: our epoch.
        source: cluster and topic ids, which each position contains.
        mode: the ids by which this run will move positions; see
            :data:`~oncely.ledgers.topic.records.RunMode`.
        forced: partitions whose positions are set regardless of their present values.
    """

    cluster: Cluster
    fence: Fence
    source: SourceIdentity
    mode: RunMode = "partition"
    forced: frozenset[TopicPartition] = field(default_factory=frozenset)

    def take(
        self,
        wanted: Mapping[TopicPartition, Position],
        known: Mapping[TopicPartition, StoredPosition],
    ) -> Positions:
        """Keep existing positions; ``wanted`` is for partitions without one.

        Args:
            known: the last known positions, to guess their movers.

        Raises:
            Fenced: a newer run holds a partition.
            Unavailable: no answer, or concurrent openers without end.
        """
        seen, done = dict(known), Positions()
        for _ in range(_TRIES):
            left = {tp: at for tp, at in wanted.items() if tp not in done}
            if not left:
                return done
            movers = list(self.movers(left, seen).items())
            for at in range(0, len(movers), TOGETHER):
                ours, found = self._take_group(dict(movers[at : at + TOGETHER]))
                done |= ours
                seen |= found
        if done.keys() == wanted.keys():
            return done
        left_over = ", ".join(map(str, sorted(wanted.keys() - done.keys())))
        raise InstanceFenced(f"other runs have taken {left_over} repeatedly")

    def movers(
        self,
        wanted: Mapping[TopicPartition, Position],
        seen: Mapping[TopicPartition, StoredPosition],
    ) -> dict[str, Positions]:
        """The positions by the transactional ids that may move them."""
        keys = self.cluster.keys
        found: dict[str, Positions] = {}
        for tp, at in wanted.items():
            for one in keys.movers(tp, seen.get(tp)):
                found.setdefault(one, {})[tp] = at
        return found

    def write(self, writer: Transaction, positions: Mapping[TopicPartition, Position]) -> None:
        """Write one transaction that moves no position and changes epoch and mode."""
        taken = {tp: self._taken(tp, at) for tp, at in positions.items()}
        writer.begin()
        # Of no member, in every run: a takeover does not depend on a generation of the group.
        write_moves(self.cluster, writer, taken, self.cluster.no_member())
        writer.commit()
        for tp, moved in taken.items():
            self.cluster.remember(tp, moved.entry)

    def _take_group(
        self, group: Mapping[str, Positions]
    ) -> tuple[Positions, dict[TopicPartition, StoredPosition]]:
        """Take some ids' positions, each id in one transaction; return ours, and all that were
        read.

        Positions are read once for the group, when all of its ids are initialised and none of its
        transactions is open: reading the ledger topic to its end would wait for them.
        """
        with ExitStack() as stack:
            writers = {
                one: stack.enter_context(self.cluster.transaction(one)) for one in group
            }  # closed together at the end of the group: each has several open files
            initialised = run_concurrently(self._initialise, writers.items())
            held = [one for one, ours in zip(writers, initialised, strict=True) if ours]
            now = self.cluster.stored_positions({tp for one in held for tp in group[one]})
            self._refuse_newer(now)
            done = run_concurrently(
                lambda one: self._by_mover(one, writers[one], group[one], now), held
            )
        return {tp: at for ours in done for tp, at in ours.items()}, now

    @staticmethod
    def _initialise(item: tuple[str, Transaction]) -> bool:
        """Initialise an id; False if a concurrent opener was faster: read again."""
        try:
            item[1].init()
        except InstanceFenced:
            return False
        return True

    def _by_mover(
        self,
        identity: str,
        writer: Transaction,
        wanted: Positions,
        now: Mapping[TopicPartition, StoredPosition],
    ) -> Positions:
        """Write the positions that this id moves, and return those that are ours now."""
        keys = self.cluster.keys
        done = {tp: now[tp].position for tp, at in wanted.items() if self._has(tp, at, now)}
        written = {
            tp: self._at(tp, at, now)
            for tp, at in wanted.items()
            if tp not in done and keys.mover(tp, now.get(tp)) == identity
        }
        if written and not self._written(writer, written):
            return done
        return done | written

    def _written(self, writer: Transaction, positions: Positions) -> bool:
        """True if the transaction has certainly taken effect; otherwise positions must be read
        again."""
        try:
            self.write(writer, positions)
        except Unavailable:  # fenced by a concurrent opener, or the answer to the commit was lost
            return False
        return True

    def _refuse_newer(self, now: Mapping[TopicPartition, StoredPosition]) -> None:
        self.fence.refuse_taken({tp: one.entry for tp, one in now.items()})

    def _has(
        self, tp: TopicPartition, at: Position, now: Mapping[TopicPartition, StoredPosition]
    ) -> bool:
        """True if a position already has our epoch, and the value of the reset if it is forced."""
        found = now.get(tp)
        if found is None or found.epoch != self.fence.epoch:
            return False
        return tp not in self.forced or found.position == at

    def _at(
        self, tp: TopicPartition, at: Position, now: Mapping[TopicPartition, StoredPosition]
    ) -> Position:
        return at if tp in self.forced or tp not in now else now[tp].position

    def _taken(self, tp: TopicPartition, at: Position) -> PositionRecord:
        topic_id = self.source.topic_ids.get(tp.topic, "")
        epoch, cluster = self.fence.epoch, self.source.cluster_id
        totals = None if tp in self.forced else self.cluster.totals(tp, at)
        no_records, mode = (0, 0, 0, 0), FIRST[self.mode]
        return PositionRecord(
            at, epoch, cluster, topic_id, at, at, "taken", *no_records, mode, totals
        )
