"""The records of a topic as tasks read them: shares of ranges, and columns of messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import confluent_kafka as ck
import pytest

from oncely.audit import datasets
from oncely.core.ranges import OffsetRange, TopicPartition


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize(
    "sizes", [(), (1,), (0, 5), (200_000, 3, 70_000), (49_999,) * 5, (10**9,), (1,) * 500]
)
def test_each_offset_is_in_one_share(sizes: tuple[int, ...], most: int) -> None:
    ranges = {TopicPartition("t", n): OffsetRange(n, n + size) for n, size in enumerate(sizes)}
    given = datasets.shares(ranges, most)
    assert 1 <= len(given) <= most
    parts = sorted((tp, one.start, one.end) for share in given for tp, one in share.items())
    for tp, whole in ranges.items():
        at = whole.start
        for _, start, end in (one for one in parts if one[0] == tp):
            assert start == at < end
            at = end
        assert at == whole.end
    largest = max(sum(one.end - one.start for one in share.values()) for share in given)
    assert largest <= 3 * max(50_000, sum(sizes) / most)


class Message(NamedTuple):
    told: tuple[int, int] = (ck.TIMESTAMP_CREATE_TIME, 1_500)
    pairs: Any = None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 1

    def offset(self) -> int:
        return 2

    def timestamp(self) -> tuple[int, int]:
        return self.told

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"v"

    def headers(self) -> Any:
        return self.pairs


def test_columns_of_messages() -> None:
    none = ck.TIMESTAMP_NOT_AVAILABLE
    given = [
        Message(pairs=[("h", b"1"), ("h", None)]),
        Message((none, 0)),
        Message((ck.TIMESTAMP_CREATE_TIME, 2**62)),
    ]
    made = datasets._batch(given)
    assert made["timestamp"].cast("int64").to_pylist() == [1_500_000, None, None]
    assert made["headers"].to_pylist() == [
        [{"key": "h", "value": b"1"}, {"key": "h", "value": None}], [], [],
    ]  # fmt: skip
    assert made.slice(0, 1).drop_columns(["timestamp", "headers"]).to_pylist() == [
        {"topic": "t", "partition": 1, "offset": 2, "key": None, "value": b"v"}
    ]
