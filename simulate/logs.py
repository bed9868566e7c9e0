"""Logs with transactions, retention, compaction and leaders, and what reads them in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError

from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.kafka.source import KafkaSource, Look, Watermarks
from simulate.broker import NAME, Message, Topic
from simulate.schedule import Schedule, step

_MOST_PARTITIONS = 4
_RESET = KafkaError(KafkaError._AUTO_OFFSET_RESET)


class Logs(Topic):
    """The logs of the topics.

    ``logs`` are the committed records, also those that retention has deleted, without those that
    compaction has removed. ``ends`` are the high watermarks.

    Attributes:
        low: the first offset of a log.
        open: the records of a transaction that has not ended.
        compacted: records that compaction has removed.
        cuts: where logs were cut, in order.
    """

    def __init__(self, schedule: Schedule, partitions: int) -> None:
        super().__init__(schedule, partitions)
        self._schedule = schedule
        self.low = dict.fromkeys(self.partitions, 0)
        self.open: dict[TopicPartition, list[int]] = {tp: [] for tp in self.partitions}
        self.compacted: dict[TopicPartition, set[int]] = {tp: set() for tp in self.partitions}
        self.cuts: list[tuple[TopicPartition, int]] = []
        self._leaders = {tp: [(0, 0)] for tp in self.partitions}  # epochs and their first offsets

    def stable(self, tp: TopicPartition) -> int:
        """The last stable offset."""
        return self.open[tp][0] if self.open[tp] else self.ends[tp]

    def readable(self, tp: TopicPartition, at: int, *, committed: bool) -> list[int]:
        """The offsets of records that a reader gets from an offset on."""
        end = self.stable(tp) if committed else self.ends[tp]
        return [one for one in self.logs[tp] if max(at, self.low[tp]) <= one < end]

    # -- what happens to them --------------------------------------------------------------

    def grow(self) -> None:
        """Some records, or a hole, or a part of a transaction."""
        tp = self._random.choice(self.partitions)
        if self.open[tp] and self._random.random() < 0.5:
            self.end_transaction(tp)
            return
        inside = self._random.random() < 0.3
        for _ in range(self._random.randint(1, 5)):
            if inside and (self.open[tp] or self._random.random() < 0.7):
                self.open[tp].append(self.ends[tp])
            elif self._random.random() < 0.8:
                self.append(tp)
                continue
            self.ends[tp] += 1

    def end_transaction(self, tp: TopicPartition) -> None:
        """Commit or abort it; its marker has an offset, too."""
        if self._random.random() < 0.5:
            self.logs[tp] = sorted([*self.logs[tp], *self.open[tp]])
        self.open[tp] = []
        self.ends[tp] += 1

    def compact(self) -> None:
        """A record is removed, because a later one has its key."""
        tp = self._random.choice(self.partitions)
        if found := self.readable(tp, 0, committed=True):
            gone = self._random.choice(found[-3:])
            self.logs[tp].remove(gone)
            self.compacted[tp].add(gone)

    def delete(self) -> None:
        """Retention deletes the oldest records."""
        tp = self._random.choice(self.partitions)
        self.low[tp] = self._random.randint(self.low[tp], self.stable(tp))

    def elect(self) -> None:
        """A new leader, which has all records."""
        tp = self._random.choice(self.partitions)
        self._leaders[tp].append((self._leaders[tp][-1][0] + 1, self.ends[tp]))

    def cut(self) -> None:
        """A new leader lacks the last records, and others take their place."""
        tp = self._random.choice(self.partitions)
        at = self._random.randint(max(self.low[tp], self.ends[tp] - 6), self.ends[tp])
        number = self._leaders[tp][-1][0] + 1
        kept = [one for one in self._leaders[tp] if one[1] < at]
        self._leaders[tp] = [*kept, (number, at)]
        self.logs[tp] = [one for one in self.logs[tp] if one < at]
        self.open[tp] = [one for one in self.open[tp] if one < at]
        self.compacted[tp] = {one for one in self.compacted[tp] if one < at}
        self.cuts.append((tp, at))
        self.ends[tp] = at
        for _ in range(self._random.choice([0, 3, 12])):
            self.append(tp)

    def append(self, tp: TopicPartition) -> None:
        """A record."""
        self.logs[tp].append(self.ends[tp])
        self.ends[tp] += 1

    def add_partition(self) -> None:
        """A partition more."""
        if len(self.partitions) < _MOST_PARTITIONS:
            tp = TopicPartition(NAME, len(self.partitions))
            self.partitions.append(tp)
            self.logs[tp], self.open[tp], self.compacted[tp] = [], [], set()
            self.ends[tp] = self.low[tp] = 0
            self._leaders[tp] = [(0, 0)]

    # -- leaders ---------------------------------------------------------------------------

    def leader(self, tp: TopicPartition) -> int:
        """The present leader epoch."""
        return self._leaders[tp][-1][0]

    def end_of(self, tp: TopicPartition, epoch: int) -> int:
        """The end of the records of a leader epoch."""
        return min([self.ends[tp], *(at for one, at in self._leaders[tp] if one > epoch)])


class ScriptedSource(KafkaSource):
    """The source of one driver and its tasks.

    Attributes:
        seen: the last stable offsets at the last look, and the number of cuts.
        told: the ends that the last look has told; None if an error came after it.
        goal: the ends that were told first, and no error came after them.
        least: the least ends that were told until then.
    """

    logs: Logs
    schedule: Schedule
    seen: tuple[dict[TopicPartition, int], int]
    told: dict[TopicPartition, int] | None
    goal: dict[TopicPartition, int] | None
    least: dict[TopicPartition, int]

    @classmethod
    def of(cls, schedule: Schedule, logs: Logs) -> ScriptedSource:
        """The source of these logs."""
        found = cls("", (NAME,))
        found.schedule, found.logs = schedule, logs
        found.seen, found.told, found.goal, found.least = ({}, 0), None, None, {}
        return found

    def _asked(self, what: str) -> None:
        step()
        self.schedule.may_fail(what, 0.01)

    def close(self) -> None:
        """Nothing to close."""

    def identity(self) -> SourceIdentity:
        """Always the same cluster."""
        return SourceIdentity("cluster", self.topic_ids())

    def topic_ids(self) -> dict[str, str]:
        """Always the same topic."""
        self._asked("describe the topics")
        return {NAME: "id"}

    def look(self) -> Look:
        """The present bounds; a new leader may tell an end that lags for a moment."""
        self.set_goal()
        self._asked("look")
        ends = self.ends()
        self.seen = (dict(ends), len(self.logs.cuts))
        for tp, end in ends.items():
            if self.schedule.happens(0.03):
                ends[tp] = self.schedule.random.randint(self.logs.low[tp], end)
        self.told = dict(ends)
        if self.goal is None:  # an answer may have been used although an error came after it
            self.least = {tp: min(end, self.least.get(tp, end)) for tp, end in ends.items()}
        return Look({NAME: "id"}, ends, self._leaders())

    def set_goal(self) -> None:
        """The last look is used."""
        self.goal = self.goal or self.told

    def ends(self) -> dict[TopicPartition, int]:
        """The last stable offsets."""
        return {tp: self.logs.stable(tp) for tp in self.logs.partitions}

    def earliest(self) -> dict[TopicPartition, Position]:
        """The first offsets."""
        self._asked("look up offsets")
        return dict(self.logs.low)

    def resolve_start(self, _: object) -> dict[TopicPartition, Position]:
        """The beginning."""
        return self.earliest()

    def watermarks(self) -> dict[TopicPartition, Watermarks]:
        """The bounds of the logs."""
        self._asked("look up offsets")
        logs = self.logs
        return {tp: Watermarks(logs.low[tp], logs.stable(tp), logs.ends[tp])
                for tp in logs.partitions}  # fmt: skip

    def leader_epochs(self) -> dict[TopicPartition, int]:
        """The present leader epochs."""
        self._asked("look up offsets")
        return self._leaders()

    def _leaders(self) -> dict[TopicPartition, int]:
        return {tp: self.logs.leader(tp) for tp in self.logs.partitions}

    def truncated(
        self, positions: Mapping[TopicPartition, tuple[Position, int]], **_: float
    ) -> dict[TopicPartition, str]:
        """The partitions that end before a position in its leader epoch."""
        self._asked("look for a truncation")
        return {
            tp: "log truncation"
            for tp, (at, epoch) in positions.items()
            if self.logs.end_of(tp, epoch) < at
        }


class RangeConsumer:
    """As confluent-kafka's consumer, of partitions that are assigned to it manually."""

    def __init__(self, schedule: Schedule, logs: Logs, isolation: object) -> None:
        self._schedule, self._logs = schedule, logs
        self._committed = isolation == "read_committed"
        self._next: dict[TopicPartition, int] = {}
        self._told: dict[TopicPartition, int] = {}

    def assign(self, given: Iterable[Any]) -> None:
        """Fetch these partitions."""
        self._next = {TopicPartition(one.topic, one.partition): one.offset for one in given}
        self._told = {}

    def incremental_unassign(self, left: Iterable[Any]) -> None:
        """Fetch some partitions no more."""
        for one in left:
            self._next.pop(TopicPartition(one.topic, one.partition), None)

    def unassign(self) -> None:
        """Fetch nothing more."""
        self._next = {}

    def close(self) -> None:
        """Nothing to close."""

    def get_watermark_offsets(self, one: Any, **_: object) -> tuple[int, int]:
        """The bounds of a log."""
        tp = TopicPartition(one.topic, one.partition)
        logs = self._logs
        return logs.low[tp], logs.stable(tp) if self._committed else logs.ends[tp]

    def poll(self, _: float) -> Message | None:
        """A message, or nothing yet."""
        step()
        self._schedule.may_fail("fetch", 0.005)
        if self._schedule.happens(0.1):
            return None
        return next(iter(self._take(1)), None)

    def consume(self, number: int, _: float) -> list[Message]:
        """More messages."""
        return self._take(min(number, self._schedule.random.randint(0, 4)))

    def _take(self, number: int) -> list[Message]:
        order = self._schedule.random.sample(sorted(self._next), len(self._next))
        found = itertools.chain.from_iterable(map(self._of, order))
        return list(itertools.islice(found, number))

    def _of(self, tp: TopicPartition) -> Iterable[Message]:
        """Messages of a partition; each is counted when it is taken."""
        logs, at = self._logs, self._next[tp]
        if not logs.low[tp] <= at <= logs.ends[tp]:
            yield Message(tp, at, fault=_RESET)
            return
        end = logs.stable(tp) if self._committed else logs.ends[tp]
        if self._schedule.happens(0.2):  # a follower, or a new leader, that lags behind
            end = self._schedule.random.randint(min(at, end), end)
        for one in logs.readable(tp, at, committed=self._committed):
            if one < end:
                self._next[tp] = one + 1
                yield Message(tp, one)
        if end > self._told.get(tp, -1):
            self._told[tp], self._next[tp] = end, max(self._next[tp], end)
            yield Message(tp, end, end=True)
