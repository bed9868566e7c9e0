"""The event log alone: what each epoch says of its positions, its batches and its commits.

A run's lines are read in their order. Lines of several runs may be in another order than their
commits: a run whose last commit took effect before it was fenced may tell of it after the newer run
has opened. So epochs are compared by their positions, not by the order of their lines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.ranges import OffsetRange, TopicPartition, from_tree, grouped
from oncely.verify import log as of
from oncely.verify.log import Line, Log
from oncely.verify.reading import AHEAD, GAP, Covered, Entry, Rules
from oncely.verify.report import Broken

_AROUND = 4  # lines that are shown before and after a broken one


@dataclass
class Batch:
    """A planned batch.

    Attributes:
        number: its number in the epoch.
        planned: its ranges.
        told: the ranges that have taken effect, with those of earlier attempts.
        ended: its end was told.
    """

    number: int
    planned: Mapping[TopicPartition, tuple[int, int]]
    told: list[Entry] = field(default_factory=list)
    ended: bool = False


@dataclass
class Epoch:
    """The events of one run with one epoch; or of a reset.

    Attributes:
        number: the epoch.
        run: the name of the process.
        at: the index of the line that opened it.
        every: all partitions were taken over.
        opened: position by partition when it was opened; of a reset, those before it.
        moved: of a reset, the positions after it; None if it is a run.
        now: the positions that the events have led to.
        most: the positions up to which unreported commits may have led.
        own: the committed ranges that took effect in this epoch, with their lines.
        earlier: the ranges that were found committed, by an attempt that told nothing.
        batches: its batches.
        begun: where partitions begin, of those that no run had moved, or that were added.
        lossy: events of it are missing, as the log says.
        beyond: the ranges beyond the positions that had taken effect when it was opened.
    """

    number: int
    run: str
    at: int
    every: bool
    opened: Mapping[TopicPartition, int]
    moved: Mapping[TopicPartition, int] | None = None
    now: dict[TopicPartition, int] = field(default_factory=dict)
    most: dict[TopicPartition, int] = field(default_factory=dict)
    own: dict[TopicPartition, list[tuple[Entry, int]]] = field(default_factory=dict)
    earlier: dict[TopicPartition, list[OffsetRange]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    begun: dict[TopicPartition, int] = field(default_factory=dict)
    lossy: bool = False
    beyond: Mapping[TopicPartition, Sequence[OffsetRange]] = field(default_factory=dict)

    def covers(self, tp: TopicPartition) -> bool:
        """True if the epoch has taken the partition over."""
        return tp in self.opened or tp in self.begun

    @property
    def open_batch(self) -> Batch | None:
        """The batch whose end was not told."""
        return self.batches[-1] if self.batches and not self.batches[-1].ended else None

    def known(self, tp: TopicPartition) -> int:
        """The position that certainly was reached."""
        ends = (one.end for one, _ in self.own.get(tp, ()) if one.kind != AHEAD)
        return self._moved_on(tp, max([self.now.get(tp, 0), *ends]))

    def _moved_on(self, tp: TopicPartition, position: int) -> int:
        """A position moves over the ranges beyond it that have taken effect."""
        ahead = (one for one, _ in self.own.get(tp, ()) if one.kind == AHEAD)
        done = [OffsetRange(one.start, one.end) for one in ahead]
        for one in sorted([*done, *self.beyond.get(tp, ())]):
            if one.start <= position:
                position = max(position, one.end)
        return position

    def reached(self, tp: TopicPartition) -> int:
        """The position that commits may have reached, also those of which no event tells."""
        left = self.open_batch
        planned = left.planned.get(tp, (0, 0))[1] if left else 0
        return self._moved_on(tp, max(self.known(tp), planned, self.most.get(tp, 0)))

    def may_contain(self, one: Entry, earlier: Covered) -> bool:
        """True if the ledger may have this commit of the epoch although no event tells of it.

        A batch that has no end, and a chunk whose task was lost: another attempt has found its
        range committed.

        Args:
            one: the commit.
            earlier: :attr:`earlier` of its partition.
        """
        left = self.open_batch
        tp, allowed = one.partition, list[OffsetRange]()
        if left is not None and tp in left.planned:
            allowed.append(OffsetRange(*left.planned[tp]))
        if self.most.get(tp, 0) > self.now.get(tp, 0):  # a gap that was found
            allowed.append(OffsetRange(self.now[tp], self.most[tp]))
        lacking = earlier.lacks(OffsetRange(one.start, one.end))
        return self.lossy or not any(part.minus(allowed) for part in lacking)


_REPLAYED = "replayed"


@dataclass
class Story:
    """The log by epochs.

    Attributes:
        lines: all lines.
        epochs: ascending by number; of two with the same number, in the order of their lines.
        broken: the steps that a single run must not take.
    """

    lines: Sequence[Line]
    epochs: list[Epoch] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    headless: set[str] = field(default_factory=set)
    """Runs whose first events are missing: their file was cut at its beginning."""
    lossy: set[str] = field(default_factory=set)
    """Runs that could not write all of their events."""

    def around(self, at: int) -> tuple[str, ...]:
        """The lines around an index, and the lines of the same run before it."""
        own = self._of_run[self.lines[at].event.run] if at < len(self.lines) else []
        before = bisect_left(own, at)
        same = own[max(0, before - _AROUND) : before]
        near = {*same, *range(max(0, at - 2), min(len(self.lines), at + _AROUND))}
        return of.shown(self.lines[i] for i in sorted(near))

    @cached_property
    def _of_run(self) -> Mapping[str, list[int]]:
        """The indices of each run's lines."""
        return grouped((line.event.run, at) for at, line in enumerate(self.lines))


