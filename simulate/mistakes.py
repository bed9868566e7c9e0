"""Mistakes that the simulation must find, each put into the worker or its ledger while it is on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import confluent_kafka as ck

from oncely.commit.run import OpenLedger
from oncely.core import batch, events
from oncely.core.claim import Claim, Entry, Fence, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kafka import group as group_consumer
from oncely.kafka.group import GroupConsumer
from oncely.runtimes.worker.assignment import Assignment, PartitionState
from oncely.runtimes.worker.member import Member
from simulate import store
from simulate.store import MemoryLedger, Store

Mistake = Callable[[], AbstractContextManager[object]]
_patch = mock.patch.object


def _offset_before_data() -> AbstractContextManager[object]:
    """The position moves in a transaction before that of the records."""
    return _patch(Store, "together", False)


@contextmanager
def _both(*patches: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


def epoch_not_compared() -> AbstractContextManager[object]:
    """A worker believes that every epoch which it reads is its own, and a commit compares none."""
    positions = MemoryLedger.positions

    def ours(self: MemoryLedger, fence: Fence, *of: Any, **how: Any) -> dict[TopicPartition, Entry]:
        found = positions(self, fence, *of, **how)
        return {tp: replace(one, epoch=fence.epoch, run=fence.run) for tp, one in found.items()}

    return _both(_patch(MemoryLedger, "positions", ours), _patch(Store, "compares", ("position",)))


def answer_taken_for_failure() -> AbstractContextManager[object]:
    """A commit without an answer is repeated, and the ledger is not read again before."""
    positions, commit = MemoryLedger.positions, MemoryLedger.commit
    known: dict[Fence, dict[TopicPartition, Entry]] = {}

    def remembered(
        self: MemoryLedger, fence: Fence, *_: Any, **__: Any
    ) -> dict[TopicPartition, Entry]:
        return dict(known.setdefault(fence, positions(self, fence)))

    def answered(self: MemoryLedger, claim: Claim, records: Any) -> None:
        commit(self, claim, records)
        for tp in claim.ranges:
            now = known[claim.fence][tp]
            known[claim.fence][tp] = replace(now, position=claim.end(tp))

    return _both(
        _patch(MemoryLedger, "positions", remembered),
        _patch(MemoryLedger, "commit", answered),
        _patch(Store, "compares", ("epoch", "run")),
    )


def _revocation_ignored() -> AbstractContextManager[object]:
    """What was revoked stays in the worker's hands."""

    def revoked(self: Member, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        self.listener(events.PartitionsChanged("lost" if lost else "revoked", partitions))

    return _patch(Member, "revoked", revoked)


def _buffer_kept() -> AbstractContextManager[object]:
    """What was buffered before a takeover is still there after it."""
    taken = Assignment.taken

    def keeps(self: Assignment, fence: Any, positions: Any, epochs: Any) -> None:
        before = {tp: one for tp, one in self._all.items() if one.buffer}
        taken(self, fence, positions, epochs)
        for tp, one in before.items():
            if self._all[tp] is not one and tp in positions:
                self._all[tp].buffer, self._all[tp].next = one.buffer, one.next

    def nothing(self: Assignment, partitions: Any, **_: bool) -> int:
        for tp in partitions:
            if tp in self._all:
                self._all[tp].stage, self._all[tp].fence = PartitionState.TAKING, None
        return 0

    return _both(_patch(Assignment, "taken", keeps), _patch(Assignment, "lost", nothing))


def _commit_failed_and_memory_kept() -> AbstractContextManager[object]:
    """After a commit that has failed the worker goes on with what it has in memory."""
    return _patch(Assignment, "lost", lambda *_, **__: 0)


def _fence_kept() -> AbstractContextManager[object]:
    """A partition that is assigned again is written under its first fence."""
    taken = Assignment.taken
    kept: dict[tuple[int, TopicPartition], Any] = {}

    def keeps(self: Assignment, fence: Any, positions: Mapping[Any, Any], epochs: Any) -> None:
        for tp in positions:
            taken(self, kept.setdefault((id(self), tp), fence), {tp: positions[tp]}, epochs)

    return _patch(Assignment, "taken", keeps)


def _takes_all() -> AbstractContextManager[object]:
    """A worker takes all partitions over, not those that were assigned to it."""
    opened = OpenLedger.open

    def everything(self: OpenLedger[Any], takeover: Takeover) -> Any:
        every = frozenset(takeover.earliest) if takeover.partitions else takeover.partitions
        return opened(self, replace(takeover, partitions=every))

    return _patch(OpenLedger, "open", everything)


def _spark_overlooked() -> AbstractContextManager[object]:
    """A takeover does not compare the last run of all partitions."""
    opened = OpenLedger.open

    def forgets(self: OpenLedger[Any], takeover: Takeover) -> Any:
        return opened(self, replace(takeover, since=None))

    return _patch(OpenLedger, "open", forgets)


def _decoded_ahead_kept() -> AbstractContextManager[object]:
    """What was decoded ahead is committed, whoever has its partitions by then."""
    return _patch(Member, "_put_back", lambda *_: None)


def _no_seek() -> AbstractContextManager[object]:
    """A partition that is taken over late is read on from where the consumer happens to be."""
    return _patch(GroupConsumer, "seek", lambda *_: None)


def _marked_too_early() -> AbstractContextManager[object]:
    """Kafka's group offset is set when a commit begins."""
    planned = Member._planned

    def early(self: Member, fence: Any, ranges: Any, seconds: Any) -> None:
        planned(self, fence, ranges, seconds)
        self._group.mark({tp: range_.end for tp, range_ in ranges.items()})

    return _patch(Member, "_planned", early)


def _earlier_messages_kept() -> AbstractContextManager[object]:
    """Messages that were fetched before an assignment, in the same call, are kept."""
    on_assign = GroupConsumer._on_assign

    def forgets(self: GroupConsumer, consumer: Any, partitions: list[Any]) -> None:
        on_assign(self, consumer, partitions)
        self._begun.clear()

    return _patch(GroupConsumer, "_on_assign", forgets)


def _pause_kept() -> AbstractContextManager[object]:
    """A partition is taken for one that is fetched, though it was paused when it was revoked."""
    on_assign = GroupConsumer._on_assign

    def forgets(self: GroupConsumer, consumer: Any, partitions: list[Any]) -> None:
        self._paused -= {TopicPartition(one.topic, one.partition) for one in partitions}
        on_assign(self, consumer, partitions)

    return _patch(GroupConsumer, "_on_assign", forgets)


def _repeated_refused() -> AbstractContextManager[object]:
    """A message that comes again ends the worker."""
    return _patch(Assignment, "again", lambda *_: frozenset())


def _skipped_passed_over() -> AbstractContextManager[object]:
    """Messages from before an assignment are kept, and those that they hide are taken for ones
    that come again."""

    def hides(self: Assignment, tp: TopicPartition, offsets: Sequence[int]) -> frozenset[int]:
        next_, found = self._all[tp].next if tp in self._all else 0, set()
        for index, offset in enumerate(offsets):
            if offset < next_:
                found.add(index)
            next_ = max(next_, offset + 1)
        return frozenset(found)

    return _both(_earlier_messages_kept(), _patch(Assignment, "again", hides))


def _seek_during_a_rebalance() -> AbstractContextManager[object]:
    """A partition that begins again is sought at once, and messages of the same call are kept."""
    seek = GroupConsumer.seek

    def at_once(self: GroupConsumer, tp: TopicPartition, position: int) -> None:
        self._polling = False
        seek(self, tp, position)

    return _patch(GroupConsumer, "seek", at_once)


def _end_kept() -> AbstractContextManager[object]:
    """A partition that begins again knows the end of its log still, and passes over what it has
    dropped."""
    restart = Assignment.restart

    def keeps(self: Assignment) -> dict[TopicPartition, int]:
        ends = {tp: one.end for tp, one in self._all.items()}
        found = restart(self)
        for tp in found:
            self._all[tp].end = ends[tp]
        return found

    return _patch(Assignment, "restart", keeps)


def _end_claimed() -> AbstractContextManager[object]:
    """A commit claims the end of the log, not the offset after the last record that was read."""
    work = Assignment.work

    def claims(self: Assignment, *at_least: int) -> Any:
        found = work(self, *at_least)
        if found is None:
            return None
        ends = {tp: max(one.end, self._all[tp].end) for tp, one in found.ranges.items()}
        ranges = {tp: replace(one, end=ends[tp]) for tp, one in found.ranges.items()}
        for tp, end in ends.items():
            self._all[tp].given = end
        return replace(found, ranges=ranges)

    return _patch(Assignment, "work", claims)


def _holes_over_records() -> AbstractContextManager[object]:
    """Positions move to the end of the log while records are buffered."""
    return _patch(
        Assignment, "fetched", lambda self, tp, piece: self.ended(tp, piece.last + 1) or True
    )


def _memory_unbounded() -> AbstractContextManager[object]:
    """A partition whose buffer is full is not paused."""
    return _patch(Assignment, "_is_full", lambda *_: False)


def _finished_forgotten() -> AbstractContextManager[object]:
    """A takeover forgets the finished ranges beyond the position."""
    take = Store.take

    def forgets(
        self: Store, partitions: frozenset[TopicPartition], run: str, *, whole: bool
    ) -> Fence:
        for tp in partitions:
            self.entries[tp] = replace(self.entries[tp], done=())
        return take(self, partitions, run, whole=whole)

    return _patch(Store, "take", forgets)


def _unfinished_passed_over() -> AbstractContextManager[object]:
    """A thread moves the position to the end of its last range."""

    def moved(entry: Entry, taken: Sequence[OffsetRange]) -> Entry:
        ends = [one.end for one in (*taken, *entry.done)]
        return replace(entry, position=max([entry.position, *ends]), done=())

    return _patch(store, "moved", moved)


def _key_on_two_threads() -> AbstractContextManager[object]:
    """The records of a key go round the threads."""
    calls = itertools.count()
    return _patch(batch, "lane_of", lambda _, number: next(calls) % number)


def _at_the_end_until_taken() -> AbstractContextManager[object]:
    """A partition that is taken later is assigned at its end, which is asked of the broker."""
    return _patch(group_consumer, "UNTAKEN", ck.OFFSET_END)


MISTAKES: Mapping[str, Mistake] = {
    "offset before data": _offset_before_data,
    "epoch not compared": epoch_not_compared,
    "lost answer taken for a failure": answer_taken_for_failure,
    "revocation ignored": _revocation_ignored,
    "buffer kept over a takeover": _buffer_kept,
    "memory kept after a failed commit": _commit_failed_and_memory_kept,
    "fence kept over an assignment": _fence_kept,
    "all partitions taken over": _takes_all,
    "a run on Spark overlooked": _spark_overlooked,
    "no seek after a late takeover": _no_seek,
    "assigned at the end until taken": _at_the_end_until_taken,
    "decoded ahead and kept over a revocation": _decoded_ahead_kept,
    "group offset marked before the commit": _marked_too_early,
    "messages from before an assignment kept": _earlier_messages_kept,
    "a message that comes again refused": _repeated_refused,
    "skipped messages taken for repeated ones": _skipped_passed_over,
    "a pause kept over a revocation": _pause_kept,
    "messages of a rebalance's call kept in a restart": _seek_during_a_rebalance,
    "end of the log kept in a restart": _end_kept,
    "end of the log claimed": _end_claimed,
    "holes over buffered records": _holes_over_records,
    "memory unbounded": _memory_unbounded,
    "finished ranges forgotten at a takeover": _finished_forgotten,
    "position moved over unfinished records": _unfinished_passed_over,
    "a key on two threads": _key_on_two_threads,
}
