"""Requests and answers between the sink and the broker are lost or come late; nothing is lost
or doubled. The control, a plain producer that lives on, shows what the late ones can do."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from oncely.commit.backoff import Backoff
from oncely.errors import Unavailable
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests import kafka_proxy as kp
from tests.kafka_proxy import KafkaProxy, proxied_broker
from tests.kafkatools import Topics, connected, make_topics, producing_by, ready
from tests.sinktools import T0, Rec, at_t0, commit_all, commit_on, numbered

pytestmark = pytest.mark.long

Proxied = tuple[Broker, KafkaProxy]


@pytest.fixture(scope="module")
def proxied() -> Iterator[Proxied]:
    with proxied_broker() as both:
        yield both


@pytest.fixture
def topics(proxied: Proxied) -> Topics:
    broker, proxy = proxied
    made = make_topics(broker)
    return dataclasses.replace(made, bootstrap=broker._inner, brokers=proxy.bootstrap)


def patient() -> Backoff:
    return Backoff(0.01, 0.2, 20)


@pytest.mark.parametrize("kind", ["lose request", "lose response", "hold request"])
@pytest.mark.parametrize("api", kp.NAMES, ids=list(kp.NAMES.values()))
def test_a_frame_is_lost_or_late(topics: Topics, proxied: Proxied, api: int, kind: kp.Kind) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    with proxied[1].fault(api, kind) as fault:
        records = [*numbered(5, 10), Rec(10, bad="no JSON")]
        commit_all(sink, at_t0(5, records), fence, patience=patient())
        assert fault.met.is_set()
        if kind == "hold request":
            fault.release()
    _whole(topics, 10, 11)
    commit_all(sink, at_t0(11, numbered(11, 15)), fence, patience=patient())
    assert [one["id"] for one in topics.values()] == [*range(10), *range(11, 15)]
    assert topics.committed() == {T0: 15}
    assert topics.ledger_ranges() == [
        (0, 0, 5, "data"), (0, 5, 11, "data"), (0, 11, 15, "data"),
    ]  # fmt: skip


def _whole(topics: Topics, records: int, position: int) -> None:
    assert [one["id"] for one in topics.values()] == list(range(records))
    assert len(topics.records(topics.rejects)) == 1
    assert topics.committed() == {T0: position}


@pytest.mark.parametrize("api", kp.NAMES, ids=list(kp.NAMES.values()))
def test_a_request_of_an_ended_attempt_comes_in_the_middle_of_the_next(
    topics: Topics, proxied: Proxied, api: int
) -> None:
    """The late request meets an open transaction of the same transactional id, which then aborts.

    What a reader sees afterwards is the first chunk alone.
    """
    sink, fence = ready(topics.sink())
    with proxied[1].fault(api, "hold request") as fault:
        commit_all(sink, at_t0(0, numbered(0, 5)), fence, patience=patient())
        assert fault.met.is_set()

        def late(producer: Any, timeout: float) -> None:
            producer.flush(timeout)
            fault.release()
            raise Unavailable("no answer")

        hurt = connected(sink, producing_by(commit_transaction=late))
        with pytest.raises(Unavailable):
            commit_on(hurt, at_t0(5, numbered(5, 10)), hurt.ledger.positions(fence), fence)
    assert [one["id"] for one in topics.values()] == [0, 1, 2, 3, 4]
    assert topics.committed() == {T0: 5}
    commit_all(sink, at_t0(5, numbered(5, 10)), fence, patience=patient())
    assert [one["id"] for one in topics.values()] == list(range(10))


def test_a_broker_that_leaves_while_offsets_are_sent_holds_nobody_up(
    topics: Topics, proxied: Proxied
) -> None:
    """The client's own call waits until the broker is back, whatever its timeout."""
    sink, fence = ready(topics.sink(timeout=3.0))
    positions = sink.ledger.positions(fence)
    with proxied[1].fault(kp.TXN_OFFSET_COMMIT, "lose broker") as fault:
        with pytest.raises(Unavailable, match="send_offsets_to_transaction: no answer in time"):
            commit_on(sink, at_t0(0, numbered(0, 5)), positions, fence)
        assert fault.met.is_set()
    commit_all(sink, at_t0(0, numbered(0, 5)), fence, patience=patient())
    assert [one["id"] for one in topics.values()] == list(range(5))
    assert topics.committed() == {T0: 5}


def test_the_control_is_hurt_by_a_late_end(proxied: Proxied) -> None:
    """A plain producer, reused: a late commit of transaction 1 commits transaction 2."""
    broker, proxy = proxied
    topic = broker.create_topic(f"control-{uuid.uuid4().hex[:8]}")
    producer = Producer(
        {
            "bootstrap.servers": proxy.bootstrap,
            "transactional.id": topic,
            "transaction.timeout.ms": 60_000,
            "log_level": 0,
        }
    )
    producer.init_transactions(120)
    with proxy.fault(kp.END_TXN, "hold request") as fault:
        producer.begin_transaction()
        producer.produce(topic, b"1")
        producer.commit_transaction(120)
        assert fault.met.is_set()
        producer.begin_transaction()
        producer.produce(topic, b"2")
        producer.flush(120)
        fault.release()
        with pytest.raises(KafkaException):
            producer.abort_transaction(120)
    seen = [m.value() for m in messages(broker._inner, topic)]
    assert seen == [b"1", b"2"], "the anomaly did not show: then the other tests prove nothing"


def test_a_late_end_of_a_transaction_in_turns_meets_none_of_its_id(
    topics: Topics, proxied: Proxied
) -> None:
    """The first id's EndTxn comes again in the middle of that id's next transaction."""
    topics = dataclasses.replace(topics, turns=True)
    sink, fence = ready(topics.sink())
    (end,) = [api for api, name in kp.NAMES.items() if name == "EndTxn"]
    held: list[str] = []  # the id whose EndTxn is held, and then once more when it is released
    with proxied[1].fault(end, "hold request") as fault:

        def connect(kind: Any, *args: Any, **own: Any) -> Any:
            identity = own.get("transactional.id", "")

            def committed(producer: Any, timeout: float) -> None:
                producer.commit_transaction(timeout)
                if fault.met.is_set() and not held:
                    held.append(identity)

            def with_offsets(producer: Any, *args: Any) -> None:
                if held == [identity]:
                    held.append(identity)
                    assert producer.flush(120) == 0  # the broker has the records, and no offsets
                    fault.release()
                    raise KafkaException(KafkaError(KafkaError._STATE))  # it is aborted
                producer.send_offsets_to_transaction(*args)

            return producing_by(
                commit_transaction=committed, send_offsets_to_transaction=with_offsets
            )(kind, *args, **own)

        sink = connected(sink, connect)
        for start in range(0, 20, 5):
            commit_all(sink, at_t0(start, numbered(start, start + 5)), fence, patience=patient())
    assert len(held) == 2
    assert [one["id"] for one in topics.values()] == list(range(20))
    assert topics.committed() == {T0: 20}
