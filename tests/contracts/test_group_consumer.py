"""A group of a real broker: partitions that were paused, that are added, and members of others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from confluent_kafka import Producer

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import ConfigError
from oncely.kafka import group as group_consumer
from oncely.kafka.client import KafkaAdmin, members
from oncely.kafka.group import GroupConsumer, Membership, Protocols, worker_id
from oncely.kafka.reader import RecordReader as RangeReader
from oncely.kafka.records import EVERY_COLUMN, offsets_of
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce
from tests.kafka_proxy import LIST_OFFSETS, proxied_broker

REFRESH = "topic.metadata.refresh.interval.ms"
pytestmark = pytest.mark.timeout(120)


class Reader:
    """A member that reads each partition from its beginning, and counts what has arrived."""

    polled_bytes = 64 << 20
    kafka: Mapping[str, object] = {}

    def __init__(
        self, broker: Broker, topic: str, protocol: Protocols, client: str | None = None
    ) -> None:
        self.held: set[TopicPartition] = set()
        self.read: dict[TopicPartition, int] = {}
        self.next: dict[TopicPartition, int] = {}  # of partitions that are read without a gap
        membership = Membership(
            f"{topic}-{protocol}", protocol, session_seconds=6.0, client=client,
            polled_bytes=self.polled_bytes,
        )  # fmt: skip
        self.group = GroupConsumer(
            broker.bootstrap, self.kafka, [topic], membership, self, EVERY_COLUMN
        )

    def assigned(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        self.held |= partitions
        self.read |= dict.fromkeys(partitions, 0)
        self.next |= dict.fromkeys(partitions, 0)
        return dict.fromkeys(partitions, 0)

    def revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        self.held -= partitions

    def poll(self) -> Reader:
        for tp, messages in self.group.poll(0.05).messages.items():
            self.read[tp] += len(messages)
            last = self.next[tp] + len(messages)
            assert offsets_of(messages).tolist() == list(range(self.next[tp], last))
            self.next[tp] = last
        return self

    def seek(self, tp: TopicPartition, position: int) -> None:
        self.group.seek(tp, position)
        self.next[tp] = position

    def close(self) -> None:
        self.group.close()


@pytest.mark.parametrize("protocol", get_args(Protocols))
def test_a_paused_partition_that_went_and_came_back_is_read(
    broker: Broker, make_topic: Any, protocol: Protocols
) -> None:
    topic = make_topic(partitions=2, records=[(at % 2, b"key", b"value") for at in range(40)])
    with closing(Reader(broker, topic, protocol)) as member:
        await_that(lambda: sorted(member.poll().read.values()) == [20, 20], "all records")
        member.group.pause(member.held)
        with closing(Reader(broker, topic, protocol)) as guest:
            await_that(lambda: member.poll() and guest.poll().held, "the guest's share")
            (gone,) = await_that(lambda: member.poll() and guest.poll().held - member.held, "gone")
        await_that(lambda: gone in member.poll().held, "it comes back")
        await_that(lambda: member.poll().read[gone] == 20, "its records, once more")


@pytest.mark.parametrize("protocol", get_args(Protocols))
def test_each_record_is_returned_once_beside_a_rebalance_a_seek_and_a_pause(
    broker: Broker, make_topic: Any, monkeypatch: pytest.MonkeyPatch, protocol: Protocols
) -> None:
    """Records grow: more of them are taken out of librdkafka's queues than a call returns."""
    for name in ("_ROWS", "_MANY"):
        monkeypatch.setattr(group_consumer, name, 400)
    monkeypatch.setattr(Reader, "polled_bytes", 100 << 10)
    many = 1500
    records = [(at % 2, b"key", b"v" * (at // 2)) for at in range(2 * many)]
    topic = make_topic(partitions=2, records=records)
    first = TopicPartition(topic, 0)
    with closing(Reader(broker, topic, protocol)) as member:
        await_that(lambda: min([0, *member.poll().next.values()][-2:]) > 500, "all are read")
        member.seek(first, 10)
        await_that(lambda: member.poll().next[first] > 500, "it goes on after the seek")
        member.group.pause({first})
        with closing(Reader(broker, topic, protocol)) as guest:
            await_that(lambda: member.poll() and guest.poll().held, "the guest's share")
            await_that(lambda: member.poll() and guest.poll().held.isdisjoint(member.held), "gone")
            member.group.pause(set())
            for tp in member.held | guest.held:
                await_that(lambda tp=tp: many in (m.poll().next.get(tp) for m in (member, guest)),
                           "every record")  # fmt: skip
        await_that(lambda: len(member.poll().held) == 2, "it comes back")
        await_that(lambda: set(member.poll().next.values()) == {many}, "every record")


class Waiting(Reader):
    """A member that is told later where to begin, and keeps the offsets that have arrived."""

    def assigned(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        self.held, self.offsets = {*partitions}, list[int]()
        return {}

    def poll(self) -> Waiting:
        for messages in self.group.poll(0.05).messages.values():
            self.offsets += offsets_of(messages).tolist()
        return self


@pytest.mark.servers
@pytest.mark.parametrize("protocol", get_args(Protocols))
def test_an_answer_that_comes_after_a_seek_makes_nobody_read_the_log_again(
    protocol: Protocols,
) -> None:
    with proxied_broker() as (broker, proxy):
        topic = broker.create_topic(f"late-{protocol}")
        produce(broker, topic, [(0, None, b"%d" % n) for n in range(3_000)])
        through = SimpleNamespace(bootstrap=proxy.bootstrap)
        with (
            proxy.fault(LIST_OFFSETS, "hold response") as late,
            closing(Waiting(through, topic, protocol)) as member,
        ):
            await_that(lambda: member.poll() and late.met.is_set(), "the question for an offset")
            member.group.seek(TopicPartition(topic, 0), 2_990)
            member.group.pause(set())
            await_that(lambda: 2_999 in member.poll().offsets, "the last record")
            late.release()
            await_that(lambda: member.poll().offsets.count(2_999) == 2, "it comes once more")
            assert min(member.offsets) == 2_990


@pytest.mark.parametrize("protocol", get_args(Protocols))
def test_a_member_without_partitions_has_joined(
    broker: Broker, make_topic: Any, monkeypatch: pytest.MonkeyPatch, protocol: Protocols
) -> None:
    topic = make_topic()
    with closing(Reader(broker, topic, protocol)) as one:
        await_that(lambda: one.poll().held, "the partition")
        assert one.group.joined()
        only_one = one.group._described()
        with closing(Reader(broker, topic, protocol)) as two:
            with monkeypatch.context() as patched:  # it may have joined in the meantime
                patched.setattr(group_consumer, "members", lambda *_: only_one)
                assert not two.group.joined()
            await_that(lambda: one.poll() and two.poll().group.joined(), "both have joined")
            await_that(lambda: len(one.poll().held | two.poll().held) == 1, "the partition")


@pytest.mark.parametrize("protocol", get_args(Protocols))
def test_partitions_that_are_added_are_assigned(
    broker: Broker, make_topic: Any, monkeypatch: pytest.MonkeyPatch, protocol: Protocols
) -> None:
    assert int(group_consumer._OWN[REFRESH]) <= 30_000  # the client's default: five minutes
    monkeypatch.setitem(group_consumer._OWN, REFRESH, 1_000)
    topic = make_topic()
    with closing(Reader(broker, topic, protocol)) as member:
        await_that(lambda: member.poll().held, "the first one")
        broker.add_partitions(topic, 3)
        await_that(lambda: len(member.poll().held) == 3, "those that were added", 180)


@pytest.mark.parametrize("protocol", get_args(Protocols))
def test_two_pipelines_in_one_group_are_refused(
    broker: Broker, make_topic: Any, protocol: Protocols
) -> None:
    topic = make_topic(partitions=2)
    with (  # the first one may have joined before the second one begins
        pytest.raises(ConfigError, match=r"worker\.group: pipeline '(one|two)' works in"),
        closing(Reader(broker, topic, protocol, worker_id("one", ""))) as one,
        closing(Reader(broker, topic, protocol, worker_id("two", ""))) as two,
    ):
        await_that(lambda: one.poll() and two.poll() and False, "an end", 180)
    group = one.group._membership.group  # who left while joining stays for a session
    admin = KafkaAdmin(broker.bootstrap, {}, 10.0)
    await_that(lambda: not members(admin, group), "both have left")
    with closing(Reader(broker, topic, protocol, worker_id("one", ""))) as one:
        await_that(lambda: len(one.poll().held) == 2, "alone")
        with closing(Reader(broker, topic, protocol, worker_id("one", ""))) as same:
            await_that(lambda: one.poll() and same.poll().held, "of the same pipeline")
        with pytest.raises(ConfigError, match=r"worker\.group: pipeline 'one' works in group"):
            Reader(broker, topic, protocol, worker_id("two", ""))


@pytest.mark.parametrize("native", ["", "off"])
@pytest.mark.parametrize("codec", ["zstd", "gzip", "lz4", "snappy"])
def test_what_decompresses_beyond_the_bound_ends_both_readers_with_its_offset(
    codec: str, native: str, broker: Broker, make_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka bounds zstd alone. What precedes the record is read, and ranges before it end."""
    monkeypatch.setenv("ONCELY_NATIVE", native)
    monkeypatch.setattr(Reader, "kafka", {"receive.message.max.bytes": 20_000_000})
    topic = make_topic(config={"max.message.bytes": "10000000"})
    limits = {"message.max.bytes": 90_000_000, "compression.type": codec}
    producer = Producer({**broker.client_config(), **limits})
    for value in (b"before", bytes(30_000_000), b"after"):
        producer.produce(topic, value)
        assert producer.flush(30) == 0
    tp, told = TopicPartition(topic, 0), f"{topic}-0: the records from offset 1 on"
    with closing(RangeReader(broker.bootstrap, Reader.kafka)) as ranges:
        for start, end in ((0, 1), (2, 3)):
            (piece,) = ranges.read({tp: OffsetRange(start, end)})
            assert (piece.next, piece.records.num_rows) == (end, 1)
        with closing(Reader(broker, topic, "cooperative")) as member:
            if codec != "zstd":
                await_that(lambda: member.poll().read.get(tp) == 3, 30)
                assert [p.next for p in ranges.read({tp: OffsetRange(0, 3)})][-1] == 3
                return
            with pytest.raises(ConfigError, match=told) as caught:
                await_that(lambda: member.poll().read.get(tp) == 2, 30)
            assert member.read[tp] == 1
        assert caught.value.key == "source.kafka.receive.message.max.bytes"
        assert "20,000,000 bytes" in caught.value.message
        assert f"--topic {topic}:0 --to-offset" in caught.value.way_out
        read: list[int] = []
        with pytest.raises(ConfigError, match=told):
            read.extend(piece.next for piece in ranges.read({tp: OffsetRange(0, 3)}))
        assert read == [1]
