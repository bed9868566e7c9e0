"""Compare-and-set in Kafka: the state for a decision is read between ``init`` and ``begin``.

Kafka's offsets have no compare-and-set. A transactional id provides it: ``init`` ends and fences
every earlier writer with this id, so state that only this id changes does not change until our own
commit. If it were read before ``init``, another writer's records and ours could both take effect
(docs/decisions/0010). An instance is initialised anew for every transaction, see
:mod:`oncely.kafka.transaction`.

A takeover gives positions an epoch, each by the one transactional id that may move it. A position
moves by compare-and-set: initialise its mover's id, read the position, write, commit; an
instance that initialised the id in between has fenced this one. The mover follows from the position
(:meth:`LedgerKeys.mover`), so it is guessed first, and guessed again if the position belongs to
another id. Of two ids that take turns both are initialised: a worker may move the position between
the guess and the reading. Two instances that read the same position thus always have the same id,
and one of them fences the other, for any runs and modes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from oncely.core.claim import Claim, Counts, Entry, Fence, PositionMoved
from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.errors import InvariantViolation, Unavailable, check
from oncely.kafka.topics import TOGETHER
from oncely.kafka.transaction import InstanceFenced, Message, Transaction
from oncely.phases import longest, measured
from oncely.stores.document import add_range
from oncely.stores.topic.cluster import Cluster, newer
from oncely.stores.topic.records import (
    FIRST,
    NEXT,
    Mode,
    PositionRecord,
    RunMode,
    StoredPosition,
    encode,
    stamp,
)

A = TypeVar("A")
B = TypeVar("B")

_NO_DEFAULTS: Mapping[str, object] = MappingProxyType({})


@contextmanager
def compare_and_set(
    cluster: Cluster,
    identity: str,
    read: Callable[[], A],
    sizes: Collection[int] = (1_000_000,),
    defaults: Mapping[str, object] = _NO_DEFAULTS,
) -> Iterator[tuple[Transaction, A]]:
    """An initialised transaction, not begun yet, and the state that was read after its ``init``.

    Args:
        cluster: the open clients.
        identity: the transactional id that changes the state.
        read: reads the state, compares it, and raises if the decision is outdated.
        sizes: ``max.message.bytes`` of the topics of the transaction.
        defaults: properties of the producer that the user has not set.
    """
    with cluster.transaction(identity, sizes, defaults) as writer:
        writer.init()
        yield writer, read()


@dataclass
class Move:
    """The transaction that moves positions.

    Attributes:
        writer: not begun yet.
        mode: the mode that the positions will have.
        moved: the positions that were written.
    """

    writer: Transaction
    mode: Mode
    moved: Mapping[TopicPartition, PositionRecord] = field(default_factory=dict)


@contextmanager
def moving(
    cluster: Cluster,
    mode: RunMode,
    claim: Claim,
    sizes: Collection[int] = (1_000_000,),
    defaults: Mapping[str, object] = _NO_DEFAULTS,
) -> Iterator[Move]:
    """The transaction that moves the claim's positions, after a check that they have not moved
    since the decision.

    The caller begins it, sends, calls :func:`write_positions`, and commits.

    Args:
        mode: the ids by which the run moves positions; except in mode ``batch`` the claim has one
            partition.

    Raises:
        PositionMoved: a position has moved since the decision.
    """
    ids = cluster.keys
    expected = {tp: claim.expected[tp] for tp in claim.ranges}
    if mode == "turns":
        with _in_turn(cluster, expected, sizes, defaults) as move:
            yield move
    else:
        identity = ids.publisher if mode == "batch" else ids.writer(*claim.ranges)

        def compare() -> None:
            refuse_moved(cluster, expected, [mode])

        with compare_and_set(cluster, identity, compare, sizes, defaults) as (writer, _):
            yield Move(writer, mode)
    for tp in claim.ranges:
        cluster.remember(tp, Entry(claim.end(tp), claim.fence.epoch))


@contextmanager
def _in_turn(
    cluster: Cluster,
    expected: Mapping[TopicPartition, Entry],
    sizes: Collection[int],
    defaults: Mapping[str, object],
) -> Iterator[Move]:
    """The transaction of the id whose turn it is (docs/decisions/0047).

    The id that the position names was initialised before our own commit wrote the position: then
    only this instance can move it. Otherwise the position is read after the id was initialised.
    """
    (tp,) = expected

    def initialised(mode: Mode) -> Transaction:
        return cluster.transaction(cluster.keys.named(tp, mode), sizes, defaults).init()

    turn = cluster.turns.taken(tp, sizes, initialised)
    with ExitStack() as stack:
        stack.callback(turn.close)  # without effect after `kept`
        now = turn.known(expected[tp]) or refuse_moved(cluster, expected, list(NEXT))[tp]
        writer = stack.enter_context(turn.instance(now.mode))
        move = Move(writer, NEXT[now.mode])
        yield move
        cluster.turns.keep(tp, turn.next(writer, now.mode, move.moved[tp]))
        cluster.learn_totals(tp, move.moved[tp])
        stack.pop_all()
        writer.close()


def move_alone(
    cluster: Cluster, mode: RunMode, claim: Claim, counts: Mapping[TopicPartition, Counts]
) -> None:
    """Move positions over ranges without records; except in mode ``batch`` each by its own id."""
    parts = [claim] if mode == "batch" else [claim.only([tp]) for tp in sorted(claim.ranges)]

    def one(part: Claim) -> None:
        with moving(cluster, mode, part, sizes=()) as move:
            move.writer.begin()
            write_positions(cluster, move, part, counts)
            move.writer.commit()

    run_concurrently(one, [part for part in parts if part.ranges])


def write_positions(
    cluster: Cluster,
    move: Move,
    claim: Claim,
    counts: Mapping[TopicPartition, Counts],
) -> None:
    """Write the positions at the ends of the claim's ranges, in the transaction that moves them."""
    registered = cluster.registered().pipeline
    if registered is None:
        raise InvariantViolation(f"pipeline {claim.fence.pipeline!r} is not in the ledger")
    moves = {}
    for tp, range_ in claim.ranges.items():
        done = counts[tp]
        moves[tp] = PositionRecord(
            position=claim.end(tp),
            epoch=claim.fence.epoch,
            cluster=registered.cluster,
            topic_id=registered.topic_ids.get(tp.topic, ""),
            start=range_.start,
            end=range_.end,
            kind=claim.kind,
            records=done.records,
            rows=done.rows,
            rejects=done.rejects,
            filtered=done.filtered,
            mode=move.mode,
            totals=add_range(
                cluster.totals(tp, range_.start), range_.start, done, claim.fence.epoch
            ),
        )
    write_moves(cluster, move.writer, moves, cluster.group_metadata())
    move.moved = moves


