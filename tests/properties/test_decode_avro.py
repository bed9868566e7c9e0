"""The Avro decoder reads what another library writes, and survives what nobody would write."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import fastavro
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.decode.avro import AvroDecoder, avro_decoder
from oncely.decode.avro_schema import Definition
from tests.conftest import examples


class Kind(NamedTuple):
    """A type: its schema, its datums, and what the column's value looks like in Python."""

    schema: Any
    datums: st.SearchStrategy[Any]
    seen: Callable[[Any], Any] = lambda datum: datum


INT = Kind("int", st.integers(-(2**31), 2**31 - 1))
LONG = Kind("long", st.integers(-(2**63), 2**63 - 1))
LEAVES = [
    Kind("boolean", st.booleans()),
    INT,
    LONG,
    Kind("float", st.floats(width=32, allow_nan=False)),
    Kind("double", st.floats(allow_nan=False)),
    Kind("string", st.text()),
    Kind("bytes", st.binary()),
    Kind({"type": "int", "logicalType": "date"}, st.dates()),
    Kind(
        {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4},
        st.integers(-(10**20) + 1, 10**20 - 1).map(lambda n: Decimal(n).scaleb(-4)),
    ),
    Kind({"type": "long", "logicalType": "time-micros"}, st.times()),
    Kind({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes()),
]


def nullable(kind: Kind) -> Kind:
    return Kind(
        ["null", kind.schema],
        st.none() | kind.datums,
        lambda datum: None if datum is None else kind.seen(datum),
    )


def array(kind: Kind) -> Kind:
    return Kind(
        {"type": "array", "items": kind.schema},
        st.lists(kind.datums, max_size=4),
        lambda datum: [kind.seen(item) for item in datum],
    )


def mapping(kind: Kind) -> Kind:
    return Kind(
        {"type": "map", "values": kind.schema},
        st.dictionaries(st.text(max_size=3), kind.datums, max_size=3),
        lambda datum: [(name, kind.seen(item)) for name, item in datum.items()],
    )


def nested(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    return (
        inner.map(array) | inner.map(mapping) | st.lists(inner, min_size=1, max_size=3).map(struct)
    )


def struct(kinds: list[Kind]) -> Kind:
    names = [f"f{index}" for index in range(len(kinds))]
    return Kind(
        ("record", [*zip(names, [kind.schema for kind in kinds], strict=True)]),
        st.fixed_dictionaries(dict(zip(names, [kind.datums for kind in kinds], strict=True))),
        lambda datum: {
            name: kind.seen(datum[name]) for name, kind in zip(names, kinds, strict=True)
        },
    )


def named(schema: Any, names: list[str]) -> Any:
    """Each record with a name of its own."""
    if isinstance(schema, tuple):
        names.append(f"R{len(names)}")
        name = names[-1]
        fields = [{"name": field, "type": named(kind, names)} for field, kind in schema[1]]
        return {"type": "record", "name": name, "fields": fields}
    if isinstance(schema, list):
        return [named(member, names) for member in schema]
    if isinstance(schema, dict):
        inner = {key: named(schema[key], names) for key in ("items", "values") if key in schema}
        return schema | inner
    return schema


leaves = st.sampled_from(LEAVES)
kinds = st.recursive(leaves | leaves.map(nullable), nested, max_leaves=6)
records = st.lists(kinds, min_size=1, max_size=5).map(struct)


def made(kind: Kind) -> tuple[Any, AvroDecoder]:
    schema = named(kind.schema, [])
    decoder = avro_decoder(Definition(json.dumps(schema)))
    return fastavro.parse_schema(schema), decoder


def encode(schema: Any, datum: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, datum)
    return out.getvalue()


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_what_fastavro_writes_is_read_back(data: st.DataObject) -> None:
    kind = data.draw(records)
    datums = data.draw(st.lists(kind.datums, max_size=5))
    schema, decoder = made(kind)
    values = [encode(schema, datum) for datum in datums]
    decoded = decoder.decode(pa.table({"value": pa.array(values, pa.binary())}))
    decoded.rows.validate(full=True)
    assert list(decoded.rejections) == []
    assert decoded.rows.to_pylist() == [kind.seen(datum) for datum in datums]


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_damaged_datums_have_one_outcome_each_and_leave_their_neighbours(
    data: st.DataObject,
) -> None:
    kind = data.draw(records)
    schema, decoder = made(kind)
    datum = data.draw(kind.datums)
    good = encode(schema, datum)
    bad = data.draw(st.lists(st.binary(max_size=30) | damaged(good), max_size=8))
    values = [good, *(value for each in bad for value in (each, good))]
    decoded = decoder.decode(pa.table({"value": pa.array(values, pa.binary())}))
    decoded.rows.validate(full=True)
    rejected = [rejection.record for rejection in decoded.rejections]
    rows = decoded.row_record.to_pylist()
    assert sorted(rows + rejected) == list(range(len(values)))
    assert rows == sorted(rows)
    assert rejected == sorted(rejected)
    table = decoded.rows.to_pylist()
    assert all(table[rows.index(at)] == kind.seen(datum) for at in range(0, len(values), 2))
    assert all(len(r.reason) < 500 and r.reason.isprintable() for r in decoded.rejections)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    at = draw(st.integers(0, len(good)))
    inserted = draw(st.binary(max_size=3) | st.sampled_from([b"\xff" * 9, b"\xfe\xff\xff\xff\x0f"]))
    return good[:at] + inserted + good[at + draw(st.integers(0, 3)) :]
