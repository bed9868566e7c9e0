"""The fast JSON decoder and the per-record reference agree, whatever the bytes.

Records are named by their place: every valid record carries a serial number, so a decoder that
shifted rows by one, or dropped one and doubled another, would be seen.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncely.decode.base import Decoded
from oncely.decode.json import JsonDecoder
from oncely.decode.reference import InvalidRecord, JsonRules, read_record
from oncely.decode.schema import parse_schema
from tests.conftest import examples

SCHEMA = parse_schema(
    "serial BIGINT NOT NULL, name STRING, `größe` INT, tiny TINYINT, small SMALLINT, flag BOOLEAN,"
    "f FLOAT, d DOUBLE, amount DECIMAL(12,2), whole DECIMAL(38,0), day DATE, at TIMESTAMP,"
    "local TIMESTAMP_NTZ, data BINARY, tags ARRAY<STRING>, days ARRAY<DATE>,"
    "where STRUCT<lat: DOUBLE NOT NULL, at: TIMESTAMP, m: MAP<STRING, SMALLINT>>,"
    "m MAP<STRING, DECIMAL(4,1)>, deep ARRAY<STRUCT<a: ARRAY<MAP<STRING, TIMESTAMP>>>>"
)
DECODERS = {rounding: JsonDecoder(SCHEMA, rounding=rounding) for rounding in (False, True)}

NUMBERS = [
    "0", "-0", "-0.0", "0.0", "1", "-1", "1.0", "1.5", "1.25", "1e2", "1E+2", "15e-1", "1e-400",
    "127", "128", "-128", "-129", "32767", "32768", "2147483647", "2147483648", "-2147483648",
    "-2147483649", "9223372036854775807", "9223372036854775808", "-9223372036854775808",
    "-9223372036854775809", "18446744073709551615", "18446744073709551616", "1" * 38, "9" * 39,
    "1" * 309, "1" * 310, "-" + "1" * 5000, "1e308", "1.8e308", "1e309", "1e999999999999999999999",
    "0e999999999999999999999", "1e-999999999999999999999", "3.4028235e38", "3.4028236e38",
    "3.40282356779733661637e38", "3.40282356779733661638e38", "0.1", "0.30000000000000004",
    "9007199254740993", "123456789012.34", "1234567890.12", "1234567890.120", "12345678901.1",
    "999.9", "999.95", "1e11", "1e-2", "1.50e-1", "5e-324", "2.5e-324", "0." + "0" * 400 + "1",
    "1." + "0" * 2000, "100e-2", "1e37", "1e38", "1234567890.12000000000000000000000000000000000",
]  # fmt: skip
DECIMALS = [  # in texts, beside the numbers
    "+1", "+1.5", "01", "-007.50", ".5", "5.", "-.5", ".", "", "+", "1e", "1e+", "e1", "1.5.",
    "1 ", " 1", "1_0", "１", "NaN", "Infinity", "-inf", "0x1", "1,5", "0" * 60 + "1.5", "1\n",
    "+" + "9" * 38,
]  # fmt: skip
TIMES = [
    "2013-01-01", "2013-01-01T05", "2013-01-01T05Z", "2013-01-01T05:06", "2013-01-01 05:06:07",
    "2013-01-01T05:06:07Z", "2013-01-01T05:06:07.1Z", "2013-01-01T05:06:07.123456Z",
    "2013-01-01T05:06:07.1234567Z", "2013-01-01T05:06:07.123456789", "1969-12-31T23:59:59.9999999Z",
    "2013-01-01T05:06:07.1234567890Z", "2013-01-01T05:06:07+01", "2013-01-01T05:06:07-0130",
    "2013-01-01T05:06:07.5+01:30", "2013-01-01T05:06:07+24:00", "2013-01-01T05:06:07+01:60",
    "2013-01-01T24:00:00Z", "2013-01-01T23:59:60Z", "2013-02-29", "2012-02-29", "2013-02-29T00:00Z",
    "0000-01-01", "0000-12-31T23:59:59Z", "0001-01-01", "0001-01-01T00:00:00+00:01", "9999-12-31",
    "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59-00:01",
    "9999-12-31T23:59:59.9999999Z", "10000-01-01", "-001-01-01", "20130101T000000Z", "2013-1-1",
    " 2013-01-01", "2013-01-01 ", "2013-01-01T05:06:07z", "2013-01-01t05:06:07Z", "2013-001", "",
    "2013-01-01T05:06:07,5Z", "2013-01-01T05:06:07.Z", "2013-01-01Z", "2013-01-01T05:06:07 Z",
    "２013-01-01", "1677-09-21T00:12:43.1234567Z", "2300-01-01T00:00:00.1234567Z", "1e3", "now",
    "2013-01-01T05:06.1234567Z", "2013-01-01T05:06:07\n", "2013-01-01T05:06:07Z\n",
]  # fmt: skip
TEXTS = [
    "", "UA", "naïve ☃", "😀", "a\x00b", "\x7f", "QUJD", "QUJ=", "QQ==", "QQ=", "QR==", "Q===",
    "QUJD\n", "-_-_", "null", "5", "true", "x" * 300, "[" * 300, '"', "\\", "\u2028",
]  # fmt: skip
RAW_TOKENS = [
    "null", "true", "false", "NaN", "Infinity", "-Infinity", "nul", "True", "01", "1.", ".5", "+1",
    "1e", "-", "0x10", "''", "{}", "[]", '{"a":1,"a":"x"}', "[null,1]", "[[]]", '"\\ud800"',
    '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\u12g4"', '"\\x41"', '"a\nb"', '"\t"',
    '"unterminated', '"\\', "[1,]", '{"a":1,}', "[1 2]", '{"a" 1}', "{1:2}", "/**/1", "1_000",
    "[" * 126 + "]" * 126, "[" * 127 + "]" * 127, "[" * 128 + "]" * 128, "[" * 4000 + "]" * 4000,
    "[" * 5000, '{"a":' * 130 + "1" + "}" * 130, "[" + "{}," * 200 + "1]", '"' + "[{" * 200 + '"',
]  # fmt: skip
WHOLE_RECORDS = [
    None, b"", b" ", b"\n", b"\t\r\n ", b"null", b"true", b"1", b'"x"', b"[]", b"[{}]", b"{}", b"{",
    b"}", b"\x00", b"\xff\xfe{\x00}\x00", b'\xef\xbb\xbf{"serial":1}', b'{"serial":1}{"serial":2}',
    b'{"serial":1}\n{"serial":2}', b'{"serial":1},{"serial":2}', b'{"serial":1} x',
    b'{"serial":1}\x00', b'{"serial":1}\x0c', b'\x0b{"serial":1}', b' \r\n\t{"serial"\n:\t1}\n',
    b'{"serial":1,"serial":2}', b'{"serial":"x","serial":2}', b'{"serial":1,"serial":null}',
    b'{"\\u0073erial":7}', b'{"SERIAL":1}', b'{"serial":1,"gr\xc3\xb6\xc3\x9fe":5}',
    b'{"serial":1,"gr\\u00f6\\u00dfe":5}', b'{"serial":1,"z":"\xff"}', b'{"serial":1,"\xff":1}',
    b'{"serial":1,"z":"\xed\xa0\x80"}', b'{"serial":1,"z":"\xc0\xaf"}',
    b'{"serial":1,"z":"\xf4\x90\x80\x80"}', b'{"serial":1,"z":"\\ud800"}',
    b'{"serial":1,"name":"\\ud800","name":"x"}', b'{"serial":1,"z":["\\udfff"]}',
]  # fmt: skip

scalars = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS).map(json.dumps),
    st.sampled_from(DECIMALS).map(json.dumps),
    st.sampled_from(TIMES).map(json.dumps),
    st.sampled_from(TEXTS).map(json.dumps),
    st.sampled_from(TEXTS).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(RAW_TOKENS),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=2).map(str),
    st.datetimes().map(lambda at: json.dumps(at.isoformat())),
    st.text().map(json.dumps),
)


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    keys = st.sampled_from(["a", "b", "lat", "at", "m", "", "ö", 'a"b', "a\x00"]).map(json.dumps)
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]"),
        pairs.map(lambda items: "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}"),
    )


json_values = st.recursive(scalars, containers, max_leaves=8)
micro_text = st.datetimes().map(lambda at: json.dumps(at.isoformat() + "Z"))
fitting: dict[str, st.SearchStrategy[str]] = {
    "name": st.text().map(json.dumps),
    "größe": st.integers(-(2**31), 2**31 - 1).map(str),
    "tiny": st.integers(-128, 127).map(str),
    "small": st.integers(-32768, 32767).map(str),
    "flag": st.booleans().map(json.dumps),
    "f": st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    "d": st.floats(allow_nan=False, allow_infinity=False).map(repr),
    "amount": st.tuples(st.integers(-(10**12) + 1, 10**12 - 1), st.sampled_from(["", '"'])).map(
        lambda v: f"{v[1]}{v[0] / 100:.2f}{v[1]}"
    ),
    "whole": st.integers(-(10**38) + 1, 10**38 - 1).map(str),
    "day": st.dates().map(lambda day: json.dumps(day.isoformat())),
    "at": micro_text,
    "local": st.datetimes().map(lambda at: json.dumps(at.isoformat(" "))),
    "data": st.sampled_from(['""', '"QQ=="', '"QUJD"']),
    "tags": st.lists(st.text().map(json.dumps) | st.just("null")).map(lambda v: f"[{','.join(v)}]"),
    "days": st.lists(st.dates().map(lambda day: json.dumps(day.isoformat()))).map(
        lambda v: f"[{','.join(v)}]"
    ),
    "where": st.tuples(micro_text, st.integers(-9, 9)).map(
        lambda v: f'{{"lat": {v[1]}.5, "at": {v[0]}, "m": {{"k": {v[1]}}}}}'
    ),
    "m": st.sampled_from(["{}", '{"a": 1.5, "b": null}', '{"a": -999.9, "a": 0}']),
    "deep": micro_text.map(lambda at: f'[null, {{"a": [{{"x": {at}}}, null]}}, {{}}]'),
}


@st.composite
def records(draw: st.DrawFn) -> bytes | None:
    """Mostly good records, some with members that don't fit, some with damaged bytes."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(WHOLE_RECORDS) | st.binary(max_size=40))
    members = [("serial", str(draw(st.integers(0, 10**6))))]
    names = draw(st.lists(st.sampled_from([*fitting, "unknown"]), unique=True, max_size=6))
    for name in names:
        fits = kind > 3 or draw(st.booleans())
        value = draw(fitting[name] if fits and name in fitting else json_values)
        members.append((name, value))
    if kind == 1:
        members = draw(st.permutations(members))[: draw(st.integers(0, len(members)))]
    comma = draw(st.sampled_from([",", ", ", " ,\n", ",\r\n\t"]))
    text = "{" + comma.join(f"{json.dumps(n)}:{v}" for n, v in members) + "}"
    data = text.encode("utf-8", "surrogatepass")
    return damaged(draw, data) if kind in (2, 3) else data


