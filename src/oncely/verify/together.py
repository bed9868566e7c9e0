"""The epochs of an event log in a row, and compared with the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.verify.history import Explained
from oncely.verify.report import Broken, Finding, Unknown
from oncely.verify.runs import Epoch, Story, chain, partitions
from oncely.verify.state import (
    AHEAD,
    AROUND,
    COMMITS,
    DATA,
    HOLE,
    JOINED,
    Entry,
    Held,
    Ledger,
    Rules,
    shown,
)

# -- the log ---------------------------------------------------------------------------------------


def check_log(told: Story, rules: Rules) -> Iterator[Finding]:
    """Every epoch begins where the one before it has ended, and commits nothing after that."""
    yield from told.broken
    for run in sorted(told.headless):
        yield Unknown(f"the first events of run {run} are missing: its file begins later")
    for one in told.epochs:
        if one.lossy:
            yield Unknown(f"epoch {one.number} could not write all of its events")
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
    by_partition: dict[TopicPartition, list[Entry]] = {}
    for entry in ledger.history:
        if entry.kind in COMMITS and 0 <= entry.start <= entry.end:
            by_partition.setdefault(entry.partition, []).append(entry)
    for tp in sorted({*by_partition, *ledger.positions, *partitions(told.epochs)}):
        entries = by_partition.get(tp, [])
        if ledger.complete:
            yield from _replayed(tp, entries, earlier)
            yield from _started(tp, entries, ledger, earlier)
        yield from _commits(tp, entries, ledger, told, earlier, rules)
        for entry in entries:
            if entry.kind == JOINED:
                yield from _is_sum(entry, told, rules)
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
    joined = [one for one in entries if one.kind == JOINED]
    for epoch in chain(earlier.epochs, tp):
        for own, line in epoch.own.get(tp, ()):
            yield from _is_stored(own, line, known, joined, ledger, rules, earlier)
    own_orders = {own.order for epoch in epochs.values() for own, _ in epoch.own.get(tp, ())}
    for order, entry in known.items():
        if order not in own_orders:
            yield from _is_told(entry, epochs.get(entry.epoch), entries, told)
    before = 0
    for one in chain(told.epochs, tp):
        fenced = [e for e in known.values() if e.epoch == before or e.epoch not in epochs]
        yield from _is_fenced(tp, one, fenced, told)
        before = one.number


def _is_stored(
    own: Entry,
    line: int,
    known: dict[tuple[int, int], Entry],
    joined: Sequence[Entry],
    ledger: Ledger,
    rules: Rules,
    told: Story,
) -> Iterator[Broken]:
    found = known.get(own.order)
    if found is None:
        whole = any(one.covers(own.start, own.end) and one.epoch >= own.epoch for one in joined)
        if whole or not ledger.complete:
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
    stored = [OffsetRange(one.start, one.end) for one in entries]
    for epoch in chain(told.epochs, tp):
        for one in epoch.earlier.get(tp, ()):
            for left in one.minus(stored):
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
    if epoch is not None and (epoch.first or tp in epoch.added):
        start = epoch.added.get(tp, epoch.opened.get(tp, 0))
        yield from _begun(tp, start, epoch, entries, held, told)
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
    entry: Entry, epoch: Epoch | None, entries: Sequence[Entry], told: Story
) -> Iterator[Broken]:
    if epoch is None:
        return  # of a run without event log
    tp = entry.partition
    if not epoch.covers(tp):
        text = f"epoch {entry.epoch} has not taken {tp} over, and has committed: {entry}"
        yield Broken("partition", text, tp, entry.order, told.around(epoch.at))
        return
    if not epoch.may_contain(entry):
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
        entries: those of the epoch before it, and of epochs of which no event tells.
        told: the log.
    """
    if tp not in epoch.opened:
        return
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


def _is_sum(joined: Entry, told: Story, rules: Rules) -> Iterator[Finding]:
    """A joined range has the sums of its parts, if the log contains all of them."""
    tp = joined.partition
    parts = [own for epoch in told.epochs for own, _ in epoch.own.get(tp, ())
             if own.kind in (DATA, HOLE, AHEAD) and joined.covers(own.start, own.end)
             and own.epoch <= joined.epoch]  # fmt: skip
    if not _disjoint(parts):
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


def _disjoint(parts: list[Entry]) -> bool:
    parts.sort(key=lambda one: one.start)
    return all(one.end <= other.start for one, other in pairwise(parts))


def _latest(parts: Iterable[Entry]) -> list[Entry]:
    """Without the ranges that a later epoch has committed again, after a reset."""
    ordered = sorted(parts, key=lambda one: (-one.epoch, one.start))
    kept: list[Entry] = []
    for one in ordered:
        if not any(max(one.start, o.start) < min(one.end, o.end) for o in kept):
            kept.append(one)
    return sorted(kept, key=lambda one: one.start)


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


def proven_by(told: Story, ledger: Ledger) -> Callable[[TopicPartition], bool]:
    """True if the log, with what is left of the ledger, contains every step of a partition."""

    def proven(tp: TopicPartition) -> bool:
        epochs, held = list(chain(told.epochs, tp)), ledger.positions.get(tp)
        if not epochs or held is None or held.epoch != epochs[-1].number:
            return False
        if any(one.lossy for one in epochs) or not (epochs[0].first or tp in epochs[0].added):
            return False
        stored = ledger.of(tp)
        ends = [*(one.opened.get(tp, 0) for one in epochs[1:]), held.position]
        return all(_is_covered(one, tp, end, stored) for one, end in zip(epochs, ends, strict=True))

    return proven


def _is_covered(epoch: Epoch, tp: TopicPartition, end: int, stored: Iterable[Entry]) -> bool:
    """The steps behind the last event of an epoch are in the ledger."""
    at = epoch.known(tp)
    if end <= at:
        return True
    left = [OffsetRange(one.start, one.end) for one in stored if one.epoch == epoch.number]
    return not OffsetRange(at, end).minus(left)
