"""One seed: workers, a run on Spark now and then, faults, and calm after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from oncely.commit import path
from oncely.commit.path import ByKey
from oncely.commit.run import CommitContext, OpenLedger
from oncely.core import events
from oncely.core.batch import Chunk
from oncely.core.claim import Claim, Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced, Unavailable
from oncely.kafka import group as group_consumer
from oncely.kafka.group import GroupConsumer, Membership, Protocols
from oncely.runtimes import chunks
from oncely.runtimes.chunks import PipelinedCommit
from oncely.runtimes.takeover import Takeovers
from oncely.runtimes.worker.assignment import BufferLimits, PendingCommit
from oncely.runtimes.worker.member import Member, WorkerRun
from simulate.broker import NAME, Coordinator, ScriptedAdmin, ScriptedConsumer, Topic
from simulate.schedule import Schedule, Steps, Violation, patience, step
from simulate.store import MemoryLedger, MemorySink, Store, key_of

_ACTIONS = 160
_CALM = 400  # rounds
_PROCESSES = 3
_LIMITS = BufferLimits(records=6, bytes=1 << 20, buffered_records=8, buffered_bytes=6_000)
_PIECE = 12  # records that one poll may add to a full buffer


class SteppedCommit(PipelinedCommit):
    """Commits step by step, when the schedule says so."""

    schedule: Schedule
    steps: Steps | None = None

    def begin_work(self, work: Callable[[], list[Any]]) -> None:
        """Begin; nothing is done yet."""
        self.steps = Steps(work)
        self._running = self.steps.future

    def pause(self, seconds: float) -> None:
        """The schedule decides when it goes on."""

    def wait(self, seconds: float) -> bool:
        """Nearly always the commit ends in time."""
        for _ in range(self.schedule.random.choice([0, 1, 2, 99, 99, 99, 99])):
            if self.ended or self.steps is None:
                break
            self.steps.go()
        if not self.schedule.faults:
            while not self.ended and self.steps is not None:
                self.steps.go()
        return self.ended


class SteppedByKey(ByKey):
    """Threads that go on when the schedule says so."""

    schedule: Schedule

    def run(self) -> list[Any]:
        """One step of one of them at a time."""
        lanes = [Steps(partial(self._work, lane)) for lane in range(len(self._lanes))]
        try:
            while alive := [one for one in lanes if not one.future.done()]:
                step()
                self.schedule.random.choice(alive).go()
        finally:
            for one in lanes:
                one.kill()
        return self._ended()


class SimulatedRun(WorkerRun):
    """Real takeovers and commits; records are numbers, which need no decoding."""

    def chunk(self, work: PendingCommit) -> Chunk:
        """The offsets of the work."""
        partitions = tuple(sorted(work.pieces))
        offsets = [
            (number, message.offset())
            for number, tp in enumerate(partitions)
            for piece in work.pieces[tp]
            for message in piece.payload
        ]
        none = np.array([], dtype=np.int64)
        return Chunk(
            work.ranges, partitions,
            np.array([one for one, _ in offsets], dtype=np.int32),
            np.array([one for _, one in offsets], dtype=np.int64),
            pa.table({}), none, None, none, (), lambda _: [],
            keys=pa.chunked_array([pa.array([key_of(one) for _, one in offsets], pa.binary())])
            if self.by_key else None,
        )  # fmt: skip


class SimulatedMember(Member):
    """A member whose turns are taken one by one."""

    @property
    def hand(self) -> SteppedCommit:
        """The commit in hand."""
        assert isinstance(self._hand, SteppedCommit)
        return self._hand

    def enter(self, schedule: Schedule) -> None:
        """Join the group."""
        self._hand = SteppedCommit(self.run.ledger.budget, overlap=False)
        self._hand.schedule = schedule
        self._group = self.join(self)

    def leave(self) -> None:
        """Return the partitions, and leave the group."""
        self._leave()


class Process:
    """One worker process.

    Attributes:
        asleep: the number of actions for which it is paused.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name, self.asleep = world, name, 0
        self._assigned: set[TopicPartition] = set()
        ledger = MemoryLedger(world.store, name, self._assigned)
        nothing: Any = None
        opened = OpenLedger(CommitContext(MemorySink(ledger), nothing, nothing))
        source: Any = world.topic
        takeovers = Takeovers(opened, source, "simulated", "earliest", "fail", self._listen)
        run = SimulatedRun(opened, takeovers, nothing)
        self._consumer = ScriptedConsumer(world.schedule, world.coordinator, name)
        self.member = SimulatedMember(
            run, self._join, limits=_LIMITS, revoke_seconds=world.revoke_seconds,
            restarts=world.restarts, listener=self._listen, clock=lambda: world.schedule.now,
        )  # fmt: skip
        run.begin()
        self.member.enter(world.schedule)

    def _join(self, rebalances: Any) -> GroupConsumer:
        world = self._world
        admin = ScriptedAdmin(world.schedule, world.coordinator)
        with (
            mock.patch.object(group_consumer, "make", lambda *_, **__: self._consumer),
            mock.patch.object(group_consumer, "KafkaAdmin", lambda *_, **__: admin),
        ):
            protocol: Protocols = "eager" if world.coordinator.eager else "cooperative"
            return GroupConsumer("", {}, [NAME], Membership(NAME, protocol), rebalances)

    def turn(self) -> None:
        """One turn of the thread that owns the consumer."""
        self.member.turn()
        buffered = self.member.assignment.buffered
        if buffered > (_LIMITS.buffered_records + _PIECE) * len(self._world.topic.partitions):
            raise Violation(f"{self.name} holds {buffered} records in memory")

    def commit_step(self) -> None:
        """One step of the thread that commits."""
        if self.member.hand.steps is not None:
            self.member.hand.steps.go()

    def end(self) -> None:
        """The process is killed."""
        if self.member.hand.steps is not None:
            self.member.hand.steps.kill()

    def expire(self) -> None:
        """The group removes the member, which was silent for too long."""
        self._world.coordinator.leave(self._consumer.memberid())

    def _listen(self, event: events.Event) -> None:
        self._world.tell(f"{self.name}: {event}")
        match event:
            case events.PartitionsChanged("assigned", partitions):
                self._assigned |= partitions
            case events.PartitionsChanged(_, partitions):
                self._assigned -= partitions
            case events.BatchPlanned() if foreign := event.ranges.keys() - self._assigned:
                raise Violation(f"{self.name} commits {sorted(foreign)}, not assigned to it")


