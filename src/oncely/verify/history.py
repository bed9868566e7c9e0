"""The ledger alone: each partition's ranges lead from its start to its position.

A history *in force* contains a range once, and marks the ranges that a reset has undone. A history
of *moves* is a log of the position's changes, of which the oldest may be missing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from oncely.core.claim import SKIPPED, UNKNOWN
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.verify.reading import (
    AHEAD,
    AMENDMENTS,
    COMMITS,
    DATA,
    GAP,
    HOLE,
    JOINED,
    MOVES,
    RESET,
    TAKEN,
    Covered,
    Entry,
    Held,
    Ledger,
    Rules,
    shown,
)
from oncely.verify.report import Broken, Finding, Unknown

Explained = Callable[[TopicPartition, int, int, int, int], str | None]
"""Explains why positions passed over offsets without a commit: ``(partition, start, end, epoch
before, epoch after)`` to an empty text, if an event tells of it; to a reason, if it may be so; to
None, if no reset can be the cause."""


class Proofs(NamedTuple):
    """What events prove beside the ledger.

    Attributes:
        explained: see :data:`Explained`.
        begun: True if they contain the position at which a partition was begun.
        proven: True if they contain the steps that the ledger no longer has.
    """

    explained: Explained
    begun: Callable[[TopicPartition], bool]
    proven: Callable[[TopicPartition], bool]


def check_ledger(ledger: Ledger, rules: Rules, events: Proofs) -> Iterator[Finding]:
    """Check every partition."""
    for text in ledger.problems:
        yield Broken("stored", text)
    for reason in ledger.unknown:
        yield Unknown(reason)
    partitions = sorted({*ledger.positions, *(one.partition for one in ledger.history)})
    for tp in partitions:
        entries, held = ledger.of(tp), ledger.positions.get(tp)
        wrong = list(_shapes(entries, ledger, rules))
        yield from wrong
        yield from _lacking(tp, entries, ledger.digested, rules)
        if held is None:
            text = f"{tp} has a history and no position"
            yield Broken("position", text, tp, _last(entries), shown(entries, len(entries)))
        elif held.epoch > ledger.epoch:
            text = f"{tp} is held by epoch {held.epoch}, and {ledger.epoch} was given out last"
            yield Broken("epoch", text, tp, (held.epoch, held.position))
        elif not wrong and ledger.moves:
            found = _moves(tp, entries, held, ledger)
            yield from (one for one in found if isinstance(one, Broken) or not events.proven(tp))
        elif not wrong:
            yield from _in_force(tp, entries, held, events.explained)
            begin = min([held.position, *(one.start for one in entries)])
            if begin and not events.begun(tp):
                yield Unknown(f"{tp}: nothing stored tells that it was begun at {begin}", tp)
    for tp, offset in ledger.stray:
        yield from _stray(tp, offset, ledger)


# -- single entries ------------------------------------------------------------------------------


class _Amended:
    """The rejects of the amendments in force, by the range in which they are."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        mine = (one for one in entries if one.kind in AMENDMENTS and not one.superseded)
        self._own = sorted((one.start, one.end, one.counts.rejects) for one in mine if one.counts)

    def rejects(self, within: Entry) -> list[int]:
        low = bisect_left(self._own, (within.start,))
        high = bisect_right(self._own, (within.end, inf))
        return [number for _, end, number in self._own[low:high] if end <= within.end]


def _shapes(entries: Sequence[Entry], ledger: Ledger, rules: Rules) -> Iterator[Broken]:
    valid = (one for one in entries if one.kind in COMMITS and 0 <= one.start <= one.end)
    amended = _Amended(entries)
    committed = Covered(OffsetRange(one.start, one.end) for one in valid)  # also what was undone
    for at, one in enumerate(entries):
        text = _wrong_shape(one, ledger, committed) or _wrong_counts(one, rules, amended)
        if text:
            yield Broken("entry", f"{one}: {text}", one.partition, one.order, shown(entries, at))


def _wrong_shape(one: Entry, ledger: Ledger, committed: Covered) -> str:
    held = ledger.positions.get(one.partition)
    if one.kind not in MOVES | AMENDMENTS:
        return f"the kind {one.kind!r} is unknown"
    if not 0 <= one.start <= one.end:
        return "it is no range of offsets"
    if one.kind in AMENDMENTS:
        return _wrong_amendment(one, ledger, committed)
    if held is not None and one.epoch > held.epoch:
        return f"its epoch is later than that of the position, {held.epoch}"
    if one.superseded and not one.epoch < one.superseded <= max(ledger.epoch, one.epoch):
        return "it was superseded by an epoch that is not later, or was never given out"
    return ""


