"""Threads that divide a chunk by key commit exactly once, and in the order of each key."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from oncely.commit.path import ByKey, Delivery, Outcome, commit, pass_over
from oncely.core.batch import Chunk, lane_of
from oncely.core.claim import Budget, Claim, Entry, Fence, Finished, Opened, PositionMoved, Takeover
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import Fenced, LedgerWentBack, OncelyError, Stopped, Unavailable
from oncely.runtimes.chunks import PipelinedCommit
from oncely.stores.sql.connection import close_all
from oncely.stores.sql.ledger import SqlLedger
from oncely.verify.check import check
from oncely.verify.log import Log
from oncely.verify.reading import Entry as Stored
from oncely.verify.reading import Held, Ledger, Rules
from tests.contracts.looking import history, positions
from tests.sinktools import SOURCE, T0, Place, at_t0, impatient, rec, sqlite_place

Before = Callable[[Chunk, Claim], object]


@dataclass
class Effects:
    """A sink that inserts the offset of each record; ``before`` is called before it does."""

    ledger: SqlLedger
    threads: Mapping[str, int] = field(default_factory=lambda: {"t": 3})
    before: Before = lambda *_: None

    def finish(
        self, what: Chunk, fence: Fence, claim: Claim, max_rejects: int | None = None
    ) -> Mapping[TopicPartition, Sequence[Finished]]:
        self.before(what, claim)
        with self.ledger.transaction(fence) as ours:
            for number in what.row_record:
                ours.execute("INSERT INTO effects VALUES (%s)", (int(what.offset[number]),))
            counts = what.counts_of(claim.parts, what.row_record, what.rejections)
            return self.ledger.finish(ours, claim, counts)


@pytest.fixture
def place() -> Iterator[Place]:
    with sqlite_place() as one:
        one.sql('CREATE TABLE effects ("offset" INT NOT NULL) STRICT')
        yield one
        close_all()


def taken(place: Place, reset: int | None = None) -> tuple[SqlLedger, Opened]:
    """A takeover of t-0, as of a worker; or a reset."""
    ledger = SqlLedger("p", place.dialect, place.table("oncely_positions"))
    return ledger, ledger.open(
        Takeover(
            SOURCE,
            lambda: {T0: 0},
            {T0: 0},
            reset=None if reset is None else lambda _: {T0: reset},
            partitions=frozenset({T0}) if reset is None else None,
        )
    )


def keyed(start: int, keys: Sequence[int]) -> Chunk:
    """Records with these keys."""
    made = at_t0(start, [rec(start + n, id=n, name="") for n in range(len(keys))])
    return replace(made, keys=pa.chunked_array([pa.array([bytes([k]) for k in keys])]))


def by_key(sink: Any, fence: Fence, what: Chunk, piece: int = 2) -> list[Outcome]:
    return ByKey(Delivery(sink, sink.ledger), what, fence, None, piece, impatient).run()


def effects(place: Place) -> list[int]:
    return [one for (one,) in place.sql('SELECT "offset" FROM effects ORDER BY rowid')]


def verified(place: Place) -> list[str]:
    """What `oncely verify` has to say of the ledger."""
    stored = place.sql(
        'SELECT "partition", range_start, range_end, epoch, kind, superseded FROM oncely_ranges'
    )
    held = place.sql('SELECT "position", epoch FROM oncely_positions')
    [(epoch,)] = place.sql("SELECT epoch FROM oncely_pipelines")
    ledger = Ledger(
        "p",
        epoch,
        dict.fromkeys([T0], Held(*held[0])),
        [
            Stored(TopicPartition("t", tp), start, end, of, kind, None, superseded)
            for tp, start, end, of, kind, superseded in stored
        ],
    )
    report = check(ledger, Log([]), Rules(), Log([]))
    return [one.text for one in report.broken]


def test_the_position_is_at_the_end_when_all_threads_have_ended(place: Place) -> None:
    ledger, opened = taken(place)
    keys = [random.Random(1).randrange(7) for _ in range(40)]
    outcomes = by_key(Effects(ledger), opened.fence, keyed(0, keys))
    assert positions(place) == [(0, 40)]
    assert sorted(effects(place)) == list(range(40))
    for key in range(7):
        own = [o for o in effects(place) if keys[o] == key]
        assert own == sorted(own)
    assert sum(one.counts.rows for one in outcomes) == 40
    assert ledger.entries()[T0].done == ()
    assert verified(place) == []


def failing(*offsets: int) -> Before:
    def before(what: Chunk, claim: Claim) -> None:
        for one in claim.parts[T0]:
            if any(offset in one for offset in offsets):
                raise Stopped("the handler has failed")

    return before


def test_after_an_error_only_what_has_failed_is_done_again(place: Place) -> None:
    ledger, opened = taken(place)
    others = threading.Event()

    def before(what: Chunk, claim: Claim) -> None:
        if 0 in claim.parts[T0][0]:  # the thread of the first record fails as the last one
            assert others.wait(180)
            raise Stopped("the handler has failed")
        if claim.parts[T0][-1].end >= 9:
            others.set()

    keys = [0, 1, 1, 1, 1, 1, 1, 1, 1]
    with pytest.raises(Stopped):
        by_key(Effects(ledger, {"t": 3}, before), opened.fence, keyed(0, keys), piece=100)
    finished = effects(place)
    assert 0 not in finished

    later, again = taken(place)
    assert again.positions == {T0: 0}
    assert [r for r in again.beyond.get(T0, ())] == list(later.entries()[T0].done)
    outcomes = by_key(Effects(later), again.fence, keyed(0, keys))
    assert sorted(effects(place)) == list(range(9))
    assert sorted(
        o for one in outcomes if one.replayed for o in range(one.range.start, one.range.end)
    ) == sorted(finished)
    assert positions(place) == [(0, 9)]
    assert verified(place) == []


def finish(ledger: SqlLedger, fence: Fence, entry: Entry, *parts: tuple[int, int]) -> None:
    """Commit some ranges as a thread that has decided on this entry."""
    ranges = tuple(OffsetRange(*one) for one in parts)
    hull = {T0: OffsetRange(ranges[0].start, ranges[-1].end)}
    claim = Claim(fence, hull, {T0: entry}, "ahead", parts={T0: ranges})
    whole = at_t0(0, [rec(n, id=n, name="") for n in range(20)])
    Effects(ledger).finish(whole.keep({T0: ranges}), fence, claim)


def test_two_threads_that_have_read_the_same_entry_move_the_position_together(
    place: Place,
) -> None:
    ledger, opened = taken(place)
    read = ledger.entries()[T0]
    finish(ledger, opened.fence, read, (1, 2), (3, 4))
    assert ledger.entries()[T0].done == (OffsetRange(1, 2), OffsetRange(3, 4))
    assert positions(place) == [(0, 0)]
    finish(ledger, opened.fence, read, (0, 1))  # it has read that nothing is done beyond
    assert positions(place) == [(0, 2)]
    finish(ledger, opened.fence, read, (2, 3))
    assert positions(place) == [(0, 4)]
    assert [(start, end, kind) for _, start, end, _, kind, *_ in history(place)] == [
        (0, 1, "data"), (1, 2, "ahead"), (2, 3, "data"), (3, 4, "ahead"),
    ]  # fmt: skip
    assert verified(place) == []


def test_a_range_that_has_taken_effect_since_is_not_committed_again(place: Place) -> None:
    ledger, opened = taken(place)
    read = ledger.entries()[T0]
    finish(ledger, opened.fence, read, (2, 4))
    for again in ((2, 4), (3, 5), (1, 3)):
        with pytest.raises(PositionMoved):
            finish(ledger, opened.fence, read, again)
    assert effects(place) == [2, 3]


def test_a_thread_of_a_fenced_owner_commits_nothing(place: Place) -> None:
    ledger, opened = taken(place)
    read = ledger.entries()[T0]
    finish(ledger, opened.fence, read, (2, 4))
    later, again = taken(place)
    assert again.beyond == {T0: (OffsetRange(2, 4),)}
    with pytest.raises(PositionMoved):
        finish(ledger, opened.fence, read, (5, 6))
    with pytest.raises(Fenced):
        by_key(Effects(ledger), opened.fence, keyed(0, [1, 2, 3]))
    finish(later, again.fence, later.entries()[T0], (0, 2))
    assert positions(place) == [(0, 4)]
    assert verified(place) == []


def test_the_name_of_the_run_is_compared_too(place: Place) -> None:
    """After a failover an epoch is given out again."""
    ledger, opened = taken(place)
    read = ledger.entries()[T0]
    place.sql("UPDATE oncely_positions SET run = 'another'")
    with pytest.raises(PositionMoved):
        finish(ledger, opened.fence, read, (0, 1))


def test_after_an_error_no_thread_begins_another_piece(place: Place) -> None:
    ledger, opened = taken(place)
    failed, untold = threading.Event(), []

    def before(what: Chunk, claim: Claim) -> None:
        if 0 in claim.parts[T0][0]:
            raise Stopped("the handler has failed")
        if not failed.wait(180):
            untold.append(claim)

    class Telling(ByKey):
        def give_up(self) -> None:
            super().give_up()
            failed.set()

    sink = Effects(ledger, {"t": 2}, before)
    one, other = (next(k for k in range(99) if lane_of(bytes([k]), 2) == n) for n in range(2))
    what = keyed(0, [one, other, other, other, other, other])
    with pytest.raises(Stopped):
        Telling(Delivery(sink, ledger), what, opened.fence, None, 1, impatient).run()  # type: ignore[arg-type]
    assert not untold
    assert len(effects(place)) <= 1


def test_when_the_time_to_wait_is_up_no_thread_begins_another_piece(place: Place) -> None:
    """As when partitions are revoked, and the commit in hand does not end."""
    ledger, opened = taken(place)
    begun, go_on = threading.Event(), threading.Event()

    def before(what: Chunk, claim: Claim) -> None:
        begun.set()
        assert go_on.wait(180)

    delivery = Delivery(Effects(ledger, {"t": 2}, before), ledger)
    with PipelinedCommit(Budget(None, None, 0, 0), overlap=True) as hand:
        hand.begin(delivery, opened.fence, keyed(0, [1] * 250))  # type: ignore[arg-type]
        assert begun.wait(180)
        assert not hand.wait(0.01)
        go_on.set()
        with pytest.raises(Unavailable, match="change hands"):
            hand.finish()
    assert effects(place) == list(range(100))
    assert positions(place) == [(0, 100)]


def test_a_reset_undoes_ranges_beyond_its_target(place: Place) -> None:
    ledger, opened = taken(place)
    finish(ledger, opened.fence, ledger.entries()[T0], (0, 1), (2, 4))
    assert taken(place, reset=0)[1].beyond == {}
    later, again = taken(place)
    assert again.beyond == {}
    by_key(Effects(later), again.fence, keyed(0, [1, 2, 3, 4]))
    assert sorted(effects(place)) == [0, 0, 1, 2, 2, 3, 3]
    assert positions(place) == [(0, 4)]
    assert verified(place) == []


def test_the_plain_commit_path_does_what_is_left(place: Place) -> None:
    """As a worker without threads does."""
    ledger, opened = taken(place)
    finish(ledger, opened.fence, ledger.entries()[T0], (1, 2), (4, 5))
    later, again = taken(place)

    class Plain(Effects):
        def commit(self, what: Chunk, fence: Fence, claim: Claim, *_: Any) -> Any:
            with self.ledger.transaction(fence) as ours:
                for number in what.row_record:
                    ours.execute("INSERT INTO effects VALUES (%s)", (int(what.offset[number]),))
                counts = what.counts(what.row_record, what.rejections)
                self.ledger.compare_and_set(ours, claim, counts)
            return counts

    sink = Plain(later)
    outcomes = list(
        commit(Delivery(sink, later), keyed(0, [0] * 6), again.fence, None, impatient())  # type: ignore[arg-type]
    )
    assert sorted(effects(place)) == list(range(6))
    assert positions(place) == [(0, 6)]
    found = {one.range for one in outcomes if one.replayed}
    assert found >= {OffsetRange(1, 2), OffsetRange(4, 5)}
    assert verified(place) == []


def test_a_lost_answer_is_settled_by_the_ledger(place: Place) -> None:
    ledger, opened = taken(place)
    lost: list[int] = []

    class Losing(Effects):
        def finish(self, *args: Any) -> Any:
            found = super().finish(*args)
            if len(lost) < 3:
                lost.append(1)
                raise Unavailable("the answer was lost")
            return found

    outcomes = by_key(Losing(ledger), opened.fence, keyed(0, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert len(lost) == 3
    assert sorted(effects(place)) == list(range(8))
    assert any(one.replayed for one in outcomes)
    assert positions(place) == [(0, 8)]


def test_what_is_given_up_is_left_and_said(place: Place) -> None:
    ledger, opened = taken(place)
    sink = Effects(ledger)
    work = ByKey(Delivery(sink, ledger), keyed(0, [1, 2, 3, 4, 5, 6]), opened.fence, None, 1)  # type: ignore[arg-type]
    sink.before = lambda *_: work.give_up()
    with pytest.raises(Unavailable, match="change hands"):
        work.run()
    assert len(effects(place)) < 6


def test_a_ledger_that_went_back_is_noticed(place: Place) -> None:
    ledger, opened = taken(place)
    with pytest.raises(LedgerWentBack):
        by_key(Effects(ledger), opened.fence, keyed(7, [1, 2]))


def test_old_ranges_are_joined_below_the_position_only(place: Place) -> None:
    ledger, opened = taken(place)
    finish(ledger, opened.fence, ledger.entries()[T0], (1, 2), (3, 4), (6, 8))
    later, again = taken(place)
    finish(later, again.fence, later.entries()[T0], (0, 1), (2, 3))
    assert later.join_history(again.fence, 0) == 3
    assert [(start, end, epoch, kind) for _, start, end, epoch, kind, *_ in history(place)] == [
        (0, 4, 2, "joined"), (6, 8, 1, "ahead"),
    ]  # fmt: skip
    assert verified(place) == []
    finish(later, again.fence, later.entries()[T0], (4, 6))
    assert positions(place) == [(0, 8)]
    assert verified(place) == []


def test_ranges_are_joined_if_one_of_them_has_moved_the_position(place: Place) -> None:
    ledger, opened = taken(place)
    finish(ledger, opened.fence, ledger.entries()[T0], (2, 3), (4, 5))
    finish(ledger, opened.fence, ledger.entries()[T0], (3, 4))
    later, again = taken(place)
    pass_over(Delivery(Effects(later), later), {T0: OffsetRange(0, 2)}, again.fence, "gap")  # type: ignore[arg-type]
    assert later.join_history(again.fence, 0) == 0
    finish(later, again.fence, later.entries()[T0], (5, 6))
    later.join_history(again.fence, 0)
    assert [(start, end, epoch, kind) for _, start, end, epoch, kind, *_ in history(place)] == [
        (0, 2, 2, "gap"), (2, 6, 2, "joined"),
    ]  # fmt: skip
    assert verified(place) == []


@pytest.mark.parametrize("to", range(8))
def test_any_reset_is_told_from_a_position_that_has_moved_by_itself(place: Place, to: int) -> None:
    ledger, opened = taken(place)
    for parts in [(2, 3)], [(3, 4)], [(5, 6)], [(0, 1)]:
        finish(ledger, opened.fence, ledger.entries()[T0], *parts)
    taken(place, reset=to)
    later, again = taken(place)
    later.join_history(again.fence, 0)
    assert verified(place) == []
    by_key(Effects(later), again.fence, keyed(to, [1] * (8 - to)))
    later.join_history(again.fence, 0)
    assert verified(place) == []


@pytest.mark.parametrize("seed", range(12))
def test_errors_and_takeovers_at_random(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    keys = [chance.randrange(9) for _ in range(60)]
    for _ in range(200):
        ledger, opened = taken(place)
        at: Position = opened.positions[T0]
        if at == 60:
            break
        end = min(60, at + chance.randint(1, 30))

        def before(what: Chunk, claim: Claim) -> None:
            if chance.random() < 0.1:
                raise chance.choice([Stopped("failed"), Unavailable("lost")])

        sink = Effects(ledger, {"t": chance.randint(1, 4)}, before)
        with suppress(OncelyError):
            by_key(sink, opened.fence, keyed(at, keys[at:end]), piece=chance.randint(1, 6))
        assert verified(place) == []
    assert sorted(effects(place)) == list(range(60))
    for key in range(9):
        own = [o for o in effects(place) if keys[o] == key]
        assert own == sorted(own)
