"""A chunk is committed while the next one is read: one at a time, in order, and never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from oncely.core.batch import Chunk
from oncely.core.claim import Budget, Claim, Counts, Entry, Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.base import Decoded
from oncely.errors import (
    DataLost,
    GivenUp,
    InvariantViolation,
    SourceMismatch,
    TooManyRejects,
    Unavailable,
)
from oncely.runtimes.batches.commit import TaskResult, commit_chunks
from oncely.runtimes.chunks import ChunkBounds, PipelinedCommit, RangeReader
from oncely.runtimes.jobs import Attempt, Spent, answers
from oncely.runtimes.row_transform import Unchanged
from tests.jobtools import GivenRecords, records
from tests.sinktools import T0, at_t0, numbered, together


@dataclass
class Memory:
    """A sink that remembers, and says when a commit begins."""

    at: dict[TopicPartition, int] = field(default_factory=lambda: {T0: 0})
    order: list[tuple[int, int]] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1_000))
    fail_at: int = -1
    threads: set[int] = field(default_factory=set)
    at_once: int = 0

    @property
    def ledger(self) -> Any:
        return self

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        return {tp: Entry(at, 1) for tp, at in self.at.items()}

    def commit(self, chunk: Chunk, fence: Fence, claim: Claim, *_: Any) -> Any:
        self.at_once += 1
        assert self.at_once == 1
        self.threads.add(threading.get_ident())
        self.begun.release()
        assert self.go_on.acquire(timeout=60)
        range_ = chunk.ranges[T0]
        if range_.start == self.fail_at:
            self.at_once -= 1
            raise TooManyRejects("enough")
        self.at[T0] = claim.end(T0)
        self.order.append((range_.start, range_.end))
        self.at_once -= 1
        return {T0: Counts(chunk.records, chunk.rows.num_rows, 0, 0)}


SHARE = {T0: OffsetRange(0, 100)}


def task(sink: Any, tables: Any) -> Iterator[object]:
    """A task that commits these records."""
    needs = frozenset({"value"})
    reading = RangeReader(
        GivenRecords(tables), Decoder(), Unchanged(), needs, ChunkBounds(records=10)
    )
    work = partial(commit_chunks, together(sink), Fence("p", 1), Budget(), reading)
    return answers(work, SHARE, Attempt(0))


def begin(hand: PipelinedCommit, sink: Any, chunk: Chunk) -> None:
    hand.begin(together(sink), Fence("p", 1), chunk)


class Decoder:
    """Every record is a row."""

    needs = frozenset({"value"})
    schema = pa.schema([("value", pa.binary())])

    def decode(self, records: pa.Table) -> Decoded:
        return Decoded(records.select(["value"]), pa.array(range(records.num_rows), pa.int64()), [])


def batch(first: int, count: int = 10) -> pa.Table:
    return records(T0, [b"x"] * count, first)


def told(found: Iterable[object]) -> list[object]:
    """The ranges of outcomes, and what else a task tells."""
    outcomes = [(one, getattr(one, "outcome", None)) for one in found]
    return [(of.range.start, of.range.end) if of else type(one) for one, of in outcomes]


def test_the_next_chunk_is_read_while_one_is_committed() -> None:
    sink = Memory(go_on=threading.Semaphore(0))

    def batches() -> Any:
        yield batch(0)
        # More is asked for while the first chunk's commit has begun and has not ended.
        assert sink.begun.acquire(timeout=60)
        assert sink.order == []
        sink.go_on.release(1_000)
        yield batch(10)
        yield batch(20)

    found = told(task(sink, batches))
    assert sink.order == [(0, 10), (10, 20), (20, 30)]
    assert found == [(0, 10), (10, 20), (20, 30), TaskResult, Spent]
    assert threading.get_ident() not in sink.threads


def test_a_read_that_fails_proves_nothing() -> None:
    def batches() -> Any:
        yield batch(0)
        yield batch(10, 7)
        raise DataLost("records were deleted")

    sink = Memory()
    assert told(task(sink, batches)) == [Unavailable]
    assert sink.at[T0] in (0, 10)


def test_after_a_failure_nothing_more_is_committed() -> None:
    sink = Memory(fail_at=10)
    assert told(task(sink, [batch(at) for at in range(0, 100, 10)])) == [(0, 10), TooManyRejects]
    assert sink.at == {T0: 10}


def test_a_task_that_is_not_read_up_ends_after_the_commit_in_hand() -> None:
    sink = Memory()
    cancelled = task(sink, [batch(at) for at in range(0, 50, 10)])
    next(cancelled)
    cancelled.close()  # type: ignore[attr-defined]
    position = sink.at[T0]
    assert position in (10, 20)
    assert not [t for t in threading.enumerate() if t.name.startswith("oncely-commit")]
    assert sink.at[T0] == position


def test_two_at_once_are_refused() -> None:
    sink = Memory()
    with PipelinedCommit(Budget(), overlap=True) as hand:
        begin(hand, sink, at_t0(0, numbered(0, 3)))
        with pytest.raises(InvariantViolation, match="at once"):
            begin(hand, sink, at_t0(3, numbered(3, 6)))
        assert [one.range.end for one in hand.finish()] == [3]
        assert hand.finish() == []


def test_without_overlap_it_is_done_at_once_and_in_this_thread() -> None:
    sink = Memory()
    with PipelinedCommit(Budget(), overlap=False) as hand:
        begin(hand, sink, at_t0(0, numbered(0, 3)))
        assert sink.order == [(0, 3)]
        assert sink.threads == {threading.get_ident()}
        assert [one.range.end for one in hand.finish()] == [3]


def test_a_server_is_asked_while_the_caller_goes_on() -> None:
    go_on = threading.Event()
    with PipelinedCommit(Budget(), overlap=True) as hand:
        answer = hand.ask(lambda: go_on.wait(180))
        go_on.set()
        assert answer()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_error_of_a_question_is_that_of_the_commit(overlap: bool) -> None:
    def question() -> object:
        raise SourceMismatch("another topic")

    def commit_after(answer: Callable[[], object]) -> None:
        hand.begin(together(sink), Fence("p", 1), at_t0(0, numbered(0, 3)), answer)
        hand.finish()

    sink = Memory()
    with PipelinedCommit(Budget(), overlap=overlap) as hand:
        with pytest.raises(SourceMismatch):
            commit_after(hand.ask(question))
        assert sink.order == []


def test_a_pause_ends_with_the_commit() -> None:
    sink = Memory(go_on=threading.Semaphore(0))
    with PipelinedCommit(Budget(), overlap=True) as hand:
        begin(hand, sink, at_t0(0, numbered(0, 3)))
        hand.pause(0.001)
        assert not hand.ended
        sink.go_on.release()
        hand.pause(60)
        assert hand.ended


def test_a_commit_that_is_not_waited_for_is_told_so() -> None:
    """The isolation of refused rows asks for it, and ends."""
    sink, asked = Memory(), []
    sink.go_on = threading.Semaphore(0)

    def commit(chunk: Chunk, *_: Any) -> Any:
        asked.append(chunk.given_up(0))
        sink.begun.release()
        assert sink.go_on.acquire(timeout=60)
        asked.append(chunk.given_up(0))
        raise GivenUp("nobody waits")

    sink.commit = commit  # type: ignore[method-assign]
    chunk = at_t0(0, numbered(0, 3))
    chunk.prepared["sql"] = "kept"
    with PipelinedCommit(Budget(), overlap=True) as hand:
        begin(hand, sink, chunk)
        assert sink.begun.acquire(timeout=60)
        assert not hand.wait(0.0)
        sink.go_on.release()
        with pytest.raises(GivenUp):
            hand.finish()
        assert asked == [False, True]
        begin(hand, sink, chunk)
        assert sink.begun.acquire(timeout=60)
        assert asked[2:] == [False]
        sink.go_on.release()


def test_a_commit_that_is_not_waited_for_does_not_wait_for_its_store() -> None:
    """A worker that is asked to stop while the database is down ends."""
    with PipelinedCommit(Budget(), overlap=True) as hand:
        begin(hand, Down(), at_t0(0, numbered(0, 3)))
        assert not hand.wait(0.01)
        hand.pause(20)
        assert hand.ended
        with pytest.raises(Unavailable, match="down"):
            hand.finish()


class Down(Memory):
    """A store that does not answer."""

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        raise Unavailable("the database is down")
