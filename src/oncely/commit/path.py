"""The commit path: chunks, holes, gaps and batches of every run take effect here.

    read the ledger  ->  decide  ->  write and compare-and-set in one transaction
          ^                                        |
          +------- moved, or no answer ------------+

Work that was done twice (a Spark retry, a speculative copy, a zombie, a replayed batch) and a
COMMIT whose answer was lost are one case: the ledger is asked again, on a new session when the
old one broke, and what has taken effect is never written a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from oncely.commit.backoff import Backoff
from oncely.commit.delivery import Delivery, commit_chunk, publish_batch
from oncely.core import ledger
from oncely.core.batch import Batch, BudgetSpent, Chunk, StagedRowsGone
from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence, PositionMoved, RangeKind
from oncely.core.ledger import Ahead, Append, Decision, Entry, Gap, Skip, Trim, decide
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import (
    DataLost,
    Fenced,
    InvariantViolation,
    LedgerWentBack,
    OncelyError,
    Unavailable,
)
from oncely.sinks.base import CommitsChunks, Sink, StagesBatches

T = TypeVar("T")
Entries = Mapping[TopicPartition, Entry]


def settle(attempt: Callable[[], T], patience: Backoff, *, stages: bool = False) -> T:
    """Repeat an attempt until its outcome is known.

    Args:
        attempt: reads the ledger, decides, and acts in one transaction.
        patience: how long a store may not answer.
        stages: the attempt stages its rows itself, and can do so again when they are gone.

    Raises:
        StagedRowsGone: nothing was published; the batch can be repeated.
        LedgerWentBack: the ledger does not know what this run has committed.
        Unavailable: the store did not answer for as long as ``patience`` lasts.
    """
    while True:
        try:
            return attempt()
        except PositionMoved:
            continue
        except Unavailable as error:
            if isinstance(error, LedgerWentBack if stages else (LedgerWentBack, StagedRowsGone)):
                raise
            patience.wait_or_raise()


@dataclass(frozen=True)
class Outcome:
    """What one commit did for one topic-partition; ``replayed`` when it had taken effect before."""

    partition: TopicPartition
    range: OffsetRange
    counts: Counts
    replayed: bool = False


def commit(
    delivery: Delivery[CommitsChunks],
    chunk: Chunk,
    fence: Fence,
    max_rejects: int | None,
    patience: Backoff,
) -> Iterator[Outcome]:
    """Commit what has not taken effect of a chunk, and report every range of it.

    Raises:
        Fenced: a newer run holds the ledger.
        DataLost, LedgerWentBack, InvariantViolation: the range begins beyond the ledger's
            position.
        TooManyRejects: the reject budget is spent; nothing was written.
        Unavailable: the sink did not answer for as long as ``patience`` lasts.
    """

    def act(left: Chunk, claim: Claim) -> Mapping[TopicPartition, Counts]:
        try:
            return commit_chunk(delivery, left, claim, max_rejects)
        except BudgetSpent as error:
            raise error.about(left) from None

    yield from _commit_parts(delivery, chunk, fence, patience, "data", act)


def pass_over(
    delivery: Delivery[Sink],
    ranges: Mapping[TopicPartition, OffsetRange],
    fence: Fence,
    kind: RangeKind,
    patience: Backoff | None = None,
) -> list[Outcome]:
    """Move positions over ranges that are known to hold no records. Raises as :func:`commit`."""

    def act(_: Chunk, claim: Claim) -> Mapping[TopicPartition, Counts]:
        nothing = dict.fromkeys(claim.ranges, NO_RECORDS)
        delivery.ledger.move(claim, nothing)
        return nothing

    nothing = Chunk.of_nothing(ranges)
    return list(_commit_parts(delivery, nothing, fence, patience or Backoff(), kind, act))


def _commit_parts(
    delivery: Delivery[Sink],
    chunk: Chunk,
    fence: Fence,
    patience: Backoff,
    kind: RangeKind,
    act: Callable[[Chunk, Claim], Mapping[TopicPartition, Counts]],
) -> Iterator[Outcome]:
    """Let ``act`` commit what is left of the chunk, the first range of each partition at a time.

    Work that is done out of order can leave several ranges of one partition.
    """
    waits: Chunk | None = chunk

    def attempt() -> tuple[list[Outcome], Chunk | None]:
        entries = _entries(delivery, fence, chunk.ranges)
        undone = {
            tp: _undone(delivery, decide(entries[tp], range_, fence.epoch), fence, tp)
            for tp, range_ in chunk.ranges.items()
        }
        first = {tp: ranges[0] for tp, ranges in undone.items() if ranges}
        part = chunk
        if first != chunk.ranges:
            part = replace(chunk.keep({tp: (one,) for tp, one in first.items()}), ranges=first)
        counts = act(part, Claim(fence, first, entries, kind)) if first else {}
        done = [Outcome(tp, first[tp], one) for tp, one in counts.items()]
        for tp in chunk.ranges.keys() - first.keys():
            done.append(Outcome(tp, chunk.ranges[tp], NO_RECORDS, replayed=True))
        rest = {tp: chunk.ranges[tp] for tp, ranges in undone.items() if len(ranges) > 1}
        return done, replace(chunk, ranges=rest) if rest else None

    while waits is not None:
        chunk = waits
        outcomes, waits = settle(attempt, patience)
        yield from outcomes


def publish(
    delivery: Delivery[StagesBatches],
    batch: Batch,
    fence: Fence,
    entries: Callable[[], Entries],
) -> bool:
    """Publish a batch; True when it had taken effect before.

    Args:
        delivery: how rows and positions take effect.
        batch: what was staged.
        fence: our epoch.
        entries: reads the ledger, and raises Fenced when a newer run holds it.

    Raises:
        LedgerWentBack: the ledger stands before the batch.
        InvariantViolation: the ledger holds some ranges of the batch and not others.
        StagedRowsGone: nothing was published; the batch can be repeated.
    """

    def attempt() -> bool:
        known = entries()
        if _all_done(delivery, batch.ranges, known, fence):
            return True
        try:
            publish_batch(delivery, batch, Claim(fence, batch.ranges, known))
        except StagedRowsGone:
            if _all_done(delivery, batch.ranges, entries(), fence):
                return True  # our own publication took them, and its answer was lost
            raise
        return False

    return settle(attempt, Backoff())


def _entries(
    delivery: Delivery[Sink], fence: Fence, ranges: Mapping[TopicPartition, OffsetRange]
) -> Entries:
    """The ledger; asked for all that was committed when it seems to end before a range begins.

    What it shows may lag behind, and here that would look like records that nobody committed.
    """
    entries = delivery.ledger.positions(fence)
    late = any(
        tp in entries and entries[tp].position < range_.start for tp, range_ in ranges.items()
    )
    if late:
        entries = delivery.ledger.positions(fence, settled=True)
    require_current(delivery, fence, {tp: entries.get(tp) for tp in ranges})
    return entries


def require_current(
    delivery: Delivery[Sink], fence: Fence, entries: Mapping[TopicPartition, Entry | None]
) -> None:
    """Refuse a ledger that knows nothing of our epoch, which it has given out itself.

    Raises:
        LedgerWentBack, InvariantViolation: some entry is missing or older.
    """
    for tp, entry in entries.items():
        if entry is None:
            raise behind(delivery, fence, f"{tp} has no position in the ledger")
        if entry.epoch < fence.epoch:
            told = f"{tp}: the ledger's epoch is {entry.epoch}, and ours {fence.epoch}"
            raise behind(delivery, fence, told)


def behind(delivery: Delivery[Sink], fence: Fence, what: str) -> OncelyError:
    """The error for a ledger that does not know what this run has committed."""
    return LedgerWentBack(fence.pipeline, what) if delivery.one_store else InvariantViolation(what)


def _undone(
    delivery: Delivery[Sink], decision: Decision, fence: Fence, tp: TopicPartition
) -> tuple[OffsetRange, ...]:
    """What a decision leaves to be committed."""
    match decision:
        case Append(range_):
            return (range_,)
        case Trim(keep):
            return keep
        case Skip():
            return ()
        case Gap(missing):
            raise DataLost(f"{tp}: offsets {missing} left the topic before they were read")
        case Ahead(missing):
            raise behind(delivery, fence, f"{tp}: offsets {missing} were not committed before")
        case ledger.Fenced(epoch):
            raise Fenced(fence.pipeline, fence.epoch, epoch)


def _all_done(
    delivery: Delivery[Sink],
    ranges: Mapping[TopicPartition, OffsetRange],
    entries: Entries,
    fence: Fence,
) -> bool:
    """Append for all, or Skip for all: one transaction has them all or none."""
    decisions = [decide(entries[tp], one, fence.epoch) for tp, one in ranges.items()]
    if all(isinstance(one, Append) for one in decisions):
        return False
    if all(isinstance(one, Skip) for one in decisions):
        return True
    ahead = [one for one in decisions if isinstance(one, Ahead)]
    if ahead:
        raise behind(delivery, fence, f"offsets {ahead[0].missing} were not committed before")
    raise InvariantViolation(f"a batch commit met a ledger that holds half of it: {decisions}")