def _wrong_amendment(one: Entry, ledger: Ledger, committed: Covered) -> str:
    if one.epoch > ledger.epoch:
        return f"its epoch is later than the last one that was given out, {ledger.epoch}"
    if not one.superseded and committed.lacks(OffsetRange(one.start, one.end)):
        return "it amends offsets that nothing has committed"
    return ""


def _wrong_counts(one: Entry, rules: Rules, amended: _Amended) -> str:
    counts = one.counts
    if counts is None or one.kind not in COMMITS | {SKIPPED}:
        return ""
    each = (counts.records, counts.rows, counts.rejects, counts.filtered)
    if one.kind in (HOLE, GAP, SKIPPED) and any(each):
        return "offsets without records have counts"
    if min(each) < 0:
        return "a count is negative"
    if counts.records > one.end - one.start:
        return "more records than offsets"
    if (counts.digest is None) != (counts.recipe in ("", UNKNOWN)) and counts.digest != 0:
        return "it has a digest without recipe, or a recipe without digest"
    more = sum(number for number in amended.rejects(one) if number > 0)
    if one.letters is not None and one.letters > counts.rejects + more:
        return f"{one.letters} dead letters lie in it, more than its rejects"
    if not rules.counted or rules.mixed:
        return ""
    left = counts.records - counts.rejects - counts.filtered
    if left < 0 or counts.rows < left or (rules.one_row and counts.rows != left):
        return "rows, rejects and filtered records are not its records"
    return ""


def _lacking(
    tp: TopicPartition, entries: Sequence[Entry], digested: Set[int], rules: Rules
) -> Iterator[Unknown]:
    """Digests and dead letters that a range in force should have."""
    amended = _Amended(entries)
    for one in entries:
        if one.counts is None or one.kind not in COMMITS or one.superseded:
            continue
        if one.kind == DATA and one.counts.rows and not one.counts.recipe and one.epoch in digested:
            yield Unknown(f"{one}: it has no digest, and other ranges of its epoch have one", tp)
        left = one.counts.rejects + sum(amended.rejects(one))
        if rules.counted and not rules.mixed and one.letters is not None and one.letters < left:
            text = f"{one.letters} dead letters lie in it, fewer than its rejects"
            yield Unknown(f"{one}: {text}: others were removed, or the counts changed", tp)


# -- ranges in force ------------------------------------------------------------------------------


def _in_force(
    tp: TopicPartition, entries: Sequence[Entry], held: Held, explained: Explained
) -> Iterator[Finding]:
    commits = [one for one in entries if one.kind in COMMITS | {SKIPPED}]
    undone = [one for one in commits if one.superseded]
    chain = sorted(one for one in ((e.start, e.end, e.epoch, i) for i, e in enumerate(commits))
                   if not commits[one[3]].superseded)  # fmt: skip
    ordered = [commits[i] for *_, i in chain]
    below = [one for one in ordered if one.kind != AHEAD or one.start < held.position]
    beyond = [one for one in ordered if one.kind == AHEAD and one.start >= held.position]
    upto, past = _moved_by(below, 0), _moved_by(below[::-1], held.epoch + 1)[::-1]
    for at, (one, other) in enumerate(pairwise(below), 1):
        moved = upto[at - 1], past[at]
        yield from _follows(one, other, moved, undone, explained, shown(below, at))
    yield from _ends(tp, below, undone, held, explained)
    yield from _beyond(tp, beyond, held)
    yield from _undone(ordered, undone)


def _moved_by(ordered: Sequence[Entry], first: int) -> list[int]:
    """The epoch of each entry that has moved the position; else that of the one before it."""
    epochs = accumulate(ordered, lambda to, e: to if e.kind == AHEAD else e.epoch, initial=first)
    return list(epochs)[1:]


def _beyond(tp: TopicPartition, beyond: Sequence[Entry], held: Held) -> Iterator[Finding]:
    """Finished ranges beyond the position."""
    for at, (one, other) in enumerate(pairwise(beyond), 1):
        if other.start < one.end:
            yield _overlap(one, other, shown(beyond, at))
    if beyond and beyond[0].start == held.position:
        text = f"{tp} is at {held.position}, and {beyond[0]} was committed from there on"
        yield Broken("position", text, tp, (held.epoch, held.position), shown(beyond, 0))


