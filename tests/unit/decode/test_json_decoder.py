from __future__ import annotations

import gc
import json
import math
import pickle
import tracemalloc
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from oncely.decode.base import Decoded
from oncely.decode.json import JsonDecoder, TypedJson
from oncely.decode.reference import nesting, read_record
from oncely.decode.schema import parse_schema

FLIGHTS = "carrier STRING NOT NULL, flight INT, time_hour TIMESTAMP, dep_delay DOUBLE"


def decode(ddl: str, *values: bytes | None) -> Decoded:
    return JsonDecoder(parse_schema(ddl)).decode(table(*values))


def table(*values: bytes | None) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.binary())})


def column(ddl_type: str, *texts: str) -> list[Any]:
    """What JSON texts become in a column of that type; for a rejection its reason."""
    decoded = decode(f"x {ddl_type}", *(f'{{"x": {text}}}'.encode() for text in texts))
    found: list[Any] = [None] * len(texts)
    for record, value in zip(decoded.row_record.to_pylist(), decoded.rows["x"], strict=True):
        found[record] = value.as_py()
    for rejection in decoded.rejections:
        assert rejection.stage == "decode"
        found[rejection.record] = rejection.reason
    return found


def test_a_record_becomes_a_row_of_the_schema() -> None:
    decoded = decode(
        FLIGHTS,
        b'{"carrier": "UA", "flight": 1545, "time_hour": "2013-01-01T10:00:00Z", "dep_delay": 2}',
        b'{"flight": null, "carrier": "A\\u0000A", "later": {"added": [1, 2]}}',
    )
    assert decoded.rows.to_pylist() == [
        {
            "carrier": "UA",
            "flight": 1545,
            "time_hour": datetime(2013, 1, 1, 10, tzinfo=UTC),
            "dep_delay": 2.0,
        },
        {"carrier": "A\0A", "flight": None, "time_hour": None, "dep_delay": None},
    ]
    assert decoded.rows.schema == parse_schema(FLIGHTS)
    assert decoded.row_record.to_pylist() == [0, 1]
    assert list(decoded.rejections) == []
    assert decoded.tombstones is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "the value is null"),
        (b"", "the value is blank"),
        (b" \r\n\t", "the value is blank"),
        (b"null", "the value is not a JSON object but null"),
        (b"[1, 2]", "the value is not a JSON object but an array of 2"),
        (b'"text"', 'the value is not a JSON object but the text "text"'),
        (b"not JSON", "the value is not JSON: Expecting value at character 1"),
        (b'{"carrier": "UA"', "the value is not JSON: Expecting ',' delimiter at character 17"),
        (b'{"carrier": "UA"} {}', "the value is not JSON: Extra data at character 19"),
        (b'{"carrier": "UA"}\n{"carrier": 1}', "the value is not JSON: Extra data at character 19"),
        (b'\xef\xbb\xbf{"carrier": "UA"}', "the value begins with a byte order mark (EF BB BF)"),
        (
            b'{"carrier": "U\nA"}',
            "the value is not JSON: Invalid control character at character 15",
        ),
        (b'{"carrier": "U\xffA"}', "the value is not UTF-8: byte 0xff at 14"),
        (b'{"carrier": "UA", "z": "\xed\xa0\x80"}', "the value is not UTF-8: byte 0xed at 24"),
        (b'{"carrier": "\\ud800"}', "the value is not JSON: \\ud800 is half a surrogate pair"),
        (b'{"carrier": "UA", "z": NaN}', "the value is not JSON: NaN is no number"),
        (b'{"carrier": "UA", "z": -Infinity}', "the value is not JSON: -Infinity is no number"),
        (b'{"z": ' + b"[" * 128 + b"]" * 128 + b"}", "the value is nested more than 128 deep"),
        (b"{}", "carrier: found nothing, but it is NOT NULL"),
        (b'{"carrier": null}', "carrier: found null, but it is NOT NULL"),
        (b'{"Carrier": "UA"}', "carrier: found nothing, but it is NOT NULL"),
        (b'{"carrier": 5}', "carrier: expected STRING, found 5"),
        (b'{"carrier": "UA", "flight": "5"}', 'flight: expected INT, found the text "5"'),
        (b'{"carrier": "UA", "flight": 1.5}', "flight: expected INT, found 1.5"),
        (b'{"carrier": "UA", "flight": true}', "flight: expected INT, found true"),
        (b'{"carrier": "UA", "flight": 2147483648}', "flight: 2147483648 is out of range of INT"),
        (b'{"carrier": "UA", "dep_delay": 1e309}', "dep_delay: 1e309 is out of range of DOUBLE"),
        (
            b'{"carrier": "UA", "time_hour": "yesterday"}',
            'time_hour: expected TIMESTAMP, found the text "yesterday"',
        ),
        (b'{"carrier": {"a": 1, "b": 2}}', "carrier: expected STRING, found an object of 2"),
    ],
)  # fmt: skip
def test_a_bad_record_is_rejected_with_its_reason_and_leaves_its_neighbours(
    value: bytes | None, reason: str
) -> None:
    good = b'{"carrier": "UA", "flight": %d}'
    decoded = decode(FLIGHTS, good % 1, value, good % 2)
    assert [(r.record, r.reason) for r in decoded.rejections] == [(1, reason)]
    assert decoded.row_record.to_pylist() == [0, 2]
    assert decoded.rows["flight"].to_pylist() == [1, 2]


