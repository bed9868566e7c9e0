from __future__ import annotations

import functools
import io
import json
import pickle
import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from oncely.decode.avro import AvroDecoder, Registry, avro_decoder
from oncely.decode.avro_read import Corrupt, Incompatible, compile_reader
from oncely.decode.avro_schema import AvroSchema, Definition
from oncely.errors import ConfigError
from oncely.extras import SWITCH
from tests.registrytools import running

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "namespace": "org.example",
    "fields": [
        {"name": "carrier", "type": "string"},
        {"name": "flight", "type": ["null", "int"], "default": None},
        {"name": "delay", "type": ["double", "null"]},
    ],
}


def record(
    *fields: dict[str, Any] | tuple[str, Any], name: str = "R", **more: Any
) -> dict[str, Any]:
    made = [f if isinstance(f, dict) else {"name": f[0], "type": f[1]} for f in fields]
    return {"type": "record", "name": name, "fields": made, **more}


def decimal_of(precision: int, scale: int) -> dict[str, Any]:
    return {"logicalType": "decimal", "precision": precision, "scale": scale}


def decoder(schema: Any, **more: Any) -> AvroDecoder:
    return avro_decoder(Definition(json.dumps(schema)), **more)


def encode(schema: Any, datum: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), datum)
    return out.getvalue()


def table(*values: bytes | None) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.binary())})


def doubled(levels: int, leaf: Any) -> dict[str, Any]:
    """Records of which each has two fields of the next type."""
    made = record(("x", leaf), name=f"D{levels}")
    for at in reversed(range(levels)):
        made = record(("a", made), ("b", f"D{at + 1}"), name=f"D{at}")
    return made


def outcome(schema: Any, *values: bytes | None) -> list[Any]:
    """Rows as dicts and rejections as texts, in the records' order."""
    decoded = decoder(schema).decode(table(*values))
    found: list[Any] = [None] * len(values)
    for index, row in zip(decoded.row_record.to_pylist(), decoded.rows.to_pylist(), strict=True):
        found[index] = row
    for rejection in decoded.rejections:
        found[rejection.record] = rejection.reason
    return found


def resolved(writer: Any, reader: Any, datum: Any) -> Any:
    parsed = [AvroSchema.parse(Definition(json.dumps(schema))) for schema in (writer, reader)]
    data = encode(writer, datum)
    value, end = compile_reader(*parsed)(data, 0)
    assert end == len(data)
    return value


def test_every_type_has_a_column() -> None:
    schema = record(
        ("b", "boolean"), ("i", "int"), ("l", "long"), ("f", "float"), ("d", "double"),
        ("s", "string"), ("y", "bytes"),
        ("x", {"type": "fixed", "name": "X", "size": 2}),
        ("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
        ("a", {"type": "array", "items": ["null", "int"]}),
        ("m", {"type": "map", "values": "long"}),
        ("r", ["null", record(("n", "int"), ("again", "X"), name="Inner")]),
        ("day", {"type": "int", "logicalType": "date"}),
        ("tm", {"type": "int", "logicalType": "time-millis"}),
        ("tu", {"type": "long", "logicalType": "time-micros"}),
        ("im", {"type": "long", "logicalType": "timestamp-millis"}),
        ("iu", {"type": "long", "logicalType": "timestamp-micros"}),
        ("in", {"type": "long", "logicalType": "timestamp-nanos"}),
        ("lm", {"type": "long", "logicalType": "local-timestamp-millis"}),
        ("dec", {"type": "bytes"} | decimal_of(6, 2)),
        ("fdec", {"type": "fixed", "name": "D", "size": 40} | decimal_of(9, 0)),
        ("id", {"type": "string", "logicalType": "uuid"}),
        ("odd", {"type": "string", "logicalType": "of-mine"}),
    )  # fmt: skip
    at = datetime(2013, 1, 1, 5, 6, 7, 891_000, UTC)
    an_id = uuid.UUID("0f8fad5b-d9cb-469f-a165-70867728950e")
    datum = {
        "b": True, "i": -5, "l": 2**40, "f": 0.5, "d": 0.1, "s": "ö", "y": b"\0", "x": b"ab",
        "e": "B", "a": [1, None], "m": {"k": 2}, "r": {"n": 1, "again": b"cd"},
        "day": date(2013, 1, 1), "tm": time(1, 2, 3, 4000), "tu": time(1, 2, 3, 4), "im": at,
        "iu": at, "in": 1_357_016_767_891_000_999, "lm": at.replace(tzinfo=None),
        "dec": Decimal("-12.34"), "fdec": Decimal(7), "id": str(an_id), "odd": "x",
    }  # fmt: skip
    (row,) = outcome(schema, encode(schema, datum))
    assert row == datum | {"in": at, "m": [("k", 2)]}
    columns = decoder(schema).schema
    assert columns.field("i") == pa.field("i", pa.int32(), nullable=False)
    assert columns.field("r").nullable
    assert columns.field("r").type == pa.struct(
        [pa.field("n", pa.int32(), nullable=False), pa.field("again", pa.binary(), nullable=False)]
    )
    assert columns.field("iu").type == pa.timestamp("us", "UTC")
    assert columns.field("lm").type == pa.timestamp("us")
    assert columns.field("dec").type == pa.decimal128(6, 2)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (["null", "int", "string"], "x: a union of null, int, string has no column"),
        (["null"], "x: a union of null has no column"),
        ("null", "x: null alone has no column"),
        ({"type": "array", "items": ["int", "long"]}, "x: item: a union of int, long"),
        (record(name="Empty"), "x: Empty has no fields"),
        (record(("next", ["null", "Node"]), name="Node"), "x: next: Node is recursive"),
        (
            functools.reduce(
                lambda inner, at: record(("y", inner), name=f"R{at}"), range(60), "int"
            ),
            "it is nested more than 32 deep",
        ),
        (doubled(30, "int"), "it has more than 16,384 types, some of them by reference"),
        (
            {"type": "bytes"} | decimal_of(39, 0),
            "x: a decimal of 39 digits",
        ),
    ],
)
def test_a_type_without_a_column_is_a_configuration_error(kind: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decoder(record(("x", kind)), key="decode.key.schema")
    assert caught.value.key == "decode.key.schema"
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "5", "null", "{}", '{"type": "record"}', '"unknown"', "[" * 100_000),
        '{"type": "record", "name": "record", "fields": []}',
        '{"type": "fixed", "name": "F", "size": -1}',
        '{"type": "fixed", "name": "F", "size": "2"}',
    ],
)
def test_what_is_no_schema_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"decode\.schema"):
        avro_decoder(Definition(text))