def _overlap(one: Entry, other: Entry, context: tuple[str, ...]) -> Broken:
    text = (
        f"{one.partition}: offsets [{other.start}, {min(one.end, other.end)}) were committed twice,"
        f" by epoch {one.epoch} and by epoch {other.epoch}"
    )
    return Broken("overlap", text, one.partition, other.order, context)


def _follows(
    one: Entry,
    other: Entry,
    moved: tuple[int, int],
    undone: Sequence[Entry],
    explained: Explained,
    context: tuple[str, ...],
) -> Iterator[Finding]:
    """``moved``: the epochs that have moved the position up to ``one``, and past ``other``."""
    tp, (newest, next_) = one.partition, moved
    if other.start < one.end:
        yield _overlap(one, other, context)
    if other.kind != AHEAD and other.epoch < newest:
        text = (
            f"{tp}: epoch {other.epoch} has committed [{other.start}, {other.end}) behind a range"
            f" of epoch {newest}: a fenced run has committed"
        )
        yield Broken("epoch", text, tp, other.order, context)
    elif not {JOINED, AHEAD} & {one.kind, other.kind} and one.at and other.at and other.at < one.at:
        yield Unknown(
            f"{tp}: [{other.start}, {other.end}) has an earlier time than the range before it: the"
            " clock of the database was set back, or entries were exchanged",
            tp,
        )
    if other.start <= one.end:
        return
    between = _undone_between(undone, newest, other.epoch, other.start)
    for start, end in _uncovered(one.end, other.start, between):
        why = explained(tp, start, end, newest, next_)
        yield from _passed_over(tp, start, end, why, other.order, context)


def _passed_over(
    tp: TopicPartition,
    start: int,
    end: int,
    why: str | None,
    order: tuple[int, int],
    context: tuple[str, ...],
) -> Iterator[Finding]:
    if why is None:
        text = f"{tp}: the position passed over [{start}, {end}), which nothing has committed"
        yield Broken("missing", text, tp, order, context)
    elif why:
        yield Unknown(f"{tp}: nothing has committed [{start}, {end}); {why}", tp)


def _ends(
    tp: TopicPartition,
    chain: Sequence[Entry],
    undone: Sequence[Entry],
    held: Held,
    explained: Explained,
) -> Iterator[Finding]:
    """The history ends at the position."""
    if not chain and not undone:
        return
    everything = [*chain, *undone]
    context = shown(chain, len(chain))
    if chain and chain[-1].end > held.position:
        text = (
            f"{tp} is at {held.position}, and {chain[-1].end} was committed: the position has gone"
            " back without a reset"
        )
        yield Broken("position", text, tp, (held.epoch, held.position), context)
        return
    last = chain[-1] if chain else min(everything, key=lambda one: one.start)
    begin = chain[-1].end if chain else last.start
    before = chain[-1].epoch if chain else 0
    between = _undone_between(undone, before, held.epoch + 1, held.position)
    for start, end in _uncovered(begin, held.position, between):
        why = explained(tp, start, end, before, held.epoch + 1)
        yield from _passed_over(tp, start, end, why, (held.epoch, end), context)


def _undone_between(
    undone: Sequence[Entry], before: int, after: int, position: int
) -> list[OffsetRange]:
    """The offsets below a position that resets between two epochs may have left uncovered.

    A reset undoes every range that ends behind its target. So its target is below the first of
    their ends; from there on, offsets were committed again, or another reset has skipped them.
    """
    between = [one for one in undone if before < one.superseded < after]
    last = max((one.superseded for one in between), default=0)
    most = min((one.end for one in between if one.superseded == last), default=0) - 1
    found = [OffsetRange(one.start, one.end) for one in between]
    if position <= most:
        return found
    return [OffsetRange(one.start, min(one.end, most)) for one in found if one.start <= most]


def _undone(chain: Sequence[Entry], undone: Sequence[Entry]) -> Iterator[Broken]:
    """What was committed again was undone before."""
    active: list[Entry] = []
    for entry in sorted((*undone, *chain), key=lambda it: it.start):
        if entry.start == entry.end:
            continue
        active = [one for one in active if one.end > entry.start]
        for before in active:
            one, other = (before, entry) if before.superseded else (entry, before)
            if one.superseded and not _was_undone_before(one, other):
                text = (
                    f"{one.partition}: [{other.start}, {other.end}) was committed by epoch"
                    f" {other.epoch}, before the reset of epoch {one.superseded} had undone"
                    f" [{one.start}, {one.end})"
                )
                context = (str(one), str(other))
                yield Broken("overlap", text, one.partition, other.order, context)
        active.append(entry)


