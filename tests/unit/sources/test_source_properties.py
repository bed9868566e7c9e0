"""Which Kafka keys are accepted, and what is said about the others."""

from __future__ import annotations

import pytest

from oncely.clients.kafka import keys, properties
from oncely.errors import ConfigError

PLAIN = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "pat",
    "sasl.password": "opensesame",
}


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
        ("isolation.level", "read_uncommitted", "aborted"),
        ("enable.ssl.certificate.verification", False, "ssl.ca.location"),
        ("group.id", "mine", "source.group"),
        ("enable.auto.commit", True, "the position is kept in the sink"),
        ("auto.offset.reset", "latest", "source.start"),
        ("bootstrap.servers", "h:1", "source.brokers"),
        ("minPartitions", 8, "two tasks"),
        ("maxRecordsPerPartition", 8, "two tasks"),
        ("failOnDataLoss", False, "source.on_gap"),
        ("startingOffsets", "latest", "Spark's reader"),
        ("sasl.jaas.config", "…", "sasl.username"),
        ("ssl.key.password", "opensesame", "pkcs12"),
        ("ssl.truststore.location", "/x", "ssl.ca.location"),
        ("fetch.max.wait.ms", 5, "fetch.wait.max.ms"),
        ("kafka.client.id", "x", "write client.id"),
        ("cleint.id", "x", "did you mean client.id?"),
        ("queued.min.messages", 5, "without a counterpart"),
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


def test_the_only_value_of_a_fixed_key_is_accepted() -> None:
    assert said({key: value for key, (value, _) in keys.FIXED.items()}) == {}


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
    for key in keys.SECRET | {"sasl.jaas.config"}:
        assert secret not in " ".join(said({key: secret}).values())
