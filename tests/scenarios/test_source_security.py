"""One set of Kafka keys reaches both clients: SASL_SSL, SCRAM, and certificates on both sides.

The password holds what every quoting gets wrong, and is looked for in all that Spark writes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import ConfigError
from oncely.kafka.source import KafkaSource
from oncely.testing.servers.kafka import Broker, Scram

TOPIC = "behind-a-lock"
P0, P1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
PASSWORD = "quill\"umbrella\\thicket; xylo='fjord'"
PARTS = ("umbrella", "thicket", "fjord")


@pytest.fixture(scope="module")
def locked() -> Iterator[Broker]:
    """A broker that wants a password and a certificate."""
    with Broker(security=Scram({"pat": PASSWORD}, client_certificates=True)) as broker:
        broker.create_topic(TOPIC, 2)
        producer = Producer(broker.client_config())
        for n in range(10):
            producer.produce(TOPIC, f"v{n}", partition=n % 2)
        assert producer.flush(30) == 0
        yield broker


def keys(broker: Broker, **changed: str) -> dict[str, str]:
    """``[source.kafka]`` for the broker."""
    config = broker.client_config()
    del config["bootstrap.servers"]
    return config | {name.replace("_", "."): value for name, value in changed.items()}


def test_librdkafka_gets_in(locked: Broker) -> None:
    with KafkaSource(locked.bootstrap, [TOPIC], keys(locked)) as source:
        assert source.stable_end() == {P0: 5, P1: 5}
        assert source.fetch(P1, [2])[2].value == b"v5"
        ranges = {P0: OffsetRange(1, 5), P1: OffsetRange(2, 5)}
        tables = list(source.read(ranges, frozenset({"value"})))
        values = sorted(one for table in tables for one in table["value"].to_pylist())
        assert values == sorted(b"v%d" % n for n in range(10) if n not in (0, 1, 3))
        assert source.timestamps_at({P0: 4})[P0]
        source.mirror("behind-a-lock", {P0: 3})
        assert source.mirrored("behind-a-lock") == {P0: 3}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sasl_password": "wrong-password"}, ("refuses the login", "sasl.password")),
        ({"sasl_username": "nobody"}, ("refuses the login", "sasl.username")),
        ({"ssl_ca_location": "its own"}, ("no TLS trust", "ssl.ca.location")),
    ],
)
def test_a_closed_door_is_a_mistake_in_the_file_and_told_at_once(
    locked: Broker, changed: dict[str, str], words: tuple[str, ...], capfd: Any
) -> None:
    kafka = keys(locked, **changed)
    if "ssl_ca_location" in changed:  # a certificate that did not sign the broker's
        kafka["ssl.ca.location"] = kafka["ssl.certificate.location"]
    with KafkaSource(locked.bootstrap, [TOPIC], kafka) as source:
        for call in (source.identity, lambda: source.fetch(P0, [1])):
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.key == "source.kafka"
            for word in words:
                assert word in str(caught.value)
            for secret in (*PARTS, "wrong-password"):
                assert secret not in str(caught.value)
    del call, caught  # a client that ends with a question open has something to say
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_client_without_certificate_is_told_so(locked: Broker) -> None:
    kafka = {k: v for k, v in keys(locked).items() if k not in _CLIENT}
    with (
        KafkaSource(locked.bootstrap, [TOPIC], kafka) as source,
        pytest.raises(ConfigError, match=r"ssl\.certificate\.location"),
    ):
        source.identity()


_CLIENT = ("ssl.certificate.location", "ssl.key.location")