def test_a_reason_is_short_and_printable_however_large_the_record() -> None:
    huge = json.dumps({"carrier": "UA", "flight": "\0" * 1_000_000}).encode()
    digits = b'{"carrier": "UA", "flight": ' + b"9" * 1_000_000 + b"}"
    shown = [r.reason for r in decode(FLIGHTS, huge, digits).rejections]
    assert shown == [
        'flight: expected INT, found the text "' + 40 * "\\u0000" + '" and 999960 characters more',
        "flight: a number of 1000000 characters is out of range of INT",
    ]


def test_integers_keep_their_width() -> None:
    assert column("TINYINT", "-128", "127", "128") == [
        -128, 127, "x: 128 is out of range of TINYINT"
    ]  # fmt: skip
    assert column("BIGINT", "9223372036854775807", "-9223372036854775808", "-0", "1.0", "1e2") == [
        2**63 - 1, -(2**63), 0, "x: expected BIGINT, found 1.0", "x: expected BIGINT, found 1e2",
    ]  # fmt: skip
    assert column("BIGINT", "9223372036854775808")[0].endswith("is out of range of BIGINT")


def test_decimals_are_exact_or_refused() -> None:
    assert column(
        "DECIMAL(4,2)", "1", "1.5", "-99.99", "1.50000", "1e1", "15e-1", "0e99", "1.255", "100",
        "[1.5]", "true", "1." + "0" * 3000, "1e999999999999999999999",
    ) == [
        *map(Decimal, ("1.00", "1.50", "-99.99", "1.50", "10.00", "1.50", "0.00")),
        "x: 1.255 does not fit DECIMAL(4,2) exactly",
        "x: 100 does not fit DECIMAL(4,2) exactly",
        "x: expected DECIMAL(4,2), found an array of 1",
        "x: expected DECIMAL(4,2), found true",
        Decimal("1.00"),
        "x: 1e999999999999999999999 does not fit DECIMAL(4,2) exactly",
    ]  # fmt: skip


@pytest.mark.parametrize("type_", ["FLOAT", "DOUBLE"])
def test_floats_that_are_no_numbers_of_json_are_the_texts_that_a_kafka_sink_writes(
    type_: str,
) -> None:
    found = column(type_, "1.5", '"Infinity"', '"-Infinity"', '"NaN"', '"nan"', '"inf"', '"1.5"')
    assert found[:3] == [1.5, math.inf, -math.inf]
    assert math.isnan(found[3])
    assert all(reason.startswith(f"x: expected {type_}") for reason in found[4:])