def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.integers(0, 3))
        if what == 0:
            data = data[:at]
        elif what == 1:
            data = data[:at] + data[at + 1 :]
        elif what == 2:
            data = data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at:]
        else:
            nasty = st.sampled_from(
                [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"\x00"]
            )
            data = data[:at] + draw(nasty) + data[at + 1 :]
    return data


def by_reference(
    batch: list[bytes | None], rules: JsonRules
) -> tuple[list[Any], list[int], list[tuple[int, str]]]:
    rows, good, bad = [], [], []
    for index, data in enumerate(batch):
        try:
            rows.append(read_record(data, SCHEMA, rules=rules))
            good.append(index)
        except InvalidRecord as refused:
            bad.append((index, str(refused)))
    columns = [pa.array([pairs(row[field.name]) for row in rows], field.type) for field in SCHEMA]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    return comparable(table), good, bad


def pairs(value: Any) -> Any:
    """Maps as pyarrow.array wants them; a struct may be pairs as well."""
    if isinstance(value, dict):
        return [(name, pairs(inner)) for name, inner in value.items()]
    return [pairs(item) for item in value] if isinstance(value, list) else value


def comparable(table: pa.Table) -> list[str]:
    # repr tells 0.0 from -0.0; numbers of days and microseconds tell what datetimes can't hold.
    return [repr(row) for row in table.to_pylist()]


