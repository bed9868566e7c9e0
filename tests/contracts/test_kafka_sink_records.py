"""What a record is made of: key, value, topic, headers; and what its topic does not accept."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from oncely.core.batch import Chunk
from oncely.core.claim import Counts
from oncely.errors import ConfigError, Stopped, TableMismatch
from oncely.kinds.kafka.format import AvroValue, RawValue, RecordFormat
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import SHARED_LEDGER, Topics, make_topics, ready, set_config
from tests.sinktools import T0, Rec, at_t0, commit_all, rec

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("raw", pa.binary())])


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker, ledger=SHARED_LEDGER)


def write(topics: Topics, form: RecordFormat, *records: Rec, keys: Any = ()) -> dict[Any, Counts]:
    sink, fence = ready(topics.sink(form))
    done = commit_all(sink, at_t0(0, records, form.schema, keys=keys), fence)
    return {one.partition: one.counts for one in done}


def test_a_key_is_a_column_and_stays_in_the_value(topics: Topics) -> None:
    form = RecordFormat(SCHEMA, topic=topics.output, key="name")
    write(topics, form, rec(0, id=1, name="ü", raw=b"\0"), rec(1, id=2, name=None, raw=None))
    assert [(m.key(), m.value()) for m in topics.records(topics.output)] == [
        ("ü".encode(), '{"id":1,"name":"ü","raw":"AA=="}'.encode()),
        (None, b'{"id":2,"name":null,"raw":null}'),
    ]


def test_a_number_as_the_key_and_raw_values(topics: Topics) -> None:
    form = RecordFormat(SCHEMA, RawValue("raw"), topics.output, key="id")
    write(topics, form, rec(0, id=-1, name="a", raw=b"\0\xff"), rec(1, id=2, name="b", raw=None))
    assert [(m.key(), m.value()) for m in topics.records(topics.output)] == [
        (b"-1", b"\0\xff"), (b"2", None),
    ]  # fmt: skip


def test_a_tombstone_keeps_its_place(topics: Topics) -> None:
    form = RecordFormat(SCHEMA, RawValue("raw"), topics.output, key="name")
    write(
        topics, form, rec(0, id=1, name="k", raw=b"1"), Rec(1, deletes={"name": "k"}),
        rec(2, id=2, name="k", raw=b"2"), keys=["name"],
    )  # fmt: skip
    assert [m.value() for m in topics.records(topics.output)] == [b"1", None, b"2"]


@pytest.mark.parametrize(
    ("column", "keys", "why"),
    [
        ("id", [b"7"], ["column 'id': x is not int64"]),
        ("other", [], ["no column 'id', the key"] * 2),
    ],
)
def test_the_key_of_a_tombstone_is_that_of_rows(
    topics: Topics, column: str, keys: list[bytes], why: list[str]
) -> None:
    """It has bypassed the transform, which may cast the key."""
    sink, fence = ready(topics.sink(RecordFormat(SCHEMA, RawValue("raw"), topics.output, key="id")))
    gone = at_t0(0, [Rec(0, deletes={"id": 1}), Rec(1, deletes={"id": 2})], SCHEMA, keys=["id"])
    gone = dataclasses.replace(gone, deletes=pa.table({column: ["007", "x"]}))
    commit_all(sink, gone, fence)
    assert [m.key() for m in topics.records(topics.output) if m.value() is None] == keys
    letters = [reason(one) for one in topics.records(topics.rejects)]
    assert all(said in one for said, one in zip(why, letters, strict=True)), letters


def test_each_row_names_its_topic(topics: Topics, broker: Broker) -> None:
    other = broker.create_topic(f"second-{topics.output}")
    form = RecordFormat(SCHEMA, RawValue("raw"), topic_column="name")
    written = write(
        topics, form, rec(0, id=0, name=topics.output, raw=b"0"),
        rec(1, id=1, name=other, raw=b"1"),
        rec(2, id=2, name="nowhere", raw=b"2"), rec(3, id=3, name=None, raw=b"3"),
        rec(4, id=4, name=topics.output, raw=b"4"),
    )  # fmt: skip
    assert [m.value() for m in topics.records(topics.output)] == [b"0", b"4"]
    assert [m.value() for m in topics.records(other)] == [b"1"]
    assert [reason(m) for m in topics.records(topics.rejects)] == [
        "no such topic: 'nowhere'", "sink.topic_column is null",
    ]  # fmt: skip
    assert written == {T0: Counts(5, 3, 2, 0)}


def test_what_is_too_large_is_a_reject_and_what_just_fits_is_written(broker: Broker) -> None:
    """The limit is the batch's: 61 bytes, and the record with the lengths of its parts."""
    topics = make_topics(
        broker, config={"max.message.bytes": "1000", "compression.type": "producer"}
    )
    form = RecordFormat(SCHEMA, RawValue("raw"), topics.output, key=None)
    sizes = range(915, 940)
    records = [rec(n, id=n, name="", raw=bytes([n % 256]) * size) for n, size in enumerate(sizes)]
    small = [rec(100 + n, id=n, name="", raw=b"x" * 90) for n in range(100)]
    sink, fence = ready(topics.sink(form, producer={"compression.type": "none"}))
    commit_all(sink, at_t0(0, [*records, *small], SCHEMA), fence)
    fits = 1000 - 61 - 2 - 3 - 1 - 2 - 1  # body's length, fixed part, no key, value's length, none
    lengths = [len(m.value()) for m in topics.records(topics.output)]
    assert lengths == [*(size for size in sizes if size <= fits), *[90] * 100]
    rejected = topics.records(topics.rejects)
    assert len(rejected) == sum(size > fits for size in sizes) > 0
    assert "too large for topic" in reason(rejected[0])


