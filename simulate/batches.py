"""One seed of runs in batches: drivers, their tasks, hostile logs, faults, and calm after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from oncely.commit import path
from oncely.commit.run import CommitContext, OpenLedger
from oncely.core import events
from oncely.core.claim import Positions
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.base import Decoded
from oncely.errors import DataLost, Fenced, SourceMismatch, Unavailable
from oncely.kafka import reader
from oncely.runtimes import chunks
from oncely.runtimes.batches import commit, run
from oncely.runtimes.batches.commit import PartitionCommit
from oncely.runtimes.batches.run import BatchRun
from oncely.runtimes.chunks import ChunkBounds
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.takeover import Takeovers
from oncely.threads import StopSignal
from simulate.batch_store import BatchLedger, BatchStore
from simulate.jobs import BatchThread, ScriptedJobs, TaskCommit, wait
from simulate.logs import Logs, RangeConsumer, ScriptedSource
from simulate.schedule import Schedule, Steps, Violation, patience, step
from simulate.store import MemorySink

_ACTIONS = 140
_CALM = 400  # rounds
_DRIVERS = 2  # at the same time
_OFFSETS_A_TASK = 6
_BOUNDS = ChunkBounds(records=3, bytes=1 << 20, seconds=1e9)


class Numbers:
    """Decodes a record to its offset."""

    needs = frozenset[str]()
    schema = pa.schema([("offset", pa.int64())])

    def decode(self, records: pa.Table) -> Decoded:
        """A row for each record."""
        return Decoded(records.select(["offset"]), pa.array(np.arange(records.num_rows)))


class SteppedStop(StopSignal):
    """Waits until the schedule has moved the time on."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def wait(self, seconds: float) -> bool:
        """At least one step."""
        until = self._schedule.now + seconds
        while not self.draining:
            step()
            if self._schedule.now >= until:
                break
        return self.draining


