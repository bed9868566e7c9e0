"""The epochs of an event log in a row, and compared with the ledger."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange, TopicPartition, grouped
from oncely.verify.history import Explained
from oncely.verify.reading import (
    AHEAD,
    AROUND,
    COMMITS,
    DATA,
    HOLE,
    JOINED,
    Covered,
    Entry,
    Held,
    Ledger,
    Rules,
    shown,
)
from oncely.verify.report import Broken, Finding, Unknown
from oncely.verify.runs import Epoch, Story, chain, partitions

# -- the log ---------------------------------------------------------------------------------------


def check_log(told: Story, rules: Rules) -> Iterator[Finding]:
    """Every epoch begins where the one before it has ended, and commits nothing after that."""
    yield from told.broken
    for run in sorted(told.headless):
        yield Unknown(f"the first events of run {run} are missing: its file begins later")
    for run in sorted(told.lossy):
        yield Unknown(f"run {run} could not write all of its events")
    for one in told.epochs:
        yield from _twice(one, told)
    if rules.timed:
        return
    for tp in partitions(told.epochs):
        for one, other in pairwise(chain(told.epochs, tp)):
            yield from _continues(tp, one, other, told)
    yield from _vanished(told)


def _twice(epoch: Epoch, told: Story) -> Iterator[Broken]:
    for tp, own in epoch.own.items():
        ordered = sorted(own, key=lambda one: (one[0].start, one[1]))
        for (one, _), (other, at) in pairwise(ordered):
            if other.start < one.end:
                text = (
                    f"{other.place}: {tp} [{other.start}, {min(one.end, other.end)}) was committed"
                    f" twice by epoch {epoch.number}, see {one.place}"
                )
                yield Broken("overlap", text, tp, other.order, told.around(at))


def _continues(tp: TopicPartition, one: Epoch, other: Epoch, told: Story) -> Iterator[Finding]:
    """The position at which an epoch was opened is the one to which the epoch before has led."""
    if tp not in other.opened:
        return
    at, order = other.opened[tp], (other.number, other.opened[tp])
    low, high = one.known(tp), one.reached(tp)
    if low <= at <= high or one.lossy:
        return
    missing = other.number - one.number - 1
    place = told.lines[other.at].place
    if at < low:
        late = next((e for e, line in one.own.get(tp, ()) if line > other.at and e.end > at), None)
        if late is not None and not missing:
            text = (
                f"{late.place}: epoch {one.number} has committed {tp} [{late.start}, {late.end})"
                f" after epoch {other.number} had taken the partition over at {at}"
            )
            line = next(i for e, i in one.own[tp] if e is late)
            yield Broken("fence", text, tp, late.order, told.around(line))
        elif missing:
            yield Unknown(
                f"{tp} went back from {low} to {at} between the epochs {one.number} and"
                f" {other.number}: a reset, of which no event tells?",
                tp,
            )
        else:
            text = (
                f"{place}: {tp} was at {low} in epoch {one.number}, and epoch {other.number} has"
                f" found it at {at}: the ledger was put back to an older state"
            )
            yield Broken("position", text, tp, order, told.around(other.at))
    elif not missing:
        text = (
            f"{place}: {tp} was at most at {high} in epoch {one.number}, and epoch {other.number}"
            f" has found it at {at}: no event tells what has moved it"
        )
        yield Broken("missing", text, tp, order, told.around(other.at))


def _vanished(told: Story) -> Iterator[Broken]:
    """A takeover of all partitions has a position for each that was known."""
    known: set[TopicPartition] = set()
    for epoch in told.epochs:
        for tp in sorted(known - epoch.opened.keys()) if epoch.every else ():
            text = (
                f"{told.lines[epoch.at].place}: epoch {epoch.number} has taken all partitions over,"
                f" and has no position for {tp}, which an earlier epoch had"
            )
            yield Broken("partition", text, tp, (epoch.number, 0), told.around(epoch.at))
        known |= epoch.now.keys()


# -- the log and the ledger ------------------------------------------------------------------------


def check_together(ledger: Ledger, told: Story, earlier: Story, rules: Rules) -> Iterator[Finding]:
    """What the log says was committed is in the ledger, and the other way round.

    Args:
        ledger, rules: the ledger, and the rules of its pipeline.
        told: the log, read after the ledger.
        earlier: the log, read before the ledger.
    """
    if rules.timed:
        yield Unknown('delivery = "none": positions move on a timer, which no event tells of')
        return
    by_partition = grouped(
        (entry.partition, entry)
        for entry in ledger.history
        if entry.kind in COMMITS and 0 <= entry.start <= entry.end
    )
    for tp in sorted({*by_partition, *ledger.positions, *partitions(told.epochs)}):
        entries = by_partition.get(tp, [])
        if ledger.complete:
            yield from _replayed(tp, entries, earlier)
            yield from _started(tp, entries, ledger, earlier)
        yield from _commits(tp, entries, ledger, told, earlier, rules)
        yield from _are_sums(tp, entries, told, rules)
        yield from _stands(tp, ledger, told, earlier)


def _commits(
    tp: TopicPartition,
    entries: Sequence[Entry],
    ledger: Ledger,
    told: Story,
    earlier: Story,
    rules: Rules,
) -> Iterator[Broken]:
    """Commits in the log, and entries of the ledger, one by one."""
    epochs = {one.number: one for one in reversed(told.epochs)}
    known = {one.order: one for one in entries if one.kind != JOINED}
    joined = _Joined(one for one in entries if one.kind == JOINED)
    found = {number: Covered(one.earlier.get(tp, ())) for number, one in epochs.items()}
    for epoch in chain(earlier.epochs, tp):
        for own, line in epoch.own.get(tp, ()):
            yield from _is_stored(own, line, known, joined, ledger, rules, earlier)
    own_orders = {own.order for epoch in epochs.values() for own, _ in epoch.own.get(tp, ())}
    for order, entry in known.items():
        if order not in own_orders and entry.epoch in epochs:  # else of a run without event log
            yield from _is_told(entry, epochs[entry.epoch], found[entry.epoch], entries, told)
    by_epoch = grouped((entry.epoch, entry) for entry in known.values())
    untold = _Untold([own for number, own in by_epoch.items() if number not in epochs])
    before: list[Entry] = []
    for one in chain(told.epochs, tp):
        if tp in one.opened:
            fenced = [*before, *untold.behind(one.opened[tp], one.number)]
            yield from _is_fenced(tp, one, fenced, told)
        before = by_epoch.get(one.number, [])


class _Joined:
    """The joined ranges of a partition."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._ordered = sorted(entries, key=lambda one: one.start)
        self._ends = list(accumulate((one.end for one in self._ordered), max))

    def contain(self, own: Entry) -> bool:
        """True if one of them may have been made of a commit, among others."""
        at = bisect_right(self._ordered, own.start, key=lambda one: one.start) - 1
        while at >= 0 and self._ends[at] >= own.end:
            if self._ordered[at].end >= own.end and self._ordered[at].epoch >= own.epoch:
                return True
            at -= 1
        return False