def check_batch(batch: list[bytes | None]) -> None:
    value_type = pa.large_binary() if len(batch) % 3 == 0 else pa.binary()
    around = pa.array([b'{"serial": 1}', *batch, b'{"serial": 2}'], value_type)
    middle = len(batch) // 2
    column = pa.chunked_array(
        [around.slice(1, middle), around.slice(1 + middle, len(batch) - middle)]
    )
    for rounding, decoder in DECODERS.items():
        decoded = decoder.decode(pa.table({"value": column}))
        check_outcomes(decoded, batch, JsonRules(rounding=rounding))


def check_outcomes(decoded: Decoded, batch: list[bytes | None], rules: JsonRules) -> None:
    rows, good, bad = by_reference(batch, rules)
    decoded.rows.validate(full=True)
    assert decoded.rows.schema == SCHEMA
    assert decoded.row_record.to_pylist() == good
    assert [(r.record, r.reason) for r in decoded.rejections] == bad
    assert comparable(decoded.rows) == rows
    assert sorted(good + [index for index, _ in bad]) == list(range(len(batch)))
    assert all(len(reason) < 500 and reason.isprintable() for _, reason in bad)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(records(), max_size=20))
@example(WHOLE_RECORDS)
@example([json.dumps({"serial": 1, "d": math.inf}).encode()])
def test_fast_and_reference_agree_on_hostile_records(batch: list[bytes | None]) -> None:
    check_batch(batch)