def test_a_letter_that_is_too_large_for_the_rejects_says_so(broker: Broker) -> None:
    topics = make_topics(broker)
    small = broker.create_topic(f"small-{topics.rejects}", 1, {"max.message.bytes": "1000"})
    topics = dataclasses.replace(topics, rejects=small)
    huge = Rec(0, bad="no JSON", key=b"k", value=b"v" * 2000, headers=[("h", b"1")])
    hugest = Rec(1, bad="no JSON", key=b"k" * 2000, value=b"v" * 2000)
    written = write(topics, RecordFormat(SCHEMA, topic=topics.output), huge, hugest)
    assert written[T0].rejects == 2
    first, second = topics.records(small)
    assert (first.key(), first.value(), second.key()) == (b"k", None, None)
    assert dict(first.headers())["h"] == b"1"
    for one, offset in ((first, b"0"), (second, b"1")):
        assert b"value 2000 bytes" in dict(one.headers())["oncely.left_out"]
        assert dict(one.headers())["oncely.offset"] == offset


def test_a_reject_is_the_record_as_it_was(topics: Topics) -> None:
    bad = Rec(3, bad="no JSON", key=b"\0", value=b"\xff", headers=[("a", b"1"), ("a", None)])
    write(topics, RecordFormat(SCHEMA, topic=topics.output), bad)
    (letter,) = topics.records(topics.rejects)
    assert (letter.key(), letter.value()) == (b"\0", b"\xff")
    assert letter.headers()[:2] == [("a", b"1"), ("a", None)]
    assert {name: value for name, value in letter.headers()[2:]} == {
        "oncely.pipeline": topics.pipeline.encode(), "oncely.epoch": b"1",
        "oncely.topic": b"t", "oncely.partition": b"0", "oncely.offset": b"3",
        "oncely.timestamp_ms": b"1700000000000", "oncely.stage": b"decode",
        "oncely.reason": b"no JSON",
        "source_topic": b"t", "source_partition": b"0", "source_offset": b"3",
        "x-original-topic": b"t", "x-exception-message": b"no JSON",
    }  # fmt: skip


AVRO = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "raw", "type": ["null", "bytes"], "default": None},
    ],
}


@pytest.mark.parametrize("schema_id", [None, 7])
def test_avro(topics: Topics, schema_id: int | None) -> None:
    """A value that the schema does not take is a reject, with all rows of its record."""
    form = RecordFormat(SCHEMA, AvroValue(json.dumps(AVRO), schema_id), topics.output)
    large = Rec(1, ({"id": 5, "name": "b"}, {"id": 2**40, "name": "c"}))
    write(topics, form, rec(0, id=1, name="a", raw=b"\0"), large, rec(2, id=3, name=None))
    values = [m.value() for m in topics.records(topics.output)]
    if schema_id is not None:
        assert {one[:5] for one in values} == {b"\0\0\0\0\7"}
        values = [one[5:] for one in values]
    schema = fastavro.parse_schema(AVRO)
    assert [fastavro.schemaless_reader(io.BytesIO(one), schema, schema) for one in values] == [
        {"id": 1, "name": "a", "raw": b"\0"}, {"id": 3, "name": None, "raw": None},
    ]  # fmt: skip
    (letter,) = topics.records(topics.rejects)
    assert "can't be encoded" in reason(letter)


@pytest.mark.parametrize(
    ("form", "match"),
    [
        (RecordFormat(SCHEMA, topic="x", topic_column="name"), "not both"),
        (RecordFormat(SCHEMA), "not both"),
        (RecordFormat(SCHEMA, topic="x", key="nope"), "no column 'nope'"),
        (RecordFormat(SCHEMA, topic_column="id"), "'id' is int64"),
        (RecordFormat(SCHEMA, RawValue("id"), "x"), "'id' is int64"),
        (RecordFormat(pa.schema([("d", pa.duration("s"))]), topic="x"), "no one meaning in JSON"),
        (RecordFormat(pa.schema([("d", pa.float64())]), topic="x", key="d"), "'d' is double"),
        (RecordFormat(SCHEMA, AvroValue("{"), "x"), "not an Avro schema"),
        (RecordFormat(SCHEMA, AvroValue('"string"'), "x"), "not a record"),
        (RecordFormat(pa.schema([("z", pa.int8())]), AvroValue(json.dumps(AVRO)), "x"), "no field"),
        (
            RecordFormat(pa.schema([("id", pa.int8())]), AvroValue(json.dumps(AVRO)), "x"),
            "no column",
        ),
    ],
)
def test_forms_that_are_refused(topics: Topics, form: RecordFormat, match: str) -> None:
    with pytest.raises(TableMismatch, match=match):
        topics.sink(form).bind()


