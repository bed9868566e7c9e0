"""THE commit path. Every runtime brings its chunks here.

    read the ledger  ->  decide  ->  write and compare-and-set in one transaction
          ^                                        |
          +------- moved, or no answer ------------+

A chunk that was read twice (a Spark retry, a speculative copy, a zombie, a replayed batch) and
a COMMIT whose answer was lost are one case: the ledger is asked again, on a new session when
the old one broke, and what has taken effect is never written a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from oncely.core import ledger
from oncely.core.ledger import Ahead, Append, Decision, Entry, Gap, Skip, Trim, decide
from oncely.core.offsets import TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.errors import (
    DataLost,
    Fenced,
    InvariantViolation,
    LedgerWentBack,
    OncelyError,
    Unavailable,
)
from oncely.runtimes.backoff import Backoff
from oncely.sinks.base import (
    BudgetSpent,
    Chunk,
    Committer,
    Fence,
    PositionMoved,
    RangeKind,
    Written,
)


@dataclass(frozen=True)
class Outcome:
    """What one commit did for one topic-partition; ``replayed`` when it had taken effect before."""

    partition: TopicPartition
    range: OffsetRange
    written: Written
    replayed: bool = False


def commit(
    sink: Committer,
    chunk: Chunk,
    fence: Fence,
    max_rejects: int | None,
    patience: Backoff,
    kind: RangeKind = "data",
) -> Iterator[Outcome]:
    """Commit what has not taken effect of a chunk, and report every range of it.

    Raises:
        Fenced: a newer run holds the ledger.
        DataLost, LedgerWentBack, InvariantViolation: the range begins beyond the ledger's
            position.
        TooManyRejects: the reject budget is spent; nothing was written.
        Unavailable: the sink did not answer for as long as ``patience`` lasts.
    """
    while True:
        try:
            entries = _entries(sink, fence, chunk)
            require_current(sink, fence, {tp: entries.get(tp) for tp in chunk.ranges})
            left = {
                tp: _left(sink, decide(entries[tp], range_, fence.epoch), fence, tp)
                for tp, range_ in chunk.ranges.items()
            }
            now = _first_parts(chunk, left)
            written = sink.commit(now, entries, fence, max_rejects, kind) if now.ranges else {}
        except PositionMoved:
            continue
        except BudgetSpent as error:
            raise error.about(chunk) from None
        except Unavailable:
            patience.wait_or_raise()
            continue
        yield from (Outcome(tp, now.ranges[tp], done) for tp, done in written.items())
        for tp in chunk.ranges.keys() - now.ranges.keys():
            yield Outcome(tp, chunk.ranges[tp], Written(0, 0, 0, 0), replayed=True)
        # Work done out of order can leave several ranges of one partition: take the next ones.
        more = {tp: chunk.ranges[tp] for tp, ranges in left.items() if len(ranges) > 1}
        if not more:
            return
        chunk = replace(chunk, ranges=more)


def _entries(sink: Committer, fence: Fence, chunk: Chunk) -> Mapping[TopicPartition, Entry]:
    """The ledger; asked for all that was committed when it seems to end before the chunk begins.

    What it shows may lag behind, and here that would look like records that nobody committed.
    """
    entries = sink.entries(fence)
    late = any(
        tp in entries and entries[tp].position < range_.start for tp, range_ in chunk.ranges.items()
    )
    return sink.committed(fence) if late else entries


def require_current(
    sink: Committer, fence: Fence, entries: Mapping[TopicPartition, Entry | None]
) -> None:
    """Refuse a ledger that knows nothing of our epoch, which it has given out itself.

    Raises:
        LedgerWentBack, InvariantViolation: some entry is missing or older.
    """
    for tp, entry in entries.items():
        if entry is None:
            raise behind(sink, fence, f"{tp} has no position in the ledger")
        if entry.epoch < fence.epoch:
            raise behind(
                sink, fence, f"{tp}: the ledger's epoch is {entry.epoch}, and ours {fence.epoch}"
            )


def behind(sink: Committer, fence: Fence, what: str) -> OncelyError:
    """The error for a ledger that does not know what this run has committed."""
    return LedgerWentBack(fence.pipeline, what) if sink.one_store else InvariantViolation(what)


def _left(
    sink: Committer, decision: Decision, fence: Fence, tp: TopicPartition
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
            raise behind(sink, fence, f"{tp}: offsets {missing} were not committed before")
        case ledger.Fenced(epoch):
            raise Fenced(fence.pipeline, fence.epoch, epoch)


def _first_parts(chunk: Chunk, left: Mapping[TopicPartition, tuple[OffsetRange, ...]]) -> Chunk:
    """The chunk cut to the first range that is left of each topic-partition."""
    first = {tp: ranges[0] for tp, ranges in left.items() if ranges}
    if first == chunk.ranges:
        return chunk
    return replace(chunk.keep({tp: (one,) for tp, one in first.items()}), ranges=first)