@pytest.mark.parametrize("name", [*SCHEMA.names, "unknown"])
def test_fast_and_reference_agree_on_every_oddity_in_every_column(name: str) -> None:
    tokens = [*NUMBERS, *RAW_TOKENS, *map(json.dumps, TIMES + TEXTS)]
    odd = [*tokens, *(f"[{t}]" for t in tokens), *(f'{{"a": {t}}}' for t in tokens)]
    odd += [f'{{"lat": 1, "at": {t}}}' for t in tokens] + [f'{{"lat": {t}}}' for t in tokens]
    odd += [f'[{{"a":[{{"k": {t}}}]}}]' for t in tokens]
    texts = [f'{{"serial": {i}, {json.dumps(name)}: {t}}}' for i, t in enumerate(odd)]
    check_batch([text.encode("utf-8", "surrogatepass") for text in texts])


@pytest.mark.parametrize("scale", [0, 3, 9, 18, 37, 38])
def test_decimals_at_the_ends_of_their_range(scale: int) -> None:
    """As texts, as numbers, in lists and in objects; of a required column also null."""
    whole = 38 - scale
    numbers = [
        f"{sign}{lead}{digits}{tail}"
        for sign in ("", "-")
        for lead in ("", "00")
        for digits in ("0", *(d * n for d in "19" for n in range(1, 37)), "1" + "0" * 30)
        for tail in ("", ".5", "." + "0" * scale)
        if (len(digits) - whole) in range(-1, 9) and len(digits + tail) < 37
    ]
    tokens = [*map(json.dumps, numbers), *(one for one in numbers if "00" not in one[:3]), "null"]
    ddl = f"DECIMAL(38,{scale})"
    schema = parse_schema(
        f"a {ddl} NOT NULL, l ARRAY<{ddl}>, s STRUCT<d: {ddl} NOT NULL, e: INT>, o {ddl}"
    )
    batch: list[bytes | None] = [
        f'{{"a": {a}, "l": {li}, "s": {s}, "o": {o}}}'.encode()
        for t in tokens
        for a, li, s, o in ((t, "[]", "null", "1e0"), ("0", f"[{t}]", "null", "null"),
                            ("0", "null", f'{{"d": {t}}}', "0"), ('"0"', "null", "null", t))
    ]  # fmt: skip
    for several in (batch, [one for one in batch if b'"a": "' in (one or b"")]):
        decoded = JsonDecoder(schema, "value").decode(pa.table({"value": pa.array(several)}))
        good, bad = [], []
        for index, data in enumerate(several):
            try:
                good.append((index, read_record(data, schema)))
            except InvalidRecord as refused:
                bad.append((index, str(refused)))
        assert [(r.record, r.reason) for r in decoded.rejections] == bad
        assert decoded.row_record.to_pylist() == [index for index, _ in good]
        assert decoded.rows.to_pylist() == [row for _, row in good]
