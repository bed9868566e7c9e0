"""A member of a group: errors by their consequence, and messages beside a new assignment."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka import group_consumer
from oncely.clients.kafka.group_consumer import GroupConsumer, Membership, members_of
from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError, InstanceTaken, OncelyError, Unavailable

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Message(SimpleNamespace):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found if name.startswith("_") else lambda: found


def record(tp: TopicPartition, offset: int) -> Message:
    return Message(topic=tp.topic, partition=tp.partition, offset=offset, error=None)


class Scripted:
    """librdkafka's consumer; a function in a list of messages is a callback of a rebalance."""

    def __init__(self, config: Mapping[str, Any], **_: Any) -> None:
        self.polls: list[list[Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.refusals = 0

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:
        self.on = callbacks

    def poll(self, _: float) -> Any:
        self.now = self.polls.pop(0) if self.polls else []
        return self._next()

    def _next(self) -> Any:
        while self.now:
            one = self.now.pop(0)
            if isinstance(one, Message):
                return one
            one()
        return None

    def consume(self, count: int, _: float) -> list[Any]:
        found = []
        while (one := self._next()) is not None:
            found.append(one)
        return found

    def seek(self, at: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            raise KafkaException(KafkaError(KafkaError._STATE))
        self.calls.append(("seek", (at.partition, at.offset)))

    def consumer_group_metadata(self) -> None:
        """Nobody asks for it."""

    def __getattr__(self, name: str) -> Any:
        return lambda given=(): self.calls.append(
            (name, [(one.partition, one.offset) for one in given])
        )

    def assign_again(self, *tps: TopicPartition) -> None:
        self.on["on_assign"](self, [SimpleNamespace(topic=t, partition=p) for t, p in tps])


class Positions:
    """The ledger is at 5 everywhere, or does not answer."""

    answers = True

    def assigned(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(partitions, 5) if self.answers else {}

    def revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        pass


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> GroupConsumer:
    monkeypatch.setattr(group_consumer.ck, "Consumer", Scripted)
    return GroupConsumer("127.0.0.1:1", {}, ["t"], Membership("g", instance="one"), Positions())


def end(tp: TopicPartition, offset: int) -> Message:
    eof = KafkaError(KafkaError._PARTITION_EOF)
    return Message(topic=tp.topic, partition=tp.partition, offset=offset, error=eof)


def offsets(found: group_consumer.Polled) -> dict[TopicPartition, list[int]]:
    return {tp: [one.offset() for one in own] for tp, own in found.messages.items()}


def test_messages_of_an_earlier_assignment_do_not_hide_records(consumer: GroupConsumer) -> None:
    """Offsets 5 to 7 were fetched under the earlier assignment, and dropped with its buffer."""
    scripted: Any = consumer._consumer
    scripted.polls = [
        [record(T0, 8), record(T1, 3), lambda: scripted.assign_again(T0), record(T0, 9)],
        [record(T0, 5), record(T1, 4)],
    ]
    assert offsets(consumer.poll(0)) == {T1: [3]}
    assert ("incremental_assign", [(0, 5)]) in scripted.calls
    assert offsets(consumer.poll(0)) == {T0: [5], T1: [4]}
    assert ("seek", (0, 5)) in scripted.calls


def test_an_end_that_comes_with_an_assignment_is_told_again(consumer: GroupConsumer) -> None:
    """librdkafka tells of an end once; it may be that of the earlier assignment."""
    scripted: Any = consumer._consumer
    scripted.polls = [[lambda: scripted.assign_again(T0), end(T0, 7)], [end(T0, 8)]]
    assert consumer.poll(0).ends == {}
    assert consumer.poll(0).ends == {T0: 8}
    assert ("seek", (0, 5)) in scripted.calls


def test_nothing_is_returned_before_a_seek_was_possible(consumer: GroupConsumer) -> None:
    scripted: Any = consumer._consumer
    scripted.refusals = 2
    scripted.polls = [[record(T0, 8)], [record(T0, 5)]]
    consumer.seek(T0, 5)
    assert offsets(consumer.poll(0)) == {}
    assert offsets(consumer.poll(0)) == {T0: [5]}


def test_what_was_not_taken_over_is_assigned_paused(
    consumer: GroupConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Positions, "answers", False)
    scripted: Any = consumer._consumer
    scripted.polls = [[lambda: scripted.assign_again(T0)]]
    consumer.poll(0)
    assert [name for name, _ in scripted.calls] == ["incremental_assign", "pause"]


def test_an_error_of_a_callback_is_raised_by_poll(
    consumer: GroupConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assigned(*_: object) -> Any:
        raise Unavailable("gone")

    monkeypatch.setattr(Positions, "assigned", assigned)
    scripted: Any = consumer._consumer
    scripted.polls = [[lambda: scripted.assign_again(T0)]]
    with pytest.raises(Unavailable, match="gone"):
        consumer.poll(0)


FATAL = KafkaError._FATAL


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED), ConfigError, "worker.group: no right"),
        (
            KafkaError(FATAL, "Fatal error: Broker: API version not supported: heartbeat"),
            ConfigError,
            "worker.protocol: the broker does not support",
        ),
        (
            KafkaError(FATAL, str(KafkaError(KafkaError.FENCED_INSTANCE_ID).str())),
            InstanceTaken,
            "another process has joined group 'g' as 'one'",
        ),
        (
            KafkaError(FATAL, str(KafkaError(KafkaError.UNRELEASED_INSTANCE_ID).str())),
            ConfigError,
            "worker.instance: 'one' is still a member",
        ),
        (KafkaError(KafkaError.GROUP_MAX_SIZE_REACHED), Unavailable, "work in group 'g'"),
    ],
)
def test_errors_of_the_group(
    consumer: GroupConsumer, error: KafkaError, kind: type[OncelyError], says: str
) -> None:
    scripted: Any = consumer._consumer
    scripted.polls = [[Message(topic=None, partition=-1, offset=-1, error=error)]]
    with pytest.raises(kind, match=says):
        consumer.poll(0)


def test_a_seek_in_a_rebalance_drops_what_the_same_call_has_taken(
    consumer: GroupConsumer,
) -> None:
    """Offset 8 was taken before the callback that begins again at 5."""
    scripted: Any = consumer._consumer
    scripted.polls = [
        [record(T0, 8), record(T1, 3), lambda: consumer.seek(T0, 5), record(T1, 4)],
        [record(T0, 5)],
    ]
    assert offsets(consumer.poll(0)) == {T1: [3, 4]}
    assert offsets(consumer.poll(0)) == {T0: [5]}
    assert scripted.calls.count(("seek", (0, 5))) == 1


@pytest.mark.parametrize(
    ("answer", "members"),
    [
        (SimpleNamespace(members=["one", "two"]), 2),
        (SimpleNamespace(members=[]), 0),
        (KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND)), 0),
    ],
)
def test_the_members_of_a_group_are_counted(
    monkeypatch: pytest.MonkeyPatch, answer: object, members: int
) -> None:
    monkeypatch.setattr(group_consumer.KafkaAdmin, "ask", lambda *_: {"g": answer})
    assert members_of("127.0.0.1:1", {}, "g") == members


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.GROUP_AUTHORIZATION_FAILED, ConfigError),
        (KafkaError.COORDINATOR_NOT_AVAILABLE, Unavailable),
    ],
)
def test_a_group_that_is_not_described_is_not_empty(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[OncelyError]
) -> None:
    answer = KafkaException(KafkaError(code))
    monkeypatch.setattr(group_consumer.KafkaAdmin, "ask", lambda *_: {"g": answer})
    with pytest.raises(kind, match="describe group 'g'"):
        members_of("127.0.0.1:1", {}, "g")