def test_a_schema_that_is_no_record_has_no_columns() -> None:
    with pytest.raises(ConfigError, match="it is no record but long"):
        decoder("long")


def test_a_key_is_named_in_its_reasons() -> None:
    named = decoder(record(("id", ["null", "long"])), column="key")
    decoded = named.decode(pa.table({"key": [b"\x02\x06", b"\x00", b"\x04", None]}))
    assert decoded.rows.to_pylist() == [{"id": 3}, {"id": None}]
    assert [r.reason for r in decoded.rejections] == [
        "the key is no Avro datum: id: a union of 2 has no member 2",
        "the key is null",
    ]


GOOD = encode(FLIGHT, {"carrier": "UA", "flight": 1545, "delay": 2.0})
ROW = {"carrier": "UA", "flight": 1545, "delay": 2.0}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "the value is null"),
        (b"", "the value is empty"),
        (GOOD[:-1], "the value is no Avro datum: delay: it ends too early"),
        (GOOD[:3], "the value is no Avro datum: flight: it ends too early"),
        (GOOD + b"\0", "the value has 1 bytes after its datum"),
        (b"\x03U", "the value is no Avro datum: carrier: -2 bytes are claimed, 1 are left"),
        (b"\xfe\xff\xff\xff\x0fU", "carrier: 2147483647 bytes are claimed, 1 are left"),
        (b"\x04\xff\xfe" + GOOD[3:], "the value is no Avro datum: carrier: a text is not UTF-8"),
        (GOOD[:3] + b"\x01" + GOOD[4:], "flight: a union of 2 has no member -1"),
        (GOOD[:3] + b"\x04" + GOOD[4:], "flight: a union of 2 has no member 2"),
        (GOOD[:4] + b"\x80\x80\x80\x80\x10" + GOOD[6:], "flight: an int is longer than 32 bits"),
        (GOOD[:4] + b"\xff" * 9 + b"\x02" + GOOD[6:], "flight: a number is longer than 64 bits"),
        (GOOD[:4] + b"\xff" * 11 + b"\x00" + GOOD[6:], "flight: a number is longer than 64 bits"),
    ],
)
def test_bytes_that_are_no_datum_are_rejected_and_leave_their_neighbours(
    value: bytes | None, reason: str
) -> None:
    first, bad, last = outcome(FLIGHT, GOOD, value, GOOD)
    assert (first, last) == (ROW, ROW)
    assert bad.endswith(reason)


