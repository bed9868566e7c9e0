from __future__ import annotations

import pyarrow as pa
import pytest

from oncely.decode.schema import is_json, parse_schema, type_name, without_json
from oncely.errors import ConfigError


def types(ddl: str) -> list[tuple[str, pa.DataType, bool]]:
    return [(field.name, field.type, field.nullable) for field in parse_schema(ddl)]


def test_every_type_of_spark_has_an_arrow_type() -> None:
    assert types(
        "carrier STRING NOT NULL, flight INT, time_hour TIMESTAMP, dep_delay DOUBLE, "
        "tags ARRAY<STRING>, where STRUCT<lat: DOUBLE, lon: DOUBLE NOT NULL>, "
        "amount DECIMAL(12,2), m MAP<STRING, INT>"
    ) == [
        ("carrier", pa.string(), False),
        ("flight", pa.int32(), True),
        ("time_hour", pa.timestamp("us", "UTC"), True),
        ("dep_delay", pa.float64(), True),
        ("tags", pa.list_(pa.string()), True),
        (
            "where",
            pa.struct([("lat", pa.float64()), pa.field("lon", pa.float64(), nullable=False)]),
            True,
        ),
        ("amount", pa.decimal128(12, 2), True),
        ("m", pa.map_(pa.string(), pa.int32()), True),
    ]
    assert [arrow for _, arrow, _ in types(
        "a BOOLEAN, b TINYINT, c SMALLINT, d BIGINT, e FLOAT, f DATE, g TIMESTAMP_NTZ, h BINARY,"
        "i DECIMAL, j DECIMAL(5), k BYTE, l SHORT, m INTEGER, n LONG, o REAL, p TIMESTAMP_LTZ,"
        "q DEC(3,3), r NUMERIC(38, 0)"
    )] == [
        pa.bool_(), pa.int8(), pa.int16(), pa.int64(), pa.float32(), pa.date32(),
        pa.timestamp("us"), pa.binary(), pa.decimal128(10, 0), pa.decimal128(5, 0), pa.int8(),
        pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.timestamp("us", "UTC"),
        pa.decimal128(3, 3), pa.decimal128(38, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "name"),
    [
        ("where STRING", "where"),
        ("timestamp STRING", "timestamp"),
        ("not STRING", "not"),
        ("comment STRING", "comment"),
        ("array ARRAY<INT>", "array"),
        ("1st STRING", "1st"),
        ("größe STRING", "größe"),
        ("`a b,c<>` STRING", "a b,c<>"),
        ("`a``b` STRING", "a`b"),
        ("`1` STRING", "1"),
        ("id: BIGINT", "id"),
        ("id bigint comment 'it''s' ", None),
        ("id bigint comment 'the \\'id\\', of it'", "id"),
    ],
)
def test_names_are_any_word_and_anything_between_backticks(ddl: str, name: str | None) -> None:
    if name is None:
        with pytest.raises(ConfigError):
            parse_schema(ddl)
    else:
        assert parse_schema(ddl).names == [name]


def test_types_nest_and_case_and_white_space_do_not_count() -> None:
    (field,) = parse_schema(
        '\n x array < struct<a:map<string,array<int>>not null comment "A",b :decimal( 3 , 1 )> >'
    )
    inner = pa.struct(
        [
            pa.field("a", pa.map_(pa.string(), pa.list_(pa.int32())), nullable=False),
            ("b", pa.decimal128(3, 1)),
        ]
    )
    assert field.type == pa.list_(inner)
    assert type_name(field.type) == ("ARRAY<STRUCT<a: MAP<STRING, ARRAY<INT>>, b: DECIMAL(3,1)>>")


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("", "at character 1: the schema has no columns"),
        ("  ", "the schema has no columns"),
        ("id", "at character 3: the end is not one of the types"),
        ("id BIGINT,", "expected a column's name, found the end"),
        ("id BIGINT at TIMESTAMP", "at character 11: expected ',' after 'id', found 'at'"),
        ("id BIGINT, id STRING", "'id' is repeated"),
        ("s STRUCT<a: INT, a: INT>", "'a' is repeated"),
        ("s STRUCT<>", "STRUCT has no columns"),
        ("id CLOB", "'CLOB' is not one of the types STRING, BOOLEAN"),
        ("id VARCHAR(x)", "expected a number, found 'x'"),
        ("id VARCHAR(3", "expected ')', found the end"),
        ("a ARRAY<JSON>", "at character 9: JSON is the type of a whole column"),
        ("a STRUCT<b: JSON>", "JSON is the type of a whole column"),
        ("id INTERVAL", "'INTERVAL' is not one of the types"),
        ("id NOT NULL", "'NOT' is not one of the types"),
        ("id INT NULL", "expected ','"),
        ("1 INT", "expected a column's name, found '1'"),
        ("`` INT", "expected a column's name"),
        ("`a INT", "at character 1: '`' has no meaning here"),
        ("a INT; DROP", "';' has no meaning here"),
        ("a.b INT", "'.' has no meaning here"),
        ("a DECIMAL(39,0)", "takes 1 to 38 digits"),
        ("a DECIMAL(0,0)", "takes 1 to 38 digits"),
        ("a DECIMAL(3,4)", "no more of them after the point"),
        ("a DECIMAL(x)", "expected a number, found 'x'"),
        ("a DECIMAL(99999999)", "expected a number"),
        ("a DECIMAL(3", "expected ')', found the end"),
        ("a ARRAY", "expected '<', found the end"),
        ("a ARRAY<INT", "expected '>', found the end"),
        ("a MAP<INT, INT>", "the keys of a MAP are STRING"),
        ("a MAP<STRING>", "expected ',', found '>'"),
        ("a INT COMMENT b", "expected a quoted comment, found 'b'"),
        ("a " + "ARRAY<" * 5000 + "INT" + ">" * 5000, "nested more than 32 deep"),
    ],
)
def test_what_is_no_schema_is_named_with_its_place(ddl: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_schema(ddl, key="decode.key.schema")
    assert caught.value.key == "decode.key.schema"
    assert problem in caught.value.message
    assert "Spark's DDL" in caught.value.way_out


def test_texts_of_sql_are_strings() -> None:
    schema = parse_schema("a VARCHAR(10), b char(3), c CHARACTER(1), d text, e ARRAY<VARCHAR(5)>")
    assert schema.types == [*[pa.string()] * 4, pa.list_(pa.string())]


def test_a_column_may_be_json() -> None:
    schema = parse_schema("json STRING, p JSON NOT NULL COMMENT 'x', q json")
    assert [is_json(one) for one in schema] == [False, True, True]
    assert schema.types == [pa.string()] * 3
    assert [one.nullable for one in schema] == [True, False, True]
    assert not any(map(is_json, without_json(schema)))
