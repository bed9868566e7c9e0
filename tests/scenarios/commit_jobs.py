"""What the processes of the commit scenarios do: write a topic's records, and die on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.copy import LibpqWriter

from oncely.commit.backoff import Backoff
from oncely.commit.path import commit, publish
from oncely.commit.run import CommitContext, OpenLedger
from oncely.core.batch import Batch, Chunk, Rejection
from oncely.core.claim import Counts, Fence, Opened, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.base import Decoded
from oncely.errors import Unavailable
from oncely.kinds.sql.sink import SqlSink
from oncely.runtimes.chunks import ChunkBounds, Processing
from oncely.runtimes.row_transform import Unchanged
from oncely.stores.sql.cast import cast_rows
from oncely.stores.sql.connection import ColumnFit
from oncely.testing.processes import kill_self, stop_self
from tests.scenarios.commit_topic import APPEND, Task, left, topic
from tests.sinktools import SOURCE, T0, T1, Rec, kept_values, together, with_faults, with_rows


def warm_up() -> None:
    """Import what pyarrow imports only when it is used (pandas: most of a second)."""
    for kind in ("append", "upsert"):
        what = left(kind, {T0: 0, T1: 0}, 999)
        assert what
        cast_rows(what.rows, [ColumnFit("id", pa.int16()), ColumnFit("name", pa.large_string())])


# -- ways to die ---------------------------------------------------------------------------


class Hit:
    """Does something at the ``at``-th call to the database, before or after it.

    After a call is before the next one: nothing that a killed process did in between is left.
    """

    def __init__(self, at: int, when: str, what: Callable[[], Any]) -> None:
        self.at, self.when, self.what = at, when, what
        self.calls: list[str] = []

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        self.calls.append(name)
        mine = len(self.calls) == self.at
        if mine and self.when == "before":
            self.what()
        try:
            return call()
        finally:
            if mine and self.when == "after":
                self.what()


def no_answer() -> None:
    raise Unavailable("no answer")


# -- jobs ----------------------------------------------------------------------------------


def prepare(task: Task) -> Opened:
    """The run that is going to die opens the ledger."""
    for statement in task.ddl():
        task.place.sql(statement)
    return opened(task.sink())


def opened(sink: SqlSink, *partitions: TopicPartition) -> Opened:
    """A run opens, of some partitions when they are named."""
    start = {T0: 0, T1: 0}
    return sink.open(
        Takeover(SOURCE, lambda: start, start, partitions=frozenset(partitions) or None)
    )


def write(
    task: Task, fence: Fence, around: Callable[[str, Callable[[], Any]], Any], last: int = 999
) -> list[tuple[TopicPartition, OffsetRange, bool]]:
    """Commit what the ledger says is left, as a task or a driver does."""
    sink = with_faults(task.sink().bind(), around)
    patience = Backoff(0.01, 0.01, 0.1, clock=lambda: 0.0)
    while True:
        try:
            entries = sink.ledger.positions(fence)
        except Unavailable:
            patience.wait_or_raise()
            continue
        positions = {tp: one.position for tp, one in entries.items() if fence.covers(tp)}
        what = left(task.kind, positions, last)
        if what is None:
            return []
        if task.is_batch:
            return _write_batch(sink, what, fence)
        return [
            (one.partition, one.range, one.replayed)
            for one in commit(together(sink), what, fence, None, patience)
        ]


def _write_batch(
    sink: SqlSink, what: Chunk, fence: Fence
) -> list[tuple[TopicPartition, OffsetRange, bool]]:
    """The driver publishes the rows of two tasks."""
    half = len(what.row_record) // 2
    counts = {
        tp: Counts(
            int((what.partition == index).sum()), 0, sum(
                int(what.partition[r.record]) == index for r in what.rejections), 0
        )
        for index, tp in enumerate(what.partitions)
    }  # fmt: skip
    letters = what.dead_letters(what.rejections)
    publication = with_rows(
        Batch(what.ranges, counts, letters), sink, what.rows.slice(0, half), what.rows.slice(half)
    )
    nothing: Any = None
    driver = OpenLedger(CommitContext(sink, nothing, nothing))
    driver.fence = fence
    replayed = publish(together(sink), publication, driver.fence, driver.entries)
    return [(tp, range_, replayed) for tp, range_ in what.ranges.items()]


def plainly(task: Task, fence: Fence) -> Any:
    """Write, undisturbed."""
    return write(task, fence, lambda _, call: call())


def die_at(task: Task, fence: Fence, at: int, when: str) -> list[str]:
    """Write, and be killed at a call to the database; the calls when there were fewer."""
    hit = Hit(at, when, kill_self)
    write(task, fence, hit)
    return hit.calls


def lose_answer(task: Task, fence: Fence, at: int) -> tuple[list[str], Any]:
    """Write; the answer of one call is lost."""
    hit = Hit(at, "after", no_answer)
    outcomes = write(task, fence, hit)
    return hit.calls, outcomes


def stop_at(task: Task, fence: Fence, name: str) -> Any:
    """Write, and be paused just before the transaction's begin or commit."""
    seen = []

    def stopping(call_name: str, call: Callable[[], Any]) -> Any:
        seen.append(call_name)
        if call_name == name and seen.count(name) == 1:
            stop_self()
        return call()

    return write(task, fence, stopping)