class _Untold:
    """The entries of epochs of which no event tells, for epochs that are asked in their order."""

    def __init__(self, by_epoch: Iterable[list[Entry]]) -> None:
        self._later = sorted(by_epoch, key=lambda own: -own[0].epoch)
        self._open: list[tuple[int, tuple[int, int], Entry]] = []  # a heap, the last end first

    def behind(self, position: int, epoch: int) -> list[Entry]:
        """Those of earlier epochs that end behind a position, and that no reset has undone."""
        while self._later and self._later[-1][0].epoch < epoch:
            for one in self._later.pop():
                heappush(self._open, (-one.end, one.order, one))
        found: list[Entry] = []
        while self._open and self._open[0][2].end > position:
            one = heappop(self._open)[2]
            if not 0 < one.superseded <= epoch:  # undone for all later epochs, too
                found.append(one)
        for one in found:
            heappush(self._open, (-one.end, one.order, one))
        return found


def _is_stored(
    own: Entry,
    line: int,
    known: dict[tuple[int, int], Entry],
    joined: _Joined,
    ledger: Ledger,
    rules: Rules,
    told: Story,
) -> Iterator[Broken]:
    found = known.get(own.order)
    if found is None:
        if joined.contain(own) or not ledger.complete:
            return
        text = f"{own.place}: the ledger does not contain this commit: {own}"
        context = *told.around(line), *_near(known.values(), own.start)
        yield Broken("ledger", text, own.partition, own.order, context)
        return
    same = (found.end, found.kind) == (own.end, own.kind)
    counted = rules.counted and found.counts is not None
    if not same or (counted and found.counts != own.counts):
        text = f"{own.place}: the event and the ledger differ: {own}; {found}"
        context = told.around(line)
        yield Broken("ledger", text, own.partition, own.order, context)


