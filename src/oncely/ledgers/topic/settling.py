"""Giving positions an epoch, each by the one transactional id that may move it.

A position moves by compare-and-set: initialise its mover's id, read where it stands, write,
commit; whoever initialised the id in between has fenced this instance. The mover follows from
what was read (:meth:`Words.mover`), so it is guessed first, and guessed again when the position
turns out to belong to another id. Two instances that read the same position thus always have
the same id, and one of them fences the other, whatever runs and modes they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from oncely.clients.kafka.limits import TOGETHER
from oncely.clients.kafka.transaction import InstanceFenced, Transaction
from oncely.core.claim import Fence
from oncely.core.topics import Position, SourceIdentity, TopicPartition
from oncely.errors import Fenced, Unavailable
from oncely.ledgers.topic.cluster import Cluster
from oncely.ledgers.topic.compare_and_set import run_concurrently, write_moves
from oncely.ledgers.topic.records import Mode, PositionRecord, StoredPosition

_TRIES = 5

Positions = dict[TopicPartition, Position]


@dataclass(frozen=True)
class Settling:
    """Puts our epoch and mode on positions.

    Attributes:
        cluster: the open clients.
        fence: our epoch.
        source: cluster and topic ids, which each position carries.
        mode: by which ids this run will move positions.
        forced: partitions that are put where they are wanted, wherever they stand.
    """

    cluster: Cluster
    fence: Fence
    source: SourceIdentity
    mode: Mode = "partition"
    forced: frozenset[TopicPartition] = field(default_factory=frozenset)

    def settle(
        self,
        wanted: Mapping[TopicPartition, Position],
        known: Mapping[TopicPartition, StoredPosition],
    ) -> Positions:
        """Keep positions where they stand; ``wanted`` is for those that stand nowhere.

        Args:
            known: where they stood when last seen, to guess their movers by.

        Raises:
            Fenced: a newer run holds a partition.
            Unavailable: no answer, or rivals without end.
        """
        seen, done = dict(known), Positions()
        for _ in range(_TRIES):
            left = {tp: at for tp, at in wanted.items() if tp not in done}
            if not left:
                return done
            movers = list(self.movers(left, seen).items())
            for at in range(0, len(movers), TOGETHER):
                ours, found = self._settle_group(dict(movers[at : at + TOGETHER]))
                done |= ours
                seen |= found
        if done.keys() == wanted.keys():
            return done
        left_over = ", ".join(map(str, sorted(wanted.keys() - done.keys())))
        raise InstanceFenced(f"rivals took {left_over} again and again")

    def movers(
        self,
        wanted: Mapping[TopicPartition, Position],
        seen: Mapping[TopicPartition, StoredPosition],
    ) -> dict[str, Positions]:
        """The positions by the transactional id that moves them."""
        words = self.cluster.place.words
        found: dict[str, Positions] = {}
        for tp, at in wanted.items():
            found.setdefault(words.mover(tp, seen.get(tp)), {})[tp] = at
        return found

    def write(self, writer: Transaction, positions: Mapping[TopicPartition, Position]) -> None:
        """One transaction that moves nothing and changes epoch and mode."""
        taken = {tp: self._taken(tp, at) for tp, at in positions.items()}
        writer.begin()
        write_moves(self.cluster, writer, taken)
        writer.commit()
        for tp, moved in taken.items():
            self.cluster.remember(tp, moved.entry)

    def _settle_group(
        self, group: Mapping[str, Positions]
    ) -> tuple[Positions, dict[TopicPartition, StoredPosition]]:
        """Some ids' positions, each id in one transaction: those that are ours now, and all seen.

        Positions are read once for the group, when all of its ids are initialised and none of its
        transactions is open: reading the ledger topic to its end would wait for them.
        """
        with ExitStack() as stack:
            writers = {
                one: stack.enter_context(self.cluster.transaction(one)) for one in group
            }  # all closed at the end of the group: each holds several open files
            initialised = run_concurrently(self._initialise, writers.items())
            held = [one for one, ours in zip(writers, initialised, strict=True) if ours]
            now = self.cluster.standing([tp for one in held for tp in group[one]])
            self._refuse_newer(now)
            done = run_concurrently(
                lambda one: self._by_mover(one, writers[one], group[one], now), held
            )
        return {tp: at for ours in done for tp, at in ours.items()}, now

    @staticmethod
    def _initialise(item: tuple[str, Transaction]) -> bool:
        """False: a rival was quicker; look again."""
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
        """Write what this id moves; the positions that are ours now."""
        words = self.cluster.place.words
        done = {tp: now[tp].position for tp, at in wanted.items() if self._has(tp, at, now)}
        written = {
            tp: self._at(tp, at, now)
            for tp, at in wanted.items()
            if tp not in done and words.mover(tp, now.get(tp)) == identity
        }
        if written and not self._written(writer, written):
            return done
        return done | written

    def _written(self, writer: Transaction, positions: Positions) -> bool:
        """Whether the transaction took effect for certain; otherwise it has to be read again."""
        try:
            self.write(writer, positions)
        except Unavailable:  # fenced by a rival, or the answer to the commit was lost
            return False
        return True

    def _refuse_newer(self, now: Mapping[TopicPartition, StoredPosition]) -> None:
        newest = max((one.epoch for one in now.values()), default=self.fence.epoch)
        if newest > self.fence.epoch:
            raise Fenced(self.fence.pipeline, self.fence.epoch, newest)

    def _has(
        self, tp: TopicPartition, at: Position, now: Mapping[TopicPartition, StoredPosition]
    ) -> bool:
        """Whether it carries our epoch already, and stands where it is to be forced."""
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
        return PositionRecord(at, epoch, cluster, topic_id, at, at, "taken", mode=self.mode)
