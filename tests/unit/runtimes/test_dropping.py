"""Records that are dropped before they are decoded."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

import pyarrow as pa
import pytest

from oncely.context import Record
from oncely.core.ranges import TopicPartition
from oncely.decode.base import Decoded
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.decode.json import JsonDecoder
from oncely.errors import ConfigError, Interrupted
from oncely.kafka.records import RECORDS
from oncely.runtimes.chunks import Processing
from oncely.runtimes.dropping import DropCondition, DroppingDecoder, Functions
from oncely.runtimes.row_transform import Unchanged
from oncely.users_function import said

PLAIN = JsonDecoder(pa.schema({"id": pa.int64()}), "value")
NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def records(*values: bytes, **columns: list[object]) -> pa.Table:
    """Records with offsets from 0 on, a second apart, the last one of now."""
    count = len(values)
    rows: dict[str, object] = {
        "topic": ["t"] * count,
        "partition": [0] * count,
        "offset": list(range(count)),
        "timestamp": [int((NOW - count + 1 + i) * 1e6) for i in range(count)],
        "key": [b"k%d" % i for i in range(count)],
        "value": list(values),
        "headers": [[]] * count,
        **columns,
    }
    return pa.table([pa.array(rows[field.name], field.type) for field in RECORDS], schema=RECORDS)


GIVEN = records(b'{"id":0}', b"{broken", b'{"id":2}', b"{broken", b'{"id":4}')


def outcome(decoder: DroppingDecoder, given: pa.Table = GIVEN) -> tuple[list[int], list[int], int]:
    """Records with rows, refused ones, and the number of those that were dropped."""
    done = decoder.decode(given)
    ids = done.rows.column("id").to_pylist()
    assert ids == done.row_record.to_pylist()
    return ids, [one.record for one in done.rejections], done.dropped


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("kafka_offset < 3", ([4], [3], 3)),
        ("key = 'k1' OR key = 'k4'", ([0, 2], [3], 2)),
        ("decode(value) LIKE '%broken'", ([0, 2, 4], [], 2)),
        ("kafka_timestamp < TIMESTAMPTZ '2025-12-31 23:59:58+00' -- old", ([2, 4], [3], 2)),
        ("kafka_partition = 1 AND kafka_topic = 't'", ([0, 2, 4], [1, 3], 0)),
        ("NULL", ([0, 2, 4], [1, 3], 0)),
        ("true", ([], [], 5)),
    ],
)
def test_a_condition_drops_records(condition: str, kept: object) -> None:
    drop = DropCondition(condition)
    drop.check()
    assert outcome(DroppingDecoder(PLAIN, drop)) == kept


def test_records_expire_by_their_age() -> None:
    old = DroppingDecoder(PLAIN, expire=2.0, clock=lambda: NOW)
    assert outcome(old) == ([2, 4], [3], 2)
    assert old.needs == {"value", "timestamp"}
    unknown = records(b'{"id":0}', timestamp=[None])
    assert outcome(old, unknown) == ([0], [], 0)
    assert outcome(DroppingDecoder(old, DropCondition("kafka_offset = 2"))) == ([4], [3], 3)


def test_a_record_for_which_the_condition_fails_is_refused() -> None:
    given = records(b'{"id":0}', b"\xff", b'{"id":2}')
    decoder = DroppingDecoder(PLAIN, DropCondition("decode(value) = '{\"id\":2}'"))
    assert outcome(decoder, given) == ([0], [1], 1)
    late = DroppingDecoder(PLAIN, decoder.drop, 0.5, lambda: NOW)
    assert outcome(late, given) == ([], [], 3)


def test_the_ledger_counts_them_as_filtered() -> None:
    decoder = DroppingDecoder(PLAIN, DropCondition("kafka_offset IN (1, 4)"))
    chunk = Processing(decoder.decode, Unchanged()).chunk(GIVEN)
    (tp,) = chunk.ranges
    assert tp == TopicPartition("t", 0)
    counts = chunk.counts(chunk.row_record, chunk.rejections)[tp]
    assert (counts.records, counts.rows, counts.rejects, counts.filtered) == (5, 2, 1, 2)


def test_a_function_decides_on_the_records_of_its_topic() -> None:
    seen: list[Record] = []

    def odd(record: Record) -> bool:
        seen.append(record)
        return record.offset % 2 == 1

    mine, others = Functions({"t": odd}), Functions({"another": odd})
    assert outcome(DroppingDecoder(PLAIN, others)) == ([0, 2, 4], [1, 3], 0)
    assert not seen
    given = records(b'{"id":0}', b"{", b'{"id":2}', headers=[[], [], [{"key": "h", "value": b"1"}]])
    assert outcome(DroppingDecoder(PLAIN, mine), given) == ([0, 2], [], 1)
    last = seen[-1]
    assert (last.topic, last.partition, last.offset, last.deleted) == ("t", 0, 2, False)
    assert (last.key, last.value, last.headers) == (b"k2", b'{"id":2}', [("h", b"1")])
    assert last.timestamp == datetime(2026, 1, 1, tzinfo=UTC)
    sql_too = DroppingDecoder(DroppingDecoder(PLAIN, mine), DropCondition("kafka_offset = 0"))
    assert outcome(sql_too, given) == ([2], [], 2)


def test_a_record_on_which_a_function_fails_is_refused() -> None:
    def fails(record: Record) -> bool:
        return json.loads(record.value)["id"] == 2

    done = DroppingDecoder(PLAIN, Functions({"t": fails})).decode(GIVEN)
    assert [(one.record, one.reason[:32]) for one in done.rejections] == [
        (1, "the filter fails: JSONDecodeErro"),
        (3, "the filter fails: JSONDecodeErro"),
    ]
    assert (done.row_record.to_pylist(), done.dropped) == ([0, 4], 1)


def test_a_time_that_python_cant_hold_refuses_its_record_alone() -> None:
    given = records(b'{"id":0}', b'{"id":1}', b'{"id":2}', timestamp=[0, 2**60, 10**15])
    done = DroppingDecoder(PLAIN, Functions({"t": lambda _: False})).decode(given)
    assert [one.record for one in done.rejections] == [1]
    assert done.rejections[0].reason.startswith("the filter fails: OverflowError: ")
    assert done.row_record.to_pylist() == [0, 2]


class Leaves(BaseException):
    """A library's way to leave."""


