"""A takeover of some partitions fences their holders there, and disturbs nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.commit.change import replay
from oncely.commit.path import pass_over
from oncely.commit.run import CommitContext, OpenLedger, save
from oncely.core.batch import Reject
from oncely.core.change import Judge, Reprocessed
from oncely.core.claim import (
    Budget,
    Claim,
    Counts,
    Fence,
    Notes,
    Opened,
    PositionMoved,
    RejectCount,
    Takeover,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced, InvariantViolation, Unavailable
from oncely.kinds.sql.change import SqlReplay
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql import takeover as sql
from oncely.stores.topic.compare_and_set import PositionTakeover
from tests.contracts.sinks import SinkAdapter, adapter
from tests.replaytools import bad, judging
from tests.replaytools import replayed as replayed_into_topic
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    T1,
    T2,
    Died,
    Place,
    asking_again,
    chunk,
    commit_all,
    impatient,
    rec,
    sink_to,
    together,
)

Make = Callable[[], Any]
LEDGERS = ("sqlite", "postgresql", "kafka")
START = {T0: 2, T1: 3, T2: 4}
FIRST = dict.fromkeys(START, 0)
_DECODER: Any = SimpleNamespace(schema=SCHEMA, needs=frozenset())


@pytest.fixture(params=LEDGERS)
def to(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkAdapter]:
    """An empty destination."""
    yield from adapter(request.param, request.getfixturevalue, tmp_path)


@pytest.fixture
def make(to: SinkAdapter) -> Make:
    """Sinks of one pipeline, each as a process of its own makes it."""
    return to.sink


def start_is_settled() -> dict[TopicPartition, int]:
    raise AssertionError("start is asked once in the pipeline's life")


def takeover(*partitions: TopicPartition, **more: Any) -> Takeover:
    """Of some partitions; of all when none is named."""
    return Takeover(
        SOURCE, lambda: START, FIRST, **{"partitions": frozenset(partitions) or None, **more}
    )


def take(sink: Any, *partitions: TopicPartition, **more: Any) -> Fence:
    return opened(sink, *partitions, **more).fence


def opened(sink: Any, *partitions: TopicPartition, **more: Any) -> Opened:
    done: Opened = sink.open(takeover(*partitions, **more))
    return done


def registered(sink: Any) -> Fence:
    """What a process finds at its start, without taking anything."""
    whole = opened(sink, partitions=frozenset()).whole
    assert whole is not None
    return whole


def write(sink: Any, fence: Fence, tp: TopicPartition, start: int, end: int) -> None:
    """Commit a partition's records."""
    ids = range(start, end)
    records = [rec(n, id=1_000 * tp.partition + n, name="n") for n in ids]
    asking_again(lambda: commit_all(sink.bind(), chunk({tp: (start, records)}), fence))


def is_fenced(step: Callable[[], object], *lost: TopicPartition) -> bool:
    """Fenced, and it names what a holder of some partitions has lost."""
    found: frozenset[object] | None = None
    try:
        asking_again(step)
    except Fenced as error:
        found = error.lost
    return found == set(lost)


def holds(sink: Any, fence: Fence) -> dict[TopicPartition, int]:
    """The positions that are the fence's."""
    entries = asking_again(lambda: sink.ledger.positions(fence, settled=True))
    return {tp: entries[tp].position for tp in sorted(fence.held(entries))}


def run_of(make: Make, *partitions: TopicPartition, **more: Any) -> OpenLedger[Any]:
    """The driver's side of a run."""
    nothing: Any = None
    run = OpenLedger(CommitContext(make(), nothing, _DECODER, Budget(count=10)))
    run.open(takeover(*partitions, **more))
    return run


def test_the_former_owner_commits_nothing_more_there_and_goes_on_with_its_others(
    make: Make,
) -> None:
    old, newer = make(), make()
    first = opened(old, T0, T1)
    assert (first.positions, first.first_start) == ({T0: 2, T1: 3}, True)
    assert first.begun == {T0, T1}
    write(old, first.fence, T0, 2, 5)
    write(old, first.fence, T1, 3, 5)

    second = opened(newer, T1, T2)
    assert (second.positions, second.first_start) == ({T1: 5, T2: 4}, False)
    assert second.begun == {T2}
    assert second.fence.epoch > first.fence.epoch
    write(old, first.fence, T0, 5, 7)
    assert is_fenced(lambda: write(old, first.fence, T1, 5, 7))
    write(newer, second.fence, T1, 5, 8)
    write(newer, second.fence, T2, 4, 6)
    assert holds(old, first.fence) == {T0: 7}
    assert holds(newer, second.fence) == {T1: 8, T2: 6}


