"""Which Kafka keys are accepted, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import confluent_kafka as ck
import pytest

from oncely.errors import ConfigError
from oncely.kafka import properties

PLAIN = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "pat",
    "sasl.password": "opensesame",
}
KEY = "-----BEGIN PRIVATE KEY-----\nTm90IGEgcmVhbCBrZXk=\n-----END PRIVATE KEY-----\n"


def said(kafka: dict[str, object]) -> dict[str, str]:
    """Key to message and way out."""
    return {e.key: str(e) for e in properties.problems(kafka)}


def test_nothing_is_fine() -> None:
    assert properties.problems({}) == []
    assert properties.checked({}) == {}


def test_values_become_texts_and_the_mechanism_capitals() -> None:
    values = {**PLAIN, "check.crcs": True, "fetch.min.bytes": 5}
    del values["sasl.mechanism"]
    values["sasl.mechanisms"] = "scram-sha-512"
    assert properties.checked(values) == {
        **PLAIN,
        "sasl.mechanism": "SCRAM-SHA-512",
        "check.crcs": "true",
        "fetch.min.bytes": "5",
    }


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("isolation.level", "read_uncommitted", "allowed: read_committed"),
        ("group.id", "mine", "source.group"),
        ("enable.auto.commit", True, "the position is kept in the sink"),
        ("auto.offset.reset", "latest", "source.start"),
        ("bootstrap.servers", "h:1", "source.brokers"),
        ("minPartitions", 8, "unknown"),
        ("maxOffsetsPerTrigger", 8, "spark.max_records_per_batch"),
        ("failOnDataLoss", False, "source.on_gap"),
        ("startingOffsets", "latest", "source.start"),
        ("sasl.jaas.config", "…", "sasl.username"),
        ("request.timeout.ms", 5, "socket.timeout.ms"),
        ("send.buffer.bytes", 5, "socket.send.buffer.bytes"),
        ("receive.buffer.bytes", 5, "socket.receive.buffer.bytes"),
        ("ssl.truststore.location", "/x", "ssl.ca.location"),
        ("fetch.max.wait.ms", 5, "fetch.wait.max.ms"),
        ("kafka.client.id", "x", "write client.id"),
        ("cleint.id", "x", "did you mean client.id?"),
        ("queued.min.messages", 5, "set by the clients themselves"),
        ("security.protocol", "tls", "plaintext, ssl"),
        ("client.id", " ", "is empty"),
        ("client.id", ["x"], "found list"),
        ("sasl.username", "pat", "would be ignored"),
        ("ssl.ca.location", "/x", "would be ignored"),
    ],
)
def test_a_refused_key_is_named_with_the_reason(key: str, value: object, word: str) -> None:
    found = said({key: value})
    assert list(found) == [f"source.kafka.{key}"]
    assert word in found[f"source.kafka.{key}"]
    with pytest.raises(ConfigError):
        properties.checked({key: value})


def test_what_earlier_versions_accepted_is_accepted() -> None:
    """Files that were written for two clients, librdkafka and Spark's."""
    kafka = {
        "isolation.level": "read_committed",
        "enable.ssl.certificate.verification": "true",
        "socket.keepalive.enable": "true",
        "fetch.wait.max.ms": 100,
        "fetch.message.max.bytes": 2000,
        "connections.max.idle.ms": 0,
    }
    assert said(kafka) == {}
    given = {key: str(value) for key, value in kafka.items() if key != "isolation.level"}
    assert properties.librdkafka(kafka) == given  # the level is each client's own


@pytest.mark.parametrize("key", sorted(properties.ACCEPTED))
def test_librdkafka_knows_each_accepted_key(key: str) -> None:
    config = {"group.id": "nobody", "log_level": 0, "bootstrap.servers": "127.0.0.1:1"}
    said = ""
    try:
        ck.Consumer({**config, key: "-7"}).close()
    except ck.KafkaException as error:
        said = error.args[0].str()  # the value is wrong
    assert "No such configuration property" not in said


def test_every_spelling_of_a_secret_is_known(tmp_path: Path) -> None:
    password = 'qu"ote\\d-canary'
    known = properties.secrets({**PLAIN, "sasl.password": password})
    assert known.redact(f"login {password}") == "login ***"
    key = tmp_path / "key.pem"
    key.write_text(KEY)
    for kafka in ({"ssl.key.location": str(key)}, {"ssl.key.pem": KEY}):
        said = properties.secrets(kafka).redact("at Tm90IGEgcmVhbCBrZXk= in line 2")
        assert said == "at *** in line 2"


@pytest.mark.parametrize("missing", ["sasl.username", "sasl.password", "sasl.mechanism"])
def test_a_login_needs_all_of_its_keys(missing: str) -> None:
    kafka = {key: value for key, value in PLAIN.items() if key != missing}
    assert list(said(kafka)) == [f"source.kafka.{missing}"]


def test_keys_that_exclude_or_miss_each_other() -> None:
    tls = {"security.protocol": "SSL"}
    assert list(said({**tls, "ssl.ca.location": "/a", "ssl.ca.pem": "b"})) == [
        "source.kafka.ssl.ca.pem"
    ]
    assert list(said({**tls, "ssl.key.location": "/a"})) == [
        "source.kafka.ssl.certificate.location"
    ]
    both = {"ssl.keystore.location": "/a", "ssl.keystore.password": "opensesame"}
    both |= {"ssl.key.pem": "k", "ssl.certificate.pem": "c"}
    assert "excludes" in said({**tls, **both})["source.kafka.ssl.keystore.location"]
    assert (
        "the same key"
        in said({**PLAIN, "sasl.mechanisms": "PLAIN"})["source.kafka.sasl.mechanisms"]
    )


def test_every_problem_is_told_at_once() -> None:
    found = said({"isolation.level": "x", "group.id": "g", "minPartitions": 2, "nonsense": 1})
    assert len(found) == 4


def test_no_message_holds_a_secret() -> None:
    secret = "opensesame-of-the-test"
    for key in properties.SECRET | {"sasl.jaas.config"}:
        assert secret not in " ".join(said({key: secret}).values())