def reason(letter: Any) -> str:
    return dict(letter.headers())["oncely.reason"].decode()


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_takes_no_record_without_a_key(broker: Broker, policy: str) -> None:
    topics = make_topics(broker, config={"cleanup.policy": policy})
    form = RecordFormat(SCHEMA, RawValue("raw"), topics.output, key="name")
    records = [rec(n, id=n, name=name, raw=b"x") for n, name in enumerate(["a", None, ""])]
    gone = Rec(3, deletes={"name": "a"})
    assert write(topics, form, *records, gone, keys=["name"])[T0].rejects == 1
    assert [m.key() for m in topics.records(topics.output)] == [b"a", b"", b"a"]
    (letter,) = topics.records(topics.rejects)
    assert "no key, and topic" in reason(letter)
    assert "cleanup.policy" in reason(letter)


def test_a_topic_of_a_column_that_is_compacted(topics: Topics, broker: Broker) -> None:
    compacted = broker.create_topic(f"compacted-{topics.output}", 1, {"cleanup.policy": "compact"})
    form = RecordFormat(SCHEMA, RawValue("raw"), topic_column="name")
    written = write(
        topics, form, rec(0, id=0, name=topics.output, raw=b"0"), rec(1, id=1, name=compacted)
    )
    assert written == {T0: Counts(2, 1, 1, 0)}


def test_a_compacted_topic_is_refused_for_records_without_keys(broker: Broker) -> None:
    topics = make_topics(broker, config={"cleanup.policy": "compact"})
    with pytest.raises(ConfigError, match=r"sink\.key: .*compacted") as caught:
        topics.sink(RecordFormat(SCHEMA, topic=topics.output)).bind()
    assert "cleanup.policy" in caught.value.way_out


HOUR = 3_600_000


@pytest.mark.parametrize(
    ("config", "accepted"),
    [
        ({}, [0, -1000 * HOUR]),  # the broker's default is an hour ahead
        ({"message.timestamp.before.max.ms": str(HOUR)}, [0]),
        ({"message.timestamp.after.max.ms": str(4 * HOUR)}, [0, 3 * HOUR, -1000 * HOUR]),
        ({"message.timestamp.type": "LogAppendTime"}, [0, 3 * HOUR, -1000 * HOUR]),
    ],
)
def test_a_timestamp_beyond_the_bounds_of_its_topic_is_a_reject(
    broker: Broker, config: dict[str, str], accepted: list[int]
) -> None:
    topics, now = make_topics(broker, config=config), int(time.time() * 1000)
    form = RecordFormat(SCHEMA, topic=topics.output, source_timestamp=True)
    distances = [0, 3 * HOUR, -1000 * HOUR]
    sink, fence = ready(topics.sink(form))
    commit_all(sink, timed([now + one for one in distances]), fence)
    assert [distances[one] for one in topics.ids()] == accepted
    reasons = [reason(letter) for letter in topics.records(topics.rejects)]
    assert len(reasons) == len(distances) - len(accepted)
    assert all("message.timestamp." in one and topics.output in one for one in reasons)


@pytest.mark.parametrize("changed", ["cleanup.policy", "message.timestamp.after.max.ms"])
@pytest.mark.parametrize("transaction", [True, False])
def test_a_record_that_only_the_broker_refuses_stops_the_run(
    broker: Broker, changed: str, transaction: bool
) -> None:
    """The topic's settings were read before they were changed."""
    topics, now = make_topics(broker), int(time.time() * 1000)
    form = RecordFormat(SCHEMA, topic=topics.output, source_timestamp=True)
    sink, fence = ready(topics.sink(form))
    set_config(broker, topics.output, {changed: "compact" if changed[0] == "c" else "1000"})
    what = timed([now + HOUR // 2])
    with pytest.raises(Stopped, match=topics.output if transaction else "produce") as caught:
        commit_all(sink, what, fence) if transaction else sink.commit(what, fence, None)
    assert changed in caught.value.way_out
    assert topics.ids() == []


def timed(timestamps: list[int]) -> Chunk:
    """A chunk of records with these timestamps, in ms."""
    what = at_t0(0, [rec(n, id=n) for n in range(len(timestamps))], SCHEMA)
    times = pa.chunked_array([pa.array(timestamps, pa.timestamp("ms", "UTC"))])
    return dataclasses.replace(what, timestamps=times)
