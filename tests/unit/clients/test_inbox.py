"""The size of a consumer's messages in memory."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Message

from oncely.core.ranges import TopicPartition
from oncely.kafka.inbox import MESSAGE, Inbox, memory_of
from oncely.runtimes.worker.assignment import Fetched

Headers = list[tuple[str, bytes | None]]
BIG = b"x" * 1_000_000


def message(
    at: int, key: bytes | None = None, value: bytes | None = None, headers: Headers | None = None
) -> Message:
    return Message(
        topic="t", partition=0, offset=at, key=key, value=value, headers=headers, leader_epoch=1
    )


PARTS = {
    "keys": {"key": BIG},
    "values": {"value": BIG},
    "headers": {"headers": [("a", BIG[:500_000]), ("b", None), ("c", BIG[500_000:])]},
}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_message_counts(part: str) -> None:
    messages = [message(at, **PARTS[part]) for at in range(40)]
    assert 40_000_000 < memory_of(messages) < 40_100_000
    assert Fetched.of(messages).bytes == memory_of(messages)


def test_a_message_without_any_is_in_memory_too() -> None:
    assert memory_of([message(at) for at in range(40)]) == 40 * MESSAGE
    assert memory_of([]) == 0


@pytest.mark.parametrize("part", PARTS)
def test_a_call_takes_as_many_messages_as_fit_into_its_memory(part: str) -> None:
    taken: list[int] = []

    class Consumer:
        def poll(self, _: float) -> Message:
            return message(0, **PARTS[part])

        def consume(self, count: int, _: float) -> list[Any]:
            taken.append(count)
            return [message(at, **PARTS[part]) for at in range(1, 4)]

    inbox = Inbox(Consumer(), 2_000, 8 << 20)
    assert inbox.poll(0).messages.keys() == {TopicPartition("t", 0)}
    inbox.poll(0)
    assert taken == [50, 8]