def hurt_inside_copy(task: Task, fence: Fence, at: int, how: str) -> Any:
    """Write; at the ``at``-th message of the first COPY something happens to the process."""
    real, sent = LibpqWriter.write, []

    def hurting(self: Any, buffer: Any) -> None:
        sent.append(1)
        if len(sent) == at:
            if how == "terminate":
                with psycopg.connect(task.place.url, autocommit=True) as other:
                    other.execute(
                        "SELECT pg_terminate_backend(%s)", (self.connection.info.backend_pid,)
                    )
            else:
                {"SIGKILL": kill_self, "SIGSTOP": stop_self}[how]()
        real(self, buffer)

    LibpqWriter.write = hurting  # type: ignore[method-assign]
    return write(task, fence, lambda _, call: call()), len(sent)


def restart(task: Task, *partitions: TopicPartition) -> Any:
    """A new run: open, and write what the ledger says is left."""
    sink = task.sink()
    fence = opened(sink, *partitions).fence
    return write(task, fence, lambda _, call: call())


# -- a task's input ------------------------------------------------------------------------


def write_input(task: Task, fence: Fence, read: int) -> None:
    """What a Spark task does with its input, which ends after ``read`` records.

    So it looks when a query is stopped or the JVM dies: the pipe closes between two Arrow
    messages, and nothing tells that more was planned.
    """
    records = [(tp, one) for tp, own in topic(task.kind).items() for one in own][:read]
    batches = (_as_table(records[at : at + 5]) for at in range(0, len(records), 5))
    sink = task.sink().bind()
    processing = Processing(_decode, Unchanged(), kept_values)
    for what in processing.chunks({T0: 0, T1: 0}, batches, ChunkBounds(records=4)):
        list(commit(together(sink), what, fence, None, Backoff(0.01, 0.01, 0.1, clock=lambda: 0.0)))


def _as_table(records: Sequence[tuple[TopicPartition, Rec]]) -> pa.Table:
    values = [json.dumps(one.rows).encode() if not one.bad else b"" for _, one in records]
    return pa.table(
        {
            "topic": [tp.topic for tp, _ in records],
            "partition": pa.array([tp.partition for tp, _ in records], pa.int32()),
            "offset": pa.array([one.offset for _, one in records], pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
    )


def _decode(records: pa.Table) -> Decoded:
    found = [json.loads(v) if v else None for v in records.column("value").to_pylist()]
    good = [at for at, rows in enumerate(found) if rows]
    return Decoded(
        pa.Table.from_pylist([found[at][0] for at in good], schema=APPEND),
        pa.array(good, pa.int64()),
        [Rejection(at, "decode", "no JSON") for at, rows in enumerate(found) if not rows],
    )
