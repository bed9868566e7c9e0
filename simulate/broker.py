"""A topic, a group's coordinator, and a consumer, as far as a worker can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.kafka.source import Watermarks
from simulate.schedule import Schedule, Violation

NAME = "records"
_EOF = KafkaError(KafkaError._PARTITION_EOF)


@dataclass(frozen=True, slots=True)
class Message:
    """A message, or the news that a partition has no more of them, or can't be read on."""

    tp: TopicPartition
    at: int
    end: bool = False
    fault: KafkaError | None = None

    def topic(self) -> str:
        """The topic."""
        return self.tp.topic

    def partition(self) -> int:
        """The partition's number."""
        return self.tp.partition

    def offset(self) -> int:
        """The offset."""
        return self.at

    def leader_epoch(self) -> int | None:
        """Not known."""
        return None

    def error(self) -> KafkaError | None:
        """The end of the partition is an error of librdkafka."""
        return _EOF if self.end else self.fault

    def key(self) -> None:
        """None."""

    def value(self) -> bytes:
        """The offset."""
        return b"%d" % self.at

    def headers(self) -> None:
        """None."""

    def __len__(self) -> int:
        return 1


class Topic:
    """The logs, with holes as markers and aborted records leave them; also the worker's source."""

    def __init__(self, schedule: Schedule, partitions: int) -> None:
        self.partitions = [TopicPartition(NAME, number) for number in range(partitions)]
        self._random = schedule.random
        self.logs: dict[TopicPartition, list[int]] = {tp: [] for tp in self.partitions}
        self.ends = dict.fromkeys(self.partitions, 0)

    def grow(self) -> None:
        """Some records, or a hole."""
        tp = self._random.choice(self.partitions)
        for _ in range(self._random.randint(1, 4)):
            if self._random.random() < 0.8:
                self.logs[tp].append(self.ends[tp])
            self.ends[tp] += 1

    def within(self, tp: TopicPartition, range_: OffsetRange) -> set[int]:
        """The offsets of records in a range."""
        return {offset for offset in self.logs[tp] if offset in range_}

    # -- as KafkaSource --------------------------------------------------------------------

    def identity(self) -> SourceIdentity:
        """Always the same topic."""
        return SourceIdentity("cluster", self.topic_ids())

    def topic_ids(self) -> dict[str, str]:
        """Always the same topic."""
        return {NAME: "id"}

    def earliest(self) -> dict[TopicPartition, int]:
        """Nothing is ever deleted."""
        return dict.fromkeys(self.partitions, 0)

    def resolve_start(self, _: object) -> dict[TopicPartition, int]:
        """The beginning."""
        return self.earliest()

    def watermarks(self) -> dict[TopicPartition, Watermarks]:
        """First offset and end."""
        return {tp: Watermarks(0, end, end) for tp, end in self.ends.items()}

    def leader_epochs(self) -> dict[TopicPartition, int]:
        """Not known."""
        return {}

    def truncated(self, _: object) -> dict[TopicPartition, str]:
        """Never."""
        return {}


@dataclass
class Coordinator:
    """Gives partitions to members: all at once (eager), or those that have moved (cooperative).

    Attributes:
        owner: the member that a partition was given to, and that has not returned it.
        target: the member that it is for.
        marks: the group's offsets.
        committed: the ledger's position of a partition.
    """

    schedule: Schedule
    topic: Topic
    eager: bool
    committed: Callable[[TopicPartition], int]
    owner: dict[TopicPartition, str] = field(default_factory=dict)
    target: dict[TopicPartition, str] = field(default_factory=dict)
    marks: dict[TopicPartition, int] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    _waits: bool = False

    def join(self, member: str) -> None:
        """A member comes."""
        self.members.append(member)
        self.rebalance()

    def leave(self, member: str) -> None:
        """A member has gone, or was silent for too long."""
        if member in self.members:
            self.members.remove(member)
            self.owner = {tp: one for tp, one in self.owner.items() if one != member}
            self.rebalance()

    def rebalance(self) -> None:
        """Decide anew."""
        self._waits = self.eager
        if self.eager:
            self.target = {}
        else:
            self._decide()
        self.proceed()

    def proceed(self) -> None:
        """Eager: decide when every member has returned its partitions."""
        if self._waits and not self.owner:
            self._waits = False
            self._decide()

    def _decide(self) -> None:
        order = self.schedule.random.sample(self.topic.partitions, len(self.topic.partitions))
        ring = self.members
        self.target = {tp: ring[at % len(ring)] for at, tp in enumerate(order)} if ring else {}

    def news(self, member: str) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """The partitions that a member has to return, and those that are given to it."""
        mine = {tp for tp, one in self.owner.items() if one == member}
        wanted = {tp for tp, one in self.target.items() if one == member}
        return mine - wanted, {tp for tp in wanted - mine if tp not in self.owner}