def _replayed(tp: TopicPartition, entries: Sequence[Entry], told: Story) -> Iterator[Broken]:
    """What an event says to have been committed before is in the ledger."""
    stored = Covered(OffsetRange(one.start, one.end) for one in entries)
    for epoch in chain(told.epochs, tp):
        for one in epoch.earlier.get(tp, ()):
            for left in stored.lacks(one):
                text = f"epoch {epoch.number} has found {tp} {left} committed, and nothing has"
                yield _missing(tp, left, f"{text} committed it", entries, epoch, told)


def _started(
    tp: TopicPartition, entries: Sequence[Entry], ledger: Ledger, told: Story
) -> Iterator[Finding]:
    """Commits begin at the position at which the partition was begun, and after each reset at its
    target."""
    held = ledger.positions.get(tp)
    if held is None:
        return
    epoch = next(chain(told.epochs, tp), None)
    if epoch is not None and tp in epoch.begun:
        yield from _begun(tp, epoch.begun[tp], epoch, entries, held, told)
    for one in told.epochs:
        if one.moved is not None and tp in one.moved:
            since = [entry for entry in entries if entry.epoch > one.number]
            yield from _begun(tp, one.moved[tp], one, since, held, told)


def _begun(
    tp: TopicPartition,
    start: int,
    epoch: Epoch,
    entries: Sequence[Entry],
    held: Held,
    told: Story,
) -> Iterator[Finding]:
    """The first of some entries begins at a position, or a later reset has passed over what is
    before it."""
    below = [one for one in entries if one.kind != AHEAD or one.start < held.position]
    below.sort(key=lambda one: (one.start, one.epoch))
    end = below[0].start if below else _led_to(tp, held, told)
    after = next((one.epoch for one in below if one.kind != AHEAD), held.epoch + 1)
    if end <= start:
        return
    why = explained_by(told)(tp, start, end, epoch.number, after)
    left = OffsetRange(start, end)
    if why is None:
        text = (
            f"{tp} was {'begun at' if epoch.moved is None else 'reset to'} {start} by epoch"
            f" {epoch.number}, and nothing has committed {left}"
        )
        yield _missing(tp, left, text, entries, epoch, told)
    elif why:
        yield Unknown(f"{tp}: nothing has committed {left}; {why}", tp)


def _led_to(tp: TopicPartition, held: Held, told: Story) -> int:
    """The position of the ledger, but not above the one to which the events of its epoch have led:
    :func:`_stands` reports what is above it."""
    reached = [one.reached(tp) for one in chain(told.epochs, tp) if one.number == held.epoch]
    return min([held.position, *reached])


def _missing(
    tp: TopicPartition,
    left: OffsetRange,
    text: str,
    entries: Sequence[Entry],
    epoch: Epoch,
    told: Story,
) -> Broken:
    context = *told.around(epoch.at), *_near(entries, left.end)
    return Broken("missing", text, tp, (epoch.number, left.start), context)