def test_what_was_decided_before_the_takeover_is_not_committed_after_it(make: Make) -> None:
    old, newer = make(), make()
    fence = take(old, T0, T1)
    write(old, fence, T1, 3, 5)
    entries = old.ledger.positions(fence)
    take(newer, T1)
    ranges = {T1: OffsetRange(5, 9)}
    what = chunk({T1: (5, [rec(8, id=1, name="n")])})
    with pytest.raises(PositionMoved):
        asking_again(lambda: old.bind().commit(what, fence, Claim(fence, ranges, entries)))


def test_start_is_settled_for_all_by_whoever_takes_some_first(make: Make) -> None:
    """A partition that nobody had taken yet does not begin at its first offset instead."""
    assert not opened(make(), partitions=frozenset()).begun
    assert opened(make(), T1).begun == {T1}
    later = make().open(Takeover(SOURCE, start_is_settled, FIRST, partitions=frozenset({T0, T1})))
    assert (later.positions, later.first_start) == ({T0: 2, T1: 3}, False)
    assert later.begun == {T0}
    whole = make().open(Takeover(SOURCE, start_is_settled, FIRST))
    assert whole.positions == START
    assert whole.begun == START.keys() - {T0, T1}


def test_each_of_several_that_start_together_tells_which_partitions_begin_with_it(
    make: Make,
) -> None:
    """The one that registers the pipeline may take none of them."""
    sinks = {tp: make() for tp in START}
    for one in sinks.values():
        registered(one)
    with ThreadPoolExecutor(len(sinks)) as pool:
        found = list(pool.map(lambda tp: asking_again(lambda: opened(sinks[tp], tp)), sinks))
    assert [one.begun for one in found] == [{tp} for tp in sinks]


def test_a_partition_seen_later_begins_at_its_first_offset(make: Make) -> None:
    make().open(Takeover(SOURCE, lambda: {T0: 2}, {T0: 0}, partitions=frozenset({T0})))
    later = make().open(
        Takeover(SOURCE, start_is_settled, {T0: 0, T1: 7}, partitions=frozenset({T1}))
    )
    assert later.positions == {T1: 7}


def test_takers_of_disjoint_partitions_do_not_disturb_each_other(make: Make) -> None:
    """All at the same moment: at the first start, and again."""
    sinks = {tp: make() for tp in START}
    expected: dict[TopicPartition, int | None] = dict.fromkeys(START)
    at = dict(START)
    for _ in range(2):
        with ThreadPoolExecutor(len(sinks)) as pool:
            asked = {
                tp: pool.submit(asking_again, partial(take, sink, tp, expected=expected[tp]))
                for tp, sink in sinks.items()
            }
            fences = {tp: one.result() for tp, one in asked.items()}
        assert len({one.epoch for one in fences.values()}) == len(fences)
        for tp, fence in fences.items():
            write(sinks[tp], fence, tp, at[tp], at[tp] + 2)
            at[tp] += 2
        expected = {tp: fence.epoch for tp, fence in fences.items()}


def test_a_takeover_of_all_fences_every_holder_of_some(make: Make) -> None:
    olds = {T0: make(), T1: make()}
    fences = {tp: take(one, tp) for tp, one in olds.items()}
    newer = make()
    whole = opened(newer)
    assert (whole.positions, whole.whole) == (START, whole.fence)
    for tp, old in olds.items():
        fence = fences[tp]
        assert is_fenced(lambda: write(old, fence, tp, START[tp], 9))  # noqa: B023
        assert is_fenced(lambda: take(old, tp, expected=fence.epoch), tp)  # noqa: B023
        assert holds(old, fence) == {}
    write(newer, whole.fence, T0, 2, 5)


