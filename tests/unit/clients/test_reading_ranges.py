"""What proves that a range was read, on a consumer that is none."""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import DataLost, Unavailable
from oncely.kafka import reader as readers
from oncely.kafka.inbox import ColumnInbox
from oncely.kafka.reader import Piece, RecordReader, _runs
from oncely.kafka.records import RECORDS

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
ENDED = KafkaError._PARTITION_EOF
OUT_OF_RANGE = KafkaError._AUTO_OFFSET_RESET


class Message:
    def __init__(self, tp: TopicPartition, offset: int, code: int | None = None) -> None:
        self._tp, self._offset = tp, offset
        self._error = None if code is None else KafkaError(code)

    def __len__(self) -> int:
        return 0  # as a real one without a value

    def topic(self) -> str:
        return self._tp.topic

    def partition(self) -> int:
        return self._tp.partition

    def error(self) -> KafkaError | None:
        return self._error

    def offset(self) -> int:
        return self._offset

    def leader_epoch(self) -> int:
        return self._offset // 100

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_CREATE_TIME, self._offset

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"%d" % self._offset

    def headers(self) -> None:
        return None


class Broker:
    """Creates consumers; each delivers its script, one list a poll."""

    def __init__(self, *scripts: list[list[Message]], bounds: tuple[int, int] = (0, 1000)) -> None:
        self.scripts, self.bounds = deque(scripts), bounds
        self.made: list[Consumer] = []

    def __call__(self, *_: object, **settings: object) -> Consumer:
        assert settings["auto.offset.reset"] == "error"
        assert settings["queued.max.messages.kbytes"] == 16 << 10  # of all partitions
        made = Consumer(deque(self.scripts.popleft() if self.scripts else []), self.bounds)
        self.made.append(made)
        return made

    @property
    def assigned(self) -> list[dict[TopicPartition, int]]:
        return [one for made in self.made for one in made.assigned]


class Consumer:
    def __init__(self, polls: deque[list[Message]], bounds: tuple[int, int]) -> None:
        self.polls, self.bounds = polls, bounds
        self.assigned: list[dict[TopicPartition, int]] = []
        self.left: list[TopicPartition] = []
        self.calls = 0
        self.rest: list[Message] = []
        self.gather: Gather | None = None
        self.closed = False

    def assign(self, partitions: list[Any]) -> None:
        self.assigned.append({TopicPartition(p.topic, p.partition): p.offset for p in partitions})

    def unassign(self) -> None:
        self.assigned.append({})

    def incremental_unassign(self, partitions: list[Any]) -> None:
        self.left += [TopicPartition(p.topic, p.partition) for p in partitions]
        self.calls += 1

    def poll(self, timeout: float) -> Message | None:
        assert not self.closed
        if not self.polls:
            return None
        first, *self.rest = self.polls.popleft()
        return first

    def consume(self, _many: int, _timeout: float) -> list[Message]:
        found, self.rest = self.rest, []
        return found

    def get_watermark_offsets(self, *_: object, **__: object) -> tuple[int, int]:
        return self.bounds

    def close(self) -> None:
        assert self.gather is None or self.gather.closed, "messages of it may exist"
        self.closed = True