def test_decimals_may_be_texts() -> None:
    good = ["179828.0471", "-0.5", "+7", "0007.50", "1e2", "15e-1", ".5", "5.", "-0", "0e99"]
    good.append("1." + "0" * 3000)
    texts = [
        "1.00001",
        "1e20",
        "",
        "-",
        ".",
        "1,5",
        " 1",
        "1 ",
        "0x1",
        "NaN",
        "1_0",
        "٣",
        "1e",
        "1\n",
    ]
    found = column("DECIMAL(18,4)", *map(json.dumps, [*good, *texts]), "7.25", "null")
    assert found[: len(good)] == [Decimal(text).quantize(Decimal("0.0001")) for text in good]
    assert found[-2:] == [Decimal("7.25"), None]
    reasons = found[len(good) : -2]
    assert reasons[0] == 'x: the text "1.00001" does not fit DECIMAL(18,4) exactly'
    assert reasons[1] == 'x: the text "1e20" does not fit DECIMAL(18,4) exactly'
    assert reasons[2] == 'x: expected DECIMAL(18,4), found the text ""'
    assert all(reason.startswith("x: expected DECIMAL(18,4)") for reason in reasons[2:])
    nines = "9" * 38
    assert column("DECIMAL(38,0)", f'"{nines}"', f'"0{nines}"', f'"{nines}9"') == [
        Decimal(nines), Decimal(nines), f'x: the text "{nines}9" does not fit DECIMAL(38,0) exactly'
    ]  # fmt: skip
    # A number stays no text, and a text no other number.
    assert column("STRING", "1.5")[0].startswith("x: expected STRING")
    assert column("DOUBLE", '"1.5"')[0].startswith("x: expected DOUBLE")


def test_a_column_of_decimals_in_texts_is_decoded_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes | None] = []

    def counted(data: bytes | None, *given: Any, **named: Any) -> Any:
        asked.append(data)
        return read_record(data, *given, **named)

    monkeypatch.setattr("oncely.decode.json.read_record", counted)
    values = [f'{{"x": "{i}.{i:04}", "y": {i}.5}}'.encode() for i in range(1_000)]
    mixed = [b'{"x": 1.5, "y": "2.5"}', b'{"x": "1.00001"}', b'{"x": "n/a"}', b'{"y": "1e1"}']
    found = decode("x DECIMAL(18,4), y DECIMAL(18,4)", *values, *mixed)
    assert [rejection.record for rejection in found.rejections] == [1_001, 1_002]
    assert found.rows["x"][999].as_py() == Decimal("999.0999")
    assert asked == mixed[1:]


def test_a_key_may_hold_a_decimal_as_a_text() -> None:
    schema = parse_schema("id DECIMAL(10,2)")
    records = pa.table({"key": pa.array([b'{"id": "7.25"}', b'{"id": "7.255"}'], pa.binary())})
    found = JsonDecoder(schema, column="key").decode(records)
    assert found.rows["id"].to_pylist() == [Decimal("7.25")]
    assert [rejection.record for rejection in found.rejections] == [1]


def test_floats_round_but_never_to_infinity_or_zero() -> None:
    texts = ("0.1", "3.4028235e38", "3.5e38", "1e-60", "1e-45", "0e-99", "-1e-46")
    assert column("FLOAT", *texts) == [
        0.10000000149011612, 3.4028234663852886e38, "x: 3.5e38 is out of range of FLOAT",
        "x: 1e-60 is out of range of FLOAT", 1.401298464324817e-45, 0.0,
        "x: -1e-46 is out of range of FLOAT",
    ]  # fmt: skip
    long = "0." + "0" * 330 + "1"
    assert column("DOUBLE", "5e-324", "1E-400", "-2e-324", "0e-400", "[1e-400]", f"-{long}") == [
        5e-324, "x: 1E-400 is out of range of DOUBLE", "x: -2e-324 is out of range of DOUBLE", 0.0,
        "x: expected DOUBLE, found an array of 1",
        "x: a number of 334 characters is out of range of DOUBLE",
    ]  # fmt: skip
    assert column("ARRAY<DOUBLE>", "[0.5,\n1e-400]", "[0.0, 1e-300]") == [
        "x[1]: 1e-400 is out of range of DOUBLE", [0.0, 1e-300]
    ]  # fmt: skip
    assert [str(value) for value in column("DOUBLE", "-0", "-0.0")] == ["0.0", "-0.0"]