def test_what_python_would_read_from_the_other_end_is_refused() -> None:
    schema = record(("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}), ("b", "boolean"))
    assert outcome(schema, b"\x02\x01", b"\x01\x01", b"\x04\x01", b"\x02\x02") == [
        {"e": "B", "b": True},
        "the value is no Avro datum: e: E has no symbol -1",
        "the value is no Avro datum: e: E has no symbol 2",
        "the value is no Avro datum: b: a boolean is 0 or 1, not 2",
    ]


def test_blocks_may_say_their_size_but_not_a_wrong_one_nor_claim_what_is_not_there() -> None:
    schema = record(
        ("a", {"type": "array", "items": "int"}), ("m", {"type": "map", "values": "int"})
    )
    two_blocks = b"\x02\x02\x03\x04\x04\x06\x00" + b"\x01\x06\x02k\x02\x00"
    assert outcome(
        schema,
        two_blocks,
        b"\x03\x06\x02\x04\x00\x00",  # says 3 bytes, takes 2
        b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x02\x00\x00",
        b"\x00\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x02k\x02\x00",
    ) == [
        {"a": [1, 2, 3], "m": [("k", 1)]},
        "the value is no Avro datum: a: a block has another size than it claims",
        "the value is no Avro datum: a: 4611686018427387903 items are claimed, 3 bytes are left",
        "the value is no Avro datum: m: 4611686018427387903 items are claimed, 4 bytes are left",
    ]


def test_values_that_no_column_holds_are_rejected() -> None:
    schema = record(
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        ("day", {"type": "int", "logicalType": "date"}),
        ("tm", {"type": "int", "logicalType": "time-millis"}),
        ("amount", {"type": "bytes"} | decimal_of(3, 1)),
    )
    plain = record(("at", "long"), ("day", "int"), ("tm", "int"), ("amount", "bytes"))
    fits = {"at": 0, "day": 0, "tm": 0, "amount": b"\x7f"}
    found = outcome(
        schema,
        encode(plain, fits),
        encode(plain, fits | {"at": 2**62}),
        encode(plain, fits | {"at": 253_402_300_800_000}),
        encode(plain, fits | {"day": 3_000_000}),
        encode(plain, fits | {"tm": 86_400_000}),
        encode(plain, fits | {"tm": -1}),
        encode(plain, fits | {"amount": b"\x7f\xff"}),
        encode(plain, fits | {"amount": b"\x7f" * 5000}),
        encode(plain, fits),
    )
    assert found[0] == found[-1] == {
        "at": datetime(1970, 1, 1, tzinfo=UTC), "day": date(1970, 1, 1), "tm": time(0),
        "amount": Decimal("12.7"),
    }  # fmt: skip
    assert [reason.split(":")[0] for reason in found[1:6]] == ["at", "at", "day", "tm", "tm"]
    assert [reason.rpartition(": ")[2] for reason in found[6:8]] == [
        "a decimal has more than 3 digits"
    ] * 2


def test_fields_are_resolved_by_name_alias_and_default() -> None:
    writer = record(
        ("gone", {"type": "array", "items": ["null", "string", record(("x", "int"), name="G")]}),
        ("n", "int"), ("old", "string"), ("kept", "bytes"),
    )  # fmt: skip
    reader = record(
        {"name": "new", "type": "string", "aliases": ["old"]},
        ("kept", "string"),
        {"name": "n", "type": ["null", "double"]},
        {"name": "added", "type": {"type": "bytes"}, "default": "\u00ff"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 5},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["a"]},
        {"name": "in", "type": record(("z", "double"), name="Z"), "default": {"z": 1}},
    )
    datum = {"gone": [None, "x", {"x": 1}], "n": 7, "old": "o", "kept": "ö".encode()}
    assert resolved(writer, reader, datum)[:-1] == [
        "o", "ö", 7.0, b"\xff", 5000, ["a"], [1.0, None]
    ]  # fmt: skip


def test_a_name_wins_over_an_alias() -> None:
    reader = record({"name": "a", "type": "int", "aliases": ["b"]})
    writer = record(("b", "int"), ("a", "int"))
    assert resolved(writer, reader, {"a": 1, "b": 2})[:-1] == [1]


def test_enums_resolve_by_symbol() -> None:
    def enum(*symbols: str, **more: str) -> dict[str, Any]:
        return record(("e", {"type": "enum", "name": "E", "symbols": [*symbols], **more}))

    assert resolved(enum("A", "B"), enum("B", "C", default="C"), {"e": "A"})[0] == "C"
    assert resolved(enum("A", "B"), enum("B", "C"), {"e": "B"})[0] == "B"
    with pytest.raises(Exception, match="A is no symbol of the reader's E"):
        resolved(enum("A", "B"), enum("B", "C"), {"e": "A"})


def test_units_of_time_are_the_writers() -> None:
    def long(logical: str) -> dict[str, Any]:
        return record(("x", {"type": "long", "logicalType": logical}))

    for writer, number in (("timestamp-millis", 1), ("timestamp-micros", 1000)):
        data = encode(record(("x", "long")), {"x": number})
        for reader in ("timestamp-millis", "timestamp-micros", "timestamp-nanos"):
            parsed = [
                AvroSchema.parse(Definition(json.dumps(long(name)))) for name in (writer, reader)
            ]
            assert compile_reader(*parsed)(data, 0)[0][0] == 1000


@pytest.mark.parametrize(
    ("writer", "reader", "why"),
    [
        ("string", "int", "string is no int"),
        ("long", "int", "long is no int"),
        ("double", "float", "double is no float"),
        ("null", "int", "null is no int"),
        ({"type": "array", "items": "string"}, {"type": "array", "items": "int"}, "string is no"),
        (record(("a", "int"), name="A"), record(("a", "int"), name="B"), "record A is no B"),
        (record(("a", "int"), name="A"), record(("b", "int"), name="A"), "b: the writer has no"),
        (
            {"type": "fixed", "name": "F", "size": 2},
            {"type": "fixed", "name": "F", "size": 3},
            "F has another size",
        ),
        (
            {"type": "bytes"} | decimal_of(5, 1),
            {"type": "bytes"} | decimal_of(5, 2),
            "a decimal of another scale",
        ),
    ],
)
def test_schemas_that_never_fit_are_found_before_any_datum(
    writer: Any, reader: Any, why: str
) -> None:
    parsed = [
        AvroSchema.parse(Definition(json.dumps(record(("x", kind))))) for kind in (writer, reader)
    ]
    with pytest.raises(Incompatible, match=f"x: .*{why}"):
        compile_reader(*parsed)


def test_a_branch_that_does_not_fit_rejects_only_its_own_datums() -> None:
    writer, reader = record(("x", ["null", "string", "int"])), record(("x", ["null", "long"]))
    assert resolved(writer, reader, {"x": None})[0] is None
    assert resolved(writer, reader, {"x": 5})[0] == 5
    with pytest.raises(Exception, match="x: string is no long"):
        resolved(writer, reader, {"x": "a"})


def test_what_holds_itself_can_be_skipped_and_not_too_deep() -> None:
    node = record(("next", ["null", "Node"]), name="Node")
    writer = record(("list", node), ("n", "int"))
    reader = record(("n", "int"))
    datum: dict[str, Any] = {"next": None}
    for _ in range(50):
        datum = {"next": datum}
    assert resolved(writer, reader, {"list": datum, "n": 3})[0] == 3
    parsed = [AvroSchema.parse(Definition(json.dumps(schema))) for schema in (writer, reader)]
    with pytest.raises(RecursionError):  # which the decoder makes a rejection
        compile_reader(*parsed)(b"\x02" * 100_000 + b"\x00\x06", 0)


@pytest.mark.parametrize("native", ["", "off"])
@pytest.mark.parametrize("leaf", ["null", {"type": "array", "items": "null"}])
def test_a_type_that_is_referred_to_twice_is_compiled_and_skipped_once(
    leaf: Any, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 levels, so 2^40 values of the innermost type. Those that take no bytes are not read."""
    monkeypatch.setenv(SWITCH, native)
    writer = record(("n", "int"), ("gone", ["int", doubled(40, leaf)]))
    with running() as server:
        head = b"\0" + server.add(writer).to_bytes(4, "big")
        made = decoder(record(("n", "int")), registry=Registry({"url": server.url}))
        decoded = made.decode(table(head + b"\x06\x00\x00", head + b"\x06\x02"))
    rows, refused = decoded.rows.to_pylist(), [r.reason for r in decoded.rejections]
    assert rows == [{"n": 3}] * (1 if isinstance(leaf, dict) else 2)
    assert len(refused) == 2 - len(rows)
    assert all(reason.endswith(".x: it ends too early") for reason in refused)


def test_items_without_bytes_are_bounded_by_the_bytes_of_the_record() -> None:
    nothing = {"type": "fixed", "name": "Z", "size": 0}
    for item in (nothing, record(("a", "null"), ("b", nothing), name="Free")):
        writer = record(("n", "int"), ("x", {"type": "array", "items": item}))
        reader = writer if item is nothing else record(("n", "int"))
        parsed = [AvroSchema.parse(Definition(json.dumps(one))) for one in (writer, reader)]
        read = compile_reader(*parsed)
        many = b"\xfe\x0f"  # 1,023
        value, end = read(b"\x06" + many + b"\x0c\x00", 0)  # and 6
        assert (value[0], end) == (3, 5)
        assert reader is not writer or value[1] == [b""] * 1029
        with pytest.raises(Corrupt, match="more than 1030 items take no bytes"):
            read(b"\x06" + many + b"\x0c\x08\x00", 0)


def test_a_decoder_travels_by_pickle_also_after_use() -> None:
    made = decoder(FLIGHT)
    before = made.decode(table(GOOD))
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.decode(table(GOOD)).rows == before.rows
    assert made.decode(table()).rows.schema == made.schema
