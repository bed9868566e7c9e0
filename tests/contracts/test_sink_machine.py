"""Opens, commits, replays, crashes and zombies in any order, against a model that is a number.

The model is the position. Whatever happened, the table must hold the rows of exactly the
records below it, and the history must cover exactly the offsets below it, once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from oncely.commit.backoff import Backoff
from oncely.commit.path import pass_over
from oncely.core.batch import Chunk
from oncely.core.claim import Claim, Entry, Fence, PositionMoved
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced, Unavailable
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.connection import close_all
from tests.conftest import examples
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    chunk,
    commit_all,
    impatient,
    losing_first_commit,
    open_sink,
    rec,
    sink_to,
    together,
    with_faults,
)

PARTITIONS = (T0, T1)
SIZES = st.integers(1, 12)
Decided = tuple[Fence, dict[TopicPartition, Entry], Chunk]


def record(tp: TopicPartition, offset: int) -> Rec | None:
    """The topic: some offsets are holes, some records bad, some filtered, some two rows."""
    if offset % 11 == 10:
        return None
    if offset % 7 == 3:
        return Rec(offset, bad="no JSON")
    if offset % 5 == 4:
        return Rec(offset)
    name = f"{tp}@{offset}"
    if offset % 13 == 6:
        return Rec(offset, ({"id": offset, "name": name}, {"id": offset, "name": f"{name}'"}))
    return rec(offset, id=offset, name=name)


def records(tp: TopicPartition, start: int, end: int) -> list[Rec]:
    return [one for at in range(start, end) if (one := record(tp, at)) is not None]


class Killed(BaseException):
    """The process ends here."""


class Ledger(RuleBasedStateMachine):
    fences = Bundle("fences")
    decided = Bundle("decided")

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.directory = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.place = Place(f"sqlite:///{self.directory.name}/sink.db")
        self.sink: SqlSink = sink_to(self.place)
        self.position = dict.fromkeys(PARTITIONS, 0)
        self.closed = {tp: set[int]() for tp in PARTITIONS}  # offsets passed without reading
        self.fence = Fence("p", 0)

    def teardown(self) -> None:
        close_all()
        self.directory.cleanup()

    @initialize(target=fences)
    def first_open(self) -> Fence:
        self.fence = open_sink(self.sink, dict.fromkeys(PARTITIONS, 0)).fence
        self.sink = self.sink.bind()
        return self.fence

    @rule(target=fences)
    def open(self) -> Fence:
        opened = open_sink(self.sink, dict.fromkeys(PARTITIONS, 77))
        assert opened.fence.epoch == self.fence.epoch + 1
        assert opened.positions == self.position
        self.fence = opened.fence
        return self.fence

    def next_chunk(self, back: int, sizes: tuple[int, int]) -> Chunk | None:
        """From ``back`` offsets before each position on, what a task would have read."""
        parts = {}
        for tp, size in zip(PARTITIONS, sizes, strict=True):
            start = max(0, self.position[tp] - back)
            read = records(tp, start, start + size)
            if read:
                parts[tp] = (start, read)
        return chunk(parts) if parts else None

    def took_effect(self, what: Chunk) -> None:
        for tp, range_ in what.ranges.items():
            self.position[tp] = max(self.position[tp], range_.end)

    @rule(back=st.sampled_from([0, 0, 0, 1, 5, 20]), sizes=st.tuples(SIZES, SIZES))
    def commit(self, back: int, sizes: tuple[int, int]) -> None:
        """New, replayed and overlapping ranges alike."""
        what = self.next_chunk(back, sizes)
        if what is not None:
            outcomes = commit_all(self.sink, what, self.fence)
            assert {o.partition for o in outcomes} == set(what.ranges)
            self.took_effect(what)

    @rule(size=SIZES, kind=st.sampled_from(["hole", "gap"]), tp=st.sampled_from(PARTITIONS))
    def passes_over(self, size: int, kind: Any, tp: TopicPartition) -> None:
        at = self.position[tp]
        nothing = Chunk.of_nothing({tp: OffsetRange(at, at + size)})
        pass_over(together(self.sink), nothing.ranges, self.fence, kind, impatient())
        self.closed[tp] |= set(range(at, at + size))
        self.took_effect(nothing)

    @rule(back=st.integers(0, 3), sizes=st.tuples(SIZES, SIZES))
    def lose_the_answer(self, back: int, sizes: tuple[int, int]) -> None:

        what = self.next_chunk(back, sizes)
        if what is not None:
            with self.faulty(losing_first_commit([])) as sink:
                commit_all(sink, what, self.fence)
            self.took_effect(what)

    @rule(back=st.integers(0, 3), sizes=st.tuples(SIZES, SIZES), at=st.integers(1, 25))
    def die(self, back: int, sizes: tuple[int, int], at: int) -> None:
        """Before the ``at``-th call to the database, or not at all when there are fewer."""
        calls = []

        def dying(name: str, call: Callable[[], Any]) -> Any:
            if name == "close":  # what the operating system does for the dead
                return call()
            calls.append(name)
            if len(calls) == at:
                raise Killed
            return call()

        what = self.next_chunk(back, sizes)
        if what is None:
            return
        with self.faulty(dying) as sink:
            try:
                commit_all(sink, what, self.fence)
            except Killed:
                if "commit" not in calls[:-1]:
                    return
        self.took_effect(what)
        close_all()  # a session that lives on would die in a later step

    @rule(sizes=st.tuples(SIZES, SIZES))
    def give_up(self, sizes: tuple[int, int]) -> None:
        def never(name: str, call: Callable[[], Any]) -> Any:
            if name == "commit":
                raise Unavailable("no answer")
            return call()

        what = self.next_chunk(0, sizes)
        if what is not None:
            with self.faulty(never) as sink, pytest.raises(Unavailable):
                commit_all(sink, what, self.fence, patience=Backoff(total=0))

    @contextmanager
    def faulty(self, around: Callable[[str, Callable[[], Any]], Any]) -> Iterator[SqlSink]:
        """Sessions are kept: those of before have no faults, those of now must not stay."""
        close_all()
        try:
            yield with_faults(self.sink, around)
        finally:
            close_all()

    @rule(fence=fences, sizes=st.tuples(SIZES, SIZES), back=st.integers(0, 9))
    def zombie(self, fence: Fence, sizes: tuple[int, int], back: int) -> None:
        what = self.next_chunk(back, sizes)
        if what is None:
            return
        if fence == self.fence:
            commit_all(self.sink, what, fence)
            self.took_effect(what)
        else:
            with pytest.raises(Fenced):
                commit_all(self.sink, what, fence)

    @rule(target=decided, sizes=st.tuples(SIZES, SIZES))
    def decide_and_pause(self, sizes: tuple[int, int]) -> Any:
        what = self.next_chunk(0, sizes)
        if what is None:
            return (self.fence, {}, Chunk.of_nothing({}))
        return (self.fence, self.sink.ledger.positions(self.fence), what)

    @rule(paused=consumes(decided))
    def resume(self, paused: Decided) -> None:
        fence, entries, what = paused
        if not what.ranges:
            return
        unmoved = fence == self.fence and all(
            entries[tp].position == self.position[tp] for tp in what.ranges
        )
        if unmoved:
            self.sink.commit(what, fence, Claim(fence, what.ranges, entries))
            self.took_effect(what)
        else:
            with pytest.raises(PositionMoved):
                self.sink.commit(what, fence, Claim(fence, what.ranges, entries))

    @rule(keep=st.integers(0, 3))
    def join_history(self, keep: int) -> None:
        self.sink.ledger.join_history(self.fence, keep)

    @invariant()
    def the_table_holds_the_records_below_the_positions(self) -> None:
        if not self.fence.epoch:
            return
        below = {
            tp: [r for r in records(tp, 0, self.position[tp]) if r.offset not in self.closed[tp]]
            for tp in PARTITIONS
        }
        rows = sorted(str(row["name"]) for tp in PARTITIONS for r in below[tp] for row in r.rows)
        found = [name for (name,) in self.place.sql("SELECT name FROM rows ORDER BY name")]
        assert found == rows
        rejects = [(tp.partition, r.offset) for tp in PARTITIONS for r in below[tp] if r.bad]
        kept = self.place.sql('SELECT "partition", "offset" FROM oncely_rejects ORDER BY 1, 2')
        assert kept == rejects
        assert dict(self.place.sql('SELECT "partition", "position" FROM oncely_positions')) == {
            tp.partition: at for tp, at in self.position.items()
        }

    @invariant()
    def the_history_covers_every_offset_once(self) -> None:
        if not self.fence.epoch:
            return
        for tp in PARTITIONS:
            at = 0
            for start, end in self.place.sql(
                'SELECT range_start, range_end FROM oncely_ranges WHERE "partition" = ?'
                " ORDER BY range_start",
                tp.partition,
            ):
                assert start == at
                at = end
            assert at == self.position[tp]
        [(written, rejected)] = self.place.sql(
            "SELECT COALESCE(SUM(written), 0), COALESCE(SUM(rejected), 0) FROM oncely_ranges"
        )
        assert [(written,)] == self.place.sql("SELECT COUNT(*) FROM rows")
        assert [(rejected,)] == self.place.sql("SELECT COUNT(*) FROM oncely_rejects")


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=examples(30),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