def _near(entries: Iterable[Entry], offset: int) -> tuple[str, ...]:
    """The entries around an offset."""
    near = sorted(entries, key=lambda one: (one.start, one.epoch))
    return shown(near, next((i for i, one in enumerate(near) if one.start >= offset), len(near)))


def _is_told(
    entry: Entry, epoch: Epoch, found: Covered, entries: Sequence[Entry], told: Story
) -> Iterator[Broken]:
    tp = entry.partition
    if not epoch.covers(tp):
        text = f"epoch {entry.epoch} has not taken {tp} over, and has committed: {entry}"
        yield Broken("partition", text, tp, entry.order, told.around(epoch.at))
        return
    if not epoch.may_contain(entry, found):
        context = *told.around(epoch.at), *_near(entries, entry.start)
        text = f"no event tells of this commit of the ledger: {entry}"
        yield Broken("log", text, tp, entry.order, context)


def _is_fenced(
    tp: TopicPartition, epoch: Epoch, entries: Iterable[Entry], told: Story
) -> Iterator[Broken]:
    """Earlier epochs have committed nothing behind the position at which this one was opened.

    Args:
        tp: the partition.
        epoch: this epoch.
        entries: those of the epoch before it, and of earlier ones of which no event tells.
        told: the log.
    """
    at, beyond = epoch.opened[tp], set(epoch.beyond.get(tp, ()))
    kept = (epoch.moved or {}).get(tp, 0)  # no event tells which ranges a reset has found below it
    for entry in entries:
        undone = 0 < entry.superseded <= epoch.number
        found = entry.end <= kept or OffsetRange(entry.start, entry.end) in beyond
        if entry.kind == AHEAD and found:
            continue
        if entry.epoch < epoch.number and entry.end > at and not undone:
            text = (
                f"epoch {entry.epoch} has committed after epoch {epoch.number} had taken {tp} over"
                f" at {at}: {entry}"
            )
            yield Broken("fence", text, tp, entry.order, told.around(epoch.at))


def _are_sums(
    tp: TopicPartition, entries: Iterable[Entry], told: Story, rules: Rules
) -> Iterator[Finding]:
    """Joined ranges have the sums of their parts."""
    own = [one for epoch in told.epochs for one, _ in epoch.own.get(tp, ())
           if one.kind in (DATA, HOLE, AHEAD)]  # fmt: skip
    own.sort(key=lambda one: one.start)
    for joined in entries:
        if joined.kind == JOINED:
            first, end = (bisect_left(own, at, key=lambda one: one.start)
                          for at in (joined.start, joined.end))  # fmt: skip
            inside = (one for one in own[first:end] if one.end <= joined.end)
            yield from _is_sum(joined, [o for o in inside if o.epoch <= joined.epoch], rules)


def _is_sum(joined: Entry, parts: Sequence[Entry], rules: Rules) -> Iterator[Finding]:
    """A joined range has the sums of its parts, which ascend, if the log contains all of them."""
    tp = joined.partition
    if any(one.end > other.start for one, other in pairwise(parts)):
        parts = _latest(parts)
    ranges = [OffsetRange(one.start, one.end) for one in parts]
    if OffsetRange(joined.start, joined.end).minus(ranges):
        yield Unknown(
            f"the ledger has joined the steps of {joined}; no log contains all of them", tp
        )
        return
    sums = sum((one.counts or NO_RECORDS for one in parts), NO_RECORDS)
    if rules.counted and joined.counts != sums:
        text = f"{joined} was joined from ranges that have other sums: {sums}"
        context = tuple(str(one) for one in parts[-2 * AROUND :])
        yield Broken("ledger", text, tp, joined.order, context)


def _latest(parts: Iterable[Entry]) -> list[Entry]:
    """Without the ranges that a later epoch has committed again, after a reset."""
    ordered = sorted(parts, key=lambda one: (-one.epoch, one.start))
    kept: list[Entry] = []  # disjoint, ascending
    for one in ordered:
        at = bisect_right(kept, one.start, key=lambda it: it.end)
        if at == len(kept) or one.end <= kept[at].start:
            kept.insert(at, one)
    return kept


