"""The run that holds the positions goes on, whatever dies or pauses before it has taken them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from oncely.commit.path import pass_over
from oncely.core.claim import Fence, Opened, QueryBatch, Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.errors import Fenced, TableMismatch, Unavailable
from oncely.kinds.sql.sink import SqlSink
from oncely.runtimes.spark.plugin import BatchRanges, PublishedBatches
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Died,
    Place,
    asking_again,
    at_t0,
    chunk,
    commit_all,
    impatient,
    numbered,
    open_sink,
    ready,
    sink_to,
    together,
    with_faults,
)


class DieAt:
    """Dies before the n-th call that is no query, and asks nothing more."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        self.left -= name in ("begin", "execute", "execute_many", "execute_all", "commit")
        if self.left > 0 or name == "close":  # the server closes the sessions of a dead process
            return call()
        if self.left == 0:
            raise Died
        raise ConnectionError("a dead process asks nothing")


class Meanwhile:
    """Something happens before the positions are taken: the second transaction of an opener."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens
        self.begun = 0

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        if name == "begin":
            self.begun += 1
            if self.begun == 2:
                self.happens()
        return call()


def opens(sink: SqlSink) -> object:
    return sink.open(Takeover(SOURCE, dict, {T0: 0}))


def takes(sink: SqlSink) -> object:
    """One of the partitions."""
    return sink.open(Takeover(SOURCE, dict, {T0: 0}, partitions=frozenset({T0})))


def resets(sink: SqlSink) -> object:
    """Of the same pipeline, whose file names another table from now on."""
    elsewhere = replace(sink.wanted, table=sink.wanted.table.sibling("elsewhere"))
    return replace(sink, wanted=elsewhere).open(
        Takeover(SOURCE, dict, {T0: 0}, reset=lambda _: {T0: 2})
    )


@pytest.mark.parametrize("held", [None, frozenset({T0})], ids=["all", "some"])
@pytest.mark.parametrize("step", [opens, takes, resets])
def test_a_run_goes_on_for_good_when_its_rival_died_before_it_had_the_positions(
    place: Place, step: Callable[[SqlSink], object], held: frozenset[TopicPartition] | None
) -> None:
    fenced = list(_after_each_death(place, step, held))
    assert fenced == sorted(fenced)
    assert set(fenced) == {False, True}


def test_a_holder_of_other_partitions_goes_on_wherever_a_takeover_of_some_dies(
    place: Place,
) -> None:
    fenced = list(_after_each_death(place, takes, frozenset({T1})))
    assert set(fenced) == {False}


def _after_each_death(
    place: Place, step: Callable[[SqlSink], object], held: frozenset[TopicPartition] | None
) -> Iterator[bool]:
    """For each call at which the rival dies, and for none, whether the older run is fenced."""
    for at in itertools.count(1):
        sink = sink_to(place, pipeline=f"p{at}")
        fence, old = sink.open(_first(held)).fence, sink.bind()
        tp = min(held or [T0])
        commit_all(old, chunk({tp: (0, numbered(0, 3))}), fence)
        died = False
        try:
            step(with_faults(sink_to(place, pipeline=f"p{at}"), DieAt(at)))
        except Died:
            died = True
        yield _is_fenced(old, fence, tp)
        if not died:
            return


def _first(held: frozenset[TopicPartition] | None) -> Takeover:
    both = {T0: 0, T1: 0}
    return Takeover(SOURCE, lambda: both if held else {T0: 0}, both, partitions=held)


def _is_fenced(old: SqlSink, fence: Fence, tp: TopicPartition) -> bool:
    """Do all that a run does, to its next start. True: every step of it says Fenced."""

    def opening(expected: int | None) -> Opened:
        takeover = Takeover(SOURCE, dict, {tp: 0}, expected, partitions=fence.partitions)
        return old.open(takeover)

    whole = fence.partitions is None
    steps = [
        lambda: old.ledger.tidy(fence),
        *([lambda: old.ledger.add_partitions(fence, {T1: 0}, SOURCE)] if whole else []),
        lambda: commit_all(old, chunk({tp: (3, numbered(3, 6))}), fence),
        lambda: pass_over(together(old), {tp: OffsetRange(6, 8)}, fence, "gap", impatient()),
        *([lambda: _publish_nothing(old, fence)] if whole else []),
        lambda: opening(fence.epoch),
    ]
    answers = [_fenced(one) for one in steps]
    assert len(set(answers)) == 1, answers
    if not answers[0]:
        opened = opening(None)
        assert opened.positions == ({T0: 8, T1: 0} if whole else {tp: 8})
        assert opened.fence.epoch > fence.epoch + 1
    return answers[0]


def _fenced(step: Callable[[], object]) -> bool:
    try:
        asking_again(step)
    except (Fenced, TableMismatch):  # after a reset that led the pipeline to another table
        return True
    return False


def _publish_nothing(sink: SqlSink, fence: Fence) -> None:
    """What a batch of somebody's query asks first."""
    batches = PublishedBatches(sink, fence, None, lambda _: {}, stateful=False)  # type: ignore[arg-type]
    assert not batches._is_published(QueryBatch("query", 0, "plan"), BatchRanges({}, complete=True))


