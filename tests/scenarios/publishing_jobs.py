"""Batch commits to Kafka that die, pause or meet a takeover on the way."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from oncely.commit.path import pass_over
from oncely.core.batch import Batch, Chunk, Reject
from oncely.core.claim import NO_RECORDS, Append, Claim, Counts, Fence, PositionMoved, Skip, decide
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced, Unavailable
from oncely.kinds.kafka.sink import KafkaSink
from oncely.testing.processes import kill_self
from tests.kafkatools import Topics, open_sink
from tests.scenarios.kafka_jobs import Calls, hooked, patient
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    at_t0,
    commit_all,
    commit_on,
    numbered,
    publish_on,
    together,
    with_rows,
)

ENDS = {T0: 10, T1: 25}
START = {T0: 0, T1: 0}
IDS = range(30)
Work = Callable[[KafkaSink], None]


def batch_sink(topics: Topics, **more: object) -> KafkaSink:
    """A sink of a run of batch commit."""
    return dataclasses.replace(topics.sink(**more), by_batch=True)


def rows(ids: Sequence[int]) -> pa.Table:
    return pa.table({"id": list(ids), "name": [f"n{one}" for one in ids]})


def publication(
    sink: KafkaSink,
    *parts: pa.Table,
    ends: Mapping[TopicPartition, int] = ENDS,
    start: Mapping[TopicPartition, int] = START,
    rejects: bool = True,
) -> Batch:
    """Everything from ``start`` to ``ends``, one record of it a reject."""
    bad = Reject(T0, 3, 1_700_000_000_000, b"k", b"{", [("h", b"v")], "decode", "no JSON")
    ranges = {tp: OffsetRange(start[tp], end) for tp, end in ends.items()}
    written = {tp: Counts(range_.end - range_.start, 0, 0, 0) for tp, range_ in ranges.items()}
    return with_rows(Batch(ranges, written, [bad] if rejects else []), sink, *parts)


def of_two_tasks(sink: KafkaSink) -> Batch:
    """The rows of two tasks."""
    return publication(sink, rows(IDS[:15]), rows(IDS[15:]))


def publish_all(sink: KafkaSink, what: Batch, fence: Fence) -> bool:
    """As the driver does it: until the ledger tells; whether it had taken effect before."""
    patience = patient()
    while True:
        try:
            entries = sink.ledger.positions(fence)
            decisions = [decide(entries[tp], one, fence.epoch) for tp, one in what.ranges.items()]
            if all(isinstance(one, Skip) for one in decisions):
                return True
            assert all(isinstance(one, Append) for one in decisions), decisions
            sink.publish(what, fence, Claim(fence, what.ranges, entries))
        except PositionMoved:
            continue
        except Unavailable:
            patience.wait_or_raise()
            continue
        return False


def large_rows(count: int, size: int) -> pa.Table:
    """Rows of ``size`` bytes each, that no codec makes smaller."""
    names = [os.urandom(size // 2).hex() for _ in range(count)]
    return pa.table({"id": list(range(count)), "name": names})


def publish_and_die(topics: Topics, fence: Fence, at: int, when: str, only: str) -> list[str]:
    """Publish; at the ``at``-th call to a producer the process dies."""
    calls = Calls(at, when, kill_self, only)
    sink = hooked(batch_sink(topics), calls)
    publish_all(sink, of_two_tasks(sink), fence)
    return calls.names


def restart(topics: Topics) -> bool:
    """A new run brings the same batch; whether there was nothing to do."""
    sink = batch_sink(topics)
    opened = open_sink(sink, START)
    if dict(opened.positions) == ENDS:
        return True
    assert dict(opened.positions) == START, opened
    return publish_all(sink, of_two_tasks(sink), opened.fence)


class Paused:
    """Work of a run that will be a zombie, in a thread that waits at a call to a producer.

    By default before the third one: connected, initialised, and it has read where positions
    stand; what it writes next is decided.
    """

    def __init__(self, sink: KafkaSink, work: Work, at: int = 3, only: str = "") -> None:
        self._there, self._go = threading.Event(), threading.Event()
        self._sink, self._work = hooked(sink, Calls(at, "before", self._wait, only)), work
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Go on until it waits, or has failed."""
        self._thread.start()
        assert self._there.wait(180)

    def finish(self) -> BaseException | None:
        """Let it go on to its end; the error that it ended with."""
        if self._thread.ident is None:  # the moment has not come
            self.start()
        self._go.set()
        self._thread.join(180)
        assert not self._thread.is_alive()
        return self.error

    def _wait(self) -> None:
        self._there.set()
        assert self._go.wait(180)

    def _run(self) -> None:
        try:
            self._work(self._sink)
        except BaseException as error:
            self.error = error
        finally:
            self._there.set()