class SparkRun:
    """A run of all partitions, which commits a few times and ends."""

    def __init__(self, world: World, name: str) -> None:
        self._store, self._random = world.store, world.schedule.random
        self._workers = {one.name for one in world.processes}
        self._fence = self._store.take(frozenset(world.topic.partitions), name, whole=True)
        self.left = self._random.randint(1, 20)

    def turn(self) -> None:
        """Commit some records of a partition."""
        self.left -= 1
        for entry in self._store.entries.values():
            if entry.run != self._fence.run:
                if entry.run in self._workers:
                    raise Violation(f"a run on Spark is fenced by {entry.run}, which is older")
                self.left = 0
                return
        tp = self._random.choice(self._store.topic.partitions)
        entry = self._store.entries[tp]
        end = min([self._store.topic.ends[tp], *(one.start for one in entry.done)])
        range_ = OffsetRange(entry.position, self._random.randint(entry.position, end))
        if not range_.is_empty:
            claim = Claim(self._fence, {tp: range_}, {tp: entry})
            self._store.apply(claim, {tp: sorted(self._store.topic.within(tp, range_))})


class World:
    """Everything of one seed."""

    def __init__(self, seed: int | str, tell: Callable[[str], None]) -> None:
        self.schedule, self.tell = Schedule(seed), tell
        restarts = Random(f"restarts {seed}")  # the schedule stays as it is
        self.restarts, self.revoke_seconds = restarts.random() < 0.4, restarts.choice([0.0, 10.0])
        random = self.schedule.random
        self.topic = Topic(self.schedule, random.randint(1, 3))
        lanes = Random(f"lanes of {seed}").choice([0, 0, 3])
        self.store = Store(self.schedule, self.topic, lanes=lanes)
        self.coordinator = Coordinator(
            self.schedule, self.topic, random.random() < 0.3,
            lambda tp: self.store.entries[tp].position,
        )  # fmt: skip
        self.processes: list[Process] = []
        self._spark: SparkRun | None = None
        self._numbers = itertools.count(1)
        self._actions: list[tuple[float, Callable[[], None]]] = [
            (0.46, self._turn),
            (0.27, self._commit_step),
            (0.13, self.topic.grow),
            (0.03, self._pause),
            (0.03, self._expire),
            (0.02, self._start),
            (0.015, self._kill),
            (0.01, self._leave),
            (0.02, self.coordinator.rebalance),
            (0.015, self._run_on_spark),
        ]

    def run(self) -> None:
        """Faults, then calm; at the end everything has taken effect once.

        Raises:
            Violation: it has not.
        """
        try:
            for _ in self.schedule.play(self._actions, _ACTIONS, self.processes, self.tell):
                pass
            self._calm()
        finally:
            for process in self.processes:
                process.end()

    def _calm(self) -> None:
        self._spark = None
        for process in self.processes:
            process.asleep = 0
        if not self.processes:
            self._start()
        for _ in range(_CALM):
            self.schedule.now += 1.0
            for process in list(self.processes):
                self._guarded(process, process.turn)
            for process in list(self.processes):
                self._guarded(process, process.commit_step)
            if self._all_done():
                return
        behind = {str(tp): self.topic.ends[tp] - one.position for tp, one in self._entries()}
        raise Violation(f"not everything is committed: {behind}")

    def by_key(self) -> Callable[..., ByKey]:
        """Makes commits by several threads, in small pieces."""

        def make(
            delivery: Any, chunk: Chunk, fence: Fence, max_rejects: int | None, **_: object
        ) -> ByKey:
            made = SteppedByKey(delivery, chunk, fence, max_rejects, 2, patience)
            made.schedule = self.schedule
            return made

        return make

    def _entries(self) -> Any:
        return self.store.entries.items()

    def _all_done(self) -> bool:
        if any(one.position < self.topic.ends[tp] for tp, one in self._entries()):
            return False
        for tp, log in self.topic.logs.items():
            if sorted(self.store.effects[tp]) != log:
                raise Violation(f"{tp}: {log} were published, {self.store.effects[tp]} took effect")
        return True

    # -- what happens ----------------------------------------------------------------------

    def _turn(self) -> None:
        if self._spark is not None and self.schedule.random.random() < 0.3:
            self._spark.turn()
            self._spark = self._spark if self._spark.left else None
        elif awake := self._awake():
            process = self.schedule.random.choice(awake)
            self._guarded(process, process.turn)

    def _commit_step(self) -> None:
        if awake := self._awake():
            process = self.schedule.random.choice(awake)
            self._guarded(process, process.commit_step)

    def _guarded(self, process: Process, work: Callable[[], None]) -> None:
        """A worker ends when Spark has taken over, or the ledger was away for long."""
        whole = self.store.whole
        try:
            work()
        except Fenced as error:
            if whole is None or error.lost:
                raise Violation(f"{process.name} ends, fenced, without a run on Spark") from error
        except Unavailable as error:
            if not self.schedule.faults:
                raise Violation(f"{process.name} ends: {error}") from error
        else:
            return
        self._end(process)
        self._start()

    def _awake(self) -> list[Process]:
        return [one for one in self.processes if not one.asleep]

    def _pause(self) -> None:
        if awake := self._awake():
            self.schedule.random.choice(awake).asleep = self.schedule.random.randint(3, 60)

    def _expire(self) -> None:
        if asleep := [one for one in self.processes if one.asleep]:
            self.schedule.random.choice(asleep).expire()

    def _start(self) -> None:
        while len(self.processes) < _PROCESSES:
            try:
                self.processes.append(Process(self, f"worker {next(self._numbers)}"))
            except Unavailable:
                continue
            return

    def _kill(self) -> None:
        if self.processes:
            process = self.schedule.random.choice(self.processes)
            self._end(process)

    def _end(self, process: Process) -> None:
        self.processes.remove(process)
        process.end()
        process.expire()

    def _leave(self) -> None:
        if awake := self._awake():
            process = self.schedule.random.choice(awake)
            self._guarded(process, process.member.leave)
            if process in self.processes:
                self._end(process)

    def _run_on_spark(self) -> None:
        self._spark = SparkRun(self, f"spark {next(self._numbers)}")


def run(seed: int | str, tell: Callable[[str], None] = lambda _: None) -> None:
    """Run one seed.

    Args:
        seed: decides on everything.
        tell: is told what happens.

    Raises:
        Violation: a promise does not hold.
        OncelyError: a worker has ended with an error that nothing explains.
    """

    with (
        mock.patch.object(chunks, "Backoff", patience),
        mock.patch.object(path, "Backoff", patience),
    ):
        world = World(seed, tell)
        with mock.patch.object(chunks, "ByKey", world.by_key()):
            world.run()