def test_dates_times_and_bytes_are_texts() -> None:
    assert column("DATE", '"2012-02-29"', '"2013-02-29"', "15000") == [
        date(2012, 2, 29),
        'x: expected DATE, found the text "2013-02-29"',
        "x: expected DATE, found 15000",
    ]
    assert column("TIMESTAMP", '"2013-01-01T05:00:00+05:00"', '"2013-01-01"', "1357000000") == [
        datetime(2013, 1, 1, tzinfo=UTC),
        datetime(2013, 1, 1, tzinfo=UTC),
        "x: expected TIMESTAMP, found 1357000000",
    ]
    assert column("TIMESTAMP_NTZ", '"2013-01-01 05:00:00"', '"2013-01-01T05:00:00Z"') == [
        datetime(2013, 1, 1, 5),
        'x: expected TIMESTAMP_NTZ, found the text "2013-01-01T05:00:00Z"',
    ]
    assert column("BINARY", '"QUI="', '""', '"QUI"', '"QUJ="', '"QU\\nI="', '"QU-_"') == [
        b"AB",
        b"",
        'x: expected BINARY, found the text "QUI"',
        'x: expected BINARY, found the text "QUJ="',
        'x: expected BINARY, found the text "QU\\nI="',
        'x: expected BINARY, found the text "QU-_"',
    ]


def test_nested_types_and_the_way_down_to_what_is_wrong() -> None:
    assert column("ARRAY<INT>", "[]", "[1, null]", "[1, 2.5]", "{}") == [
        [],
        [1, None],
        "x[1]: expected INT, found 2.5",
        "x: expected ARRAY<INT>, found an object of 0",
    ]
    dates = "{}", '{"a": "2013-01-01", "b": null}', '{"a\\u0000": 1}'
    assert column("MAP<STRING, DATE>", *dates) == [
        [],
        [("a", date(2013, 1, 1)), ("b", None)],
        'x["a\\u0000"]: expected DATE, found 1',
    ]
    struct = "STRUCT<lat: DOUBLE NOT NULL, tags: ARRAY<STRUCT<n: TINYINT>>>"
    assert column(
        struct, '{"lat": 1}', '{"tags": []}', '{"lat": 1, "tags": [{"n": 1}, null, {"n": 300}]}'
    ) == [
        {"lat": 1.0, "tags": None},
        "x.lat: found nothing, but it is NOT NULL",
        "x.tags[2].n: 300 is out of range of TINYINT",
    ]


def test_of_a_name_that_is_there_twice_the_last_counts() -> None:
    assert decode(
        "x INT", b'{"x": 1, "x": 2}', b'{"x": "a", "x": 2}', b'{"x": 1, "\\u0078": null}'
    ).rows["x"].to_pylist() == [2, 2, None]


def test_line_breaks_between_tokens_are_white_space() -> None:
    decoded = decode("x INT, y INT", b'\r\n{\n"x"\n:\n1,\n"y": 2}\n', b'{"x": 3}')
    assert decoded.rows.to_pylist() == [{"x": 1, "y": 2}, {"x": 3, "y": None}]


def test_names_that_msgspec_can_not_match_go_by_the_reference() -> None:
    decoded = decode('`a"b` INT, `c\\d` INT', b'{"a\\"b": 1, "c\\\\d": 2}', b'{"a\\"b": "x"}')
    assert decoded.rows.to_pylist() == [{'a"b': 1, "c\\d": 2}]
    assert [r.reason for r in decoded.rejections] == ['a"b: expected INT, found the text "x"']


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.binary_view()])
def test_chunks_slices_and_types_of_the_column_do_not_matter(kind: pa.DataType) -> None:
    values = [b'{"x": %d}' % n if n % 3 else b"bad" for n in range(20)]
    whole = pa.chunked_array([pa.array(values[:7]), pa.array(values[7:])]).cast(kind)
    decoded = JsonDecoder(parse_schema("x INT")).decode(pa.table({"value": whole.slice(5, 10)}))
    good = [n for n in range(5, 15) if n % 3]
    assert decoded.rows["x"].to_pylist() == good
    assert decoded.row_record.to_pylist() == [n - 5 for n in good]
    assert [r.record for r in decoded.rejections] == [n - 5 for n in range(5, 15) if not n % 3]


