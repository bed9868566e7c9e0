"""The files of a streaming query's checkpoint, as Spark 4.0 writes them."""

from __future__ import annotations

import pytest

from oncely.core.ranges import TopicPartition
from oncely.errors import InvariantViolation
from oncely.runtimes.spark.plugin import parse_initial_offsets, parse_offset_log

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{"x":"-"}}'


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
def test_other_text_is_no_offset_of_kafka(text: str) -> None:
    assert set(parse_offset_log(text)) == {None}


@pytest.mark.parametrize(
    "text", ["", "\0", '\0v2\n{"a":{"0":3}}', '\0v1\n{"a":{"0":-2}}', "\0v1\n"]
)
def test_other_text_is_no_initial_offset(text: str) -> None:
    with pytest.raises(InvariantViolation):
        parse_initial_offsets(text)
