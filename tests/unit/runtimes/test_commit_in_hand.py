"""A chunk is committed while the next one is read: one at a time, in order, and never lost."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from oncely.commit.path import Outcome
from oncely.core.batch import Chunk
from oncely.core.budget import Budget
from oncely.core.claim import Claim, Counts, Fence
from oncely.core.ledger import Entry
from oncely.core.topics import TopicPartition
from oncely.decode.base import Decoded
from oncely.errors import InvariantViolation, SourceMismatch, TooManyRejects
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.pipelined_commit import PipelinedCommit
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.reading import Reading
from oncely.runtimes.spark.task import CommitPlan, Spent, commit_chunks
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

    def positions(self, fence: Fence, *, settled: bool = False) -> dict[TopicPartition, Entry]:
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


def plan(sink: Any) -> CommitPlan:
    nothing: Any = None
    reading = Reading(nothing, Decoder(), Unchanged(), {T0: 0}, "t", Bounds(records=10))
    return CommitPlan(together(sink), Fence("p", 1), Budget(), reading)


def begin(hand: PipelinedCommit, sink: Any, chunk: Chunk) -> None:
    hand.begin(together(sink), Fence("p", 1), chunk)


class Decoder:
    """Every record is a row."""

    needs = frozenset({"value"})
    schema = pa.schema([("value", pa.binary())])

    def decode(self, records: pa.Table) -> Decoded:
        return Decoded(records.select(["value"]), pa.array(range(records.num_rows), pa.int64()), [])


def batch(first: int, count: int = 10) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(first, first + count), pa.int64()),
            "value": pa.array([b"x"] * count, pa.binary()),
        }
    )


def answers(rows: Sequence[pa.RecordBatch]) -> list[tuple[Any, Any, bool]]:
    *found, spent = [pickle.loads(row["answer"][0].as_py()) for row in rows]  # our own
    found += [] if isinstance(spent, Spent) else [spent]
    return [
        (one.range.start, one.range.end, False) if isinstance(one, Outcome) else (None, None, True)
        for one in found
    ]


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

    rows = list(commit_chunks(plan(sink), batches()))
    assert sink.order == [(0, 10), (10, 20), (20, 30)]
    assert answers(rows) == [(0, 10, False), (10, 20, False), (20, 30, False)]
    assert threading.get_ident() not in sink.threads


def test_input_that_ends_early_commits_what_was_read_and_no_more() -> None:
    sink = Memory()
    rows = list(commit_chunks(plan(sink), iter([batch(0), batch(10, 7)])))
    assert answers(rows) == [(0, 10, False), (10, 17, False)]
    assert sink.at == {T0: 17}


def test_after_a_failure_nothing_more_is_committed_and_the_input_is_read_up() -> None:
    sink = Memory(fail_at=10)
    input_ = iter([batch(at) for at in range(0, 100, 10)])
    rows = list(commit_chunks(plan(sink), input_))
    assert answers(rows) == [(0, 10, False), (None, None, True)]
    assert sink.at == {T0: 10}
    assert next(input_, None) is None


def test_a_cancelled_task_ends_after_the_commit_in_hand() -> None:
    sink = Memory()
    task = commit_chunks(plan(sink), iter([batch(at) for at in range(0, 50, 10)]))
    next(task)
    task.close()  # type: ignore[attr-defined]
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
        answer = hand.ask(lambda: go_on.wait(60))
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