def test_a_run_of_all_that_loses_one_partition_is_fenced(make: Make) -> None:
    run = run_of(make)
    take(make(), T1)
    assert is_fenced(run.positions)
    assert is_fenced(
        lambda: run.context.ledger.note(run.fence, Notes(counted=RejectCount("10", 1, 1)))
    )
    assert is_fenced(lambda: run.open(takeover(expected=run.fence.epoch)))
    assert is_fenced(lambda: save(run.context.ledger, run.fence, {T0: 9, T1: 9}))
    assert holds(make(), run.fence) == {T0: 2, T2: 4}


def test_a_run_of_some_is_fenced_for_what_it_has_lost(make: Make) -> None:
    run = run_of(make, T0, T1)
    assert run.positions() == {T0: 2, T1: 3}
    other = make()
    rival = take(other, T2)
    assert run.positions() == {T0: 2, T1: 3}, "others move as they like"
    run.context.ledger.tidy(run.fence)
    taken = take(make(), T1)
    assert is_fenced(run.positions, T1)
    assert is_fenced(lambda: run.open(takeover(T0, T1, expected=run.fence.epoch)), T1)
    asking_again(lambda: run.context.ledger.tidy(run.fence))
    # A timer saves what is still ours, and tells of the rest.
    assert is_fenced(lambda: save(run.context.ledger, run.fence, {T0: 6, T1: 9}), T1)
    assert holds(make(), run.fence) == {T0: 6}
    assert run.open(takeover(T0, expected=run.fence.epoch)).positions == {T0: 6}
    assert holds(other, rival) == {T2: 4}
    assert holds(other, taken) == {T1: 3}


def test_a_claim_and_its_holes_are_of_partitions_that_were_taken(make: Make) -> None:
    sink = make()
    take(make(), T1)
    fence = take(sink, T0)
    with pytest.raises((Fenced, InvariantViolation, Unavailable)):
        asking_again(
            lambda: pass_over(together(sink), {T1: OffsetRange(3, 9)}, fence, "hole", impatient())
        )
    with pytest.raises(InvariantViolation, match="takes others over"):
        sink.ledger.add_partitions(fence, {T2: 0}, SOURCE)
    assert holds(sink, fence) == {T0: 2}


# -- who takes some respects who has taken all --------------------------------------------


def test_a_process_that_was_started_before_a_takeover_of_all_takes_nothing(make: Make) -> None:
    """It was paused between its assignment and its takeover, and an operator has started Spark."""
    worker, spark = make(), make()
    since = registered(worker)
    fence = take(worker, T0, since=since)
    whole = take(spark)
    write(spark, whole, T0, 2, 4)
    for tp in (T0, T1):
        with pytest.raises(Fenced):
            take(worker, tp, since=since)
    assert is_fenced(lambda: write(worker, fence, T0, 2, 4))
    write(spark, whole, T0, 4, 6)
    # Started again, it finds the newer epoch: somebody wants to go back to workers.
    again = make()
    found = registered(again)
    assert found == whole
    write(again, take(again, T0, since=found), T0, 6, 8)
    assert is_fenced(run_like(spark, whole))
    assert registered(again) == found, "takeovers of some change nothing about it"


def run_like(sink: Any, fence: Fence) -> Callable[[], object]:
    return lambda: fence.refuse_taken(sink.ledger.positions(fence, settled=True))


def test_a_reset_counts_as_a_takeover_of_all(make: Make) -> None:
    worker = make()
    since = registered(worker)
    fence = take(worker, T0, T1, since=since)
    write(worker, fence, T0, 2, 6)
    put = opened(make(), reset=lambda _: {T0: 3})
    assert put.positions == {**START, T0: 3}
    assert is_fenced(lambda: write(worker, fence, T1, 3, 5))
    with pytest.raises(Fenced):
        take(worker, T0, since=since)
    again = make()
    assert opened(again, T0, since=registered(again)).positions == {T0: 3}


def test_to_register_takes_nothing(make: Make) -> None:
    run = run_of(make)
    registered(make())
    assert run.positions() == START
    run.context.ledger.tidy(run.fence)
    assert run.open(takeover(expected=run.fence.epoch)).positions == START