def zombie(kind: str, topics: Topics, at: int = 2) -> Paused:
    """A run with epoch 1 that is about to move a position by what it has read.

    ``publish`` and ``hole`` are of a run of batch commit, ``commit`` is of one of partition
    commit; ``add`` has found a partition.
    """
    sink = topics.sink() if kind == "commit" else batch_sink(topics)
    fence = open_sink(sink, {T0: 0}).fence
    entries = sink.ledger.positions(fence)

    def publish(ours: KafkaSink) -> None:
        publish_on(ours, one_range(ours, range(5)), entries, fence)

    def hole(ours: KafkaSink) -> None:
        claim = Claim(fence, {T0: OffsetRange(0, 5)}, entries, "hole")
        ours.ledger.move(claim, {T0: NO_RECORDS})

    def write(ours: KafkaSink) -> None:
        commit_on(ours, at_t0(0, numbered(0, 5)), entries, fence)

    def add(ours: KafkaSink) -> None:
        ours.ledger.add_partitions(fence, {T1: 0}, SOURCE)

    works: dict[str, Work] = {"publish": publish, "hole": hole, "commit": write, "add": add}
    return Paused(sink, works[kind], at)


def one_range(sink: KafkaSink, ids: range, tp: TopicPartition = T0) -> Batch:
    """Records of one partition, the id of each its offset."""
    return publication(sink, rows(ids), ends={tp: ids.stop}, start={tp: ids.start}, rejects=False)


def carry_on(sink: KafkaSink, fence: Fence, tp: TopicPartition, start: int, end: int) -> None:
    """What a run does with records that it reads, whichever way it commits."""
    if sink.mode == "batch":
        publish_all(sink, one_range(sink, range(start, end), tp), fence)
    elif tp == T0:
        commit_all(sink, at_t0(start, numbered(start, end)), fence)
    else:
        nothing = Chunk.of_nothing({tp: OffsetRange(start, end)})
        pass_over(together(sink), nothing.ranges, fence, "hole", patient())


def taken_over(kind: str, mode: str, topics: Topics, calls: Callable[[Paused], Calls]) -> list[str]:
    """A run takes over while another is about to write; what became of all records is checked.

    Args:
        kind: of the zombie.
        mode: of the new run.
        calls: says at which call of the takeover the zombie comes to where it waits.
    """
    old = zombie(kind, topics)
    counted = calls(old)
    new = topics.sink() if mode == "partition" else batch_sink(topics)
    start = {T0: 0, T1: 0} if kind == "add" else {T0: 0}
    opened = open_sink(hooked(new, counted), start)
    tp = T1 if kind == "add" else T0
    assert opened.positions[tp] == 0  # the old run has written nothing yet
    carry_on(new, opened.fence, tp, 0, 10)
    error = old.finish()
    assert isinstance(error, PositionMoved | Unavailable | Fenced), error
    carry_on(new, opened.fence, tp, 10, 12)
    assert topics.committed()[tp] == 12
    written = tp == T0 or mode == "batch"
    assert topics.ids() == (list(range(12)) if written else [])
    again = open_sink(topics.sink(), start)  # and whoever comes next finds it in order
    assert again.positions[tp] == 12
    return counted.names


def look(topics: Topics, *, there: bool = True) -> None:
    """A reader of committed records sees everything once, or nothing."""
    assert topics.ids() == (list(IDS) if there else [])
    assert len(topics.records(topics.rejects)) == int(there)
    assert topics.committed() == (ENDS if there else START)
