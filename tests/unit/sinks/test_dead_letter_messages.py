"""Dead letters in topics: what other tools find in them, and what Oncely reads back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oncely.core.batch import Reject
from oncely.core.claim import Fence
from oncely.core.ranges import TopicPartition
from oncely.kafka.records import KafkaRecord
from oncely.kafka.sender import batch_size
from oncely.kinds.topic_publishing import dead_letter, opened

FENCE = Fence("orders", 4)
REJECT = Reject(TopicPartition("t", 2), 5, 7, b"key", b"{", [("h", b"1")], "decode", "no JSON: é")
TOOLS = {"source_topic", "source_partition", "source_offset", "x-original-topic"}


def read(letter: Any) -> KafkaRecord:
    """A letter as the reader returns it."""
    return KafkaRecord(7, letter.key, letter.value, tuple(letter.headers))


def test_other_tools_find_where_the_record_was_and_the_reason() -> None:
    letter = dead_letter(REJECT, 10_000, FENCE)
    assert list(letter.headers)[-5:] == [
        ("source_topic", b"t"),
        ("source_partition", b"2"),
        ("source_offset", b"5"),
        ("x-original-topic", b"t"),
        ("x-exception-message", "no JSON: é".encode()),
    ]


def test_the_record_is_read_back_without_the_added_headers() -> None:
    found = opened(read(dead_letter(REJECT, 10_000, FENCE)), "orders")
    assert found is not None
    assert (found.reject, found.epoch) == (REJECT, 4)


def test_a_letter_that_a_tool_has_sent_to_its_topic_is_a_record_with_all_of_these_headers() -> None:
    sent = dead_letter(REJECT, 10_000, FENCE)
    rejected_again = replace(REJECT, offset=9, headers=list(sent.headers))
    letter = dead_letter(rejected_again, 10_000, FENCE)
    found = opened(read(letter), "orders")
    assert found is not None
    assert found.reject == rejected_again
    assert dict(letter.headers)["source_offset"] == b"9"  # the last one of a name


def test_headers_for_tools_are_left_out_before_anything_of_the_letter() -> None:
    whole = dead_letter(REJECT, 10_000, FENCE)
    less = dead_letter(REJECT, batch_size(whole) - 1, FENCE)
    assert (less.key, less.value) == (REJECT.key, REJECT.value)
    assert not TOOLS & dict(less.headers).keys()
    assert dict(less.headers)["oncely.reason"].decode() == REJECT.reason
    found = opened(read(less), "orders")
    assert found is not None
    assert (found.reject, found.left_out) == (REJECT, None)
