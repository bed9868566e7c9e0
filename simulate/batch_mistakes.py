"""Mistakes that the simulation of runs in batches must find, each in the loop, a task or a port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest import mock

import pyarrow as pa

from oncely.commit.run import OpenLedger
from oncely.core.batch import Chunk
from oncely.core.ranges import TopicPartition
from oncely.kafka.reader import RecordReader
from oncely.kafka.source import KafkaSource, Look
from oncely.runtimes import chunks
from oncely.runtimes.batches.commit import PartitionCommit
from oncely.runtimes.batches.run import BatchRun
from oncely.runtimes.chunks import RangeReader
from oncely.runtimes.takeover import EndOffsets, SameLog, Takeovers
from simulate.logs import ScriptedSource
from simulate.mistakes import Mistake, answer_taken_for_failure, epoch_not_compared
from simulate.store import Store

_patch = mock.patch.object


def _planned_end_claimed() -> AbstractContextManager[object]:
    """A chunk claims the planned end, not the offset after the last record that was read."""
    chunks = RangeReader.chunks

    def claims(self: RangeReader, ranges: Any, *, again: bool) -> Iterator[Chunk]:
        for chunk in chunks(self, ranges, again=again):
            ends = {tp: replace(one, end=ranges[tp].end) for tp, one in chunk.ranges.items()}
            yield replace(chunk, ranges=ends)

    return _patch(RangeReader, "chunks", claims)


def _deleted_records_skipped() -> AbstractContextManager[object]:
    """A reader begins at the log's start where records of a range were deleted."""

    def skips(self: KafkaSource, ranges: Any, needs: frozenset[str]) -> Iterator[pa.Table]:
        yield from RecordReader("", {}).tables(ranges, needs, lost="skip")

    return _patch(KafkaSource, "read", skips)


def _any_end_proves() -> AbstractContextManager[object]:
    """An end of a partition ends its range, wherever it lies."""
    take = RecordReader._take

    def ends(self: RecordReader, at: dict[TopicPartition, int]) -> Any:
        polled = take(self, at)
        at |= dict.fromkeys(polled.ends, 1 << 60)
        return polled

    return _patch(RecordReader, "_take", ends)


def _truncated_input() -> AbstractContextManager[object]:
    """An input that ends early looks complete."""
    fetched = chunks.fetched
    return _patch(chunks, "fetched", lambda *given: islice(fetched(*given), 2))


def _high_watermark_planned() -> AbstractContextManager[object]:
    """Batches are planned up to the high watermarks."""
    look = ScriptedSource.look

    def high(self: ScriptedSource) -> Look:
        return look(self)._replace(ends=dict(self.logs.ends))

    return _patch(ScriptedSource, "look", high)


def _not_compared() -> AbstractContextManager[object]:
    """A commit moves a position without comparing it."""
    return _patch(Store, "compares", ("epoch", "run"))


def _goal_moves() -> AbstractContextManager[object]:
    """A run until the latest records has another goal after each retry."""
    opened = BatchRun._open

    def forgets(self: BatchRun) -> Any:
        self._goal = None
        return opened(self)

    return _patch(BatchRun, "_open", forgets)


def _newer_run_not_looked_for() -> AbstractContextManager[object]:
    """A run without records does not look for a newer one."""
    return _patch(OpenLedger, "positions", lambda _: {})


def _holes_left() -> AbstractContextManager[object]:
    """The driver does not move positions over holes."""
    return _patch(PartitionCommit, "_close_holes", lambda *_: [])


def _holes_guessed() -> AbstractContextManager[object]:
    """Positions move to the planned ends before the tasks have read their ranges."""
    run = PartitionCommit.run

    def early(self: PartitionCommit, batch_id: int, ranges: Any) -> Any:
        self._close_holes(ranges, [])
        return run(self, batch_id, ranges)

    return _patch(PartitionCommit, "run", early)


def _ledger_taken_back() -> AbstractContextManager[object]:
    """A run that opens again takes the ledger from a newer run."""
    opened = Takeovers.open

    def forgets(self: Takeovers, *given: Any) -> Any:
        self._held = None
        return opened(self, *given)

    return _patch(Takeovers, "open", forgets)


def _gap_not_recorded() -> AbstractContextManager[object]:
    """A gap is told, and the ledger does not know it."""
    return _patch(OpenLedger, "record_gaps", lambda *_: [])


def _cut_overlooked() -> AbstractContextManager[object]:
    """Leader epochs are not compared."""
    return _patch(SameLog, "check", lambda *_, **__: None)


def _epoch_of_a_gap_kept() -> AbstractContextManager[object]:
    """A position after a gap moves on under the leader epoch from before it."""
    check = SameLog.check

    def keeps(self: SameLog, positions: Callable[[], Mapping[TopicPartition, int]],
              now: Any = None, *, passed: Any = ()) -> None:  # fmt: skip
        check(self, lambda: {tp: at for tp, at in positions().items() if tp not in passed}, now)

    return _patch(SameLog, "check", keeps)


def _partition_begins_late() -> AbstractContextManager[object]:
    """A new partition begins at its end."""

    def late(self: ScriptedSource) -> dict[TopicPartition, int]:
        self._asked("look up offsets")
        return self.ends()

    return _patch(ScriptedSource, "earliest", late)


def _positions_kept() -> AbstractContextManager[object]:
    """A run that opens again goes on where it believes to be."""
    opened = BatchRun._open

    def keeps(self: BatchRun) -> Any:
        before = dict(self._positions)
        positions = opened(self)
        self._positions |= before
        return positions

    return _patch(BatchRun, "_open", keeps)


def _ended_with_the_goal_ahead() -> AbstractContextManager[object]:
    """A run until the latest records ends when it has nothing to plan."""
    return _patch(BatchRun, "_reached", lambda _: True)


def _cut_goal_waited_for() -> AbstractContextManager[object]:
    """A run until the latest records does not notice that its goal was cut away."""
    return _patch(EndOffsets, "look", lambda _: None)


BATCH_MISTAKES: Mapping[str, Mistake] = {
    "planned end claimed": _planned_end_claimed,
    "deleted records taken for a hole": _deleted_records_skipped,
    "any end of a partition ends its range": _any_end_proves,
    "an input that ends early taken for complete": _truncated_input,
    "planned up to the high watermark": _high_watermark_planned,
    "a task repeated without the compare-and-set": _not_compared,
    "an attempt of an older run commits": epoch_not_compared,
    "lost answer of a task taken for a failure": answer_taken_for_failure,
    "goal of `until latest` moved by a retry": _goal_moves,
    "a newer run not looked for while idle": _newer_run_not_looked_for,
    "holes left": _holes_left,
    "holes closed before the tasks": _holes_guessed,
    "the ledger taken back from a newer run": _ledger_taken_back,
    "a gap told and not recorded": _gap_not_recorded,
    "a cut log overlooked": _cut_overlooked,
    "the epoch before a gap kept": _epoch_of_a_gap_kept,
    "a new partition begins at its end": _partition_begins_late,
    "positions kept after a failed batch": _positions_kept,
    "ended with the goal ahead": _ended_with_the_goal_ahead,
    "a goal that was cut away waited for": _cut_goal_waited_for,
}
