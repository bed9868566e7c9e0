"""A member of a group: errors by their consequence, and messages beside a new assignment."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.config import parse
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, InstanceTaken, OncelyError, Unavailable, WrongInput
from oncely.kafka import client
from oncely.kafka import group as group_consumer
from oncely.kafka.client import KafkaAdmin
from oncely.kafka.group import GroupConsumer, Membership, Protocols, worker_id
from oncely.kafka.inbox import PollResult
from tests.extras import IN_THE_BASE, PIPELINE

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Message(SimpleNamespace):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**{"key": None, "headers": None, **parts})

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found if name.startswith("_") else lambda: found

    def __len__(self) -> int:
        return 1 << 20


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


def offsets(found: PollResult) -> dict[TopicPartition, list[int]]:
    return {tp: [one.offset() for one in own] for tp, own in found.messages.items()}


def test_the_client_has_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, Any]] = []

    def consumer(config: Mapping[str, Any], **_: Any) -> Scripted:
        given.append(config)
        return Scripted(config)

    monkeypatch.setattr(group_consumer.ck, "Consumer", consumer)
    of = Membership("g", polled_bytes=32 << 20)
    GroupConsumer("127.0.0.1:1", {}, ["t"], of, Positions())
    GroupConsumer("127.0.0.1:1", {"fetch.max.bytes": "9000000"}, ["t"], of, Positions())
    assert [one["fetch.max.bytes"] for one in given] == [str(4 << 20), "9000000"]
    assert given[0]["queued.max.messages.kbytes"] == 8 << 10
    assert given[0]["queued.min.messages"] == (8 << 20) // 400
    assert given[0]["topic.metadata.refresh.interval.ms"] == 30_000


def test_librdkafka_accepts_the_smallest_buffer() -> None:
    """Its own checks: this client connects to nobody."""
    of = Membership("g", polled_bytes=(32 << 20) // 8)
    GroupConsumer("127.0.0.1:1", {}, ["t"], of, Positions()).close()


def test_librdkafka_accepts_the_longest_session_of_the_pipeline_file() -> None:
    longest = {**PIPELINE, "sink": IN_THE_BASE[0], "worker": {"session_timeout": "5 minutes"}}
    for protocol in get_args(Protocols):
        longest["worker"]["protocol"] = protocol
        given = parse(longest).worker
        of = Membership("g", given.protocol, session_seconds=given.session_timeout)
        GroupConsumer("127.0.0.1:1", {}, ["t"], of, Positions()).close()
    longest["worker"]["session_timeout"] = "301 seconds"
    with pytest.raises(
        ConfigError, match=r"worker\.session_timeout: .*5 minutes, within"
    ) as caught:
        parse(longest)
    assert "10 seconds" in str(caught.value)


def test_what_bounds_the_standstill_after_a_kill() -> None:
    """The session of the pipeline file, 10 s by default, and the name of a static member."""
    raw: dict[str, Any] = {**PIPELINE, "sink": IN_THE_BASE[0], "worker": {"instance": "one"}}
    given = parse(raw).worker
    of = Membership("g", "cooperative", given.instance, given.session_timeout).properties()
    assert (of["session.timeout.ms"], of["group.instance.id"]) == (10_000, "one")
    assert 3 * int(str(of["heartbeat.interval.ms"])) <= 10_000
    decided_by_the_broker = Membership("g", "consumer", given.instance, given.session_timeout)
    assert "session.timeout.ms" not in decided_by_the_broker.properties()


def test_a_call_takes_as_many_messages_as_fit(consumer: GroupConsumer) -> None:
    """The default is 64 MiB."""
    scripted: Any = consumer._consumer
    taken: list[int] = []
    scripted.consume = lambda count, _: taken.append(count) or []
    scripted.polls = [[record(T0, at)] for at in range(2)]
    consumer.poll(0)
    assert consumer.poll(0).messages.keys() == {T0}
    assert taken == [50, 63]  # of 1 MiB, and what is beside it


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (None, ""),
        ("billing", ""),
        (worker_id("orders", "here"), ""),
        (worker_id("other", "here"), "pipeline 'orders' works in group 'g', too: oncely-work/"),
        (worker_id("orders", "there"), "too, and writes into another destination: oncely-work/"),
    ],
)
def test_workers_of_another_pipeline_or_destination_are_refused(
    monkeypatch: pytest.MonkeyPatch, client: str | None, said: str
) -> None:
    """A client of another kind is not refused, and does not refuse."""
    names = ("rdkafka", *[worker_id("orders", "here")] * 2)
    group = SimpleNamespace(members=[SimpleNamespace(client_id=one, host="/h") for one in names])
    monkeypatch.setattr(group_consumer.ck, "Consumer", Scripted)
    monkeypatch.setattr(group_consumer.KafkaAdmin, "ask", lambda *_: {"g": group})
    given = "127.0.0.1:1", {}, ["t"], Membership("g", client=client), Positions()
    if not said:
        GroupConsumer(*given)
        return
    with pytest.raises(ConfigError, match=rf"^worker\.group: .*{said}"):
        GroupConsumer(*given)


def test_partitions_of_strangers_are_named(
    consumer: GroupConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(member: str, client: str, *of: tuple[str, int]) -> Any:
        assignment = SimpleNamespace(topic_partitions=[TopicPartition(*one) for one in of])
        more = {"client_id": client, "host": "/h", "assignment": assignment}
        return SimpleNamespace(member_id=member, **more)

    consumer._consumer.memberid = lambda: "me"
    found = [held("other", "us", ("t", 1)), held("x", "them", ("t", 2), ("u", 0))]
    monkeypatch.setattr(group_consumer, "members", lambda *_: found)
    assert consumer.strangers() == {}  # not a member yet
    found.append(held("me", "us", ("t", 0)))
    assert consumer.strangers() == {TopicPartition("t", 2): "them at /h"}


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
    consumer.pause({T0})
    consumer.pause(set())
    assert [name for name, _ in scripted.calls] == ["incremental_assign", "pause", "resume"]


def test_what_was_paused_before_is_resumed_when_it_is_assigned(consumer: GroupConsumer) -> None:
    """librdkafka keeps a pause over a revocation."""
    scripted: Any = consumer._consumer
    scripted.polls = [[lambda: scripted.assign_again(T0)], [lambda: scripted.assign_again(T0)]]
    consumer.poll(0)
    consumer.pause({T0, T1})
    consumer.poll(0)
    assert [(name, [at[0] for at in given]) for name, given in scripted.calls] == [
        ("incremental_assign", [0]), ("pause", [0, 1]), ("resume", [0]), ("incremental_assign", [0])
    ]  # fmt: skip


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
        (KafkaError(KafkaError.POLICY_VIOLATION), WrongInput, "work in group 'g'"),
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
    monkeypatch.setattr(KafkaAdmin, "ask", lambda *_: {"g": answer})
    assert len(client.members(KafkaAdmin("127.0.0.1:1", {}, 1.0), "g")) == members


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
    monkeypatch.setattr(KafkaAdmin, "ask", lambda *_: {"g": answer})
    with pytest.raises(kind, match="describe group 'g'"):
        client.members(KafkaAdmin("127.0.0.1:1", {}, 1.0), "g")
