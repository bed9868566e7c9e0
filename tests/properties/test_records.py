"""What a record's own bytes raise belongs to that record: it is a row, a tombstone, filtered or a
dead letter, whatever its value, key, headers, timestamp and the values that a transform makes of
it; and a good record beside it is a row."""

from __future__ import annotations

import ctypes
import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncely.core.batch import Chunk
from oncely.core.ranges import TopicPartition
from oncely.decode.json import JsonDecoder
from oncely.decode.metadata import TextDecoder, WithKey, WithMetadata
from oncely.decode.schema import MetadataColumn, parse_schema
from oncely.kafka.inbox import memory_of
from oncely.kafka.records import RECORDS, UNREADABLE, headers_of, table_of, timestamps_of
from oncely.kafka.topics import TopicLimits
from oncely.kinds.kafka.form import encode, of_partition
from oncely.kinds.kafka.format import RawValue, RecordFormat
from oncely.kinds.sql.form import prepare
from oncely.kinds.sql.table import BoundTable
from oncely.runtimes.chunks import Processing
from oncely.runtimes.dropping import DroppingDecoder
from oncely.runtimes.row_transform import SqlTransform
from oncely.stores.sql.connection import ColumnFit, Relation, TableName
from tests.conftest import examples

TP = TopicPartition("t", 0)
STATE = frozenset({"oncely.ledger", "t.rejects"})
VALUES = WithKey(
    JsonDecoder(parse_schema("n BIGINT, til STRING, seen TIMESTAMP, topic STRING")),
    TextDecoder(parse_schema("id STRING"), "key"),
)
PARTS = (
    MetadataColumn("timestamp", "sent"),
    MetadataColumn("headers", "h", "h"),
    MetadataColumn("headers", "other", "\0"),
)
DECODER = DroppingDecoder(WithMetadata(VALUES, PARTS), expire=3600.0)
TRANSFORM = SqlTransform(
    "SELECT id, n, {'t': CAST(til AS TIMESTAMPTZ), 'd': [TRY_CAST(til AS DATE)]} AS span,"
    " [CAST(til AS TIMESTAMP)] AS times, MAP([coalesce(til, 'none')], [seen]) AS m,"
    " sent, other, topic"
    " FROM input WHERE n IS NULL OR n <> 5"
)
TEXT = pa.string()
TARGET = BoundTable(
    TableName(None, "x"),
    Relation("x"),
    (
        ColumnFit("id", TEXT),
        ColumnFit("n", pa.int32()),
        ColumnFit("span", TEXT, cast="jsonb"),
        ColumnFit("times", TEXT, cast="timestamp[]"),
        ColumnFit("m", TEXT),
        ColumnFit("sent", pa.timestamp("us", "UTC")),
    ),
    ("text",) * 6,
    keys=("id",),
)
GOOD = {"n": 1, "til": "2020-01-01", "seen": "2020-01-01T00:00:00Z", "topic": "out"}
TIMES = ["infinity", "-infinity", "epoch", "200000-01-01", "0001-01-01 (BC)", "290308-12-21 (BC)",
         "9999-12-31 23:59:59.999999", "67556-01-01", "x", ""]  # fmt: skip
TOPICS = ["", "..", "__consumer_offsets", "oncely.ledger", "t.rejects", "ö", "a" * 250, "nope"]


class Raw:
    """A message as confluent-kafka gives it: it raises for a name that is not UTF-8, and then has
    a list with NULL in its place."""

    def __init__(self, offset: int, key: Any, value: Any, headers: Any, stamp: int) -> None:
        self._of, self._headers, self._asked = (offset, key, value, stamp), headers, False

    def __len__(self) -> int:
        return len(self._of[2] or b"")

    offset = property(lambda self: lambda: self._of[0])
    key = property(lambda self: lambda: self._of[1])
    value = property(lambda self: lambda: self._of[2])

    def timestamp(self) -> tuple[int, int]:
        return 1, self._of[3]

    def set_headers(self, headers: Any) -> None:
        self._headers, self._asked = headers, True

    def headers(self) -> Any:
        if self._asked or self._headers is None:
            return self._headers
        self._asked, found, bad = True, [], False
        for name, value in self._headers:
            try:
                found.append((name.decode(), value))
            except UnicodeDecodeError:
                found.append(_nameless(value))
                bad = True
        self._headers = found
        if bad:
            raise SystemError("returned a result with an exception set")
        return found


