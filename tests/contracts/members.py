"""Commits by a member of a group: what the contract suite commits goes through a real
:class:`oncely.runtimes.worker.member.Member`, from the poll to the end of the commit.

Partitions, records and fences are those of the test; so a scripted group assigns and delivers them,
and the takeover has been made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from oncely import phases
from oncely.commit.path import Delivery, Outcome
from oncely.commit.run import CommitContext, OpenLedger
from oncely.core import events
from oncely.core.batch import Chunk
from oncely.core.claim import Budget, Fence
from oncely.core.ranges import TopicPartition
from oncely.kafka.group import Rebalances
from oncely.kafka.inbox import PollResult
from oncely.runtimes import chunks
from oncely.runtimes.chunks import PipelinedCommit
from oncely.runtimes.takeover import Taken, Takeovers
from oncely.runtimes.worker import member
from oncely.runtimes.worker.assignment import PendingCommit
from oncely.runtimes.worker.member import WorkerRun
from oncely.threads import StopSignal
from tests import sinktools
from tests.jobtools import Message


@contextmanager
def by_members() -> Iterator[None]:
    """Within the block :func:`tests.sinktools.commit_all` commits by members."""
    with (
        mock.patch.object(sinktools, "commit", commit),
        mock.patch.object(chunks, "Backoff", sinktools.impatient),
        mock.patch.object(member, "PipelinedCommit", _Recorded),
    ):
        yield


def commit(
    delivery: Delivery[Any], what: Chunk, fence: Fence, max_rejects: int | None, _: object
) -> list[Outcome]:
    """One chunk by one member.

    Raises:
        OncelyError: of the commit, also one after which a member would take over again.
    """
    stop, outcomes = StopSignal(), list[Outcome]()

    def listen(event: events.Event) -> None:
        if isinstance(event, events.BatchCommitted):
            phases.longest([event.phases])  # a member measures its batches by itself
        if isinstance(event, events.BatchCommitted | events.FencedOut | events.BatchFailed):
            stop.ask()

    run: Any = None  # what a chunk of the test does not need
    context = CommitContext(
        delivery.sink, run, run, Budget(count=max_rejects), delivery.ledger, delivery.order
    )
    ledger = OpenLedger(context)
    ledger.fence = fence
    run = _Run(ledger, Takeovers(ledger, run, "", "earliest", "fail", listen), run)
    run.given, run.outcomes = what, outcomes
    one = member.Member(run, lambda rebalances: _Group(what, rebalances), stop=stop,
                        listener=listen)  # fmt: skip
    one.work()
    hand: Any = one._hand
    if hand.error is not None:
        assert not one.assignment.of(fence), "after an error its partitions are taken over again"
        raise hand.error
    return outcomes


class _Run(WorkerRun):
    """The ledger was opened by the test, which has the fence."""

    given: Chunk
    outcomes: list[Outcome]

    def take(self, partitions: frozenset[TopicPartition]) -> Taken:
        starts = {tp: self.given.ranges[tp].start for tp in partitions}
        return Taken(self.ledger.fence, starts, {})

    def chunk(self, work: PendingCommit) -> Chunk:
        assert work.ranges == self.given.ranges
        return self.given

    def topic_ids(self) -> dict[str, str]:
        return {}

    def before(self, work: PendingCommit, topic_ids: Callable[[], Mapping[str, str]]) -> None:
        """There is no topic."""
        topic_ids()

    def look_for_a_whole_run(self) -> None:
        """Nobody has taken all partitions over."""

    def watch(self, fence: Fence | None) -> list[Outcome]:
        return []

    def keep_house(self, held: Collection[Fence], outcomes: Collection[Outcome]) -> None:
        """Not between the commits of a test."""
        self.outcomes += outcomes


class _Recorded(PipelinedCommit):
    """Keeps the error of a commit, on which the member acts."""

    error: BaseException | None = None

    def finish(self) -> list[Outcome]:
        try:
            return super().finish()
        except BaseException as error:
            self.error = error
            raise


class _Group:
    """Assigns the partitions of a chunk, and delivers its records, by the first poll."""

    def __init__(self, what: Chunk, rebalances: Rebalances) -> None:
        self._what, self._rebalances, self._polls = what, rebalances, 0

    def poll(self, _: float) -> PollResult:
        self._polls += 1
        if self._polls > 1:
            return PollResult()
        self._rebalances.assigned(frozenset(self._what.ranges))
        what = self._what
        return PollResult(
            {
                tp: [Message(int(at)) for at in what.offset[what.partition == number]]
                for number, tp in enumerate(what.partitions)
            }
        )

    def __getattr__(self, name: str) -> Any:
        """Pauses, marks and the rest have no effect."""
        return lambda *_: frozenset()
