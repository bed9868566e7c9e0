"""A member with nothing to commit finds a topic that was recreated, and a takeover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.commit.run import CommitContext, OpenLedger
from oncely.core import events
from oncely.core.claim import Entry, Fence
from oncely.core.ranges import TopicPartition
from oncely.errors import DataLost, SourceMismatch
from oncely.kafka.inbox import PollResult
from oncely.kafka.source import Watermarks
from oncely.runtimes.chunks import PipelinedCommit
from oncely.runtimes.takeover import EndOffsets, Takeovers
from oncely.runtimes.worker.assignment import Fetched
from oncely.runtimes.worker.member import Member, WorkerRun

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
FENCE = Fence("p", 1, "ours", frozenset({P0, P1}))
OURS = dict.fromkeys((P0, P1), Entry(5, 1, run="ours"))


class Ledger:
    """Its entries."""

    def __init__(self, entries: Mapping[TopicPartition, Entry]) -> None:
        self._entries = entries

    def positions(self, _: Fence) -> Mapping[TopicPartition, Entry]:
        return self._entries


class Run(WorkerRun):
    """It was opened for a topic with id 1."""

    def __init__(self, entries: Mapping[TopicPartition, Entry], ids: Mapping[str, str]) -> None:
        kafka: Any = SimpleNamespace(topic_ids=lambda: dict(ids))
        sink: Any = SimpleNamespace(ledger=Ledger(entries))
        nothing: Any = None
        ledger = OpenLedger(CommitContext(sink, nothing, nothing))
        ledger.fence, ledger._topic_ids = FENCE, {"t": "1"}
        takeovers = Takeovers(ledger, kafka, "p", "earliest", "fail", lambda _: None)
        super().__init__(ledger, takeovers, nothing)

    def look_for_a_whole_run(self) -> None:
        """No run has taken all partitions."""


@contextmanager
def idle(run: Run, *, owns: bool = True) -> Iterator[tuple[Member, list[events.Event]]]:
    """A member that has no records, and perhaps no partitions."""
    heard: list[events.Event] = []
    group: Any = SimpleNamespace(
        poll=lambda _: PollResult({}, {}),
        pause=lambda _: None,
        assigned_now=frozenset,
        joined=bool,
        strangers=dict,
    )
    member = Member(run, lambda _: group, listener=heard.append)
    with PipelinedCommit(run.ledger.budget, overlap=True) as member._hand:
        member._group = group
        if owns:
            member.assignment.assigned([P0, P1])
            member.assignment.taken(FENCE, dict.fromkeys((P0, P1), 5), {})
        yield member, heard


def watched(member: Member) -> None:
    """One look, and what follows it."""
    member.turn()
    assert member._hand.wait(180)
    member.turn()


def test_nothing_has_changed() -> None:
    with idle(Run(OURS, {"t": "1"})) as (member, heard):
        watched(member)
        assert [one for one in heard if not isinstance(one, events.Polled)] == []
        assert member.assignment.positions == {P0: 5, P1: 5}


@pytest.mark.parametrize("owns", [True, False])
def test_a_topic_was_recreated(*, owns: bool) -> None:
    with (
        idle(Run(OURS, {"t": "2"}), owns=owns) as (member, _),
        pytest.raises(SourceMismatch),
    ):
        watched(member)


def test_another_member_has_taken_a_partition_over() -> None:
    taken = OURS | {P1: Entry(7, 2, run="theirs")}
    with idle(Run(taken, {"t": "1"})) as (member, heard):
        watched(member)
        (fenced,) = [one for one in heard if isinstance(one, events.FencedOut)]
        assert fenced == events.FencedOut(1, 2, frozenset({P0, P1}))
        assert member.assignment.positions == {}


def test_a_partition_that_was_returned_may_be_taken_over() -> None:
    taken = OURS | {P1: Entry(7, 2, run="theirs")}
    with idle(Run(taken, {"t": "1"})) as (member, heard):
        member.revoked(frozenset({P1}), lost=False)
        watched(member)
        assert [one for one in heard if isinstance(one, events.FencedOut)] == []
        assert member.assignment.positions == {P0: 5}


def test_a_member_without_partitions_tells_once_that_it_has_joined() -> None:
    joined = events.PartitionsChanged("assigned", frozenset())
    with idle(Run(OURS, {"t": "1"}), owns=False) as (member, heard):
        answers = [False, True]
        member._group.joined = lambda: answers.pop(0)  # type: ignore[method-assign]
        member._tell()
        assert joined not in heard
        member._tell()
        member._tell()
        assert heard.count(joined) == 1


def test_a_goal_that_was_cut_away_ends_a_member() -> None:
    """The log ends at 5 now, and has ended at 9: there is nothing to wait for."""
    marks = {P0: Watermarks(0, 5, 5), P1: Watermarks(0, 5, 5)}
    source: Any = SimpleNamespace(watermarks=lambda: marks)
    now = [0.0]
    with idle(Run(OURS, {"t": "1"})) as (member, _):
        member.clock = lambda: now[0]
        for on_gap in ("record", "fail"):
            goal = EndOffsets(source, on_gap, {P0: 5, P1: 9}, lambda: now[0])
            assert not member._reached(goal)
            now[0] += 31  # a leader that has just lost its place may answer so
            assert not member._reached(goal)
            assert goal.ends[P1] == 9
            now[0] += 31
            if on_gap == "fail":
                with pytest.raises(DataLost, match="t-1 ends at 5, and has ended at 9"):
                    member._reached(goal)
                continue
            assert not member._reached(goal)
            assert member._reached(goal)


def test_records_are_committed_if_the_topic_is_the_same_after_they_were_fetched() -> None:
    """It is recreated after the first records were fetched: before the second ones were."""
    ids = {"t": "1"}
    committed: list[int] = []
    run = Run(OURS, ids)

    def begin(_: object, __: object, work: Any, before: Any) -> None:
        before()
        committed.append(work.ranges[P0].start)

    with idle(run) as (member, _):
        run.chunk = lambda work: work  # type: ignore[assignment, method-assign, return-value]
        member._hand.begin = begin  # type: ignore[assignment, method-assign]
        member.assignment.fetched(P0, Fetched(5, 5, 1, 1))
        ready = member._decoded(member.assignment.work())
        assert ready is not None
        assert ready.topic_ids() == {"t": "1"}
        ids["t"] = "2"
        member._commit(ready)
        assert committed == [5]
        member.assignment.fetched(P0, Fetched(6, 6, 1, 1))
        with pytest.raises(SourceMismatch):
            member._begin_records()
        assert committed == [5]