def write_moves(
    cluster: Cluster,
    writer: Transaction,
    moves: Mapping[TopicPartition, PositionRecord],
    member: Any,
) -> None:
    """Write both copies of positions, in the transaction that moves them.

    Args:
        member: the group's metadata.
    """
    topics = cluster.pipeline_topics
    records = [Message(encode(one), topics.keys.position_key(tp)) for tp, one in moves.items()]
    writer.send(topics.ledger_topic, records)
    offsets = {tp: (one.position, stamp(one, topics.pipeline)) for tp, one in moves.items()}
    writer.send_offsets(offsets, member)


def refuse_moved(
    cluster: Cluster, expected: Mapping[TopicPartition, Entry], modes: Collection[Mode]
) -> dict[TopicPartition, StoredPosition]:
    """Compare the positions with those of the decision; after ``init`` of their mover.

    Returns:
        The stored positions.

    Raises:
        PositionMoved: a position has moved since.
        InvariantViolation: a position went back, or belongs to another id.
    """
    now = cluster.stored_positions(list(expected))
    for tp, entry in expected.items():
        found = now.get(tp)
        if found is None or found.entry != entry:
            check(
                found is not None and newer(entry, found.entry) == found.entry,
                f"{tp} was at {entry.position} and is at {found}: the cluster has lost "
                "committed offsets",
            )
            raise PositionMoved(str(tp))
        check(found.mode in modes, f"{tp} is moved in mode {found.mode}, not in {[*modes]}")
    return now


def run_concurrently(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Call ``work`` for all items, several at a time, each to its end; then raise the first
    error."""
    wanted = list(items)
    if len(wanted) < 2:
        return [work(one) for one in wanted]
    with ThreadPoolExecutor(TOGETHER) as pool:
        ended = [pool.submit(measured, work, one) for one in wanted]
        found = [one.result() for one in ended]
    longest(seconds for _, seconds in found)
    return [answer for answer, _ in found]


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
            :data:`~oncely.stores.topic.records.RunMode`.
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
