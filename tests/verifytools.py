"""Histories for the check of the state machine: a simulated ledger, and the log of its runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from oncely.core import events
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.pipeline.event_log import described
from oncely.secrets import Secrets
from oncely.verify.check import check
from oncely.verify.log import Log, parsed, read
from oncely.verify.reading import COMMITS, Entry, Held, Ledger, Rules, read_ledger, rules_of
from oncely.verify.report import Report

NAME = "p"
ROW_BY_ROW = Rules(one_row=True)


def verified(settings: Any, *logs: Path) -> Report:
    """The result of ``oncely verify`` for a real pipeline."""
    before = read(logs, settings.name)
    ledger = read_ledger(settings)
    return check(ledger, read(logs, settings.name), rules_of(settings), before)


@dataclass
class Run:
    """A process: its name and its epoch; ``log`` is False without an event log."""

    name: str
    epoch: int = 0
    log: bool = True
    batch: int = 0


@dataclass
class Simulated:
    """A ledger as in SQL, and the lines of its runs; every method is a legal step."""

    random: Random
    epoch: int = 0
    at: dict[TopicPartition, int] = field(default_factory=dict)
    start: dict[TopicPartition, int] = field(default_factory=dict)
    held: dict[TopicPartition, int] = field(default_factory=dict)
    given: dict[TopicPartition, int] = field(default_factory=dict)  # the end of the last plan
    beyond: dict[TopicPartition, list[OffsetRange]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    clock: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    whole: bool = True  # every step was told

    # -- steps -----------------------------------------------------------------------------

    def open(self, *, log: bool = True, told: bool = True) -> Run:
        """A new run takes all partitions over."""
        run = Run(f"run{len(self.runs)}", log=log)
        self.runs.append(run)
        if log:
            self.tell(run, "started", {"version": 1, "cut": 0})
        self.take(run, told=told)
        return run

    def take(
        self, run: Run, *, told: bool = True, only: Iterable[TopicPartition] | None = None
    ) -> None:
        """The next epoch, and the positions."""
        self.epoch += 1
        run.epoch, run.batch = self.epoch, 0
        first = not self.at
        if first:
            start = self.random.choice([0, 100])
            self.at = {TopicPartition("t", n): start for n in range(2)}
            self.start = dict(self.at)
        mine = sorted(self.at if only is None else only)
        self.held |= dict.fromkeys(mine, run.epoch)
        positions = {tp: self.at[tp] for tp in mine}
        self.given |= positions
        beyond = {tp: self.beyond[tp] for tp in mine if self.beyond.get(tp)}
        if told:
            event = events.PipelineOpened(
                NAME, run.epoch, positions, first, only is None, beyond=beyond
            )
            self.hear(run, event)
        if not (run.log and told):
            self.whole = False

    def fail_to_open(self) -> None:
        """An opener that dies has used an epoch."""
        self.epoch += 1

    def batch(self, run: Run, *, dies: bool = False, threads: bool = False) -> None:
        """A batch, told when its job has ended; ``dies``: it is not told.

        ``threads``: several have divided it by key.
        """
        own = [tp for tp in sorted(self.at) if self.held[tp] == run.epoch]
        ranges = {
            tp: OffsetRange(self.given[tp], self.given[tp] + self.random.randint(1, 40))
            for tp in own
            if self.random.random() < 0.8
        }
        if not ranges:
            return
        self.hear(run, events.BatchPlanned(run.batch, ranges))
        told: list[events.Event] = []
        for tp, range_ in ranges.items():
            commits = self._in_parts if threads else self._commits
            told += commits(run, tp, range_, dies=dies)
            self.given[tp] = range_.end
        if dies:
            return
        for one in told:
            self.hear(run, one)
        done = [one for one in told if isinstance(one, events.RangeCommitted)]
        self.hear(
            run,
            events.BatchCommitted(
                run.batch, sum(one.records for one in done), sum(one.rows for one in done),
                sum(one.rejects for one in done), 0.1, {tp: r.end for tp, r in ranges.items()},
            ),
        )  # fmt: skip
        run.batch += 1

    def gap(self, run: Run, *, dies: bool = False) -> None:
        """Lost records at the beginning of a query."""
        tp = self.random.choice([tp for tp in sorted(self.at) if self.held[tp] == run.epoch])
        end = min([self.at[tp] + self.random.randint(1, 9), *(r.start for r in self.of(tp))])
        lost = OffsetRange(self.at[tp], end)
        self.hear(run, events.GapFound(tp, lost))
        if dies and self.random.random() < 0.5:
            return
        self.commit(run, tp, lost, Counts(0, 0, 0, 0), "gap")
        self.given[tp] = lost.end
        if not dies:
            self.hear(run, events.RangeCommitted(tp, lost, 0, 0, 0, 0, kind="gap"))

    def add(self, run: Run) -> None:
        """A partition is added to the topic."""
        tp = TopicPartition("t", len(self.at))
        self.at[tp], self.held[tp] = self.random.choice([0, 5]), run.epoch
        self.start[tp] = self.at[tp]
        self.given[tp] = self.at[tp]
        self.hear(run, events.PartitionAdded(tp, self.at[tp]))

    def reset(self, *, log: bool = True, by: int | None = None) -> None:
        """Positions are moved forward or back, ``by`` some offsets."""
        before, self.epoch = dict(self.at), self.epoch + 1
        for tp, at in before.items():
            to = max(0, at + (self.random.randint(-60, 30) if by is None else by))
            self.at[tp], self.held[tp], self.beyond[tp] = to, self.epoch, []
            self.entries = [
                replace(one, superseded=self.epoch)
                if one.partition == tp and one.end > to and not one.superseded
                else one
                for one in self.entries
            ]
        run = Run(f"reset{self.epoch}", self.epoch, log)
        self.tell(run, "started", {"version": 1, "cut": 0})
        self.hear(run, events.PositionsReset(self.epoch, before, dict(self.at)))
        self.whole &= log

    def join(self) -> None:
        """The history's oldest ranges are joined."""
        for tp in self.at:
            chain = [e for e in self.in_force(tp) if e.kind != "gap" and e.end <= self.at[tp]]
            run: list[Entry] = []
            for one in chain[: self.random.randint(0, len(chain))]:
                if run and run[-1].end != one.start:
                    break
                run.append(one)
            if len(run) < 2 or {e.kind for e in run} == {"ahead"}:
                continue
            counts = sum((one.counts or Counts(0, 0, 0, 0) for one in run), Counts(0, 0, 0, 0))
            whole = Entry(tp, run[0].start, run[-1].end, max(e.epoch for e in run), "joined",
                          counts, at=self.clock,
                          letters=sum(e.letters or 0 for e in run))  # fmt: skip
            self.entries = [e for e in self.entries if e not in run] + [whole]

    # -- parts -----------------------------------------------------------------------------

    def _commits(
        self, run: Run, tp: TopicPartition, range_: OffsetRange, *, dies: bool
    ) -> list[events.Event]:
        told = self._found(tp, range_)
        while self.at[tp] < range_.end:
            if dies and self.random.random() < 0.3:
                return told
            last = min([range_.end, *(one.start for one in self.of(tp))])
            end = self.random.randint(self.at[tp] + 1, last)
            one = OffsetRange(self.at[tp], end)
            hole = end == range_.end and self.random.random() < 0.3
            counts = Counts(0, 0, 0, 0) if hole else self.counts(one)
            self.commit(run, tp, one, counts, "hole" if hole else "data")
            if not hole and self.random.random() < 0.2:  # its attempt has told nothing
                told.append(events.RangeCommitted(tp, one, 0, 0, 0, 0, replayed=True))
            else:
                told.append(
                    events.RangeCommitted(
                        tp, one, counts.records, counts.rows, counts.rejects, counts.filtered,
                        kind="hole" if hole else "data",
                    )
                )  # fmt: skip
        return told

    def _in_parts(
        self, run: Run, tp: TopicPartition, range_: OffsetRange, *, dies: bool
    ) -> list[events.Event]:
        """Threads commit parts of a range in any order."""
        told, parts = self._found(tp, range_), []
        for left in range_.minus([OffsetRange(0, self.at[tp]), *self.of(tp)]):
            at = left.start
            while at < left.end:
                end = self.random.randint(at + 1, left.end)
                parts.append(OffsetRange(at, end))
                at = end
        self.random.shuffle(parts)
        for one in parts:
            if dies and self.random.random() < 0.3:
                return told
            counts, kind = self.counts(one), "ahead" if one.start > self.at[tp] else "data"
            self.commit(run, tp, one, counts, kind)
            told.append(
                events.RangeCommitted(
                    tp, one, counts.records, counts.rows, counts.rejects, counts.filtered,
                    kind=kind,  # type: ignore[arg-type]
                )
            )  # fmt: skip
        return told

    def of(self, tp: TopicPartition) -> list[OffsetRange]:
        """The finished ranges beyond the position."""
        return self.beyond.get(tp, [])

    def _found(self, tp: TopicPartition, range_: OffsetRange) -> list[events.Event]:
        """Parts of a range that had taken effect before."""
        left = range_.minus([OffsetRange(0, self.at[tp]), *self.of(tp)])
        return [
            events.RangeCommitted(tp, one, 0, 0, 0, 0, replayed=True) for one in range_.minus(left)
        ]

    def counts(self, one: OffsetRange) -> Counts:
        records = self.random.randint(0, one.end - one.start)
        rejects = self.random.randint(0, records)
        filtered = self.random.randint(0, records - rejects)
        rows = records - rejects - filtered
        # The digest of rows may be 0, once in 2**64: which is that of no rows.
        digest, recipe = (self.random.getrandbits(64) or 1, "r") if rows else (0, "")
        return Counts(records, rows, rejects, filtered, digest, recipe)

    def commit(
        self, run: Run, tp: TopicPartition, one: OffsetRange, counts: Counts, kind: str
    ) -> None:
        assert self.held[tp] == run.epoch
        self.clock += timedelta(seconds=1)
        replayed = self.random.choice([0, self.random.randint(0, counts.rejects)])
        self.entries.append(Entry(tp, one.start, one.end, run.epoch, kind, counts, at=self.clock,
                                  letters=counts.rejects - replayed))  # fmt: skip
        if replayed:
            change = Counts(0, replayed, -replayed, 0)
            self.entries.append(Entry(tp, one.start, one.end, run.epoch, "replay", change))
        if kind == "ahead":
            self.beyond[tp] = sorted([*self.of(tp), one])
            return
        self.at[tp] = one.end
        while self.of(tp) and self.of(tp)[0].start == self.at[tp]:
            self.at[tp] = self.beyond[tp].pop(0).end

    def in_force(self, tp: TopicPartition) -> list[Entry]:
        mine = [one for one in self.entries if one.partition == tp and one.kind in COMMITS]
        own = [one for one in mine if not one.superseded]
        return sorted(own, key=lambda one: one.start)

    def hear(self, run: Run, event: events.Event) -> None:
        self.tell(run, *described(event, Secrets()))

    def tell(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        if run.log:
            self.lines.append(
                line(self.clock.isoformat(), run.epoch or None, run.name, kind, fields)
            )

    # -- results ---------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        positions = {tp: Held(at, self.held[tp]) for tp, at in self.at.items()}
        return Ledger(NAME, self.epoch, positions, list(self.entries))

    def report(self) -> Report:
        return check(self.ledger, log_of(self.lines), ROW_BY_ROW)


def line(
    time: str, epoch: int | None, run: str, kind: str, fields: Mapping[str, Any], name: str = NAME
) -> str:
    head = {"time": time, "pipeline": name, "epoch": epoch, "run": run, "type": kind}
    return json.dumps({**head, **fields})


def log_of(lines: Iterable[str]) -> Log:
    return parsed("".join(f"{one}\n" for one in lines).encode(), NAME, "events")


STEPS: dict[str, Callable[[Simulated], None]] = {}


def _step(do: Callable[[Simulated], None]) -> Callable[[Simulated], None]:
    STEPS[do.__name__] = do
    return do


def _running(of: Simulated) -> Run:
    """The newest run, if it holds all partitions; else a new one."""
    if of.runs and all(epoch == of.runs[-1].epoch for epoch in of.held.values()):
        return of.runs[-1]
    return of.open(log=of.runs[-1].log if of.runs else True)


@_step
def batches(of: Simulated) -> None:
    run = _running(of)
    for _ in range(of.random.randint(1, 3)):
        of.batch(run)


@_step
def threads(of: Simulated) -> None:
    of.batch(_running(of), threads=True)


@_step
def killed_threads(of: Simulated) -> None:
    run = _running(of)
    told = len(of.lines)
    of.batch(run, threads=True, dies=of.random.random() < 0.7)
    del of.lines[max(told + 1, of.random.randint(told, len(of.lines))) :]  # the plan is told
    of.open()


@_step
def killed(of: Simulated) -> None:
    of.batch(_running(of), dies=True)
    of.open()


@_step
def failed(of: Simulated) -> None:
    run = _running(of)
    of.batch(run, dies=True)
    of.hear(run, events.BatchFailed("no answer", 1, 0.1))
    of.take(run)


@_step
def gap(of: Simulated) -> None:
    run = _running(of)
    of.take(run)
    of.gap(run)


@_step
def killed_in_a_gap(of: Simulated) -> None:
    run = _running(of)
    of.take(run)
    of.gap(run, dies=True)
    of.open()


@_step
def partition_added(of: Simulated) -> None:
    if len(of.at) < 4:
        of.add(_running(of))


@_step
def second_run(of: Simulated) -> None:
    """The first tells of its last batch after the second has opened."""
    run = _running(of)
    told = len(of.lines)
    of.batch(run)
    late = of.lines[told + 1 :]
    del of.lines[told + 1 :]
    of.open()
    of.lines += late
    of.hear(run, events.FencedOut(run.epoch, of.epoch))
    of.hear(run, events.RunClosed(False, "fenced"))


@_step
def some_partitions(of: Simulated) -> None:
    """A worker takes one partition; the others go on with theirs."""
    run = _running(of)
    worker = Run(f"worker{of.epoch}")
    of.tell(worker, "started", {"version": 1, "cut": 0})
    tp = of.random.choice(sorted(of.at))
    of.hear(worker, events.PartitionsChanged("assigned", frozenset({tp})))
    of.take(worker, only=[tp])
    of.batch(worker)
    of.batch(run)
    of.batch(worker)
    of.open()


def member(of: Simulated) -> None:
    """A member of a group takes partitions one after another, and commits under both epochs."""
    _running(of)
    name = f"member{of.epoch}"
    first, second = Run(name), Run(name)
    of.tell(first, "started", {"version": 1, "cut": 0})
    for run, tp in zip((first, second), sorted(of.at), strict=False):
        of.hear(run, events.PartitionsChanged("assigned", frozenset({tp})))
        of.take(run, only=[tp])
        of.batch(first)
    for run in (second, first, second):
        of.batch(run)
    of.hear(second, events.PartitionsChanged("revoked", frozenset(sorted(of.at)[:2])))
    of.open()


@_step
def reset(of: Simulated) -> None:
    _running(of)
    of.reset()


@_step
def nothing_opened(of: Simulated) -> None:
    of.fail_to_open()


@_step
def joined(of: Simulated) -> None:
    of.join()


def simulated(steps: Iterable[str], random: Random) -> Simulated:
    """A legal history; its last step is a whole batch."""
    of = Simulated(random)
    for one in steps:
        {**STEPS, "member": member}[one](of)
    of.batch(_running(of))
    of.hear(of.runs[-1], events.RunClosed(True))
    return of
