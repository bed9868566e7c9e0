"""The decision on a range of offsets, given the state of the ledger. Pure.

The ledger of one topic-partition is its position, the epoch that may write, and the ranges beyond
the position that are done already (work that finished out of order). Every caller that is about to
commit a range first calls :func:`decide`, with a ledger that was read *after* the last event that
could have changed it, and acts on the answer inside a transaction whose compare-and-set fails when
the ledger has moved since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oncely.core.ranges import OffsetRange, Position, normalize
from oncely.errors import check


@dataclass(frozen=True)
class Entry:
    """The ledger's state of one topic-partition.

    Attributes:
        position: next offset to read; everything before it has taken effect.
        epoch: the only epoch that may commit.
        done: ranges at or beyond the position that have taken effect already.
        run: the name of the run that has the epoch, if the ledger keeps it: after a failover that
            lost an epoch, the same epoch is given out again.
    """

    position: Position
    epoch: int
    done: tuple[OffsetRange, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class Append:
    """Nothing of the range has taken effect: commit all of it."""

    range: OffsetRange


@dataclass(frozen=True)
class Trim:
    """Part of the range has taken effect: commit only what ``keep`` covers."""

    keep: tuple[OffsetRange, ...]


@dataclass(frozen=True)
class Skip:
    """All of the range has taken effect: a replay. Commit nothing, report success."""


@dataclass(frozen=True)
class Ahead:
    """The range begins beyond the position: ``missing`` was not committed before."""

    missing: OffsetRange


@dataclass(frozen=True)
class FencedOff:
    """The ledger belongs to a newer epoch: commit nothing and stop."""

    epoch: int


Decision = Append | Trim | Skip | Ahead | FencedOff


def decide(entry: Entry, wanted: OffsetRange, epoch: int) -> Decision:
    """Decide what the owner of ``epoch`` may commit of ``wanted``.

    Args:
        entry: the ledger, freshly read.
        wanted: the range that was read from the topic.
        epoch: the epoch of the calling run.

    Raises:
        InvariantViolation: the ledger is at an older epoch than the caller; epochs are given out by
            the ledger, so this cannot happen.
    """
    check(entry.epoch >= epoch, f"the ledger's epoch {entry.epoch} is older than ours, {epoch}")
    if entry.epoch > epoch:
        return FencedOff(entry.epoch)
    taken = _taken(entry)
    if wanted.start > taken[0].end:
        return Ahead(OffsetRange(taken[0].end, wanted.start))
    keep = wanted.minus(taken)
    if not keep:
        return Skip()
    return Append(wanted) if keep == (wanted,) else Trim(keep)


def decide_parts(
    entry: Entry, wanted: Iterable[OffsetRange], epoch: int
) -> Trim | Skip | FencedOff:
    """Decide what the owner of ``epoch`` may commit of ranges that may begin beyond the position.

    Raises:
        InvariantViolation: as :func:`decide`.
    """
    check(entry.epoch >= epoch, f"the ledger's epoch {entry.epoch} is older than ours, {epoch}")
    if entry.epoch > epoch:
        return FencedOff(entry.epoch)
    taken = _taken(entry)
    keep = normalize(part for one in wanted for part in one.minus(taken))
    return Trim(keep) if keep else Skip()


def advance(entry: Entry, committed: Iterable[OffsetRange]) -> Position:
    """The position after ``committed`` has taken effect too: the end of the contiguous offsets."""
    return _taken(entry, committed)[0].end


def _taken(entry: Entry, committed: Iterable[OffsetRange] = ()) -> tuple[OffsetRange, ...]:
    """All offsets that have taken effect; the first range begins at 0, with the position."""
    below = OffsetRange(0, entry.position)
    joined = normalize((below, *entry.done, *committed))
    return joined if joined and joined[0].start == 0 else (OffsetRange(0, 0), *joined)