def story(log: Log, rules: Rules) -> Story:
    """The log by epochs; a function of its lines."""
    told = Story(log.lines)
    reader = _Reader(told, rules)
    for at, line in enumerate(log.lines):
        reader.take(at, line.event)
    told.epochs.sort(key=lambda one: (one.number, one.at))
    return told


class _Reader:
    """Reads the lines of all runs in their order."""

    def __init__(self, told: Story, rules: Rules) -> None:
        self._told, self._rules = told, rules
        self._runs: dict[str, dict[int, Epoch]] = {}  # the epochs of a run that may still commit
        self._assigned: dict[str, set[TopicPartition]] = {}  # of runs that are members of a group
        self._numbers: set[int] = set()
        self._started: set[str] = set()

    def take(self, at: int, event: of.Event) -> None:
        """Take the next line."""
        if event.run not in self._started and not isinstance(event, of.Started):
            self._told.headless.add(event.run)
        match event:
            case of.Opened():
                now = from_tree(event.positions)
                begun = now if event.first_start else of.numbers(event.begun)
                self._open(at, event, Epoch(
                    event.epoch or 0, event.run, at, event.every_partition, now, now=dict(now),
                    begun={tp: now[tp] for tp in begun if tp in now}, beyond=of.beyond(event),
                ))  # fmt: skip
            case of.Reset():
                before, after = from_tree(event.before), from_tree(event.positions)
                self._open(at, event, Epoch(
                    event.epoch or 0, event.run, at, True, before, after, dict(after)
                ))  # fmt: skip
            case of.EventsLost():
                self._told.lossy.add(event.run)
                for one in self._told.epochs:
                    one.lossy |= one.run == event.run
            case _ if isinstance(event, of.InEpoch):
                self._in_epoch(at, event)
            case of.Assigned() | of.Revoked() | of.Lost():
                self._changed(event)
            case of.Started():
                self._started.add(event.run)
            case of.Closed():
                self._runs.pop(event.run, None)
                self._assigned.pop(event.run, None)
            case _:
                pass

    def _changed(self, event: of.Assigned | of.Revoked | of.Lost) -> None:
        """The assignment of a member of a group has changed."""
        changed = set(of.numbers(event.partitions))
        before = self._assigned.get(event.run, set())
        assigned = before | changed if isinstance(event, of.Assigned) else before - changed
        self._assigned[event.run] = assigned

    def _open(self, at: int, event: of.Opened | of.Reset, epoch: Epoch) -> None:
        before = self._runs.get(event.run, {})
        if before and max(before) >= epoch.number:
            text = f"epoch {epoch.number} was opened by a run that had epoch {max(before)} before"
            self._wrong("epoch", text, at, None, (epoch.number, 0))
        if epoch.number in self._numbers:
            text = (
                f"epoch {epoch.number} was given out twice: the ledger was put back to an older"
                " state"
            )
            self._wrong("epoch", text, at, None, (epoch.number, 0))
        self._numbers.add(epoch.number)
        # A run of some partitions keeps the others under their epochs.
        kept = before if not epoch.every else {}
        self._runs[event.run] = {**kept, epoch.number: epoch}
        self._told.epochs.append(epoch)

    def _in_epoch(self, at: int, event: of.InEpoch) -> None:
        epochs = self._runs.get(event.run, {})
        epoch = epochs.get(event.epoch or 0)
        if epoch is None and event.run in self._told.headless | self._told.lossy:
            return
        if epoch is None or epoch.moved is not None:
            has = f"epoch {max(epochs)}" if epochs else "none"
            text = f"an event of epoch {event.epoch}, of a run that has {has}"
            self._wrong("epoch", text, at, None, (event.epoch or 0, 0))
            return
        match event:
            case of.Planned():
                self._planned(at, event, epoch)
            case of.RangeCommitted():
                self._committed(at, event, epoch)
            case of.BatchCommitted():
                self._ended(at, event, epoch)
            case of.PartitionAdded():
                tp = of.at(event)
                if epoch.covers(tp):
                    self._wrong("partition", f"{tp} is added a second time",
                                at, tp, (epoch.number, event.position))  # fmt: skip
                    return
                epoch.begun[tp] = epoch.now[tp] = event.position
            case of.GapFound():
                self._gap(at, event, epoch)

    def _planned(self, at: int, event: of.Planned, epoch: Epoch) -> None:
        left = epoch.open_batch
        if left is not None and not epoch.lossy:
            text = f"batch {left.number} of epoch {epoch.number} has no end"
            self._wrong("log", text, at, None, (epoch.number, _first(left)))
        planned = {tp: pair for tp, pair in of.ranges(event).items() if 0 <= pair[0] <= pair[1]}
        if len(planned) < len(of.ranges(event)):
            text = "not all of the planned ranges are ranges of offsets"
            self._wrong("log", text, at, None, (epoch.number, 0))
        # A run of some partitions is a member of a group, which assigns them.
        assigned = self._assigned.get(event.run, None if epoch.every else set())
        if event.run in self._told.headless | self._told.lossy:
            assigned = None
        for tp, (start, end) in sorted(planned.items()):
            order = (epoch.number, start)
            why = "" if epoch.covers(tp) else "it has not taken that partition over"
            if assigned is not None and tp not in assigned:
                why = "the group has not assigned that partition to it"
            if why:
                text = f"epoch {epoch.number} has planned {tp} [{start}, {end}), and {why}"
                self._wrong("partition", text, at, tp, order)
            elif start != epoch.now[tp] and not (epoch.lossy or self._rules.timed):
                text = f"{tp} [{start}, {end}) is planned, and the position is {epoch.now[tp]}"
                self._wrong("missing" if start > epoch.now[tp] else "overlap", text, at, tp, order)
        epoch.batches.append(Batch(event.batch, planned))

    def _committed(self, at: int, event: of.RangeCommitted, epoch: Epoch) -> None:
        tp, (start, end) = of.at(event), event.range
        order = (epoch.number, start)
        if not 0 <= start <= end:
            self._wrong("log", "no range of offsets", at, tp, order)
            return
        counts = Counts(event.records, event.rows, event.rejects, event.filtered)
        kind = _REPLAYED if event.replayed else event.kind
        one = Entry(tp, start, end, epoch.number, kind, counts, place=self._place(at))
        batch = epoch.open_batch
        within = batch.planned.get(tp) if batch is not None and kind != GAP else None
        if kind == GAP and tp in epoch.most:
            within = epoch.now[tp], epoch.most.pop(tp)
            epoch.now[tp] = end
        if within is None or not (within[0] <= start and end <= within[1]):
            if not epoch.covers(tp):
                text, rule = "of a partition that it has not taken over", "partition"
            else:
                text, rule = "that no plan contains", "log"
            text = f"epoch {epoch.number} has committed a range {text}"
            if not epoch.lossy:
                self._wrong(rule, text, at, tp, order)
            return
        if batch is not None:
            batch.told.append(one)
        if event.replayed:
            epoch.earlier.setdefault(tp, []).append(OffsetRange(start, end))
        elif start < end:
            epoch.own.setdefault(tp, []).append((one, at))

    def _ended(self, at: int, event: of.BatchCommitted, epoch: Epoch) -> None:
        batch, ends = epoch.open_batch, of.positions(event.positions)
        order = (epoch.number, min(ends.values(), default=0))
        if batch is None or batch.number != event.batch:
            if not epoch.lossy:
                text = f"batch {event.batch} ends, and it was not planned"
                self._wrong("log", text, at, None, order)
            epoch.now |= ends
            return
        batch.ended = True
        own = grouped((one.partition, OffsetRange(one.start, one.end)) for one in batch.told)
        for tp, (start, end) in sorted(batch.planned.items()):
            if ends.get(tp) != end:
                text = f"{tp} was planned up to {end}, and is at {ends.get(tp)}"
                self._wrong("log", text, at, tp, (epoch.number, start))
            elif not (epoch.lossy or self._rules.timed):
                self._refuse_gaps(at, epoch, batch, tp, own.get(tp, ()))
        epoch.now |= {tp: end for tp, end in ends.items() if tp in batch.planned}
        done = sum((one.counts or NO_RECORDS for one in batch.told), NO_RECORDS)
        told = (event.records, event.rows, event.rejects)
        sums = (done.records, done.rows, done.rejects)
        if told != sums and not epoch.lossy:
            text = f"the counts of the batch are {told}, and those of its ranges are {sums}"
            self._wrong("log", text, at, None, order)

    def _refuse_gaps(
        self, at: int, epoch: Epoch, batch: Batch, tp: TopicPartition, told: Iterable[OffsetRange]
    ) -> None:
        planned = OffsetRange(*batch.planned[tp])
        for left in planned.minus(told):
            text = (
                f"batch {batch.number} of epoch {epoch.number} has ended, and no event tells that"
                f" {tp} {left} was committed"
            )
            self._wrong("missing", text, at, tp, (epoch.number, left.start))

    def _gap(self, at: int, event: of.GapFound, epoch: Epoch) -> None:
        tp, (start, end) = of.at(event), event.range
        if not epoch.covers(tp) or start != epoch.now[tp] or end < start:
            text = "the gap does not begin at the position"
            self._wrong("missing", text, at, tp, (epoch.number, start))
            return
        epoch.most[tp] = end

    def _place(self, at: int) -> str:
        return self._told.lines[at].place

    def _wrong(
        self, rule: str, text: str, at: int, tp: TopicPartition | None, order: tuple[int, int]
    ) -> None:
        told = f"{self._place(at)}: {text}"
        self._told.broken.append(Broken(rule, told, tp, order, self._told.around(at)))


def _first(batch: Batch) -> int:
    return min((start for start, _ in batch.planned.values()), default=0)


def partitions(epochs: Iterable[Epoch]) -> list[TopicPartition]:
    """All partitions of some epochs."""
    return sorted({tp for one in epochs for tp in (*one.opened, *one.begun, *(one.moved or ()))})


def chain(epochs: Sequence[Epoch], tp: TopicPartition) -> Iterator[Epoch]:
    """The epochs that have taken a partition over, ascending."""
    return (one for one in epochs if one.covers(tp))
