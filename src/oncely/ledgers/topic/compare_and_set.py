"""Compare-and-set in Kafka: whatever decides is read between ``init`` and ``begin``.

Kafka's offsets have no compare-and-set. A transactional id makes one: ``init`` ends and fences
whoever was about to write by this id, so what only this id changes does not change any more until
our own commit. Read before ``init``, it would let a rival's records and ours both take effect
(docs/decisions/0010). An instance is initialised anew for every transaction, see
:mod:`oncely.clients.kafka.transaction`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeVar

from oncely.clients.kafka.limits import TOGETHER
from oncely.clients.kafka.transaction import Message, Transaction
from oncely.core.claim import Claim, Counts, PositionMoved
from oncely.core.ledger import Entry
from oncely.core.topics import TopicPartition
from oncely.errors import InvariantViolation, check
from oncely.ledgers.topic.cluster import Cluster, newer
from oncely.ledgers.topic.records import Mode, PositionRecord, encode, stamp

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
    """An initialised transaction, not begun yet, and what was read behind its ``init``.

    Args:
        cluster: the open clients.
        identity: the transactional id that changes what is read.
        read: reads, compares, and raises when the decision does not hold any more.
        sizes: ``max.message.bytes`` of the topics that will be written to.
        defaults: of the producer's keys, where the user has set nothing.
    """
    with cluster.transaction(identity, sizes, defaults) as writer:
        writer.init()
        yield writer, read()


@contextmanager
def moving(
    cluster: Cluster,
    mode: Mode,
    claim: Claim,
    sizes: Collection[int] = (1_000_000,),
    defaults: Mapping[str, object] = _NO_DEFAULTS,
) -> Iterator[Transaction]:
    """The transaction that moves the claim's positions, which stand where the claim was decided.

    The caller begins it, sends, calls :func:`write_positions`, and commits.

    Args:
        mode: by which ids the run moves positions; in mode ``partition`` the claim has one.

    Raises:
        PositionMoved: a position has moved since the decision.
    """
    ids = cluster.place.words
    identity = ids.publisher if mode == "batch" else ids.writer(*claim.ranges)
    expected = {tp: claim.expected[tp] for tp in claim.ranges}

    def compare() -> None:
        refuse_moved(cluster, expected, mode)

    with compare_and_set(cluster, identity, compare, sizes, defaults) as (writer, _):
        yield writer
    for tp in claim.ranges:
        cluster.remember(tp, Entry(claim.end(tp), claim.fence.epoch))


def move_alone(
    cluster: Cluster, mode: Mode, claim: Claim, counts: Mapping[TopicPartition, Counts]
) -> None:
    """Move positions over ranges without records; in mode ``partition`` each by its own id."""
    parts = [claim] if mode == "batch" else [claim.only([tp]) for tp in sorted(claim.ranges)]

    def one(part: Claim) -> None:
        with moving(cluster, mode, part) as writer:
            writer.begin()
            write_positions(cluster, writer, mode, part, counts)
            writer.commit()

    run_concurrently(one, [part for part in parts if part.ranges])


def write_positions(
    cluster: Cluster,
    writer: Transaction,
    mode: Mode,
    claim: Claim,
    counts: Mapping[TopicPartition, Counts],
) -> None:
    """Write the positions behind the claim's ranges, in the transaction that moves them."""
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
            mode=mode,
        )
    write_moves(cluster, writer, moves)


def write_moves(
    cluster: Cluster, writer: Transaction, moves: Mapping[TopicPartition, PositionRecord]
) -> None:
    """Both copies of positions, in the transaction that moves them."""
    place = cluster.place
    records = [Message(encode(one), place.words.position_key(tp)) for tp, one in moves.items()]
    writer.send(place.ledger_topic, records)
    offsets = {tp: (one.position, stamp(one, place.pipeline)) for tp, one in moves.items()}
    writer.send_offsets(offsets, cluster.group_metadata())


def refuse_moved(cluster: Cluster, expected: Mapping[TopicPartition, Entry], mode: Mode) -> None:
    """Compare where positions stand with what was decided on; behind ``init`` of their mover.

    Raises:
        PositionMoved: one has moved since.
        InvariantViolation: one went back, or another id moves it.
    """
    now = cluster.standing(list(expected))
    for tp, entry in expected.items():
        found = now.get(tp)
        if found is None or found.entry != entry:
            check(
                found is not None and newer(entry, found.entry) == found.entry,
                f"{tp} stood at {entry.position} and stands at {found}: the cluster has lost"
                " what it had committed",
            )
            raise PositionMoved(str(tp))
        check(found.mode == mode, f"{tp} is moved in mode {found.mode}, not in mode {mode}")


def run_concurrently(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Do it for all, some at a time, each to its end; the first error is raised afterwards."""
    wanted = list(items)
    if len(wanted) < 2:
        return [work(one) for one in wanted]
    with ThreadPoolExecutor(TOGETHER) as pool:
        return [future.result() for future in [pool.submit(work, one) for one in wanted]]
