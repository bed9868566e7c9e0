"""The ledger in Kafka goes the ways that TLC's simulation of its model has found.

Each process of the model is a thread that works with a sink, and waits before each call to Kafka
by which the model goes on. After each step the broker is looked at with plain clients.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Offset

from models.recipes import TOPIC
from models.traces import Recipe, Step
from models.walks import walks
from oncely.commit.change import try_portion
from oncely.core.batch import Batch
from oncely.core.claim import (
    NO_RECORDS,
    Claim,
    Counts,
    Entry,
    Fence,
    FencedOff,
    Notes,
    PositionMoved,
    RejectCount,
    Takeover,
    decide,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced as RunFenced
from oncely.errors import OncelyError
from oncely.kafka.client import make
from oncely.kafka.records import KafkaRecord
from oncely.kafka.sender import Producer
from oncely.kinds.kafka.change import replay_into_topics
from oncely.kinds.kafka.sink import KafkaSink
from oncely.kinds.topic_publishing import opened
from oncely.stores.topic.records import OffsetMetadata, read_stamp, stamp
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics
from tests.replaytools import bad, judging
from tests.sinktools import SOURCE, T0, chunk, rec, with_rows

PARTITIONS = {"p1": T0}
HOLES = {1}
_WAIT = 30.0

State = Mapping[str, Any]
Gate = tuple[str, str]  # a call, and the transactional id of its producer
ANYWHERE: list[Gate] = [("anywhere", "")]


class Died(BaseException):
    """The process is gone."""


class Gates:
    """Where the calls of one process wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Gate] = []
        self._released: list[Gate] = []
        self._died = False
        self.open = False

    def connect(self, kind: Any, *args: Any, **own: Any) -> Any:
        """As :func:`oncely.kafka.client.make`."""
        made = make(kind, *args, **own)
        gated = {"init_transactions", "begin_transaction", "commit_transaction"}
        if not issubclass(kind, Producer):
            gated = {"committed"}
        return _Gated(made, gated, own.get("transactional.id", ""), self)

    def pass_(self, gate: Gate) -> None:
        with self._changed:
            self._waiting.append(gate)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._died or self.open or gate in self._released)
            self._waiting.remove(gate)
            if self._died:
                raise Died
            if gate in self._released:
                self._released.remove(gate)

    def release(self, gates: Sequence[Gate]) -> None:
        with self._changed:
            self._released = list(gates)
            self._changed.notify_all()

    def let_all(self) -> None:
        with self._changed:
            self.open = True
            self._changed.notify_all()

    def die(self) -> None:
        with self._changed:
            self._died = True
            self._changed.notify_all()

    def await_(self, wanted: Sequence[Gate], ended: Callable[[], bool]) -> list[Gate]:
        """Wait until the process waits at these gates, or has ended; where it waits."""
        with self._changed:
            self._changed.wait_for(
                lambda: ended() or sorted(self._waiting) == sorted(wanted), timeout=_WAIT
            )
            return sorted(self._waiting)

    def ended(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Gated:
    def __init__(self, inner: Any, names: set[str], identity: str, gates: Gates) -> None:
        self._inner, self._names, self._identity, self._gates = inner, names, identity, gates

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in self._names:
            return method

        def call(*args: Any, **own: Any) -> Any:
            self._gates.pass_((name, self._identity))
            return method(*args, **own)

        return call


class Job:
    """What a process does at the moment, in a thread."""

    def __init__(self, gates: Gates, work: Callable[[], object]) -> None:
        self.gates, self._work = gates, work
        self.answer: object = None
        self.done = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._work()
        except BaseException as error:
            self.answer = error
        self.done = True
        self.gates.ended()

    def join(self) -> object:
        self._thread.join(_WAIT)
        assert self.done, "it has not ended"
        return self.answer


@dataclass
class Process:
    """A process of the model, as far as it lives on between its jobs."""

    sink: KafkaSink
    gates: Gates
    fence: Fence | None = None
    job: Job | None = None
    ended_replays: bool = False  # by its present takeover, before it puts a position back


@dataclass
class World:
    """One trace on its way."""

    topics: Topics
    trace: Sequence[Step]
    at: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    gone: list[Process] = field(default_factory=list)
    put_back: Counter[int] = field(default_factory=Counter)  # rows of before a reset

    @property
    def now(self) -> State:
        return self.trace[self.at].state

    @property
    def before(self) -> State:
        return self.trace[self.at - 1].state

    def gate(self, call: str, *ids: str) -> list[Gate]:
        """The gates of a call for ids of the model."""
        words = self.topics.sink().pipeline_topics.keys
        known = {"publisher": words.publisher, "opener": words.opener, "replayer": words.replayer}
        known |= {name: words.writer(tp) for name, tp in PARTITIONS.items()}
        name = {"init": "init_transactions", "begin": "begin_transaction"}.get(call, call)
        return [(name, known[one]) for one in ids] or [(name, "")]

    # -- what a process does ---------------------------------------------------------------

    def process(self, r: str, mode: str = "partition") -> Process:
        """A new one."""
        gates = Gates()
        sink = self.topics.sink(run=f"{r}-{self.at}", connect=gates.connect)
        if mode == "batch":
            sink = replace(sink, by_batch=True)
        self.processes[r] = made = Process(sink, gates)
        return made

    def start(self, r: str, work: Callable[[Process], object]) -> None:
        one = self.processes[r]
        one.job = Job(one.gates, lambda: work(one))

    def open(self, r: str) -> None:
        proc = self.now["proc"][r]
        earliest = {PARTITIONS[p]: 0 for p in proc["takes"]}

        def opening(one: Process) -> object:
            expected = one.fence.epoch if one.fence else None
            if proc["resets"]:
                there = {tp: 0 for tp in earliest}
                opened = one.sink.open(
                    Takeover(SOURCE, lambda: earliest, earliest, reset=lambda _: there)
                )
            else:
                opened = one.sink.open(Takeover(SOURCE, lambda: earliest, earliest, expected))
            one.fence = opened.fence
            return opened

        self.start(r, opening)

    def commit(self, r: str) -> None:
        """What the process has decided on is where the model will find the position."""
        proc = self.now["proc"][r]
        (p,) = proc["done"]
        tp, epoch = PARTITIONS[p], proc["epoch"]
        found, rejected = self._ahead(r, p)
        at = found or 0
        range_ = OffsetRange(at, at + 1)

        def committing(one: Process) -> object:
            assert one.fence is not None
            one.sink.bind()
            entries = {tp: Entry(at, epoch)}
            try:
                if at in HOLES:
                    hole = Claim(one.fence, {tp: range_}, entries, "hole")
                    return one.sink.ledger.move(hole, {tp: NO_RECORDS})
                one_record = bad(at) if rejected else [rec(at, id=at, name="n")]
                what = chunk({tp: (at, one_record)})
                if proc["mode"] == "partition":
                    return one.sink.commit(what, one.fence, Claim(one.fence, what.ranges, entries))
                letters = what.dead_letters(what.rejections) if rejected else []
                written = {tp: Counts(1, len(what.rows), len(letters), 0)}
                whole = with_rows(Batch({tp: range_}, written, letters), one.sink, what.rows)
                return one.sink.publish(whole, one.fence, Claim(one.fence, whole.ranges, entries))
            except PositionMoved:
                one.gates.let_all()
                return decide(one.sink.ledger.positions(one.fence, settled=True)[tp], range_, epoch)

        self.start(r, committing)

    def _ahead(self, r: str, p: str) -> tuple[int | None, bool]:
        """What this commit will read, and whether it will write a dead letter."""
        found = None
        for before, step in zip(self.trace[self.at :], self.trace[self.at + 1 :], strict=False):
            pc = step.state["proc"][r]["pc"]
            if pc == "read":
                found = step.state["proc"][r]["positions"][p]["at"]
            elif pc == "ready" and before.state["proc"][r]["pc"] == "read":
                (i,) = step.state["proc"][r]["ids"]
                return found, len(step.state["transaction"][i]["letters"]) > 0
            elif pc != "initialised":
                break
        return found, False

    def replay(self, r: str) -> None:
        passes = True
        for step in self.trace[self.at :]:
            if step.state["proc"][r]["pc"] == "down":
                passes = not step.state["transaction"]["replayer"]["letters"]
                break

        def replaying(one: Process) -> object:
            with closing(replay_into_topics(one.sink.bind())) as letters:
                return try_portion(letters, judging(lambda _: passes), 1)

        self.start(r, replaying)

    def note(self, r: str) -> None:
        def noting(one: Process) -> object:
            assert one.fence is not None
            return one.sink.ledger.note(one.fence, Notes(counted=RejectCount()))

        self.start(r, noting)

    # -- the steps -------------------------------------------------------------------------

    def actor(self) -> str:
        """The process that this step is of."""
        before, now = self.before, self.now
        changed = [r for r in now["proc"] if now["proc"][r] != before["proc"][r]]
        if changed:
            (r,) = changed
            return str(r)
        return str(next(now["holder"][i] for i in now["holder"] if now["holder"] != before["holder"]
                        and now["holder"][i] != before["holder"][i]))  # fmt: skip

    def must_end_replays(self, r: str, proc: Mapping[str, Any]) -> bool:
        """The takeover is to put positions back, and has not initialised the id of replays yet."""
        return bool(proc["forced"]) and not self.processes[r].ended_replays

    def ending_replays(self, r: str, proc: Mapping[str, Any]) -> list[Gate]:
        """The gate of that, the first time."""
        if not self.must_end_replays(r, proc):
            return []
        self.processes[r].ended_replays = True
        return self.gate("init", "replayer")

    def movers(self, proc: Mapping[str, Any]) -> list[str]:
        positions = proc["positions"]
        left = set(proc["takes"]) - set(proc["done"])
        return sorted({"publisher" if positions[p]["mode"] == "batch" else str(p) for p in left})

    def written(self, proc: Mapping[str, Any]) -> list[str]:
        """The ids by which a settling process has something to write."""
        found = set()
        for p in set(proc["takes"]) - set(proc["done"]):
            position = proc["positions"][p]
            at = 0 if p in proc["forced"] else position["at"]
            mover = "publisher" if position["mode"] == "batch" else str(p)
            if mover in proc["ids"] and (position["epoch"], position["at"]) != (proc["epoch"], at):
                found.add(mover)
        return sorted(found)

    def released(self, action: str, r: str) -> list[Gate]:
        """The gates that this step passes."""
        before, now, gate = self.before["proc"][r], self.now["proc"][r], self.gate
        all_ids = ["publisher", "replayer", *sorted(now["takes"])]
        match action:
            case "InitAll" | "InitAllAgain":
                return gate("init", *all_ids)
            case "ReadLedger":
                return gate("init", "opener") + gate("committed")
            case "WriteEpoch":
                return self.write("opener")
            case "SettleInit":
                return self.ending_replays(r, before) + gate("init", *now["ids"])
            case "InitForCommit":
                return gate("init", *now["ids"])
            case "SettleRead" | "ReadPositions" | "ReplayCompare":
                return gate("committed")
            case "SettleWrite":
                gone = set(before["ids"]) - set(now["ids"])
                ids = sorted(gone & set(self.written(before)))
                return self.write(*ids) if ids else []
            case "NoteSettled" | "NoteReset" | "NoteAsRun":
                return gate("init", "opener") + self.write("opener")
            case "EndOthers":
                return gate("init", "publisher", "replayer")
            case "SendRecords":
                return gate("begin", *before["ids"])
            case "Commit":
                return gate("commit_transaction", *before["ids"])
            case "ReplayRead":
                return gate("init", "replayer") + gate("committed")
            case "ReplayInit":
                return gate("init", "replayer")
            case "ReplayCommit":
                return self.write("replayer")
        return []

    def write(self, *ids: str) -> list[Gate]:
        """A whole transaction."""
        return self.gate("begin", *ids) + self.gate("commit_transaction", *ids)

    def waits(self, r: str) -> list[Gate] | None:
        """Where the process waits in the model's state; None: it does nothing."""
        proc, gate = self.now["proc"][r], self.gate
        match proc["pc"]:
            case "fencing":
                return gate("init", "opener")
            case "found":
                return gate("begin", "opener")
            case "settling" if self.must_end_replays(r, proc):
                return gate("init", "replayer")
            case "settling":
                return gate("init", *(self.movers(proc) or ["opener"]))
            case "settle read" | "initialised" | "replay initialised":
                return gate("committed")
            case "settle write":
                return gate("begin", *self.written(proc)) if self.written(proc) else ANYWHERE
            case "again":
                return gate("init", "publisher", "replayer", *sorted(proc["takes"]))
            case "asked":
                return gate("init", "publisher", "replayer")
            case "deciding":
                return gate("init", "opener")
            case "read":
                return gate("begin", *proc["ids"])
            case "ready":
                return gate("commit_transaction", *proc["ids"])
            case "judged":
                return gate("init", "replayer")
            case "replay compared":
                return gate("begin", "replayer")
        return None

    def step(self) -> None:
        """Do the next one."""
        self.at += 1
        action = self.trace[self.at].action
        if action in ("Expire", "ForeignCommit"):
            self.commit_offset(foreign=action == "ForeignCommit")
        elif action != "WriteMarkers":
            self.act(action, self.actor())
        for p, half in ((p, p in self.before["half"]) for p in PARTITIONS):
            if half and p not in self.now["half"]:
                self.put_back.update(counted(self.before["effects"][p]))

    def act(self, action: str, r: str) -> None:
        now, before = self.now["proc"][r], self.before["proc"][r]
        if action in ("Crash", "Stop"):
            self.gone.append(self.processes.pop(r))
            return
        if action in ("InitAll", "ReplayRead"):
            self.process(r, now["mode"])
        elif action == "SameJobTwice":
            twin = next(q for q in self.processes if self.before["proc"][q]["pc"] == "idle"
                        and self.before["proc"][q]["epoch"] == now["epoch"])  # fmt: skip
            self.process(r, now["mode"]).fence = self.processes[twin].fence
        begin = {
            "InitAll": self.open, "OpenAgain": self.open, "InitForCommit": self.commit,
            "ReplayRead": self.replay, "NoteAsRun": self.note,
        }.get(action)  # fmt: skip
        one = self.processes[r]
        one.ended_replays = one.ended_replays and begin != self.open
        one.gates.open = False
        one.gates.release(self.released(action, r))
        if begin is not None:
            begin(r)
        self.check_place(r, now, before)

    def check_place(self, r: str, now: State, before: State) -> None:
        """The process waits where the model's does, or has ended as that has."""
        one = self.processes[r]
        if one.job is None:
            return
        wanted = self.waits(r)
        if wanted == ANYWHERE:
            return
        job = one.job
        waiting = one.gates.await_(wanted or [("ended", "")], lambda: job.done)
        if wanted is not None:
            assert waiting == sorted(wanted), (waiting, job.answer)
            return
        answer = job.join()
        if now["pc"] == "fenced":
            assert isinstance(answer, RunFenced | FencedOff), answer
        elif before["pc"] == "settling":
            assert one.fence == Fence(one.sink.pipeline_topics.pipeline, now["epoch"]), answer
        elif before["pc"] == "replay initialised":
            assert isinstance(answer, PositionMoved), answer
        elif isinstance(answer, BaseException):
            assert isinstance(answer, OncelyError), answer
        one.job = None

    def commit_offset(self, *, foreign: bool) -> None:
        """Another program's group offset: without a stamp, or with another pipeline's."""
        changed = [p for p in PARTITIONS if self.before["group"][p] != self.now["group"][p]]
        offset = self.now["group"][changed[0]]["at"]
        tp = PARTITIONS[changed[0]]
        known = OffsetMetadata(offset, 1, SOURCE.cluster_id, SOURCE.topic_ids[tp.topic])
        metadata = stamp(known, "another-pipeline") if foreign else ""
        with closing(plain_reader(self.topics)) as reader:
            reader.commit(offsets=[Offset(*tp, offset, metadata)], asynchronous=False)

    def close(self) -> None:
        """End what still waits."""
        for one in [*self.processes.values(), *self.gone]:
            one.gates.die()
        for one in [*self.processes.values(), *self.gone]:
            if one.job is not None:
                one.job.join()
            one.sink.close()


# -- what is compared ------------------------------------------------------------------------


def plain_reader(topics: Topics, level: str = "read_committed") -> Any:
    return Consumer(
        {
            "bootstrap.servers": topics.bootstrap,
            "group.id": topics.group or topics.pipeline,
            "isolation.level": level,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 5,
            "log_level": 0,
        }
    )


def counted(effects: Mapping[int, int]) -> Counter[int]:
    return +Counter({offset: times for offset, times in effects.items()})


def expected(world: World) -> dict[str, Any]:
    """What the model says."""
    state = world.now
    effects = Counter(world.put_back)
    for p in PARTITIONS:
        effects.update(counted(state["effects"][p]))
    targets = state["pipeline"]["targets"]
    return {
        "epoch": state["pipeline"]["epoch"],
        "resetting": {PARTITIONS[p]: 0 for p in targets},
        "ledger": {tp: position(state["ledger"][p]) for p, tp in PARTITIONS.items()},
        "group": {tp: position(state["group"][p]) for p, tp in PARTITIONS.items()},
        "resets": {(PARTITIONS[p], epoch) for p, epoch in state["resets"]},
        "replayed": state["replayed"],
        "letters": [(PARTITIONS[one["p"]], one["o"]) for one in state["letters"]],
        "effects": dict(+effects),
    }


def position(one: Mapping[str, Any]) -> tuple[int, int, str] | None:
    ours = one["owner"] == "this pipeline"
    return (one["at"], one["epoch"], one["mode"]) if ours else None


class Outsider:
    """What a plain client finds; it reads on from where it was."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._reader, self._group = plain_reader(topics), plain_reader(topics, "read_uncommitted")
        self._assigned = False
        none: dict[str, Any] = {tp: None for tp in PARTITIONS.values()}
        self._found: dict[str, Any] = {
            "epoch": 0, "resetting": {}, "ledger": none, "resets": set(), "replayed": 0,
            "letters": [], "effects": {},
        }  # fmt: skip

    def close(self) -> None:
        self._reader.close()
        self._group.close()

    def finds(self, wanted: Mapping[str, Any]) -> None:
        """Reads until it has found what is wanted: markers are written after a commit's answer."""
        if wanted["epoch"] and not self._assigned:
            topics = self._topics
            ledger = Offset(topics.ledger, topics.ledger_partition, 0)
            here = [ledger, Offset(topics.output, 0, 0), Offset(topics.rejects, 0, 0)]
            self._reader.assign(here)
            self._assigned = True
        deadline = time.monotonic() + 180
        found = {**self._found, "group": self._offsets()}
        while found != wanted and time.monotonic() < deadline:
            for message in self._reader.consume(100, 0.02) if self._assigned else ():
                assert message.error() is None, message.error()
                self._take(message)
            found = {**self._found, "group": self._offsets()}
        assert found == wanted

    def _offsets(self) -> dict[TopicPartition, Any]:
        asked = [Offset(*tp) for tp in PARTITIONS.values()]
        offsets = dict.fromkeys(PARTITIONS.values())
        for one in self._group.committed(asked, 20):
            known = read_stamp(one.offset, one.metadata)
            if known is not None and known.pipeline == self._topics.pipeline:
                tp = TopicPartition(one.topic, one.partition)
                offsets[tp] = (known.position, known.epoch, known.mode)
        return offsets

    def _take(self, message: Any) -> None:
        found = self._found
        if message.topic() == self._topics.rejects:
            record = KafkaRecord(None, message.key(), message.value(), message.headers() or ())
            letter = opened(record, self._topics.pipeline)
            assert letter is not None
            found["letters"] = [*found["letters"], letter.origin]
            return
        value = json.loads(message.value())
        if message.topic() == self._topics.output:
            found["effects"][value["id"]] = found["effects"].get(value["id"], 0) + 1
            return
        match json.loads(message.key()):
            case ["pipeline", _]:
                found["epoch"] = value["epoch"]
                found["resetting"] = {
                    TopicPartition(topic, int(number)): at
                    for topic, own in value["resetting"].items()
                    for number, at in own.items()
                }
            case ["position", _, topic, number]:
                moved = (value["position"], value["epoch"], value["mode"])
                found["ledger"] = {**found["ledger"], TopicPartition(topic, number): moved}
            case ["reset", _, topic, number, epoch]:
                found["resets"] |= {(TopicPartition(topic, number), epoch)}
            case ["replayed", *_]:
                found["replayed"] = value["position"]


# -- the test --------------------------------------------------------------------------------


def quiet(state: State) -> bool:
    """No open transaction hides what follows it, and no markers are on their way."""
    return all(one["state"] == "ended" for one in state["transaction"].values())


def walk(world: World) -> None:
    with closing(world), closing(Outsider(world.topics)) as outsider:
        for _ in world.trace[1:]:
            world.step()
            if quiet(world.now):
                outsider.finds(expected(world))


@pytest.mark.parametrize(
    ("recipe", "race"),
    [pytest.param(one, race, id=race) for one in TOPIC for race in one.goals],
)
def test_the_ledger_goes_the_ways_of_its_model(recipe: Recipe, race: str, broker: Broker) -> None:
    walk(World(make_topics(broker), walks(recipe)[race]))
