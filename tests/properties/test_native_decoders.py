"""The decoders of ``oncely-native`` and the references agree: rows, rejections and reasons.

The environment variable ONCELY_MUTATIONS sets the number of mutated records.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from oncely.decode.avro import AvroDecoder, Registry, avro_decoder
from oncely.decode.avro_schema import Definition
from oncely.decode.base import Decoded
from oncely.decode.json import JsonDecoder, NativeJson
from oncely.decode.reference import InvalidRecord, JsonRules, read_record
from oncely.decode.schema import parse_schema
from oncely.extras import SWITCH, native
from tests.properties import test_decode_json as corpus
from tests.registrytools import running

pytestmark = pytest.mark.skipif(
    native() is None, reason="oncely-native is not installed (make native), or turned off"
)
MUTATIONS = int(os.environ.get("ONCELY_MUTATIONS", "20000"))
BATCH = 2_000
FLAT = parse_schema(
    "serial BIGINT NOT NULL, name STRING, flag BOOLEAN, flight INT, d DOUBLE, at TIMESTAMP, j JSON"
)
TOKENS = [
    *corpus.NUMBERS,
    *corpus.RAW_TOKENS,
    *(json.dumps(text) for text in corpus.DECIMALS + corpus.TIMES + corpus.TEXTS),
    *(json.dumps(text, ensure_ascii=False) for text in corpus.TEXTS),
    '"\\u00e9\\n\\"\\/\\b\\f\\r\\t\\\\"', '{"a": [1, {"b": "\\ud83d\\ude00"}], "c": {}}',
    '{"a": 1, "\\u0061": 2}', '[1e5, -0, 1.50, "\\u0001\\u007f"]', '{"k": 5, "l": null}',
]  # fmt: skip
SPLICES = [
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"\x00", b"0", b"-", b".", b"e", b" ",
    b"null", b"true", b"\\u00", b"\\ud800", b"\xc3\xa9", b"\xff", b"\xed\xa0\x80", b"1" * 20,
]  # fmt: skip
FITTING = {
    "serial": ["0", "7", "9223372036854775807", "-1"],
    "name": ['"UA"', '"na\u00efve \u2603"', '"a\\u0000\\ud83d\\ude00\\n"', '""', "null"],
    "größe": ["5", "-2147483648"],
    "tiny": ["127", "-0"],
    "small": ["-32768"],
    "flag": ["true", "false"],
    "flight": ["1545", "2147483647"],
    "f": ["0.1", "3.4028235e38", "-0.0", "7"],
    "d": ["0.1", "-0", "-0.0", "1e308", "9007199254740993", "5e-324", "12.25"],
    "amount": ["1.50", '"+0007.5"', "-9999999999.99"],
    "whole": ["1" * 37, "-5"],
    "day": ['"2012-02-29"', '"0001-01-01"'],
    "at": [json.dumps(text) for text in corpus.TIMES[:11]],
    "local": ['"2013-01-01 05:06:07.5"', '"2013-01-01"'],
    "data": ['"QQ=="', '"QUJD"', '""'],
    "tags": ['["a", null, "\\u00e9"]', "[]"],
    "days": ['["2013-01-01", null]'],
    "where": ['{"lat": 1, "at": "2013-01-01T05Z", "m": {"k": 5, "l": null}}', '{"lat":-0.0}'],
    "m": ['{"a": 1.5, "b": null}', "{}"],
    "deep": ['[null, {"a": [{"x": "2013-01-01"}, null]}, {}]'],
    "j": ['{"a": [1, 1.50, "\\u00e9\\n"], "b": {}}', "[ ]", '" x\\u001f"', "1E+05", "null"],
    "unknown": ['{"a": [1, {"b": null}]}', '"\\u00e9"', "1e999"],
}


def mutated(rng: random.Random, data: bytes, splices: list[bytes]) -> bytes:
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        at, length = rng.randint(0, len(data)), rng.choice([0, 0, 1, 1, 2, 5])
        inside = rng.choice([b"", rng.choice(splices), rng.randbytes(1), data[at : at + 9]])
        data = data[:at] + inside + data[at + length :]
    return data


def json_records(rng: random.Random, schema: pa.Schema) -> list[bytes | None]:
    def record() -> bytes | None:
        if rng.random() < 0.02:
            return rng.choice(corpus.WHOLE_RECORDS)
        names = [*schema.names[:1], *rng.sample([*schema.names[1:], "unknown"], 5)]
        if rng.random() < 0.2:
            rng.shuffle(names)
        odd = rng.choice([0, 0, 0, 0.2])
        members = [
            f"{json.dumps(name, ensure_ascii=rng.random() < 0.5)}"
            f"{rng.choice([':', ': '])}"
            f"{rng.choice(TOKENS if rng.random() < odd else FITTING[name])}"
            for name in names
        ]
        text = "{" + rng.choice([",", ", ", "\n,"]).join(members) + "}"
        return mutated(rng, text.encode("utf-8", "surrogatepass"), SPLICES)

    return [record() for _ in range(BATCH)]


def by_reference(
    batch: list[bytes | None], schema: pa.Schema, rules: JsonRules
) -> tuple[list[str], list[int], list[tuple[int, str]]]:
    rows: list[Any] = []
    good: list[int] = []
    bad: list[tuple[int, str]] = []
    for index, data in enumerate(batch):
        try:
            rows.append(read_record(data, schema, rules=rules))
            good.append(index)
        except InvalidRecord as refused:
            bad.append((index, str(refused)))
    columns = [
        pa.array([corpus.pairs(row[field.name]) for row in rows], field.type) for field in schema
    ]
    return corpus.comparable(pa.Table.from_arrays(columns, schema=schema)), good, bad


def bytes_table(values: list[bytes | None]) -> pa.Table:
    return pa.table({"value": pa.array([b"before", *values], pa.large_binary()).slice(1)})


def seeds() -> Iterator[random.Random]:
    first = random.randrange(1 << 40)
    for number in range(max(1, MUTATIONS // BATCH)):
        print("seed", first + number)
        yield random.Random(first + number)


def share(sure: list[int], of: int) -> float:
    return sum(sure) / (of * len(sure))


def check_json(batch: list[bytes | None], schema: pa.Schema, rules: JsonRules) -> None:
    decoded = JsonDecoder(schema, "value", *rules).decode(bytes_table(batch))
    decoded.rows.validate(full=True)
    rows, good, bad = by_reference(batch, schema, rules)
    assert decoded.row_record.to_pylist() == good
    assert [(r.record, r.reason) for r in decoded.rejections] == bad
    assert corpus.comparable(decoded.rows) == rows


def test_json_agrees_with_the_reference_on_mutated_records() -> None:
    sure = []
    for number, rng in enumerate(seeds()):
        schema = FLAT if number % 2 else corpus.SCHEMA
        rules = JsonRules(strict=number % 3 > 0, rounding=number % 5 == 0)
        batch = json_records(rng, schema)
        check_json(batch, schema, rules)
        _, unsure = NativeJson(schema, rules).decode(pa.array(batch, pa.binary()))
        sure.append(BATCH - len(unsure))
    assert share(sure, BATCH) > 0.25


@pytest.mark.parametrize("schema", [FLAT, corpus.SCHEMA])
def test_ordinary_records_leave_nothing_to_the_reference(schema: pa.Schema) -> None:
    """Escapes, nested values, and every form of a number and an instant included."""
    records = [
        f'{{"serial": {at}, "{name}": {token}, "{name}x": [{token}]}}'.replace(
            f'"serial": {at}, "serial"', '"serial"'
        ).encode()
        for name in [*schema.names, "unknown"]
        for at, token in enumerate(FITTING[name])
    ]
    pieces, unsure = NativeJson(schema, JsonRules(rounding=True)).decode(pa.array(records))
    assert [records[at] for at in unsure] == []
    assert [len(batch) for _, batch in pieces] == [len(records)]


AVRO = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "b", "type": "boolean"},
        {"name": "i", "type": ["null", "int"]},
        {"name": "l", "type": "long"},
        {"name": "f", "type": "float"},
        {"name": "d", "type": ["double", "null"]},
        {"name": "s", "type": ["null", "string"]},
        {"name": "y", "type": "bytes"},
        {"name": "x", "type": {"type": "fixed", "name": "X", "size": 2}},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
        {"name": "a", "type": {"type": "array", "items": ["null", "int"]}},
        {"name": "m", "type": {"type": "map", "values": "long"}},
        {"name": "r", "type": ["null", {"type": "record", "name": "In", "fields": [
            {"name": "n", "type": "int"}, {"name": "again", "type": ["null", "X"]}]}]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "tm", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "tu", "type": {"type": "long", "logicalType": "time-micros"}},
        {"name": "im", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "iu", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "lm", "type": {"type": "long", "logicalType": "local-timestamp-nanos"}},
        {"name": "dec", "type": {"type": "bytes", "logicalType": "decimal", "precision": 20,
                                 "scale": 4}},
        {"name": "text", "type": "string"},
    ],
}  # fmt: skip
PROMOTED = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "text", "type": "bytes"},
        {"name": "l", "type": ["null", "double"]},
        {"name": "i", "type": ["null", "float"]},
        {"name": "f", "type": "double"},
        {"name": "iu", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "r", "type": ["null", {"type": "record", "name": "In", "fields": [
            {"name": "n", "type": "long"}, {"name": "more", "type": "string", "default": "x"}]}]},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "C"],
                               "default": "C"}},
        *({"name": f"new{at}", "type": kind, "default": given} for at, (kind, given) in enumerate([
            ("int", 5), ("double", 1), ("boolean", True), ("bytes", "\u00ff"), ("string", "ab"),
            (["null", "string"], None), ({"type": "int", "logicalType": "date"}, 7)])),
    ],
}  # fmt: skip
DATUM = {
    "b": True, "i": -5, "l": 2**40, "f": 0.1, "d": None, "s": "naïve", "y": b"\0\xff", "x": b"ab",
    "e": "B", "a": [1, None, 3], "m": {"k": 2, "o": -9}, "r": {"n": 1, "again": b"cd"},
    "day": date(2013, 1, 1), "tm": time(1, 2, 3, 4000), "tu": time(1, 2, 3, 4),
    "im": datetime(2013, 1, 1, tzinfo=UTC), "iu": datetime(2013, 1, 1, 1, 1, tzinfo=UTC),
    "lm": -1_357_016_767_891_000_999, "dec": Decimal("-12.3400"), "text": "t",
}  # fmt: skip
AVRO_SPLICES = [
    b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\xff" * 9, b"\xff" * 9 + b"\x01", b"\x80\x00",
    b"\xfe\xff\xff\xff\x0f", b"\x01\x04", b"\xed\xa0\x80", b"\x00\x00\xa0\x7f", b"\x00\x00\xc0\xff",
    b"\x02\x02k\x04\x02\x02k\x06\x00",
]  # fmt: skip


def datums(rng: random.Random, count: int) -> list[bytes]:
    def datum() -> bytes:
        change = {
            "i": rng.choice([None, 0, 2**31 - 1, -(2**31)]),
            "s": rng.choice([None, "", "☃" * 30]),
            "l": rng.choice([0, -(2**63), 2**63 - 1, 2**53 + 1]),
            "f": rng.choice([0.0, -0.0, 1e-45, float("inf"), float("nan")]),
            "a": [rng.choice([None, n]) for n in range(rng.randint(0, 5))],
            "m": {str(n): n for n in range(rng.randint(0, 20))},
            "r": rng.choice([None, {"n": 7, "again": None}]),
            "dec": Decimal(rng.randrange(-(10**20), 10**20)).scaleb(-4),
        }
        kept = rng.sample(sorted(change), rng.randint(0, 4))
        out = io.BytesIO()
        fastavro.schemaless_writer(out, PARSED, DATUM | {name: change[name] for name in kept})
        return out.getvalue()

    return [datum() for _ in range(count)]


PARSED = fastavro.parse_schema(AVRO)


def outcome(decoded: Decoded) -> tuple[list[int], list[tuple[int, str]], list[str]]:
    decoded.rows.validate(full=True)
    rejected = [(r.record, r.reason) for r in decoded.rejections]
    return decoded.row_record.to_pylist(), rejected, corpus.comparable(decoded.rows)


def check_avro(
    decoder: AvroDecoder, values: list[bytes | None], patch: pytest.MonkeyPatch
) -> list[int]:
    """Compare both ways; returns the positions of records that the native way leaves."""
    records = bytes_table(values)
    found = outcome(decoder.decode(records))
    with patch.context() as off:
        off.setenv(SWITCH, "off")
        assert found == outcome(decoder.decode(records))
    _, unsure = decoder._natively(pa.array(values, pa.binary()))
    left: list[int] = np.asarray(unsure).tolist()
    return left


def test_avro_agrees_with_the_reference_on_mutated_datums(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        ids = [server.add(AVRO, "t-value"), server.add({**AVRO, "fields": AVRO["fields"][::-1]})]
        heads = [b"\0" + schema_id.to_bytes(4, "big") for schema_id in (*ids, 99)]
        registered = [
            avro_decoder(Definition(json.dumps(schema)), registry=Registry({"url": server.url}))
            for schema in (AVRO, PROMOTED)
        ]
        bare = avro_decoder(Definition(json.dumps(AVRO)))
        sure = []
        for rng in seeds():
            some = datums(rng, 200)
            batch = [mutated(rng, rng.choice(some), AVRO_SPLICES) for _ in range(BATCH)]
            sure.append(BATCH - len(check_avro(bare, [*batch, None, b""], monkeypatch)))
            framed = [rng.choice([heads[0], *heads]) + value for value in batch[:100]]
            for decoder in registered:
                values = [mutated(rng, value, AVRO_SPLICES) for value in framed]
                check_avro(decoder, [*framed, *values, None], monkeypatch)
    assert share(sure, BATCH) > 0.25


def test_ordinary_datums_leave_nothing_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a writer's schema whose values are promoted, dropped, and filled by defaults."""
    values = datums(random.Random(1), 500)
    assert check_avro(avro_decoder(Definition(json.dumps(AVRO))), [*values], monkeypatch) == []
    with running() as server:
        head = b"\0" + server.add(AVRO).to_bytes(4, "big")
        decoder = avro_decoder(
            Definition(json.dumps(PROMOTED)), registry=Registry({"url": server.url})
        )
        framed = [head + value for value in values]
        assert check_avro(decoder, [*framed], monkeypatch) == []


def test_the_switch_turns_the_package_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    assert native() is None
    assert NativeJson.make(FLAT, JsonRules()) is None