def _was_undone_before(one: Entry, other: Entry) -> bool:
    """True if one of two overlapping entries was undone before the other one was committed."""
    earlier = bool(other.superseded) and one.epoch > other.superseded
    return other.epoch > one.superseded or earlier


def _uncovered(start: int, end: int, by: Sequence[OffsetRange]) -> list[tuple[int, int]]:
    """The offsets that no range covers."""
    if start >= end:
        return []
    left = OffsetRange(start, end).minus(by)
    return [(one.start, one.end) for one in left]


def _stray(tp: TopicPartition, offset: int, ledger: Ledger) -> Iterator[Broken]:
    """A dead letter outside of the ranges in force is in one that a reset has cut."""
    entries = ledger.of(tp)
    held = ledger.positions.get(tp)
    inside = any(one.superseded and one.covers(offset, offset + 1) for one in entries)
    if held is not None and offset < held.position and inside:
        return
    at = next((i for i, one in enumerate(entries) if one.end > offset), len(entries))
    text = f"{tp}: the dead letter of offset {offset} is in no committed range"
    order = (held.epoch if held else 0, offset)
    yield Broken("entry", text, tp, order, shown(entries, at))


# -- moves ----------------------------------------------------------------------------------------


def _moves(
    tp: TopicPartition, entries: Sequence[Entry], held: Held, ledger: Ledger
) -> Iterator[Finding]:
    resets = ledger.resets.get(tp, {})
    first = entries[0] if entries else None
    if first is not None and not (ledger.complete or _is_first(first, resets)):
        text = f"{tp}: the ledger no longer contains the steps before {first}, if there were any"
        yield Unknown(text, tp)
    for at, (one, other) in enumerate(pairwise(entries), 1):
        yield from _moves_on(one, other, resets, ledger, shown(entries, at))
    if not entries:
        return
    last = entries[-1]
    if (last.end, last.epoch) != held:
        text = (
            f"{tp} is at {held.position} with epoch {held.epoch}, and the last step of the ledger"
            f" led to {last.end} with epoch {last.epoch}"
        )
        context = shown(entries, len(entries))
        yield Broken("position", text, tp, (held.epoch, held.position), context)


def _is_first(one: Entry, resets: Mapping[int, int]) -> bool:
    """True if no position was moved before an entry: no offset or no epoch is before it."""
    if one.start == 0:
        return not any(epoch <= one.epoch for epoch in resets)
    return (one.kind, one.epoch) == (TAKEN, 1)


def _moves_on(
    one: Entry,
    other: Entry,
    resets: Mapping[int, int],
    ledger: Ledger,
    context: tuple[str, ...],
) -> Iterator[Finding]:
    tp, order = one.partition, other.order
    if other.epoch < one.epoch:
        text = f"{tp}: epoch {other.epoch} has moved the position after epoch {one.epoch} took it"
        yield Broken("epoch", text, tp, order, context)
        return
    if other.epoch > one.epoch and other.kind in (DATA, HOLE, GAP):
        text = f"{tp}: epoch {other.epoch} has committed and has not taken the position over"
        yield Broken("epoch", text, tp, order, context) if ledger.complete else Unknown(text, tp)
    if other.start == one.end or other.kind == RESET:
        return
    moved = {at for epoch, at in resets.items() if one.epoch <= epoch <= other.epoch}
    if other.kind == TAKEN and other.start in moved:
        return
    if other.start > one.end and not ledger.complete:
        text = f"{tp}: the ledger does not contain the steps from {one.end} to {other.start}"
        yield Unknown(text, tp)
    elif other.start > one.end:
        text = f"{tp}: nothing has committed [{one.end}, {other.start})"
        yield Broken("missing", text, tp, order, context)
    elif other.kind in (DATA, HOLE, GAP):
        text = f"{tp}: offsets [{other.start}, {min(one.end, other.end)}) were committed twice"
        yield Broken("overlap", text, tp, order, context)
    else:
        text = f"{tp}: the position went back from {one.end} to {other.start} without a reset"
        yield Broken("position", text, tp, order, context)


# -- parts ----------------------------------------------------------------------------------------


def _last(entries: Sequence[Entry]) -> tuple[int, int]:
    return max((one.order for one in entries), default=(0, 0))
