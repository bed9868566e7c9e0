"""What may be done with a range of offsets, given what the ledger says. Pure.

The ledger of one topic-partition is its position, the epoch that may write, and the ranges
beyond the position that are done already (work that finished out of order). Everyone who is
about to commit a range asks :func:`decide` first, with a ledger that was read *after* the
last thing that could have changed it, and acts on the answer inside a transaction whose
compare-and-set fails when the ledger has moved since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oncely.core.ranges import OffsetRange, normalize
from oncely.core.topics import Position
from oncely.errors import check


@dataclass(frozen=True)
class Entry:
    """The ledger's word on one topic-partition.

    Attributes:
        position: next offset to read; everything before it has taken effect.
        epoch: the only epoch that may commit.
        done: ranges at or beyond the position that have taken effect already.
        run: the name of the run that has the epoch, where the ledger keeps it: after a failover
            that lost it, an epoch is given out again.
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
class Gap:
    """The topic no longer holds ``missing``: lost before it was read."""

    missing: OffsetRange


@dataclass(frozen=True)
class Ahead:
    """The range begins beyond the position, though the records between still exist."""

    missing: OffsetRange


@dataclass(frozen=True)
class Fenced:
    """The ledger belongs to a newer epoch: commit nothing and stop."""

    epoch: int


Decision = Append | Trim | Skip | Gap | Ahead | Fenced


def decide(entry: Entry, wanted: OffsetRange, epoch: int, *, oldest: Position = 0) -> Decision:
    """Decide what the owner of ``epoch`` may commit of ``wanted``.

    Args:
        entry: the ledger, freshly read.
        wanted: the range that was read from the topic.
        epoch: the epoch of the run that asks.
        oldest: the first offset that the topic still holds, when known.

    Raises:
        InvariantViolation: when the ledger is at an older epoch than the one who asks;
            an epoch is given out by the ledger, so this can't be.
    """
    check(entry.epoch >= epoch, f"the ledger's epoch {entry.epoch} is older than ours, {epoch}")
    if entry.epoch > epoch:
        return Fenced(entry.epoch)
    taken = _taken(entry)
    if wanted.start > taken[0].end:
        missing = OffsetRange(taken[0].end, wanted.start)
        return Gap(missing) if oldest >= wanted.start else Ahead(missing)
    keep = wanted.minus(taken)
    if not keep:
        return Skip()
    return Append(wanted) if keep == (wanted,) else Trim(keep)


def advance(entry: Entry, committed: Iterable[OffsetRange]) -> Position:
    """The position after ``committed`` has taken effect too: the end of what is contiguous."""
    return _taken(entry, committed)[0].end


def _taken(entry: Entry, committed: Iterable[OffsetRange] = ()) -> tuple[OffsetRange, ...]:
    """All that has taken effect, the first range beginning at zero and holding the position."""
    below = OffsetRange(0, entry.position)
    joined = normalize((below, *entry.done, *committed))
    return joined if joined and joined[0].start == 0 else (OffsetRange(0, 0), *joined)