@pytest.mark.parametrize(
    "ends", [SystemExit(0), SystemExit(), KeyboardInterrupt(), GeneratorExit(), Leaves("bye")]
)
def test_a_function_that_would_end_the_process_refuses_its_record(
    ends: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``oncely work`` calls it: Python raises no KeyboardInterrupt for SIGINT."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)

    def leaves(record: Record) -> bool:
        if record.offset == 2:
            raise ends
        return False

    done = DroppingDecoder(PLAIN, Functions({"t": leaves})).decode(GIVEN)
    reasons = {one.record: one.reason for one in done.rejections}
    assert reasons[2].startswith(f"the filter fails: {type(ends).__name__}")
    assert "FunctionEnded" not in reasons[2]


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_function_whose_body_has_not_run_drops_nothing() -> None:
    """What a coroutine or a generator is wrapped in does not show it before it is called."""

    async def drops(record: Record) -> bool:
        return False

    drop = partial(drops)
    done = DroppingDecoder(PLAIN, Functions({"t": drop})).decode(GIVEN)
    assert {one.record for one in done.rejections} == set(range(5))
    assert "a coroutine, whose body has not run" in done.rejections[0].reason
    assert done.dropped == 0


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python raises KeyboardInterrupt for SIGINT.

    Processes that a shell starts in the background ignore SIGINT, and a SparkContext, which tests
    of the same process share, has a handler of its own.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_signal_ends_the_process_from_within_a_function() -> None:
    def interrupted(_: Record) -> bool:
        signal.raise_signal(signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        DroppingDecoder(PLAIN, Functions({"t": interrupted})).decode(GIVEN)


def test_a_request_to_stop_ends_a_function() -> None:
    """As the handlers of ``oncely.cli.run`` raise it."""

    def interrupted(_: Record) -> bool:
        raise Interrupted

    with pytest.raises(Interrupted):
        DroppingDecoder(PLAIN, Functions({"t": interrupted})).decode(GIVEN)


class Crashing(JsonDecoder):
    """Dies of a record."""

    def decode(self, records: pa.Table) -> Decoded:
        if b"crash" in records.column("value").to_pylist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(records)


def test_a_child_that_a_function_forks_ends_with_its_call() -> None:
    codes, in_child = [], []

    def forks(record: Record) -> bool:
        if not in_child and (pid := os.fork()):
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return True
        in_child.append(True)
        signal.alarm(20)
        return True

    assert outcome(DroppingDecoder(PLAIN, Functions({"t": forks}))) == ([], [], 5)
    assert codes == [0] * 5


def test_beside_records_that_crash_the_decoder() -> None:
    given = records(b'{"id":0}', b"crash", b"crash", b'{"id":3}')
    decoder = DroppingDecoder(
        Crashing(PLAIN.schema, "value"), DropCondition("kafka_offset IN (0, 1)")
    )
    done = isolate_crashes(decoder, given)
    assert [one.record for one in done.rejections] == [2]
    assert (done.row_record.to_pylist(), done.dropped) == ([3], 2)


def test_it_goes_to_other_processes() -> None:
    decoder = pickle.loads(
        pickle.dumps(DroppingDecoder(PLAIN, DropCondition("kafka_offset > 0"), 1e9))
    )
    assert outcome(decoder) == ([0], [], 4)
    assert isolate_crashes(decoder, GIVEN).dropped == 4


@pytest.mark.parametrize("condition", ["no_such_column = 1", "kafka_offset >", "count(*) > 1"])
def test_what_is_no_condition_is_an_error(condition: str) -> None:
    with pytest.raises(ConfigError, match=r"filter\.drop"):
        DropCondition(condition).check()


@pytest.mark.parametrize("broken", [IndexError("no text"), SystemExit(3)])
def test_an_error_whose_text_cant_be_read(broken: BaseException) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise broken

    reason = said(Mute())
    assert reason == f"Mute: its text can't be read ({type(broken).__name__})"
