"""The SQL ledger does what its model says, step by step.

TLC has walked through ``models/SqlLedger.tla`` at random (``models/walks``). Each step of a walk is
done to a real ledger in SQLite by the code that the action is named after; then the ledger must be
what the model's state says: epochs, positions and who holds them, what took effect, dead letters. A
step that the model does the ledger must not refuse, and what the model fences it must fence.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from models.recipes import SQL_OF_ALL, SQL_OF_SOME, SQL_THREADS
from models.traces import INITIAL, Recipe, Step
from models.walks import walks
from oncely.commit.change import try_portion
from oncely.commit.path import pass_over
from oncely.core.batch import Chunk
from oncely.core.claim import (
    NO_RECORDS,
    Append,
    Claim,
    Entry,
    Fence,
    PositionMoved,
    RangeKind,
    Takeover,
    Trim,
    decide,
    decide_parts,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced, LedgerWentBack, Unavailable
from oncely.kinds.sql.change import SqlReplay
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql import takeover
from oncely.stores.sql.connection import brief_session, close_all
from oncely.stores.sql.ledger import SqlLedger
from tests.replaytools import judging
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Place,
    Rec,
    chunk,
    impatient,
    rec,
    sink_to,
    sqlite_place,
    together,
    with_faults,
)

RECORDS = 3
BAD = frozenset({("p1", 1), ("p2", 0)})
HOLES = frozenset({("p1", 2), ("p2", 1)})
TOPIC = {"p1": T0, "p2": T1}


@dataclass
class Process:
    """A process of the model: what it remembers of its run."""

    sink: SqlSink
    fence: Fence
    expected: int | None
    opener: takeover.SqlTakeover
    entries: dict[TopicPartition, Entry] = field(default_factory=dict)
    chunk: Chunk | None = None
    kind: RangeKind = "data"
    ahead: bool = False


class World:
    """A real ledger, and what the model's processes remember."""

    def __init__(self, place: Place, copy: Path, *, ahead: bool) -> None:
        self.place, self.copy, self.ahead = place, copy, ahead
        self.processes: dict[str, Process] = {}
        self.names: dict[tuple[int, int], str] = {(0, 0): ""}
        self.undone: Counter[tuple[str, int]] = Counter()
        """Rows that stay in the table though a reset has put the position before them."""
        self.undone_in_copy: Counter[tuple[str, int]] = Counter()
        self.replays = sink_to(place, keep_source=True)
        self.replays.prepare()
        self.replays = self.replays.bind()

    # -- steps -----------------------------------------------------------------------------

    def do(self, step: Step, before: dict[str, Any]) -> None:
        after = step.state
        changed = [one for one in after["proc"] if after["proc"][one] != before["proc"][one]]
        if step.action in ("ReplayLetter", "Replicate", "Failover", "AddPartition"):
            getattr(self, step.action)(before, after)
            return
        # Ending the sessions of others changes these, too; the opener comes first.
        changed.sort(key=lambda one: after["proc"][one]["pc"] != "alone")
        if changed:
            getattr(self, step.action)(changed[0], before, after)

    def TakeEpoch(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        sink, now = sink_to(self.place, keep_source=True), after["proc"][r]
        self.names[now["run"]] = sink.run
        table = None if now["resets"] else sink.wanted.table
        some = (
            None if len(now["takes"]) == len(TOPIC) else frozenset(TOPIC[p] for p in now["takes"])
        )
        whole = Fence("p", now["since"]["epoch"], self.names[now["since"]["run"]])
        opener = takeover.SqlTakeover(sink.run, None, table, some, None if some is None else whole)
        self.processes[r] = self._given(sink, opener)

    def TakeEpochAgain(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        own = self.processes[r]
        again = replace(own.opener, expected=own.expected, table=own.sink.wanted.table)
        self.processes[r] = self._given(own.sink, again)

    def _given(self, sink: SqlSink, opener: takeover.SqlTakeover) -> Process:
        with brief_session(sink.dialect, "open", sink.connect) as setup:
            fence = takeover.take_epoch(setup, sink.ledger.tables, SOURCE, opener)
        return Process(sink, fence, opener.expected, opener)

    def FencedAtReopen(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        with pytest.raises(Fenced):
            self.TakeEpochAgain(r, before, after)

    def EndSessions(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """SQLite ends nobody; who was writing writes no more."""

    def TakePositions(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        own = self.processes[r]
        if after["left"]["faults"] == before["left"]["faults"]:
            self._take(own, own.sink, before, after)
            own.expected, own.sink = own.fence.epoch, own.sink.bind()
            return

        def answer_lost(name: str, call: Callable[[], Any]) -> Any:
            answer = call()
            if name == "commit":
                raise Unavailable("the answer was lost")
            return answer

        with pytest.raises(Unavailable):
            self._take(own, with_faults(own.sink, answer_lost), before, after)

    def _take(
        self, own: Process, sink: SqlSink, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        seen = {TOPIC[p]: 0 for p, at in after["db"]["positions"].items() if at["epoch"]}
        reset = own.opener.table is None
        targets = {TOPIC[p]: after["db"]["positions"][p]["at"] for p in TOPIC} if reset else {}
        with brief_session(sink.dialect, "open", sink.connect) as setup:
            wanted = Takeover(
                SOURCE,
                lambda: seen,
                seen,
                reset=(lambda known: {tp: at for tp, at in targets.items() if tp in known})
                if reset
                else None,
                partitions=own.opener.partitions,
            )
            own.fence = takeover.take_positions(
                setup, sink.ledger.tables, own.fence, own.opener, wanted
            ).fence
        for p, tp in TOPIC.items():
            for o in range(targets.get(tp, RECORDS), RECORDS):
                self.undone[p, o] = self.rows()[p, o]

    def FencedWhileOpening(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        with pytest.raises(Fenced):
            self._take(self.processes[r], self.processes[r].sink, before, after)

    def SameJobTwice(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        now = after["proc"][r]
        own = next(
            self.processes[q]
            for q, of in before["proc"].items()
            if (of["run"], of["epoch"]) == (now["run"], now["epoch"])
        )
        self.processes[r] = Process(own.sink, own.fence, None, own.opener)

    def ReadDecideAndWriteRows(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        own, claim = self.processes[r], after["proc"][r]["claim"]
        p, at, to = claim["partition"], claim["at"], claim["to"]
        own.kind, own.chunk = self._chunk(p, at, to)
        own.ahead = self.ahead
        own.entries = own.sink.ledger.positions(own.fence)
        wanted = own.chunk.ranges[TOPIC[p]]
        assert wanted == OffsetRange(at, to)
        assert decide(own.entries[TOPIC[p]], wanted, own.fence.epoch) == Append(wanted)

    def ReadDecideAndWriteAhead(
        self, r: str, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        own, claim = self.processes[r], after["proc"][r]["claim"]
        p, at, to = claim["partition"], claim["at"], claim["to"]
        own.kind, own.chunk = self._chunk(p, at, to)
        own.ahead = True
        own.entries = own.sink.ledger.positions(own.fence)
        wanted = OffsetRange(at, to)
        assert decide_parts(own.entries[TOPIC[p]], [wanted], own.fence.epoch) == Trim((wanted,))

    def _chunk(self, p: str, at: int, to: int) -> tuple[RangeKind, Chunk]:
        """What a task makes of the records, or the driver of holes."""
        read = [self._record(p, o) for o in range(at, to) if (p, o) not in HOLES]
        if read:
            return "data", chunk({TOPIC[p]: (at, read)})
        return "hole", Chunk.of_nothing({TOPIC[p]: OffsetRange(at, to)})

    def _record(self, p: str, o: int) -> Rec:
        return Rec(o, bad="no JSON") if (p, o) in BAD else rec(o, id=o, name=p)

    def CompareAndSet(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        if after["proc"][r]["pc"] == "idle":
            with pytest.raises(PositionMoved):
                self._commit(self.processes[r])

    def Commit(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        self._commit(self.processes[r])

    def _commit(self, own: Process, sink: SqlSink | None = None) -> None:
        assert own.chunk is not None
        to, ranges = sink or own.sink, own.chunk.ranges
        claim = Claim(own.fence, ranges, own.entries, own.kind)
        if own.ahead:
            self._finish(own, to, replace(claim, parts={tp: (r,) for tp, r in ranges.items()}))
            return
        if own.kind == "data":
            to.commit(own.chunk, own.fence, claim)
        else:
            to.ledger.move(claim, dict.fromkeys(ranges, NO_RECORDS))

    def _finish(self, own: Process, sink: SqlSink, claim: Claim) -> None:
        """What a thread does whose sink has rows of records."""
        assert own.chunk is not None
        chunk = own.chunk
        with sink.ledger.transaction(own.fence) as ours:
            for number, record in enumerate(chunk.row_record):
                row = chunk.rows.slice(number, 1).to_pylist()[0]
                ours.execute(
                    "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
                    " VALUES (%s, %s, %s, %s, %s)",
                    (row["id"], row["name"], *chunk.partitions[0], int(chunk.offset[record])),
                )
            letters = chunk.dead_letters(chunk.rejections)
            sink.ledger.dead_letters.add(ours, letters, own.fence.epoch)
            counts = chunk.counts_of(claim.parts, chunk.row_record, chunk.rejections)
            sink.ledger.finish(ours, claim, counts)

    def FencedByLedger(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        with pytest.raises(Fenced):
            self._pass_over_everything(r, before)

    def LedgerWentBack(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        with pytest.raises(LedgerWentBack):
            self._pass_over_everything(r, before)

    def _pass_over_everything(self, r: str, before: dict[str, Any]) -> None:
        own = self.processes[r]
        there = [TOPIC[p] for p, at in before["db"]["positions"].items() if at["epoch"]] or [T0]
        there = list(filter(own.fence.covers, there))
        ranges = {tp: OffsetRange(0, RECORDS) for tp in there}
        pass_over(together(own.sink), ranges, own.fence, "hole", impatient())

    def AddPartition(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        positions = after["db"]["positions"]
        [p] = [p for p in TOPIC if positions[p] != before["db"]["positions"][p]]
        own = next(
            self.processes[q]
            for q, of in before["proc"].items()
            if of["pc"] == "idle"
            and of["held"]
            and (of["run"], of["epoch"]) == (positions[p]["run"], positions[p]["epoch"])
        )
        own.sink.ledger.add_partitions(own.fence, {TOPIC[p]: 0}, SOURCE)

    def ReplayLetter(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        [(p, o)] = before["db"]["letters"] - after["db"]["letters"]
        letters = SqlReplay(self.replays, (*TOPIC[p], o - 1))
        assert try_portion(letters, judging(), 1) == (1, 0)

    def Crash(self, r: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """In the middle of a commit it dies before COMMIT."""

        class Died(BaseException):
            pass

        def dying(name: str, call: Callable[[], Any]) -> Any:
            if name == "commit":
                raise Died
            return call()

        if before["proc"][r]["pc"] == "moved":
            close_all()
            own = self.processes[r]
            with pytest.raises(Died):
                self._commit(own, with_faults(own.sink, dying))
            close_all()

    BatchFails = Crash

    def Replicate(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        with closing(sqlite3.connect(self.place.file)) as ours, closing(_new(self.copy)) as copy:
            ours.backup(copy)
        self.undone_in_copy = self.undone.copy()

    def Failover(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        close_all()
        with (
            closing(sqlite3.connect(self.place.file)) as ours,
            closing(sqlite3.connect(self.copy)) as copy,
        ):
            copy.backup(ours)
        self.undone = self.undone_in_copy.copy()

    # -- what is there ---------------------------------------------------------------------

    def rows(self) -> Counter[tuple[str, int]]:
        found = self.place.sql("SELECT kafka_partition, kafka_offset FROM rows")
        return Counter((list(TOPIC)[number], o) for number, o in found)

    def check(self, db: dict[str, Any]) -> None:
        """The ledger is what the model says."""
        there = {p: at for p, at in db["positions"].items() if at["epoch"]}
        whole = db["whole"]["epoch"], self.names[db["whole"]["run"]]
        row = (db["epoch"], self.names[db["run"]], *whole)
        assert self.place.sql("SELECT epoch, run, held_epoch, held_by FROM oncely_pipelines") == (
            [row] if db["epoch"] else []
        )
        assert self.place.sql(
            'SELECT "partition", "position", epoch, run FROM oncely_positions ORDER BY 1'
        ) == [
            (TOPIC[p].partition, at["at"], at["epoch"], self.names[at["run"]])
            for p, at in sorted(there.items())
        ]
        letters = {
            (list(TOPIC)[number], o)
            for number, o in self.place.sql('SELECT "partition", "offset" FROM oncely_rejects')
        }
        assert letters == db["letters"]
        stored = SqlLedger("p", self.place.dialect, self.place.table()).entries()
        for p in there:
            done = {o for one in stored[TOPIC[p]].done for o in range(one.start, one.end)}
            assert {o for o in done if o >= there[p]["at"]} == set(db["beyond"][p])
        effects = self.rows() - self.undone + Counter(letters)
        assert effects == Counter({
            (p, o): of[o] for p, of in db["effects"].items() for o in range(RECORDS) if of[o]
        })  # fmt: skip


def _new(path: Path) -> sqlite3.Connection:
    path.unlink(missing_ok=True)
    return sqlite3.connect(path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[[bool], World]]:
    """Makes a new ledger."""
    places = []

    def make(ahead: bool) -> World:
        close_all()
        places.append(sqlite_place())
        return World(places[-1].__enter__(), tmp_path / "copy.db", ahead=ahead)

    yield make
    close_all()
    for place in places:
        place.__exit__(None, None, None)


@pytest.mark.parametrize(
    "recipe", [SQL_OF_ALL, SQL_OF_SOME, SQL_THREADS], ids=["of all", "of some", "with threads"]
)
def test_the_ledger_follows_the_model(world: Callable[[bool], World], recipe: Recipe) -> None:
    for name, walk in walks(recipe).items():
        real = world(recipe is SQL_THREADS)
        for at, (before, step) in enumerate(itertools.pairwise(walk)):
            try:
                real.do(step, before.state)
                real.check(step.state["db"])
            except BaseException as error:
                error.add_note(f"trace {name}, step {at + 1}: {step.action} led to {step.state}")
                raise


def test_every_action_of_the_model_is_done() -> None:
    actions = {name for name in vars(World) if name[0].isupper()}
    done = [
        {step.action for walk in walks(recipe).values() for step in walk}
        for recipe in (SQL_OF_ALL, SQL_THREADS)
    ]
    assert done[0] == actions - {"ReadDecideAndWriteAhead"} | {INITIAL}
    assert "ReadDecideAndWriteAhead" in done[1]