class Gather:
    """Delivers the script of a consumer as oncely-native does."""

    def __init__(self, consumer: Consumer) -> None:
        self.polls, consumer.polls = consumer.polls, deque()
        consumer.gather = self
        self.assigned: list[TopicPartition] = []
        self.left: set[int] = set()
        self.closed = False

    def begin(self, needs: frozenset[str]) -> None:
        self.assigned, self.left, self.needs = [], set(), needs

    def enter(self, topic: str, partition: int) -> int:
        self.assigned.append(TopicPartition(topic, partition))
        return len(self.assigned) - 1

    def leave(self, index: int) -> None:
        assert index not in self.left
        self.left.add(index)

    def take(self, *_: object) -> tuple[pa.RecordBatch, list[tuple[int, int]], list[Any]]:
        assert not self.closed
        found = self.polls.popleft() if self.polls else []
        sorted_ = [(self._index(one), one) for one in found]
        own = [(at, one) for at, one in sorted_ if at is not None]
        taken = sorted([(at, m) for at, m in own if not m.error()], key=lambda each: each[0])
        events = [(at, m.error().code(), m.offset(), m.error().str()) for at, m in own if m.error()]
        messages = [one for _, one in taken]
        columns = {
            "offset": pa.array([one.offset() for one in messages], pa.int64()),
            "leader_epoch": pa.array([one.leader_epoch() for one in messages], pa.int32()),
            "timestamp": pa.nulls(len(messages), pa.timestamp("us", "UTC")),
            "key": pa.nulls(len(messages), pa.binary()),
            "value": pa.array([one.value() for one in messages], pa.binary()),
            "headers": pa.array([[]] * len(messages), RECORDS.field("headers").type),
        }
        named = {name: one for name, one in columns.items() if self._has(name)}
        runs = [(at, len(list(own))) for at, own in groupby(at for at, _ in taken)]
        return pa.record_batch(named), runs, events

    def _has(self, name: str) -> bool:
        return name in self.needs or name in ("offset", "leader_epoch")

    def _index(self, message: Message) -> int | None:
        tp = TopicPartition(message.topic(), message.partition())
        at = self.assigned.index(tp) if tp in self.assigned else None
        return None if at in self.left else at

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True, params=["columns", "messages"])
def inbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(consumer: Any, many: int, size: int) -> ColumnInbox:
        return ColumnInbox(consumer, many, size, Gather(consumer))

    if request.param == "columns":
        monkeypatch.setattr(readers, "inbox_of", made)


def records(tp: TopicPartition, *offsets: int) -> list[Message]:
    return [Message(tp, one) for one in offsets]