def test_no_records_are_no_rows_of_the_same_schema() -> None:
    decoder = JsonDecoder(parse_schema(FLIGHTS))
    for records in (table(), pa.table({"value": pa.chunked_array([], pa.binary())})):
        decoded = decoder.decode(records)
        assert decoded.rows.schema == decoder.schema
        assert (len(decoded.rows), decoded.row_record.to_pylist()) == (0, [])


def test_a_decoder_travels_by_pickle_also_after_use() -> None:
    decoder = JsonDecoder(parse_schema("x INT"), column="key")
    records = pa.table({"key": pa.array([b'{"x": 1}', None])})
    before = decoder.decode(records)
    for dumps in (pickle.dumps, cloudpickle.dumps):
        again = pickle.loads(dumps(decoder))
        assert again == decoder
        assert again.needs == {"key"}
        assert again.decode(records).rows == before.rows
    assert [r.reason for r in before.rejections] == ["the key is null"]


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    decode("x INT", b'{"x": 1}')
    assert gc.isenabled()
    gc.disable()
    try:
        decode("x INT", b'{"x": 1}')
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_huge_records_are_held_as_python_objects_one_at_a_time() -> None:
    size = 20_000_000
    value = b'{"x": 1, "y": "' + b"y" * size + b'"}'
    records = pa.table({"value": pa.array([value] * 6, pa.large_binary())})
    decoder = JsonDecoder(parse_schema("x INT"))
    decoder.decode(table(b'{"x": 1}'))
    tracemalloc.start()
    try:
        assert decoder.decode(records).rows["x"].to_pylist() == [1] * 6
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * size


def test_nesting_counts_brackets_outside_texts() -> None:
    assert nesting("") == 0
    assert nesting('{"a": [1, {"b": []}], "c": {}}') == 4
    assert nesting('{"[[[": "]]{{\\"[[", "a": "\\\\"}') == 1
    assert nesting('["' + "[" * 1_000_000) == 1


class TestScalarsAsTexts:
    """As Spark's ``from_json`` reads them; ``strict`` refuses them."""

    DDL = "s STRING, l ARRAY<STRING>, o STRUCT<s: STRING>, m MAP<STRING, STRING>"
    VALUE = b'{"s": 1.50, "l": [true, "a", null, 1e3], "o": {"s": -0}, "m": {"k": 7}}'

    def decoded(self, *values: bytes, strict: bool) -> Decoded:
        return JsonDecoder(parse_schema(self.DDL), "value", strict).decode(table(*values))

    def test_a_number_or_boolean_keeps_its_text(self) -> None:
        found = self.decoded(self.VALUE, b'{"s": "x"}', strict=False)
        assert not found.rejections
        first = found.rows.to_pylist(maps_as_pydicts="strict")[0]
        assert first == {"s": "1.50", "l": ["true", "a", None, "1e3"], "o": {"s": "-0"},
                         "m": {"k": "7"}}  # fmt: skip
        assert found.row_record.to_pylist() == [0, 1]

    def test_strict_refuses_them(self) -> None:
        (refused,) = self.decoded(self.VALUE, strict=True).rejections
        assert refused.reason == "s: expected STRING, found 1.50"

    @pytest.mark.parametrize("text", ["{}", '{"a": 1}', "[]", "[1]"])
    def test_objects_and_arrays_are_no_texts(self, text: str) -> None:
        (refused,) = self.decoded(f'{{"s": {text}}}'.encode(), strict=False).rejections
        assert refused.reason.startswith("s: expected STRING, found an ")

    def test_other_types_stay_what_they_are(self) -> None:
        schema = parse_schema("n INT, b BOOLEAN, d DOUBLE, t DATE, x BINARY")
        decoder = JsonDecoder(schema, "value", strict=False)
        values = [b'{"n": true}', b'{"b": 1}', b'{"d": "1"}', b'{"t": 1}', b'{"x": 1}']
        assert len(decoder.decode(table(*values)).rejections) == 5


