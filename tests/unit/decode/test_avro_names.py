from __future__ import annotations

import hashlib
import json

import pyarrow as pa
import pytest

from oncely.decode.avro_schema import (
    arrow_schema_of,
    avro_name,
    avro_schema_of,
    column_name,
    schema_id,
    storable,
)
from oncely.errors import InvariantViolation, TableMismatch


@pytest.mark.parametrize(
    ("name", "avro"),
    [
        ("carrier", "carrier"),
        ("pos_x", "pos_x"),
        ("_x", "_x"),
        ("a.b", "a_x002E_b"),
        ("", "_x_"),
        ("_x_", "_x005F_x_"),
        ("1st", "_x0031_st"),
        ("_x0041_", "_x005F_x0041_"),
        ("_x0041é", "_x005F_x0041_x00E9_"),
        ("😀", "_x1F600_"),
        ("__proto__", "__proto__"),
    ],
)
def test_names(name: str, avro: str) -> None:
    assert avro_name(name) == avro
    assert column_name(avro) == name


@pytest.mark.parametrize("foreign", ["_xD800_", "_xFFFFFF_", "_xabcd_", "_x12_"])
def test_what_is_no_escape_stands_for_itself(foreign: str) -> None:
    assert column_name(foreign) == foreign


def test_the_text_of_a_schema_is_fixed() -> None:
    inner = pa.struct({"id": pa.int64(), "at": pa.timestamp("us", "UTC")})
    text = avro_schema_of(pa.schema({"user": inner, "tags": pa.list_(inner)}))
    fields = (
        '"fields":[{"name":"id","type":["null","long"],"default":null},{"name":"at","type":'
        '["null",{"type":"long","logicalType":"timestamp-micros"}],"default":null}]}'
    )
    assert text == (
        '{"type":"record","name":"Record","fields":[{"name":"user","type":["null",{"type":'
        f'"record","name":"user_record","namespace":"Record",{fields}],"default":null}},'
        '{"name":"tags","type":["null",{"type":"array","items":["null",{"type":"record",'
        f'"name":"tags_record","namespace":"Record",{fields}]}}],"default":null}}]}}'
    )
    assert schema_id(text) == hashlib.sha256(text.encode()).hexdigest()[:16] == "31b43026f7dc720c"


def deep(depth: int, name: str) -> pa.Schema:
    arrow = pa.int64()
    for _ in range(depth):
        arrow = pa.struct({name: arrow})
    return pa.schema({name: arrow})


def test_a_deep_schema_of_long_names_grows_no_faster_than_its_names() -> None:
    schema = deep(31, "é" * 255)
    text = avro_schema_of(schema)
    assert len(text) < 32 * (255 * 8 + 200)
    assert arrow_schema_of(text) == schema


def test_records_of_the_same_field_name_differ() -> None:
    both = pa.struct({"a": pa.struct({"a": pa.int64()}), "a_record": pa.struct({"a": pa.int64()})})
    text = avro_schema_of(pa.schema({"a": both, "Record": both}))
    assert len(arrow_schema_of(text)) == 2  # fastavro refuses a name that is defined twice


def test_other_types_become_storable() -> None:
    schema = pa.schema(
        {
            "i": pa.int16(),
            "u": pa.uint32(),
            "s": pa.large_string(),
            "d": pa.dictionary(pa.int32(), pa.string()),
            "t": pa.timestamp("ms", "Europe/Berlin"),
            "m": pa.map_(pa.string(), pa.list_(pa.int8())),
        }
    )
    assert storable(schema) == pa.schema(
        {
            "i": pa.int32(),
            "u": pa.int64(),
            "s": pa.string(),
            "d": pa.string(),
            "t": pa.timestamp("us", "UTC"),
            "m": pa.list_(pa.struct({"key": pa.string(), "value": pa.list_(pa.int32())})),
        }
    )
    table = pa.Table.from_pylist(
        [{"i": 1, "u": 2, "s": "x", "d": "y", "t": None, "m": [("k", [1, None])]}], schema
    ).cast(storable(schema))
    assert table.to_pylist()[0]["m"] == [{"key": "k", "value": [1, None]}]


@pytest.mark.parametrize(
    "arrow",
    [
        pa.null(),
        pa.struct([]),
        pa.time64("us"),
        pa.uint64(),
        pa.timestamp("ns"),
        pa.decimal256(50),
        pa.decimal128(5, -2),
        pa.decimal128(5, 7),
        pa.month_day_nano_interval(),
        pa.list_(pa.null()),
    ],
)
def test_what_has_no_place_is_refused_by_name(arrow: pa.DataType) -> None:
    schema = pa.schema({"n": pa.int64(), "who": pa.struct({"odd": arrow})})
    with pytest.raises(TableMismatch, match=r"'who\.odd") as refused:
        storable(schema)
    assert "transform" in refused.value.way_out
    with pytest.raises(InvariantViolation, match=r"who\.odd"):
        avro_schema_of(schema)


@pytest.mark.parametrize("text", ["", "{}", '"string"', json.dumps({"type": "record"}), "[]"])
def test_what_is_no_schema_of_ours(text: str) -> None:
    with pytest.raises(InvariantViolation, match="no schema of a file"):
        arrow_schema_of(text)
