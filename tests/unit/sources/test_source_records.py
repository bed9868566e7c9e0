"""How the way to single records is chosen, on a consumer that is none."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException

from oncely.core.topics import TopicPartition
from oncely.errors import Unavailable
from oncely.sources import records
from oncely.sources.records import RecordReader

TP = TopicPartition("t", 0)


class Message:
    def __init__(self, offset: int, error: KafkaError | None = None) -> None:
        self._offset, self._error = offset, error

    def error(self) -> KafkaError | None:
        return self._error

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_CREATE_TIME, self._offset

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"%d" % self._offset

    def headers(self) -> None:
        return None


class Log:
    """A partition that holds some offsets; counts what is asked of it."""

    def __init__(self, offsets: list[int]) -> None:
        self.offsets, self.at = offsets, 0
        self.assigned: list[int] = []
        self.polls = 0
        self.complaints: list[KafkaError] = []

    def assign(self, partitions: list[Any]) -> None:
        self.at = partitions[0].offset
        self.assigned.append(self.at)

    def unassign(self) -> None:
        self.assigned.append(-1)

    def poll(self, timeout: float) -> Message | None:
        self.polls += 1
        if self.complaints:
            return Message(-1, self.complaints.pop())
        left = [o for o in self.offsets if o >= self.at]
        if not left:
            return Message(self.at, KafkaError(KafkaError._PARTITION_EOF))
        self.at = left[0] + 1
        return Message(left[0])


def reader_of(log: Log, monkeypatch: pytest.MonkeyPatch) -> RecordReader:
    monkeypatch.setattr(records, "make", lambda *_, **__: log)
    return RecordReader("h:1", {})


def test_a_hole_is_known_by_the_next_record(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([0, 1, 2, *range(4, 100_000)])
    assert reader_of(log, monkeypatch).read(TP, [3], 5) == {}
    assert log.polls == 1, "nothing is read to the end of the log"


def test_near_offsets_are_read_on_to_and_far_ones_gone_to(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([*range(100_000)])
    found = reader_of(log, monkeypatch).read(TP, [90_000, 5, 10, 5, 50_000], 5)
    assert found.keys() == {5, 10, 50_000, 90_000}
    assert log.assigned == [5, 50_000, 90_000, -1]
    assert log.polls == 8


def test_a_passing_complaint_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([7])
    log.complaints = [KafkaError(KafkaError._TRANSPORT)] * 3
    assert reader_of(log, monkeypatch).read(TP, [7], 5).keys() == {7}


def test_another_complaint_is_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that can't be read now is not a record that is gone."""
    log = Log([7])
    log.complaints = [KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)]
    with pytest.raises(Unavailable, match="read t-0 again"):
        reader_of(log, monkeypatch).read(TP, [7], 5)
    assert log.assigned[-1] == -1, "nothing is fetched on"


def test_silence_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([7])
    monkeypatch.setattr(log, "poll", lambda timeout: None)
    with pytest.raises(Unavailable, match="no answer from h:1"):
        reader_of(log, monkeypatch).read(TP, [7], 0.05)


def test_the_consumers_own_exception_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([7])

    def broken(partitions: object) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE))

    monkeypatch.setattr(log, "assign", broken)
    with pytest.raises(Unavailable, match="read t-0 again"):
        reader_of(log, monkeypatch).read(TP, [7], 5)