def a_reader(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> RecordReader:
    monkeypatch.setattr(readers, "make", broker)
    return RecordReader("h:1", {})


def read(
    reader: RecordReader, *given: tuple[TopicPartition, int, int], **options: Any
) -> list[Piece]:
    ranges = {tp: OffsetRange(start, end) for tp, start, end in given}
    return list(reader.read(ranges, frozenset({"value"}), **{"silence": 0.05} | options))


def offsets(pieces: list[Piece], tp: TopicPartition = T0) -> list[int]:
    return [o for one in pieces if one.partition == tp for o in one.records["offset"].to_pylist()]


def test_several_ranges_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [
        [*records(T0, 3, 4), *records(T1, 7)],
        [*records(T1, 8, 9), *records(T0, 5, 6, 7)],
        [Message(T1, 12, ENDED)],
    ]
    broker = Broker(script)
    found = read(a_reader(broker, monkeypatch), (T0, 3, 6), (T1, 7, 12))
    assert (offsets(found), offsets(found, T1)) == ([3, 4, 5], [7, 8, 9])
    assert [(one.partition, one.next) for one in found] == [
        (T0, 5), (T1, 8), (T0, 6), (T1, 10), (T1, 12)
    ]  # fmt: skip
    assert broker.assigned == [{T0: 3, T1: 7}, {}]
    assert broker.made[0].left == [T0], "nothing more of it is fetched"


def test_small_ranges_cost_one_table_and_one_call_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    tps = [TopicPartition("t", number) for number in range(100)]
    tables = mock.Mock(wraps=readers.table_of)
    monkeypatch.setattr(readers, "table_of", tables)
    broker = Broker([[one for tp in tps[:99] for one in records(tp, 3, 4)], records(tps[99], 4)])
    found = read(a_reader(broker, monkeypatch), *((tp, 3, 5) for tp in tps))
    assert [offsets(found, tp) for tp in tps] == [[3, 4]] * 99 + [[4]]
    assert all(one.records["partition"].to_pylist()[0] == one.partition[1] for one in found)
    assert (tables.call_count, broker.made[0].calls) == (2, 1)
    broker.scripts.append([[*records(T1, 7), *records(T0, 3)], [Message(T0, 4, ENDED)]])
    (table,) = a_reader(broker, monkeypatch).tables({T0: OffsetRange(3, 4), T1: OffsetRange(7, 8)})
    assert (table["partition"].to_pylist(), table["offset"].to_pylist()) == ([0, 1], [3, 7])


def test_an_end_before_the_end_of_the_range_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower, or a new leader, whose last stable offset lags behind."""
    script = [records(T0, 0, 1), [Message(T0, 2, ENDED)], records(T0, 2), [Message(T0, 5, ENDED)]]
    found = read(a_reader(Broker(script), monkeypatch), (T0, 0, 5))
    assert offsets(found) == [0, 1, 2]
    assert found[-1].next == 5


def test_an_end_alone_is_no_end_of_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [records(T0, 0, 1), [Message(T0, 2, ENDED)]]
    says = "read ranges: t-0 from 2 on and 1 others: no answer from h:1"
    with pytest.raises(Unavailable, match=says):
        read(a_reader(Broker(script), monkeypatch), (T0, 0, 5), (T1, 3, 4))


def test_a_record_behind_the_range_proves_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    (piece,) = read(a_reader(Broker([records(T0, 9)]), monkeypatch), (T0, 0, 5))
    assert (piece.records.num_rows, piece.next) == (0, 5)


def test_records_that_were_deleted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log begins at 3 now. What is gone must not look like offsets without a record."""
    broker = Broker([[Message(T0, -1, OUT_OF_RANGE)]], bounds=(3, 10))
    with pytest.raises(DataLost, match=r"t-0 has the offsets \[3, 10\), .* from 0 on"):
        read(a_reader(broker, monkeypatch), (T0, 0, 5))


def test_records_that_were_deleted_are_skipped_if_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts = [
        [[*records(T1, 0), Message(T0, -1, OUT_OF_RANGE), Message(T1, 1, ENDED)]],
        [[*records(T0, 3, 4), Message(T0, 9, ENDED)]],
    ]
    broker = Broker(*scripts, bounds=(3, 10))
    found = read(a_reader(broker, monkeypatch), (T0, 0, 5), (T1, 0, 1), lost="skip")
    assert (offsets(found), offsets(found, T1)) == ([3, 4], [0])
    assert broker.made[0].closed, "a consumer that has reported an error delivers nothing more"


@pytest.mark.parametrize("lost", ["refuse", "skip"])
def test_a_log_that_ends_before_the_range_was_cut(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker([[Message(T0, -1, OUT_OF_RANGE)]], bounds=(0, 3))
    with pytest.raises(DataLost, match="from 4 on"):
        read(a_reader(broker, monkeypatch), (T0, 4, 5), lost=lost)


def test_an_offset_that_the_log_has_is_asked_for_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker([[Message(T0, -1, OUT_OF_RANGE)]], bounds=(0, 9))
    with pytest.raises(Unavailable, match="t-0 at 4"):
        read(a_reader(broker, monkeypatch), (T0, 4, 5), lost="skip")


def test_a_cut_log_is_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker([[Message(T0, -1, KafkaError._LOG_TRUNCATION)]], bounds=(0, 9))
    with pytest.raises(DataLost):
        read(a_reader(broker, monkeypatch), (T0, 4, 5), lost="skip", epochs={T0: 2})


def test_messages_that_come_again_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [records(T0, 0, 1, 2), records(T0, 1, 2, 3), records(T0, 2), records(T0, 4)]
    assert offsets(read(a_reader(Broker(script), monkeypatch), (T0, 0, 5))) == [0, 1, 2, 3, 4]


def test_other_partitions_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [[*records(T1, 0, 1), Message(T1, 2, ENDED), *records(T0, 0)]]
    found = read(a_reader(Broker(script), monkeypatch), (T0, 0, 1))
    assert (offsets(found), offsets(found, T1)) == ([0], [])


def test_leader_epochs_are_those_of_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [records(T0, 99, 100), records(T0, 250, 350)]
    found = read(a_reader(Broker(script), monkeypatch), (T0, 0, 300))
    assert [one.leader_epoch for one in found] == [1, 2]


def test_a_hole_is_known_by_the_next_record(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker([records(T0, 4)], bounds=(0, 100_000))
    assert a_reader(broker, monkeypatch).at(T0, [3], 5) == {}
    assert not broker.made[0].polls, "nothing is read to the end of the log"


def test_near_offsets_are_read_on_to_and_far_ones_gone_to(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [records(T0, *range(5, 11)), records(T0, 50_000), records(T0, 90_000)]
    broker = Broker(script, bounds=(0, 100_000))
    found = a_reader(broker, monkeypatch).at(T0, [90_000, 5, 10, 5, 50_000, 100_000], 5)
    assert found.keys() == {5, 10, 50_000, 90_000}
    assert broker.assigned == [{T0: 5}, {}, {T0: 50_000}, {}, {T0: 90_000}, {}]


def test_single_offsets_that_are_gone_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker([records(T0, 4)], bounds=(4, 5))
    assert a_reader(broker, monkeypatch).at(T0, [0, 4, 5], 5).keys() == {4}
    assert broker.assigned == [{T0: 4}, {}]


def test_offsets_are_cut_where_the_way_is_long() -> None:
    assert list(_runs([])) == []
    assert list(_runs([5])) == [[5]]
    assert list(_runs([1, 2, 250, 10_000, 10_001])) == [[1, 2, 250], [10_000, 10_001]]


def test_first_records(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [[*records(T0, 7, 8), Message(T1, 3, ENDED)]]
    found = a_reader(Broker(script), monkeypatch).first({T0: 5, T1: 3}, frozenset({"value"}))
    assert found[T0] is not None
    assert found[T0]["value"].to_pylist() == [b"7"]
    assert found[T1] is None


def test_a_position_in_front_of_a_record_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message without a value has the length 0."""
    broker = Broker([records(T0, 7), [Message(T1, -1, KafkaError._LOG_TRUNCATION)]])
    found = a_reader(broker, monkeypatch).refused({T0: (7, 3), T1: (9, 3)}, 5)
    assert found.keys() == {T1}


@pytest.mark.parametrize(
    ("code", "passes"), [(KafkaError._TRANSPORT, True), (KafkaError.UNKNOWN_TOPIC_OR_PART, False)]
)
def test_errors_that_pass_and_those_that_do_not(
    code: int, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that can't be read now is not a record that is gone."""
    broker = Broker([[Message(T0, -1, code)], records(T0, 0)])
    reader = a_reader(broker, monkeypatch)
    if passes:
        assert offsets(read(reader, (T0, 0, 1))) == [0]
    else:
        with pytest.raises(Unavailable, match="read ranges"):
            read(reader, (T0, 0, 1))
    assert broker.made[0].closed is not passes


def test_the_consumers_own_exception_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    reader = a_reader(broker, monkeypatch)

    def broken(_: object, __: object) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE))

    monkeypatch.setattr(Consumer, "assign", broken)
    with pytest.raises(Unavailable, match="read ranges"):
        read(reader, (T0, 0, 1))
    assert broker.made[0].closed


def test_a_caller_that_stops_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker([records(T0, 0), records(T0, 0)])
    reader = a_reader(broker, monkeypatch)
    pieces = reader.read({T0: OffsetRange(0, 9)})
    assert next(pieces).next == 1
    pieces.close()
    assert not broker.made[0].closed
    assert offsets(read(reader, (T0, 0, 1))) == [0]
    assert len(broker.made) == 1