class TestJsonColumns:
    """Any value, as JSON without spaces."""

    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ('{"a": [1, 1.50, "\\u00e9"], "b": {}}', '{"a":[1,1.50,"é"],"b":{}}'),
            ("1e400", "1e400"),
            (" true ", "true"),
            ('"x\\n"', '"x\\n"'),
            ('[ {"a": 1, "a": 2} ]', '[{"a":2}]'),
            ("null", None),
        ],
    )
    def test_a_value_keeps_its_spelling(self, text: str, kept: str | None) -> None:
        assert column("JSON", text) == [kept]
        # The reference gives the same: a name that msgspec can't match leaves it all records.
        slow = decode('`"` INT, x JSON', f'{{"x": {text}}}'.encode())
        assert slow.rows["x"].to_pylist() == [kept]

    @pytest.mark.parametrize("text", ["[NaN]", '"\\ud800"', '["\\ud800"]', "[1,]", "tru", '"\t"'])
    def test_what_is_not_json_is_refused(self, text: str) -> None:
        (reason,) = column("JSON", text)
        assert reason is not None
        assert reason.startswith("the value is not JSON: ")

    def test_null_and_nothing_are_refused_if_it_must_have_a_value(self) -> None:
        found = decode("x JSON NOT NULL", b'{"x": null}', b"{}", b'{"x": 1}')
        assert [one.reason for one in found.rejections] == [
            "x: found null, but it is NOT NULL", "x: found nothing, but it is NOT NULL",
        ]  # fmt: skip
        assert found.rows["x"].to_pylist() == ["1"]


def test_records_are_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fast path, JSON columns too, and by the reference."""
    schema = parse_schema("id BIGINT NOT NULL, s STRING, at TIMESTAMP, o STRUCT<x: INT>")
    good = [
        b'{"schema": {"type": "struct"}, "payload": {"id": 1, "s": "x", "at": "2026-01-01"}}',
        b'{"payload": {"id": 2, "o": {"x": 3}, "more": 1}}',
    ]
    bad = [b"{}", b'{"payload": null}', b'{"payload": [1]}', b'{"payload": {"s": "x"}}', None]
    decoder = JsonDecoder(schema, unwrap="payload")
    fast = decoder.decode(table(*good))
    assert fast.rows.schema == schema
    assert [one["id"] for one in fast.rows.to_pylist()] == [1, 2]
    found = decoder.decode(table(*good, *bad))
    assert [one.reason for one in found.rejections] == [
        "payload: found nothing, but it is NOT NULL",
        "payload: found null, but it is NOT NULL",
        "payload: expected STRUCT<id: BIGINT, s: STRING, at: TIMESTAMP, o: STRUCT<x: INT>>,"
        " found an array of 1",
        "payload.id: found nothing, but it is NOT NULL",
        "the value is null",
    ]
    monkeypatch.setattr(TypedJson, "make", lambda *_, **__: None)
    again = JsonDecoder(schema, unwrap="payload").decode(table(*good, *bad))
    assert again.rows.equals(fast.rows)
    assert again.rejections == found.rejections
    monkeypatch.undo()
    monkeypatch.setattr("oncely.decode.json.read_record", None)
    json = JsonDecoder(parse_schema("id BIGINT, j JSON"), unwrap="payload")
    rows = json.decode(table(b'{"payload": {"id": 1, "j": {"a": [1.50]}}}', *good[:1])).rows
    assert rows.to_pylist() == [{"id": 1, "j": '{"a":[1.50]}'}, {"id": 1, "j": None}]