@contextlib.contextmanager
def before_positions_are_taken(happens: Callable[[], object]) -> Any:
    """Something happens once, when the next opener has its epoch and no position yet."""
    with pytest.MonkeyPatch.context() as patch:

        def once(real: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                patch.undo()
                happens()
                return real(*args)

            return called

        patch.setattr(sql, "take_positions", once(sql.take_positions))
        patch.setattr(PositionTakeover, "take", once(PositionTakeover.take))
        yield


def dies() -> None:
    raise Died


def test_a_takeover_of_all_that_died_with_an_epoch_alone_stops_no_worker(make: Make) -> None:
    worker = make()
    since = registered(worker)
    fence = take(worker, T0, since=since)
    with before_positions_are_taken(dies), pytest.raises(Died):
        take(make())
    write(worker, fence, T0, 2, 5)
    fence = take(worker, T0, T1, since=since, expected=fence.epoch)
    write(worker, fence, T0, 5, 8)
    assert registered(make()) == since


@pytest.mark.parametrize("died", [T1, None], ids=["of others", "of the same"])
def test_a_takeover_of_some_that_died_with_an_epoch_alone_disturbs_nobody(
    make: Make, died: TopicPartition | None
) -> None:
    run = run_of(make, T0)
    with before_positions_are_taken(dies), pytest.raises(Died):
        take(make(), died or T0)
    assert run.positions() == {T0: 2}
    write(run.context.sink, run.fence, T0, 2, 5)
    run.context.ledger.tidy(run.fence)
    run.context.ledger.note(run.fence, Notes(leader_epochs={T0: 4}))
    run.open(takeover(T0, expected=run.fence.epoch))
    write(run.context.sink, run.fence, T0, 5, 7)
    assert take(make()).epoch > run.fence.epoch


def test_a_first_takeover_of_all_takes_what_workers_have_taken_meanwhile(make: Make) -> None:
    """They were given the later epochs, and are older processes all the same."""
    worker, slow, spark = make(), make(), make()
    since = registered(worker)
    fences = []

    def meanwhile() -> None:
        fences.append(take(worker, T0, since=since))
        write(worker, fences[0], T0, 2, 5)

    with before_positions_are_taken(meanwhile):
        whole = opened(spark)
    assert whole.positions == {**START, T0: 5}
    assert whole.fence.epoch > fences[0].epoch
    assert is_fenced(lambda: write(worker, fences[0], T0, 5, 7))
    with pytest.raises(Fenced):
        take(slow, T0, since=since)
    write(spark, whole.fence, T0, 5, 7)
    write(spark, whole.fence, T1, 3, 7)


def test_a_worker_that_was_given_an_epoch_before_all_were_taken_takes_nothing(make: Make) -> None:
    worker, spark = make(), make()
    since = registered(worker)
    wholes: list[Fence] = []
    with before_positions_are_taken(lambda: wholes.append(take(spark))), pytest.raises(Fenced):
        take(worker, T0, since=since)
    write(spark, wholes[0], T0, 2, 5)
    assert run_like(spark, wholes[0])() is None


def test_a_run_of_all_that_opens_again_is_fenced_by_a_worker(make: Make) -> None:
    """It has held them: a process that was started since has taken one by intent."""
    run, worker = run_of(make), make()
    since = registered(worker)
    fences: list[Fence] = []
    with (
        before_positions_are_taken(lambda: fences.append(take(worker, T0, since=since))),
        pytest.raises(Fenced),
    ):
        run.open(takeover(expected=run.fence.epoch))
    write(worker, fences[0], T0, 2, 5)


def test_of_two_takers_of_one_partition_the_later_epoch_holds_it(make: Make) -> None:
    one, other = make(), make()
    fences: list[Fence] = []
    with (
        before_positions_are_taken(lambda: fences.append(take(other, T0, T2))),
        pytest.raises(Fenced) as fenced,
    ):
        take(one, T0, T1)
    assert fenced.value.lost == {T0}
    write(other, fences[0], T0, 2, 5)
    write(one, take(one, T1), T1, 3, 5)


# -- beside a replay of dead letters --------------------------------------------------------


def replayed(sink: Any, judge: Judge) -> tuple[int, int]:
    """A whole replay: how many dead letters it has moved, and kept."""
    if isinstance(sink, SqlSink):
        return replay(SqlReplay(sink.bind()), judge, impatient())
    return replayed_into_topic(sink, judge)


def reject(sink: Any, fence: Fence, tp: TopicPartition, *offsets: int) -> None:
    """Commit rejects of a partition."""
    asking_again(lambda: commit_all(sink.bind(), chunk({tp: (offsets[0], bad(*offsets))}), fence))


def test_a_replay_and_a_takeover_of_some_disturb_neither_each_other_nor_other_holders(
    to: SinkAdapter,
) -> None:
    """In its middle, when the letters have been read and their records are made again.

    In SQLite the takeover waits for the replay's transaction.
    """
    holder, worker = to.sink(), to.sink()
    fences = {T0: take(holder, T0), T1: take(to.sink(), T1)}
    reject(holder, fences[T0], T0, 2, 3)
    reject(holder, fences[T1], T1, 3, 4)

    def takes_over() -> None:
        fences[T0] = take(worker, T0)
        reject(worker, fences[T0], T0, 4)
        write(worker, fences[T0], T0, 5, 7)

    with ThreadPoolExecutor(1) as pool:
        asked: list[Future[None]] = []

        def judge(found: Sequence[Reject]) -> Reprocessed:
            if not asked:
                asked.append(pool.submit(takes_over))
                wait(asked, 0.1 if to.kind == "sqlite" else 60)
            return judging()(found)

        moved, kept = replayed(to.sink(), judge)
        asked[0].result(120)
    rest, _ = replayed(to.sink(), judging())
    assert (moved + rest, kept) == (5, 0)
    assert holds(worker, fences[T0]) == {T0: 7}
    write(holder, fences[T1], T1, 5, 7)
    assert to.ids() == [2, 3, 3, 4, 4, 5, 6, 1_005, 1_006]
    assert replayed(to.sink(), judging()) == (0, 0)


# -- what is kept beside positions ---------------------------------------------------------


def test_leader_epochs_are_noted_of_partitions_that_are_still_held(make: Make) -> None:
    old, newer = make(), make()
    fence = take(old, T0, T1)
    old.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 3}))
    later = take(newer, T1)
    newer.ledger.note(later, Notes(leader_epochs={T1: 8}))
    asking_again(lambda: old.ledger.note(fence, Notes(leader_epochs={T0: 5, T1: 5})))
    assert opened(make(), T1).leader_epochs == {T1: 8}
    assert opened(make()).leader_epochs == {T0: 5, T1: 8}


