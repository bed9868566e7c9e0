"""Compare-and-set in Kafka: the state for a decision is read between ``init`` and ``begin``.

Kafka's offsets have no compare-and-set. A transactional id provides it: ``init`` ends and fences
every earlier writer with this id, so state that only this id changes does not change until our own
commit. If it were read before ``init``, another writer's records and ours could both take effect
(docs/decisions/0010). An instance is initialised anew for every transaction, see
:mod:`oncely.clients.kafka.transaction`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from oncely.clients.kafka.limits import TOGETHER
from oncely.clients.kafka.transaction import Message, Transaction
from oncely.core.claim import Claim, Counts, PositionMoved
from oncely.core.ledger import Entry
from oncely.core.ranges import TopicPartition
from oncely.errors import InvariantViolation, check
from oncely.ledgers.topic.cluster import Cluster, newer
from oncely.ledgers.topic.records import (
    NEXT,
    Mode,
    PositionRecord,
    RunMode,
    StoredPosition,
    encode,
    stamp,
)
from oncely.ledgers.totals import add_range
from oncely.phases import longest, measured

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
