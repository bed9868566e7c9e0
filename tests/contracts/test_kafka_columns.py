"""Messages go to librdkafka out of Arrow's memory, or one by one: the outcome is the same."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.errors import Unavailable
from oncely.kafka import client as clients
from oncely.kafka.properties import producer_config
from oncely.kafka.sender import Delivered, MessageColumns, Plain, Producer
from oncely.kafka.transaction import InstanceFenced, Transaction
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests.nativetools import need_native

PARTS: list[bytes | None] = [b"", None, b"a\0b", "ü".encode(), b"x" * 100_000, b"\xff"]


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is there; what is known of the library is forgotten before and afterwards."""
    monkeypatch.setattr(clients.package, "native", object)
    clients._callable.cache_clear()
    yield
    clients._callable.cache_clear()


def made(broker: Broker, name: str, **more: Any) -> Producer:
    config = producer_config({}, name or None, 20_000, [1_000_000])
    return Producer({**config, "bootstrap.servers": broker.bootstrap, "log_level": 0, **more})


def begun(broker: Broker, name: str, topic: str, **more: Any) -> Transaction:
    writer = Transaction(made(broker, name, **more), 20, broker.bootstrap, topic).init()
    writer.begin()
    return writer


def array(parts: list[bytes | None]) -> pa.LargeBinaryArray:
    return pa.array(parts, pa.large_binary())


def numbers(count: int) -> MessageColumns:
    values = array([b"%d" % n for n in range(count)])
    return MessageColumns(pa.nulls(count, pa.large_binary()), values)


def topic_of(broker: Broker, partitions: int = 1) -> str:
    return str(broker.create_topic(f"columns-{uuid.uuid4().hex[:8]}", partitions))


def pairs(broker: Broker, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    return [(one.key(), one.value()) for one in messages(broker.bootstrap, topic)]


def test_nulls_and_empty_ones_stay_what_they_are(broker: Broker, taken_as: str) -> None:
    topic = topic_of(broker)
    expected = [(key, value) for key in PARTS for value in PARTS]
    whole = MessageColumns(*(array([None, *one, b"no"]) for one in zip(*expected, strict=True)))
    with begun(broker, topic, topic) as writer:
        writer.send_columns(topic, whole[1 : len(whole) - 1])
        # A view into the middle of a view, and arrays without a byte of data.
        writer.send_columns(topic, whole[2:8][1:3])
        writer.send_columns(topic, MessageColumns(array([b"", None]), array([b"", b""])))
        writer.commit()
    more = [*expected[2:4], (b"", b""), (None, b"")]
    assert pairs(broker, topic) == [*expected, *more]


def test_a_key_goes_to_the_same_partition_either_way(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_native(monkeypatch)
    keys = array([b"%d" % n for n in range(200)])
    found = []
    for _ in range(2):
        topic = topic_of(broker, 5)
        with begun(broker, topic, topic) as writer:
            writer.send_columns(topic, MessageColumns(keys, keys))
            writer.commit()
        found.append({m.key(): m.partition() for m in messages(broker.bootstrap, topic)})
        monkeypatch.setenv("ONCELY_NATIVE", "off")
    assert found[0] == found[1]
    assert len(found[0]) == 200


def test_a_full_queue_is_waited_for_and_the_order_kept(broker: Broker, taken_as: str) -> None:
    topic = topic_of(broker)
    small = {"queue.buffering.max.messages": 700, "linger.ms": 0}
    refused: list[int] = []

    class Counting(Producer):
        def produce_batch(self, topic: str, messages: MessageColumns) -> int:
            taken = super().produce_batch(topic, messages)
            refused.append(len(messages) - taken)
            return taken

    producer = made(broker, topic, **small)
    producer.__class__ = Counting
    with Transaction(producer, 20, broker.bootstrap, topic).init() as writer:
        writer.begin()
        writer.send_columns(topic, numbers(12_000))
        writer.commit()
    assert sum(map(bool, refused)) > 3, "the queue was never full"
    assert [int(value or b"") for _, value in pairs(broker, topic)] == list(range(12_000))


def test_a_message_that_is_refused_ends_the_transaction(broker: Broker, taken_as: str) -> None:
    topic = topic_of(broker)
    values = array([b"a", b"x" * 2_000_000, b"b"])
    with begun(broker, topic, topic) as writer, pytest.raises(Unavailable, match="too large"):
        writer.send_columns(topic, MessageColumns(values, values))
    assert pairs(broker, topic) == []


def test_nothing_is_queued_without_a_transaction(broker: Broker, taken_as: str) -> None:
    topic = topic_of(broker)
    with Transaction(made(broker, topic), 20, broker.bootstrap, topic).init() as writer:
        with pytest.raises(Unavailable):
            writer.send_columns(topic, numbers(3))
        writer.begin()
        writer.commit()
    assert pairs(broker, topic) == []


def test_an_instance_that_was_fenced_commits_nothing(broker: Broker, taken_as: str) -> None:
    topic = topic_of(broker)
    with begun(broker, topic, topic) as old:
        old.send_columns(topic, numbers(3))
        with begun(broker, topic, topic) as new:
            new.send_columns(topic, numbers(5))
            with pytest.raises(InstanceFenced):
                old.commit()
            new.commit()
    assert len(pairs(broker, topic)) == 5


def test_without_transactions_delivery_reports_are_heard(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They alone tell there that a message did not arrive: nothing may go past them."""

    def never() -> None:
        pytest.fail("called directly, where nobody would hear what became of the messages")

    monkeypatch.setattr(clients, "native", never)
    topic = topic_of(broker)
    delivered = Delivered()
    lost = KafkaError(KafkaError._MSG_TIMED_OUT)
    heard: list[Any] = []

    def report(error: KafkaError | None, message: Any) -> None:
        heard.append(message.value())
        delivered(lost if len(heard) == 2 else error, message)

    plain = Plain(made(broker, "", on_delivery=report), delivered, 20, broker.bootstrap)
    plain.send_columns(topic, numbers(3))
    with pytest.raises(Unavailable):
        plain.finish()
    assert heard == [b"0", b"1", b"2"]


def test_a_closed_producer_is_an_error(broker: Broker, taken_as: str) -> None:
    topic = topic_of(broker)
    producer = made(broker, topic)
    producer.close()
    with pytest.raises((KafkaException, RuntimeError)):
        producer.produce_batch(topic, numbers(1))


@pytest.mark.usefixtures("forgotten")
def test_the_version_that_is_installed_was_tried() -> None:
    assert clients.native() is not None


@pytest.mark.usefixtures("forgotten")
def test_a_version_that_was_not_tried_is_not_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clients, "TRIED", frozenset({"1.0.0"}))
    monkeypatch.setattr(clients.ctypes, "CDLL", lambda _: pytest.fail("it was loaded"))
    with caplog.at_level(logging.WARNING, "oncely.kafka.client"):
        assert clients.native() is None
        assert clients.native() is None
    (line,) = caplog.records
    assert "was not tested; 1.0.0 was" in line.getMessage()


@pytest.mark.usefixtures("forgotten")
def test_a_library_without_the_function_is_not_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clients.cimpl, "__file__", None)  # this program itself
    with caplog.at_level(logging.WARNING, "oncely.kafka.client"):
        assert clients.native() is None
    assert "can't be called directly" in caplog.text


@pytest.mark.usefixtures("forgotten")
def test_another_copy_of_the_library_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions would be given an instance of the first one's."""
    name, number = clients.ck.libversion()
    monkeypatch.setattr(clients.ck, "libversion", lambda: (name, number + 1))
    assert clients.native() is None