def _nameless(value: bytes | None) -> Any:
    api = ctypes.pythonapi
    api.PyTuple_New.restype = ctypes.py_object
    api.PyTuple_SetItem.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.py_object]
    api.Py_IncRef.argtypes = [ctypes.py_object]
    made = api.PyTuple_New(2)
    api.Py_IncRef(value)
    api.PyTuple_SetItem(id(made), 1, value)
    return made


values = st.none() | st.binary(max_size=6) | st.fixed_dictionaries(
    {},
    optional={
        "n": st.sampled_from([1, 5, 2**31, 2**63, None, "x"]),
        "til": st.sampled_from(TIMES),
        "seen": st.sampled_from(["2020-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "infinity", -1]),
        "topic": st.sampled_from(TOPICS) | st.text(max_size=3),
    },
).map(lambda one: json.dumps(one).encode())  # fmt: skip
names = st.binary(max_size=3) | st.sampled_from([b"h", b"oncely.source", b"\xff"])
heads = st.none() | st.lists(st.tuples(names, st.none() | st.binary(max_size=3)), max_size=3)
NOW = int(datetime.now(UTC).timestamp() * 1000)
stamps = st.sampled_from([-1, -1, -1, NOW, NOW, 0, 2**62, -(2**62), -2, 253402300800000])
records = st.lists(st.tuples(st.none() | st.binary(max_size=3), values, heads, stamps), max_size=8)


def limits(topics: Any) -> dict[str, TopicLimits]:
    assert not {*STATE, ""} & {*topics}
    return {one: TopicLimits(1_000_000, False) for one in topics if one == "out"}


FORMS = (
    lambda schema: RecordFormat(schema, topic="out", key="id", source_timestamp=True),
    lambda schema: RecordFormat(schema, RawValue("id"), topic_column="topic", own_topics=STATE),
)


def made(found: Any) -> tuple[Chunk, list[Any]]:
    good = (b"good", json.dumps(GOOD).encode(), None, -1)
    messages = [Raw(at, *one) for at, one in enumerate([*found, good])]
    assert memory_of(messages) > 0
    table = table_of([(TP, messages)], frozenset(RECORDS.names))
    # A record without a timestamp is not old.
    assert table["timestamp"][-1].as_py() is timestamps_of(messages)[-1] is None
    return Processing(DECODER.decode, TRANSFORM, headers=True).chunk(table), messages


@settings(max_examples=examples(60))
@given(records)
@example([(b"k", b'{"til": "200000-01-01"}', [(b"\xff", None)], -1)])
@example([(b"k", b"{}", [(b"h", b"\xff")], -1)])
@example([(b"k", b'{"til": "infinity"}', None, -1)])
@example([(b"k", b'{"topic": ""}', None, -1), (b"k", b'{"topic": "oncely.ledger"}', None, -1)])
def test_a_record_raises_for_itself_alone(found: Any) -> None:
    chunk, messages = made(found)
    last = len(messages) - 1
    one_each(chunk, chunk.row_record, chunk.rejections)
    assert last in chunk.row_record
    prepared = prepare(chunk, TARGET, False)
    one_each(chunk, prepared.row_record, prepared.rejections)
    assert last in prepared.row_record
    for form in FORMS:
        written = encode(chunk, form(chunk.rows.schema), limits)
        one_each(chunk, written.row_record, written.rejections)
        assert last in written.row_record
        assert set(of_partition(written, chunk, TP)) == {"out"}
    assert all(one.reason.isprintable() for one in (*written.rejections, *prepared.rejections))


def one_each(chunk: Chunk, rows: Any, rejections: Any) -> None:
    refused = [one.record for one in rejections]
    assert len(refused) == len({*refused})
    assert not {*refused} & {*np.asarray(rows).tolist()}


def test_a_header_s_name_that_is_not_utf_8_is_one_character() -> None:
    message = Raw(0, None, b"", [(b"a", None), (b"\xffb", b"1"), (b"\xfe", None), (b"c", b"2")], 0)
    expected = [("a", None), (UNREADABLE, b"1"), (UNREADABLE, None), ("c", b"2")]
    assert [*headers_of(message)] == [*headers_of(message)] == expected
