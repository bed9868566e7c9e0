"""The commit path: chunks, holes, gaps and batches of every run take effect here.

    read the ledger  ->  decide  ->  write and compare-and-set in one transaction
          ^                                        |
          +------- moved, or no answer ------------+

Repeated work (a Spark retry, a speculative copy, a zombie, a replayed batch) and a COMMIT whose
answer was lost are handled alike: the ledger is read again, on a new session if the old one broke,
and ranges that have taken effect are never written a second time.

A chunk may be committed by several threads, which divide its records by key (docs/decisions/0049).
Each thread commits its own records, in pieces. The ledger contains the ranges that they have
finished, also beyond the position. When all have ended, the position is at the chunk's end.

The delivery says in which order records and positions take effect:

| semantics | order | a crash between the two |
|---|---|---|
| exactly_once | together, in the sink's own transaction | has no effect |
| at_least_once | records, then the position | writes records again |
| at_most_once | the position, then the records | loses records |
| none | the position on a timer, independent of the records | does either |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, TypeVar

from oncely.commit.backoff import Backoff, tell
from oncely.core.batch import (
    Batch,
    BudgetSpent,
    Chunk,
    CommitBudget,
    KeyShards,
    Parts,
    Reject,
    Rejection,
    StagedRowsGone,
)
from oncely.core.claim import (
    NO_RECORDS,
    NOT_COUNTED,
    Ahead,
    Append,
    Claim,
    Counts,
    Decision,
    Entry,
    Fence,
    FencedOff,
    PositionMoved,
    RangeKind,
    Skip,
    Trim,
    decide,
    decide_parts,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import (
    Fenced,
    GivenUp,
    InvariantViolation,
    LedgerWentBack,
    OncelyError,
    Stopped,
    TooLong,
    Unavailable,
)
from oncely.kinds.base import CommitsChunks, FinishesParts, PublishesBatches, Sink
from oncely.phases import longest, measured, phase
from oncely.stores.document import MovesPositions

log = logging.getLogger(__name__)

Order = Literal["together", "records_first", "position_first"]
T = TypeVar("T")
AnySink_co = TypeVar("AnySink_co", bound=Sink, covariant=True)


@dataclass(frozen=True)
class Delivery(Generic[AnySink_co]):
    """A sink, the ledger of its positions, and the order in which the two take effect. Picklable.

    Attributes:
        sink: writes rows and dead letters.
        ledger: the ledger of the positions; the sink's own when they take effect together.
        order: the order of records and positions.
    """

    sink: AnySink_co
    ledger: MovesPositions
    order: Order = "together"

    @property
    def one_store(self) -> bool:
        """See ``Ledger.one_store``; records that are written before or after positions are not in
        one store."""
        return self.order == "together" and self.ledger.one_store


Entries = Mapping[TopicPartition, Entry]


def attempts(
    patience: Backoff, *, stages: bool = False, shrinks: bool = False
) -> Iterator[AbstractContextManager[None]]:
    """Attempts at one transaction, until the outcome of one is known.

    ``for attempt in attempts(patience): with attempt: ...`` reads the ledger, decides, and acts in
    one transaction.

    Args:
        patience: the time for which a store may be unavailable.
        stages: an attempt stages its rows itself, and can do so again when they are missing.
        shrinks: the caller repeats a transaction that takes too long with fewer records.

    Raises, out of an attempt:
        StagedRowsGone: nothing was published; the batch can be repeated.
        GivenUp: nobody waits for it any more.
        TooLong: with ``shrinks``; a time limit of the store has ended it.
        LedgerWentBack: the ledger does not contain commits of this run.
        Unavailable: the store did not answer within ``patience``.
    """
    known = False

    @contextmanager
    def attempt() -> Iterator[None]:
        nonlocal known
        try:
            with phase("commit"):
                yield
            known = True
        except PositionMoved:
            pass
        except Unavailable as error:
            final = (GivenUp, LedgerWentBack, *(() if stages else (StagedRowsGone,)))
            if isinstance(error, (*final, TooLong) if shrinks else final):
                raise
            tell(error)
            patience.wait_or_raise()

    while not known:
        yield attempt()


@dataclass(frozen=True)
class Outcome:
    """The effect of one commit on one topic-partition; ``replayed`` if it took effect before."""

    partition: TopicPartition
    range: OffsetRange
    counts: Counts
    replayed: bool = False
    kind: RangeKind = "data"


def commit(
    delivery: Delivery[CommitsChunks],
    chunk: Chunk,
    fence: Fence,
    max_rejects: int | None,
    patience: Backoff,
) -> Iterator[Outcome]:
    """Commit the ranges of a chunk that have not taken effect, and report every range of it.

    If a time limit of the store ends a transaction, it and those that follow are halved.

    Raises:
        Fenced: a newer run holds the ledger.
        LedgerWentBack, Stopped: the range begins beyond the ledger's position.
        TooManyRejects: the reject budget is spent; nothing was written.
        Unavailable: the sink did not answer within ``patience``.
    """
    pending = [chunk]
    while pending:
        left = pending[0]
        shrinks = sum(one.end - one.start for one in left.ranges.values()) > 1
        try:
            for attempt in attempts(patience, shrinks=shrinks):
                with attempt:
                    work = _undone(delivery, left, fence, "data")
                    counts = work.nothing
                    try:
                        if work.claim.ranges:
                            counts = commit_chunk(delivery, work.part, work.claim, max_rejects)
                    except BudgetSpent as error:
                        raise error.about(work.part) from None
        except TooLong as error:
            tell(error)
            pending = [half for one in pending for half in one.halves()]
            continue
        yield from (done := list(work.outcomes(counts)))
        if max_rejects is not None:
            max_rejects -= sum(one.counts.rejects for one in done)
        pending[:1] = [] if work.rest is None else [work.rest]


def commit_parts(
    delivery: Delivery[FinishesParts],
    chunk: Chunk,
    parts: Mapping[TopicPartition, Sequence[OffsetRange]],
    fence: Fence,
    max_rejects: int | None,
    patience: Backoff,
) -> list[Outcome]:
    """Commit some ranges of a chunk, which may begin beyond the position, in one transaction.

    Args:
        delivery, fence, max_rejects, patience: as of :func:`commit`.
        chunk: the chunk.
        parts: ascending, disjoint ranges of it. Other threads commit others at the same time.

    Raises: the errors of :func:`commit`.
    """
    outcomes: list[Outcome] = []
    for attempt in attempts(patience):
        with attempt:
            claim = _claim_parts(delivery, chunk, parts, fence)
            outcomes = [
                Outcome(tp, done, NO_RECORDS, replayed=True)
                for tp, ranges in parts.items()
                for one in ranges
                for done in one.minus(claim.parts.get(tp, ()))
            ]
            part = chunk.keep(claim.parts)
            try:
                if claim.parts:
                    with phase("write"):
                        found = delivery.sink.finish(part, fence, claim, max_rejects)
                    outcomes += [
                        Outcome(tp, one.range, one.counts, kind=one.kind)
                        for tp, finished in found.items()
                        for one in finished
                    ]
            except BudgetSpent as error:
                raise error.about(part) from None
    return outcomes


def _claim_parts(
    delivery: Delivery[Sink],
    chunk: Chunk,
    parts: Mapping[TopicPartition, Sequence[OffsetRange]],
    fence: Fence,
) -> Claim:
    """Read the ledger, and decide on parts of a chunk's ranges: on those ranges, too, which begin
    at the position or before it."""
    whole = {tp: chunk.ranges[tp] for tp in parts}
    entries = _entries(delivery, fence, whole)
    keep: dict[TopicPartition, tuple[OffsetRange, ...]] = {}
    for tp, ranges in parts.items():
        _kept(delivery, decide(entries[tp], whole[tp], fence.epoch), fence, tp)
        left = _kept(delivery, decide_parts(entries[tp], ranges, fence.epoch), fence, tp)
        if left:
            keep[tp] = left
    hull = {tp: OffsetRange(left[0].start, left[-1].end) for tp, left in keep.items()}
    return Claim(fence, hull, entries, "ahead", parts=keep)


def pass_over(
    delivery: Delivery[Sink],
    ranges: Mapping[TopicPartition, OffsetRange],
    fence: Fence,
    kind: RangeKind,
    patience: Backoff | None = None,
) -> list[Outcome]:
    """Move positions over ranges that hold no records. Raises the errors of :func:`commit`."""
    patience = patience or Backoff()
    outcomes: list[Outcome] = []
    left: Chunk | None = Chunk.of_nothing(ranges)
    while left is not None:
        for attempt in attempts(patience):
            with attempt:
                work = _undone(delivery, left, fence, kind)
                if work.claim.ranges:
                    delivery.ledger.move(work.claim, work.nothing)
        outcomes += work.outcomes(work.nothing)
        left = work.rest
    return outcomes


@dataclass(frozen=True)
class _Work:
    """The part of a chunk that has not taken effect: the first such range of each partition.

    Attributes:
        part: the part to commit now.
        claim: the claim of its ranges; without ranges if all of them have taken effect.
        done: the parts of the whole chunk's ranges that have taken effect before.
        rest: the chunk of the remaining ranges. Work that finishes out of order can leave several
            ranges of one partition.
    """

    part: Chunk
    claim: Claim
    done: Mapping[TopicPartition, Sequence[OffsetRange]]
    rest: Chunk | None

    @property
    def nothing(self) -> Mapping[TopicPartition, Counts]:
        """Counts of zero for all ranges."""
        return dict.fromkeys(self.claim.ranges, NO_RECORDS)

    def outcomes(self, counts: Mapping[TopicPartition, Counts]) -> Iterator[Outcome]:
        """The outcomes of the claimed ranges, and of those that had taken effect before."""
        for tp, ranges in self.done.items():
            for range_ in ranges:
                yield Outcome(tp, range_, NO_RECORDS, replayed=True)
        for tp, one in counts.items():
            yield Outcome(tp, self.claim.ranges[tp], one, kind=self.claim.kind)


def _undone(delivery: Delivery[Sink], chunk: Chunk, fence: Fence, kind: RangeKind) -> _Work:
    """Read the ledger, and decide on each range."""
    entries = _entries(delivery, fence, chunk.ranges)
    undone = {
        tp: _kept(delivery, decide(entries[tp], range_, fence.epoch), fence, tp)
        for tp, range_ in chunk.ranges.items()
    }
    done = {tp: chunk.ranges[tp].minus(kept) for tp, kept in undone.items()}
    first = {tp: ranges[0] for tp, ranges in undone.items() if ranges}
    part = chunk
    if first != chunk.ranges:
        part = replace(chunk.keep({tp: (one,) for tp, one in first.items()}), ranges=first)
    rest = {tp: chunk.ranges[tp] for tp, ranges in undone.items() if len(ranges) > 1}
    left = replace(chunk, ranges=rest) if rest else None
    return _Work(part, Claim(fence, first, entries, kind), done, left)


def publish(
    delivery: Delivery[PublishesBatches], batch: Batch, fence: Fence, entries: Callable[[], Entries]
) -> bool:
    """Publish a batch; True if it had taken effect before.

    Args:
        delivery: sink, ledger and order.
        batch: the batch.
        fence: the epoch of this run.
        entries: reads the ledger, and raises Fenced when a newer run holds it.

    Raises:
        LedgerWentBack: the ledger's positions are before the batch.
        InvariantViolation: the ledger holds some ranges of the batch and not others.
        StagedRowsGone: nothing was published; the batch can be repeated.
    """
    replayed = False
    for attempt in attempts(Backoff()):
        with attempt:
            known = entries()
            replayed = _all_done(delivery, batch.ranges, known, fence)
            if replayed:
                break
            try:
                publish_batch(delivery, batch, Claim(fence, batch.ranges, known))
            except StagedRowsGone:
                # This publication may have taken them, and its answer was lost.
                replayed = _all_done(delivery, batch.ranges, entries(), fence)
                if not replayed:
                    raise
    return replayed


def _entries(
    delivery: Delivery[Sink], fence: Fence, ranges: Mapping[TopicPartition, OffsetRange]
) -> Entries:
    """The ledger; read with all committed positions when it seems to end before a range begins.

    An unsettled read may lag behind, which would look like records that were never committed.
    """
    entries = delivery.ledger.positions(fence, ranges)
    late = any(
        tp in entries and entries[tp].position < range_.start for tp, range_ in ranges.items()
    )
    if late:
        entries = delivery.ledger.positions(fence, ranges, settled=True)
    require_current(delivery, fence, {tp: entries.get(tp) for tp in ranges})
    return entries


def require_current(
    delivery: Delivery[Sink], fence: Fence, entries: Mapping[TopicPartition, Entry | None]
) -> None:
    """Refuse a ledger that does not contain our epoch, which it has given out itself.

    Raises:
        LedgerWentBack, Stopped: an entry is missing or older.
    """
    for tp, entry in entries.items():
        if entry is None:
            raise behind(delivery, fence, f"{tp} has no position in the ledger")
        if entry.epoch < fence.epoch:
            why = f"{tp}: the ledger's epoch is {entry.epoch}, and ours {fence.epoch}"
            raise behind(delivery, fence, why)


def behind(delivery: Delivery[Sink], fence: Fence, what: str) -> OncelyError:
    """The error for a ledger that does not contain commits of this run."""
    if delivery.one_store:
        return LedgerWentBack(fence.pipeline, what)
    if delivery.order == "together":
        return InvariantViolation(what)
    return Stopped(
        f"{what}: the positions were put back to an older state, and the records were not",
        way_out="start again: it continues from the older positions, and writes what follows again",
    )


def _kept(
    delivery: Delivery[Sink], decision: Decision, fence: Fence, tp: TopicPartition
) -> tuple[OffsetRange, ...]:
    """The ranges that remain to be committed after a decision."""
    match decision:
        case Append(range_):
            return (range_,)
        case Trim(keep):
            return keep
        case Skip():
            return ()
        case Ahead(missing):
            raise behind(delivery, fence, f"{tp}: offsets {missing} were not committed before")
        case FencedOff(epoch):
            raise Fenced(fence.pipeline, fence.epoch, epoch)


def _all_done(
    delivery: Delivery[Sink],
    ranges: Mapping[TopicPartition, OffsetRange],
    entries: Entries,
    fence: Fence,
) -> bool:
    """Append for all, or Skip for all: one transaction contains all ranges or none."""
    decisions = [decide(entries[tp], one, fence.epoch) for tp, one in ranges.items()]
    if all(isinstance(one, Append) for one in decisions):
        return False
    if all(isinstance(one, Skip) for one in decisions):
        return True
    ahead = [one for one in decisions if isinstance(one, Ahead)]
    if ahead:
        raise behind(delivery, fence, f"offsets {ahead[0].missing} were not committed before")
    raise InvariantViolation(f"the ledger contains only a part of the batch: {decisions}")


_PIECE = 100  # records of a transaction


class ByKey:
    """The commit of one chunk.

    Args:
        delivery: sink, ledger and order.
        chunk: the chunk, with the keys of its records.
        fence: the run that writes.
        max_rejects: the number of rejects that the chunk may add. Each transaction compares it with
            those that were committed before it began, so that threads may exceed it together.
        piece: the number of records of a transaction.
        patience: makes the time for which the store may be unavailable.
    """

    def __init__(
        self,
        delivery: Delivery[FinishesParts],
        chunk: Chunk,
        fence: Fence,
        max_rejects: int | None,
        piece: int = _PIECE,
        patience: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._delivery, self._fence, self._max_rejects = delivery, fence, max_rejects
        self._patience = patience
        self._lanes = KeyShards(chunk, delivery.sink.threads, piece)
        self._lock, fetching, fetch = threading.Lock(), threading.Lock(), chunk.dead_letters
        self._outcomes: list[Outcome] = []
        self._failed: list[BaseException] = []

        def one_at_a_time(rejections: Sequence[Rejection]) -> list[Reject]:
            with fetching:
                return fetch(rejections)

        self._chunk = replace(chunk, dead_letters=one_at_a_time)

    def give_up(self) -> None:
        """Begin no more pieces; those in hand are ended."""
        self._lanes.give_up()

    def run(self) -> list[Outcome]:
        """Commit, and report every range.

        What threads have committed stays, if another one fails.

        Raises:
            Unavailable: it was given up before the end.
            OncelyError: the errors of :func:`oncely.commit.path.commit`; the first one of a thread.
        """
        with ThreadPoolExecutor(len(self._lanes), "oncely-lane") as threads:
            ended = [
                threads.submit(copy_context().run, measured, self._work, lane)
                for lane in range(len(self._lanes))
            ]
        longest(one.result()[1] for one in ended)
        return self._ended()

    def _ended(self) -> list[Outcome]:
        """All threads have ended."""
        if self._failed:
            raise self._failed[0]
        if self._lanes.left:
            raise Unavailable("records were not handled: their partitions change hands")
        return sorted(self._outcomes, key=lambda one: (one.partition, one.range))

    def _work(self, lane: int) -> None:
        """The work of a thread. After an error none begins another piece."""
        try:
            while (parts := self._next(lane)) is not None:
                found = commit_parts(
                    self._delivery, self._chunk, parts, self._fence, self._rejects_left(),
                    self._patience(),
                )  # fmt: skip
                with self._lock:
                    self._outcomes += found
        except BaseException as error:
            self.give_up()
            self._failed.append(error)

    def _next(self, lane: int) -> Parts | None:
        with self._lock:
            return self._lanes.next(lane)

    def _rejects_left(self) -> int | None:
        if self._max_rejects is None:
            return None
        with self._lock:
            return max(0, self._max_rejects - sum(one.counts.rejects for one in self._outcomes))


# -- the order of records and positions -----------------------------------------------------


@phase("write")
def commit_chunk(
    delivery: Delivery[CommitsChunks], chunk: Chunk, claim: Claim, max_rejects: int | None
) -> Mapping[TopicPartition, Counts]:
    """Make a chunk and its positions take effect.

    Raises:
        PositionMoved: nothing was written; read the ledger and decide again.
        BudgetSpent: nothing was written.
        Unavailable: the outcome is unknown; read the ledger and decide again.
    """
    sink, nothing = delivery.sink, dict.fromkeys(claim.ranges, NOT_COUNTED)
    if delivery.order == "together":
        return sink.commit(chunk, claim.fence, claim, max_rejects)
    if delivery.order == "records_first":
        counts = sink.commit(chunk, claim.fence, None, max_rejects)
        with phase("commit"):
            delivery.ledger.move(claim, counts)
        return counts
    # Decode before the position moves: an error in decode should lose no records.
    CommitBudget(max_rejects, "decode or transform").spend(chunk.rejections)
    write = partial(sink.commit, chunk, claim.fence, None, max_rejects)
    written = _position_first(delivery.ledger, claim, nothing, write)
    return nothing if written is None else written


@phase("write")
def publish_batch(delivery: Delivery[PublishesBatches], batch: Batch, claim: Claim) -> None:
    """Make a batch and its positions take effect. Raises the errors of the sink's ``publish``."""
    sink = delivery.sink
    if delivery.order == "together":
        sink.publish(batch, claim.fence, claim)
    elif delivery.order == "records_first":
        sink.publish(batch, claim.fence, None)
        with phase("commit"):
            delivery.ledger.move(claim.data, batch.counts)
    else:
        write = partial(sink.publish, batch, claim.fence, None)
        _position_first(delivery.ledger, claim.data, batch.counts, write)


def _position_first(
    ledger: MovesPositions,
    claim: Claim,
    counts: Mapping[TopicPartition, Counts],
    write: Callable[[], T],
) -> T | None:
    """Move positions, then write. Records that could not be written are lost, and logged as lost;
    None then.

    Raises:
        Unavailable: it is unknown whether positions were moved. A retry that reads moved positions
            treats the records as written, so a warning is logged here.
    """
    named = ", ".join(f"{tp} {range_}" for tp, range_ in sorted(claim.ranges.items()))
    try:
        with phase("commit"):
            ledger.move(claim, counts)
    except Unavailable as error:
        log.warning(
            "at most once: the records of %s are lost if their position was moved, which"
            " is unknown: %s",
            named,
            error.message,
        )
        raise
    try:
        return write()
    except Unavailable as error:
        log.warning("at most once: some or all records of %s are lost: %s", named, error.message)
        return None