@pytest.fixture
def old(place: Place) -> tuple[SqlSink, Fence]:
    """A run with a few records committed."""
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    return sink, fence


def test_an_opener_that_pauses_takes_over_what_the_older_run_did_meanwhile(
    place: Place, old: tuple[SqlSink, Fence]
) -> None:
    sink, fence = old

    def meanwhile() -> None:
        asking_again(lambda: commit_all(sink, at_t0(3, numbered(3, 6)), fence))
        sink.ledger.tidy(fence)
        sink.ledger.add_partitions(fence, {T1: 4}, SOURCE)

    opened = open_sink(with_faults(sink_to(place), Meanwhile(meanwhile)))
    assert opened.positions == {T0: 6, T1: 4}
    assert _fenced(lambda: sink.ledger.tidy(fence))
    assert _fenced(lambda: open_sink(sink, expected=fence.epoch))


def test_an_opener_that_pauses_is_fenced_when_the_older_run_opens_again_meanwhile(
    place: Place, old: tuple[SqlSink, Fence]
) -> None:
    sink, fence = old
    again: list[Fence] = []

    def meanwhile() -> None:
        again.append(open_sink(sink, expected=fence.epoch).fence)

    with pytest.raises(Fenced):
        open_sink(with_faults(sink_to(place), Meanwhile(meanwhile)))
    asking_again(lambda: commit_all(sink, at_t0(3, numbered(3, 6)), again[0]))
    sink.ledger.tidy(again[0])


def test_a_run_that_opens_again_is_fenced_by_who_took_the_positions_meanwhile(
    place: Place, old: tuple[SqlSink, Fence]
) -> None:
    """Though the epoch that it was given is the higher one: it is the older run."""
    sink, fence = old
    rival = sink_to(place)
    newer: list[Fence] = []

    def rival_pauses() -> None:
        """The rival has its epoch; the older run takes one after it, and pauses in its turn."""
        with pytest.raises(Fenced):
            open_sink(with_faults(sink, Meanwhile(older_pauses)), expected=fence.epoch)
        raise Died

    def older_pauses() -> None:
        newer.append(open_sink(rival).fence)

    with pytest.raises(Died):
        open_sink(with_faults(sink_to(place), Meanwhile(rival_pauses)))
    asking_again(lambda: commit_all(rival.bind(), at_t0(3, numbered(3, 6)), newer[0]))


def test_the_lower_of_two_epochs_may_take_the_positions_first(
    place: Place, old: tuple[SqlSink, Fence]
) -> None:
    """The older run opens again with a higher epoch than the rival has, and comes second."""
    sink, fence = old
    died = sink_to(place)

    def older_took_an_epoch() -> None:
        """Only that: it pauses for good."""
        with pytest.raises(Died):
            open_sink(with_faults(sink, Meanwhile(_die)), expected=fence.epoch)

    opened = open_sink(with_faults(died, Meanwhile(older_took_an_epoch)))
    assert opened.fence.epoch == fence.epoch + 1
    assert _fenced(lambda: open_sink(sink, expected=fence.epoch))
    asking_again(lambda: commit_all(died.bind(), at_t0(3, numbered(3, 6)), opened.fence))


def _die() -> None:
    raise Died


def test_a_run_finds_positions_that_it_took_itself_though_a_rival_has_taken_an_epoch_since(
    place: Place, old: tuple[SqlSink, Fence]
) -> None:
    sink, fence = old

    def answer_lost(name: str, call: Callable[[], Any]) -> Any:
        answer = call()
        if name == "commit" and next(commits) == 2:
            raise Unavailable("the connection broke")
        return answer

    commits = itertools.count(1)
    with pytest.raises(Unavailable):
        open_sink(with_faults(sink, answer_lost), expected=fence.epoch)
    with pytest.raises(Died):
        open_sink(with_faults(sink_to(place), Meanwhile(_die)))
    opened = open_sink(sink, expected=fence.epoch)
    assert opened.fence.epoch == fence.epoch + 3
    commit_all(sink, at_t0(3, numbered(3, 6)), opened.fence)


def test_a_query_without_kafka_positions_goes_on_after_a_rival_died(place: Place) -> None:
    source = SourceIdentity("", {})
    sink = sink_to(place)
    fence = sink.open(Takeover(source, dict, {})).fence
    with pytest.raises(Died):
        with_faults(sink_to(place), Meanwhile(_die)).open(Takeover(source, dict, {}))
    sink.ledger.tidy(fence)
    _publish_nothing(sink, fence)
    newer = sink_to(place)
    newer.open(Takeover(source, dict, {}))
    assert _fenced(lambda: sink.ledger.tidy(fence))
    assert _fenced(lambda: _publish_nothing(sink, fence))
