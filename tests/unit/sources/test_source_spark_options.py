"""What Spark's reader is told, and the files of its checkpoint, as Spark 4.0 writes them."""

from __future__ import annotations

import json
import re

import pytest

from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError, InvariantViolation
from oncely.runtimes.spark.options import (
    REDACTION_REGEX,
    parse_initial_offsets,
    parse_offset_log,
    reader_options,
)

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{"x":"-"}}'


def test_options() -> None:
    options = reader_options(
        "h:1,i:2",
        ["a", "b"],
        {A1: 7, A0: 0, B0: 2**40},
        kafka={"client.id": "me", "isolation.level": "read_committed"},
        max_records=10,
        headers=True,
    )
    assert json.loads(options.pop("startingOffsets")) == {"a": {"0": 0, "1": 7}, "b": {"0": 2**40}}
    assert options == {
        "kafka.bootstrap.servers": "h:1,i:2",
        "subscribe": "a,b",
        "failOnDataLoss": "true",
        "includeHeaders": "true",
        "maxOffsetsPerTrigger": "10",
        "kafka.client.id": "me",
        "kafka.fetch.max.wait.ms": "10",
        "kafka.max.poll.records": "10000",
        "kafka.max.partition.fetch.bytes": "4194304",
        "kafka.receive.buffer.bytes": "-1",
        "kafka.isolation.level": "read_committed",
    }


def test_how_much_is_fetched_at_once_is_the_users_choice() -> None:
    options = reader_options("h:1", ["a"], {A0: 0}, kafka={"fetch.message.max.bytes": 1_000})
    assert options["kafka.max.partition.fetch.bytes"] == "1000"


def test_a_poll_holds_few_records_when_they_are_large() -> None:
    """How large they are once decompressed: what is fetched at once may hold gigabytes."""
    for largest, records in ((0, 10_000), (1_000, 10_000), (1 << 20, 16), (64 << 20, 1)):
        options = reader_options("h:1", ["a"], {A0: 0}, largest_record=largest)
        assert options["kafka.max.poll.records"] == str(records)


def test_nothing_wins_over_the_guarantee() -> None:
    for key, value in (("failOnDataLoss", "false"), ("isolation.level", "read_uncommitted")):
        with pytest.raises(ConfigError, match=f"source.kafka.{key}"):
            reader_options("h:1", ["a"], {A0: 0}, kafka={key: value})


def test_offset_log() -> None:
    text = f'v1\n{METADATA}\n{{"a":{{"1":7,"0":5}},"b":{{"0":0}}}}'
    assert parse_offset_log(text) == [{A0: 5, A1: 7, B0: 0}]
    assert parse_offset_log(f'v1\n{METADATA}\n-\n{{"a":{{"0":5}}}}\n') == [{}, {A0: 5}]


def test_initial_offsets() -> None:
    assert parse_initial_offsets('\0v1\n{"a":{"0":3,"1":4}}') == {A0: 3, A1: 4}
    assert parse_initial_offsets('v1\n{"a":{"0":3}}') == {A0: 3}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v1",
        f'v2\n{METADATA}\n{{"a":{{"0":5}}}}',
        'v1\n{"a":{"0":5}}\n{"logOffset":3}',
        f"v1\n{METADATA}\n[1]",
        f'v1\n{METADATA}\n{{"a":5}}',
        f'v1\n{METADATA}\n{{"a":{{"x":5}}}}',
        f'v1\n{METADATA}\n{{"a":{{"0":-1}}}}',
        f'v1\n{METADATA}\n{{"a":{{"0":true}}}}',
        f'v1\n{METADATA}\n{{"a":{{"0":5}}',
    ],
)
def test_other_text_is_no_offset_log(text: str) -> None:
    with pytest.raises(InvariantViolation):
        parse_offset_log(text)


@pytest.mark.parametrize(
    "text", ["", "\0", '\0v2\n{"a":{"0":3}}', '\0v1\n{"a":{"0":-2}}', "\0v1\n"]
)
def test_other_text_is_no_initial_offset(text: str) -> None:
    with pytest.raises(InvariantViolation):
        parse_initial_offsets(text)


def test_sparks_own_logs_hide_what_it_does_not_know_as_secret() -> None:
    for key in (
        "ssl.keystore.key",
        "ssl.keystore.password",
        "sasl.jaas.config",
        "ssl.key.password",
    ):
        assert re.search(REDACTION_REGEX, key), key
    for key in ("group.id", "ssl.keystore.type", "ssl.truststore.location"):
        assert not re.search(REDACTION_REGEX, key), key