class Driver:
    """One process that runs a pipeline in batches.

    Attributes:
        asleep: the number of actions for which it is paused.
        steps: its thread.
    """

    def __init__(self, world: BatchWorld, name: str, *, calm: bool = False) -> None:
        random = world.schedule.random
        self._world, self.name, self.asleep = world, name, 0
        self._source = ScriptedSource.of(world.schedule, world.logs)
        self.stop = SteppedStop(world.schedule)
        self.until_latest = not calm and random.random() < 0.3
        self._on_gap = "record" if calm or random.random() < 0.9 else "fail"
        self._trigger, self._limit = random.choice([0.0, 0.0, 1.0]), random.choice([4, 12, 100])
        self._jobs = ScriptedJobs(world.schedule, world.zombies, world.tell)
        self.steps = Steps(self._work)

    def _work(self) -> bool:
        ledger = BatchLedger(self._world.store, self.name, set())
        opened = OpenLedger(CommitContext(MemorySink(ledger), self._source, Numbers()))
        batches = PartitionCommit(opened, Unchanged(), self._jobs, _BOUNDS)
        mirror: Any = self
        takeovers = Takeovers(
            opened, self._source, "simulated", "earliest", self._on_gap, self._listen
        )
        return BatchRun(
            self._jobs, batches, takeovers, mirror, self._trigger, self._limit, self.stop
        ).run(until_latest=self.until_latest)

    # -- as a mirror -----------------------------------------------------------------------

    def start(self, positions: Positions) -> None:
        """The positions of a run that begins."""

    def put(self, positions: Positions) -> None:
        """The positions after a batch."""
        store = self._world.store
        if store.holds(self.name):
            ahead = {tp for tp, at in positions.items() if store.entries[tp].position < at}
            if ahead:
                raise Violation(f"{self.name} shows {sorted(ahead)} ahead of the ledger")

    def finish(self) -> None:
        """Nothing waits."""

    # -- what it promises ------------------------------------------------------------------

    def _listen(self, event: events.Event) -> None:
        self._world.tell(f"{self.name}: {event}")
        match event:
            case events.BatchPlanned(_, ranges):
                self._planned(ranges)
            case events.GapFound(tp, missing):
                self._world.told.setdefault(tp, []).append(missing)
            case events.BatchCommitted():
                self.put(event.positions)
            case events.BatchFailed():
                self._source.told = None

    def _planned(self, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        """Ranges end at the last stable offset, and begin in a log that was not cut."""
        store, (ends, cuts) = self._world.store, self._source.seen
        store.seen[self.name] = cuts
        self._source.set_goal()
        goal = (self._source.goal or {}) if self.until_latest else ends
        for tp, range_ in ranges.items():
            if range_.end > ends[tp]:
                raise Violation(f"{tp}: {range_} is planned, stable is {ends[tp]}")
            if range_.end > goal.get(tp, 0):
                raise Violation(f"{tp}: {range_} is planned, until {goal.get(tp)}")
            at = store.cut.get(tp, range_.start)
            if at < range_.start and (tp, at) in self._world.logs.cuts[:cuts]:
                raise Violation(f"{tp}: {range_} is planned, the log was cut at {at}")

    def has_goal(self) -> bool:
        """True if it had a goal, which the ledger has reached."""
        store = self._world.store
        reached = {tp: entry.position for tp, entry in store.entries.items()}
        done = all(reached.get(tp, 0) >= end for tp, end in self._source.least.items())
        return self.until_latest and (done or bool(self._world.logs.cuts))

    def explained(self, error: BaseException) -> bool:
        """True if the driver may end so."""
        world = self._world
        match error:
            case Fenced():
                return not world.store.holds(self.name)
            case Unavailable():
                return world.schedule.faults
            case DataLost():
                cut = self.until_latest and world.logs.cuts  # the goal was cut away
                return self._on_gap == "fail" and bool(world.told or cut)
            case SourceMismatch():
                # A run that another one, or an operator, has followed may have noticed it, too.
                known = bool(world.store.cuts())
                return known or (bool(world.logs.cuts) and not world.store.holds(self.name))
        return False


class BatchWorld:
    """Everything of one seed."""

    def __init__(self, seed: int | str, tell: Callable[[str], None]) -> None:
        self.schedule, self.tell = Schedule(f"batches {seed}"), tell
        random = self.schedule.random
        self.logs = Logs(self.schedule, random.randint(1, 3))
        self.store = BatchStore(self.schedule, self.logs)
        self.zombies: list[Steps] = []
        self.told: dict[TopicPartition, list[OffsetRange]] = {}
        self._drivers: list[Driver] = []
        self._numbers = itertools.count(1)
        hostile = Random(f"hostile {seed}")
        self._actions: list[tuple[float, Callable[[], None]]] = [
            (0.5, self._turn),
            (0.15, self.logs.grow),
            (0.04, self._zombie),
            (0.03, self._start),
            (0.02, self._pause),
            (0.02, self._kill),
            (0.01, self._ask_to_stop),
            (hostile.choice([0, 0.03]), self.logs.compact),
            (hostile.choice([0, 0.04]), self.logs.delete),
            (hostile.choice([0, 0.05]), self.logs.elect),
            (hostile.choice([0, 0, 0, 0.01]), self._cut),
            (hostile.choice([0, 0.02]), self.logs.add_partition),
        ]

    def run(self) -> None:
        """Faults, then calm; at the end everything has taken effect once.

        Raises:
            Violation: it has not.
        """
        try:
            for _ in self.schedule.play(self._actions, _ACTIONS, self._drivers, self.tell):
                self._ended()
            self._calm()
        finally:
            for steps in [*(one.steps for one in self._drivers), *self.zombies]:
                steps.kill()

    # -- what happens ----------------------------------------------------------------------

    def _turn(self) -> None:
        if not self._drivers:
            self._start()
        if awake := [one for one in self._drivers if not one.asleep]:
            steps = self.schedule.random.choice(awake).steps
            for _ in range(self.schedule.random.choice([1, 2, 4, 8])):
                steps.go()

    def _zombie(self) -> None:
        if self.zombies:
            steps = self.schedule.random.choice(self.zombies)
            for _ in range(self.schedule.random.randint(1, 6)):
                steps.go()

    def _start(self) -> None:
        if len(self._drivers) < _DRIVERS:
            self._drivers.append(Driver(self, f"driver {next(self._numbers)}"))

    def _pause(self) -> None:
        if self._drivers:
            self.schedule.random.choice(self._drivers).asleep = self.schedule.random.randint(3, 40)

    def _kill(self) -> None:
        if self._drivers:
            one = self.schedule.random.choice(self._drivers)
            self._drivers.remove(one)
            one.steps.kill()

    def _cut(self) -> None:
        self.logs.cut()
        tp, at = self.logs.cuts[-1]
        if tp in self.store.entries:
            self.store.beyond(tp, self.store.entries[tp].position, at)

    def _ask_to_stop(self) -> None:
        if self._drivers:
            self.schedule.random.choice(self._drivers).stop.ask()

    # -- what must hold --------------------------------------------------------------------

    def _ended(self) -> None:
        """Attempts and drivers that have ended."""
        for zombie in [one for one in self.zombies if one.future.done()]:
            self.zombies.remove(zombie)
            if isinstance(error := zombie.future.exception(), Violation):
                raise error
        for driver in [one for one in self._drivers if one.steps.future.done()]:
            self._drivers.remove(driver)
            error = driver.steps.future.exception()
            self.tell(f"{driver.name} ends: {error or driver.steps.future.result()}")
            if error is not None:
                if not driver.explained(error):
                    raise Violation(f"{driver.name} ends: {error!r}") from error
                if isinstance(error, SourceMismatch):
                    self.store.reset()
            elif not (driver.stop.draining or driver.has_goal()):
                raise Violation(f"{driver.name} ends, and has not reached its goal")

    def _calm(self) -> None:
        followed = self.schedule.random.choice([0, 0, 1])
        for tp in self.logs.partitions:
            if self.logs.open[tp]:
                self.logs.end_transaction(tp)
        for _ in range(_CALM):
            self.schedule.now += 1.0
            if not self._drivers:
                self._drivers.append(Driver(self, f"driver {next(self._numbers)}", calm=True))
            for steps in [*(one.steps for one in self._drivers), *self.zombies]:
                for _ in range(5):
                    steps.go()
            self._ended()
            if self._all_done():
                if not followed:
                    return
                followed -= 1  # by a newer run: the idle one must notice it
                self._drivers.append(Driver(self, f"driver {next(self._numbers)}", calm=True))
        raise Violation(f"not everything is committed: {self._behind()}")

    def _behind(self) -> dict[str, str]:
        entries = self.store.entries
        found = {
            str(tp): f"{entries[tp].position if tp in entries else None} of {end}"
            for tp, end in self.logs.ends.items()
            if tp not in entries or entries[tp].position < end
        }
        found |= {str(tp): "its log was cut" for tp in self.store.cut}
        only = self._drivers[0] if len(self._drivers) == 1 else None
        if only is None or only.until_latest or not self.store.holds(only.name):
            found["drivers"] = ", ".join(one.name for one in self._drivers)
        return found

    def _all_done(self) -> bool:
        if self.zombies or self._behind():
            return False
        for tp, log in self.logs.logs.items():
            done = [one for one in self.store.effects[tp] if one not in self.logs.compacted[tp]]
            gone = [one for one in log if any(one in gap for gap in self.store.gaps[tp])]
            wanted = [one for one in log if one >= self.store.begun[tp] and one not in gone]
            if done != wanted:
                raise Violation(f"{tp}: {wanted} were published, {done} took effect")
            untold = [
                one for gap in self.store.gaps[tp] for one in gap.minus(self.told.get(tp, []))
            ]
            if untold:
                raise Violation(f"{tp}: {untold} were passed over, and not told")
        return True


@contextmanager
def _scripted(world: BatchWorld) -> Iterator[None]:
    clock = SimpleNamespace(monotonic=lambda: world.schedule.now)

    def consumer(*_: object, **own: object) -> RangeConsumer:
        return RangeConsumer(world.schedule, world.logs, own["isolation.level"])

    class Commit(TaskCommit):
        schedule = world.schedule

    patches: list[tuple[Any, str, object]] = [
        (chunks, "Backoff", patience),
        (path, "Backoff", patience),
        (run, "ThreadPoolExecutor", BatchThread),
        (run, "wait", wait),
        (run, "time", clock),
        (reader, "time", clock),
        (reader, "make", consumer),
        (commit, "OFFSETS_A_TASK", _OFFSETS_A_TASK),
        (commit, "PipelinedCommit", Commit),
        (chunks, "isolate_crashes", lambda decoder, records: decoder.decode(records)),
    ]
    with ExitStack() as stack:
        for where, name, what in patches:
            stack.enter_context(mock.patch.object(where, name, what))
        yield


def run_batches(seed: int | str, tell: Callable[[str], None] = lambda _: None) -> None:
    """Run one seed.

    Args:
        seed: decides on everything.
        tell: is told what happens.

    Raises:
        Violation: a promise does not hold.
    """
    world = BatchWorld(seed, tell)
    with _scripted(world):
        world.run()