class ScriptedConsumer:
    """As confluent-kafka's consumer; rebalances are served by its calls, late or early."""

    def __init__(self, schedule: Schedule, coordinator: Coordinator, name: str) -> None:
        self._schedule, self._coordinator, self._name = schedule, coordinator, name
        self._incarnation = 0
        self._next: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._told: dict[TopicPartition, int] = {}
        self._last: dict[TopicPartition, int] = {}  # the last messages that were returned
        self.mine: set[TopicPartition] = set()
        self._on: dict[str, Callable[..., None]] = {}
        self._inside = False

    def subscribe(self, _: list[str], **callbacks: Callable[..., None]) -> None:
        """Join the group."""
        self._on = callbacks
        self._coordinator.join(self.memberid())

    def memberid(self) -> str:
        """A new one after each time that the group has removed it."""
        return f"{self._name}.{self._incarnation}"

    def consumer_group_metadata(self) -> str:
        """For a sink in Kafka, which is not simulated."""
        return self.memberid()

    # -- records ---------------------------------------------------------------------------

    def poll(self, _: float) -> Message | None:
        """A message, or nothing after a rebalance was served."""
        if self._serve():
            return None
        taken = self._take(1)
        return taken[0] if taken else None

    def consume(self, number: int, _: float) -> list[Message]:
        """Messages; a rebalance may be served between two of them."""
        taken: list[Message] = []
        for _ in range(self._schedule.random.randint(0, 3)):
            taken += self._take(self._schedule.random.randint(1, 3))
            if self._schedule.random.random() < 0.2:
                self._serve()
        return taken[:number]

    def _take(self, number: int) -> list[Message]:
        found: list[Message] = []
        logs, ends = self._coordinator.topic.logs, self._coordinator.topic.ends
        ready = sorted(self._next.keys() - self._paused)
        for tp in self._schedule.random.sample(ready, len(ready)):
            logical = {ck.OFFSET_END: ends[tp], ck.OFFSET_BEGINNING: 0}
            at = logical.get(self._next[tp], self._next[tp])
            more = [Message(tp, one) for one in logs[tp] if one >= at][: number - len(found)]
            self._next[tp] = more[-1].at + 1 if more else ends[tp]
            self._last |= {tp: more[-1].at} if more else {}
            if not more and self._told.get(tp) != ends[tp]:
                self._told[tp] = ends[tp]
                more = [Message(tp, ends[tp], end=True)]
            found += more
            if len(found) >= number:
                break
        return found

    # -- the assignment --------------------------------------------------------------------

    def assign(self, given: Iterable[Any]) -> None:
        """Replace the assignment; pauses are kept, as librdkafka keeps them."""
        self.unassign()
        self.incremental_assign(given)

    def incremental_assign(self, given: Iterable[Any]) -> None:
        """Add to the assignment. The last message of a partition that is kept may come again."""
        for tp, last in self._last.items():
            if tp in self._next and self._schedule.happens(0.2):
                self._next[tp] = last
        for one in given:
            tp = TopicPartition(one.topic, one.partition)
            self._next[tp] = one.offset
            self._last.pop(tp, None)
            self._told.pop(tp, None)

    def unassign(self) -> None:
        """Fetch nothing more."""
        self._next = {}

    def incremental_unassign(self, taken: Iterable[Any]) -> None:
        """Fetch nothing more of some partitions."""
        for one in taken:
            self._next.pop(TopicPartition(one.topic, one.partition), None)

    def pause(self, partitions: Iterable[Any]) -> None:
        """Fetch nothing more for now."""
        self._paused |= {TopicPartition(one.topic, one.partition) for one in partitions}

    def resume(self, partitions: Iterable[Any]) -> None:
        """Fetch again."""
        self._paused -= {TopicPartition(one.topic, one.partition) for one in partitions}

    def seek(self, one: Any) -> None:
        """Fetch from another offset on; refused now and then while a partition is started."""
        tp = TopicPartition(one.topic, one.partition)
        if tp not in self._next or self._schedule.happens(0.2):
            raise KafkaException(KafkaError(KafkaError._STATE))
        if self._next[tp] < 0 and self._schedule.random.random() < 0.3:
            return  # the offset was asked for, and the answer that comes late replaces this one
        self._next[tp] = one.offset
        self._last.pop(tp, None)
        self._told.pop(tp, None)

    def commit(self, offsets: Iterable[Any], asynchronous: bool) -> None:
        """Set the group's offsets, of a member that the group knows."""
        group = self._coordinator
        for one in offsets:
            tp = TopicPartition(one.topic, one.partition)
            if group.owner.get(tp) != self.memberid():
                continue
            if one.offset < group.marks.get(tp, 0):
                raise Violation(f"{tp}: the group's offset goes back to {one.offset}")
            if one.offset > group.committed(tp):
                raise Violation(f"{tp}: the group's offset is before the ledger's position")
            group.marks[tp] = one.offset

    def close(self) -> None:
        """Return everything, and leave."""
        self._return(set(self.mine), "on_revoke")
        self._coordinator.leave(self.memberid())

    # -- rebalances ------------------------------------------------------------------------

    def _serve(self) -> bool:
        """Serve news of the group, if there are any and they have arrived."""
        if self._schedule.happens(0.3):
            return False
        group, random = self._coordinator, self._schedule.random
        served = self._lost() or self._return(group.news(self.memberid())[0], "on_revoke")
        given = group.news(self.memberid())[1]
        # Often in one call, or in the next one.
        if given and not (served and random.random() < 0.5):
            for tp in given:
                group.owner[tp] = self.memberid()
            self.mine |= given
            self._on["on_assign"](self, [ck.TopicPartition(*tp) for tp in sorted(given)])
        return served or bool(given)

    def _lost(self) -> bool:
        """The group has removed this member: it joins again."""
        if self.memberid() in self._coordinator.members:
            return False
        # librdkafka may tell of lost partitions as if they were revoked.
        how = self._schedule.random.choice(["on_lost", "on_revoke"])
        self._return(set(self.mine), how)
        self._incarnation += 1
        self._coordinator.join(self.memberid())
        return True

    def _return(self, partitions: set[TopicPartition], how: str) -> bool:
        if not partitions:
            return False
        self._on[how](self, [ck.TopicPartition(*tp) for tp in sorted(partitions)])
        self.mine -= partitions
        group = self._coordinator
        for tp in partitions:
            if group.owner.get(tp) == self.memberid():
                del group.owner[tp]
        group.proceed()
        return True


class ScriptedAdmin:
    """Answers who has which partition."""

    def __init__(self, schedule: Schedule, coordinator: Coordinator) -> None:
        self._schedule, self._coordinator = schedule, coordinator

    def ask(self, doing: str, _: object) -> dict[str, Any]:
        """The group's description, by its name."""
        self._schedule.may_fail(doing)
        group = self._coordinator
        members = [
            SimpleNamespace(
                member_id=member,
                client_id=NAME,
                host="",
                assignment=SimpleNamespace(
                    topic_partitions=[
                        ck.TopicPartition(*tp) for tp, one in group.owner.items() if one == member
                    ]
                ),
            )
            for member in group.members
        ]
        return {NAME: SimpleNamespace(members=members)}

    def close(self) -> None:
        """Nothing to close."""