def test_the_counts_of_several_holders_add_up(make: Make) -> None:
    one, other = run_of(make, T0), run_of(make, T1)
    for run, records, rejects in ((one, 100, 2), (other, 50, 1), (one, 10, 1)):
        run.count(Counts(records, 0, rejects, 0))
        asking_again(lambda: run.tidy(0))  # noqa: B023
    assert opened(make()).counted == RejectCount("10", 160, 4)
    third = run_of(make, T2)
    third.count(Counts(5, 0, 1, 0))
    asking_again(lambda: third.tidy(0))
    assert opened(make()).counted == RejectCount("10", 165, 5)


def test_a_holder_that_has_lost_everything_notes_no_count(make: Make) -> None:
    run = run_of(make, T0)
    take(make(), T0)
    counted = Notes(counted=RejectCount("10", 9, 9))
    assert is_fenced(lambda: run.context.ledger.note(run.fence, counted), T0)
    assert opened(make()).counted == RejectCount()


def test_a_holder_of_some_joins_the_history_of_its_own_partitions(place: Place) -> None:
    one, other = sink_to(place), sink_to(place)
    fences = {T0: take(one, T0), T1: take(other, T1)}
    for tp, fence in fences.items():
        for at in range(START[tp], START[tp] + 4):
            write(one, fence, tp, at, at + 1)
    saved = asking_again(lambda: one.ledger.join_history(fences[T0], 1))
    assert saved == 2
    left = place.sql(
        'SELECT "partition", COUNT(*) FROM oncely_ranges'
        " WHERE kind <> 'skipped' GROUP BY 1 ORDER BY 1"
    )
    assert left == [(0, 2), (1, 4)]