def _stands(tp: TopicPartition, ledger: Ledger, later: Story, told: Story) -> Iterator[Finding]:
    """The position of the ledger is the one to which the last epoch has led."""
    last = next(chain(list(reversed(told.epochs)), tp), None)
    held = ledger.positions.get(tp)
    if last is None:
        return
    order = (last.number, last.known(tp))
    context = told.around(len(told.lines))
    if held is None:
        yield Broken("position", f"the ledger has no position for {tp}", tp, order, context)
        return
    if held.epoch not in {one.number for one in later.epochs}:
        yield Unknown(f"{tp} is held by epoch {held.epoch}, of which no event tells", tp)
    elif not any(one.covers(tp) or one.lossy for one in later.epochs if one.number == held.epoch):
        text = f"{tp} is held by epoch {held.epoch}, which has not taken it over"
        yield Broken("epoch", text, tp, order, context)
        return
    if held.epoch < last.number:
        text = (
            f"{tp} is held by epoch {held.epoch}, and epoch {last.number} has held it: the ledger"
            " was put back to an older state"
        )
        yield Broken("epoch", text, tp, order, context)
        return
    grown = next(one for one in reversed(later.epochs) if one.number == last.number)
    low, high = last.known(tp), grown.reached(tp)
    if low <= held.position <= high or grown.lossy:
        return
    where = f"[{low}, {high}]" if low != high else str(low)
    text = f"{tp} is at {held.position}, and the events of epoch {last.number} led to {where}"
    if held.epoch == last.number:
        yield Broken("position", text, tp, order, context)
    elif held.position < low:
        yield Unknown(f"{text}: epoch {held.epoch} was a reset, of which no event tells?", tp)


def explained_by(told: Story) -> Explained:
    """Explains passed offsets by resets that the log contains, or may lack."""

    def explained(tp: TopicPartition, start: int, end: int, before: int, after: int) -> str | None:
        between = [one for one in told.epochs if before < one.number < after]
        resets = [
            (one.opened.get(tp, start), one.moved[tp])
            for one in between
            if one.moved and tp in one.moved
        ]
        ends = [min(to for _, to in resets[at:]) for at in range(len(resets))]
        jumps = [
            OffsetRange(of, end) for (of, _), end in zip(resets, ends, strict=True) if of < end
        ]
        if not OffsetRange(start, end).minus(jumps):
            return ""
        if len(between) >= after - before - 1:
            return None
        return (
            f"an epoch between {before} and {after} may have been a reset, of which no event tells"
        )

    return explained


def begun_in(told: Story) -> Callable[[TopicPartition], bool]:
    """True if an event tells where a partition begins."""

    def begun(tp: TopicPartition) -> bool:
        first = next(chain(told.epochs, tp), None)
        return first is not None and tp in first.begun

    return begun


def proven_by(told: Story, ledger: Ledger) -> Callable[[TopicPartition], bool]:
    """True if the log, with what is left of the ledger, contains every step of a partition."""

    def proven(tp: TopicPartition) -> bool:
        epochs, held = list(chain(told.epochs, tp)), ledger.positions.get(tp)
        if not epochs or held is None or held.epoch != epochs[-1].number:
            return False
        if any(one.lossy for one in epochs) or tp not in epochs[0].begun:
            return False
        stored = grouped((one.epoch, OffsetRange(one.start, one.end)) for one in ledger.of(tp))
        ends = [*(one.opened.get(tp, 0) for one in epochs[1:]), held.position]
        return all(
            _is_covered(one, tp, end, stored.get(one.number, ()))
            for one, end in zip(epochs, ends, strict=True)
        )

    return proven


def _is_covered(epoch: Epoch, tp: TopicPartition, end: int, stored: Iterable[OffsetRange]) -> bool:
    """The steps behind the last event of an epoch are in the ledger."""
    at = epoch.known(tp)
    return end <= at or not OffsetRange(at, end).minus(stored)
