"""Inference against a plain reference, record by record; and cut into calls in any way."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.decode import infer as infer_module
from oncely.decode.infer import Inferred, InferringJson
from oncely.decode.merging import Caps, widen
from oncely.decode.schema import large, same_schema
from tests.conftest import examples

CAPS = Caps(fields=6, depth=4, name=4)


class No(Exception):
    """The reference refuses."""


class Many:
    """A type of the reference: what a list holds."""

    def __init__(self, of: Any) -> None:
        self.of = of


def kind(known: Any, value: Any) -> Any:
    """The reference: the type after a value. None is nothing known; a dict is a struct."""
    if value is None:
        return known
    if isinstance(value, dict):
        if not (known is None or isinstance(known, dict)):
            raise No
        inside = {n: kind((known or {}).get(n), v) for n, v in value.items()}
        return {**(known or {}), **{n: each for n, each in inside.items() if each is not None}}
    if isinstance(value, list):
        if not (known is None or isinstance(known, Many)):
            raise No
        of = known.of if known else None
        for item in value:
            of = kind(of, item)
        return Many(of)
    own = {bool: "bool", str: "text", int: "int", float: "float"}[type(value)]
    if own == "int" and known == "float":
        if int(float(value)) != value:
            raise No
        return "float"
    if own == "int" and abs(value) > 2**53:
        own = "large"
    if known is None or known == own:
        return own
    if {known, own} == {"int", "float"} if isinstance(known, str) else False:
        return "float"
    if {known, own} == {"int", "large"} if isinstance(known, str) else False:
        return "large"
    raise No


def pruned(known: Any) -> Any:
    if isinstance(known, dict):
        inside = {name: pruned(each) for name, each in known.items()}
        return {name: each for name, each in inside.items() if each is not None} or None
    if isinstance(known, Many):
        of = pruned(known.of)
        return None if of is None else Many(of)
    return known


def fields(known: Any) -> int:
    if isinstance(known, Many):
        return fields(known.of)
    return sum(1 + fields(each) for each in known.values()) if isinstance(known, dict) else 0


def depth(known: Any) -> int:
    if isinstance(known, Many):
        return 1 + depth(known.of)
    if isinstance(known, dict):
        return 1 + max(map(depth, known.values()), default=0)
    return 1


def longest(known: Any) -> int:
    if isinstance(known, Many):
        return longest(known.of)
    if isinstance(known, dict):
        return max((max(len(n), longest(each)) for n, each in known.items()), default=0)
    return 0


def seen(known: Any, value: Any) -> Any:
    if value is None or known is None:
        return None
    if isinstance(known, dict):
        return {name: seen(each, value.get(name)) for name, each in known.items()}
    if isinstance(known, Many):
        return [seen(known.of, item) for item in value]
    if known in ("int", "large") and not -(2**63) <= value < 2**63:
        raise No
    if known == "float":
        value = float(value)
        if not math.isfinite(value):
            raise No
    return value


def scope_of(record: dict[str, Any], columns: Sequence[str]) -> tuple[str | None, ...]:
    found: list[str | None] = []
    for name in columns:
        value = record.get(name)
        if isinstance(value, bool):
            found.append("true::BOOLEAN" if value else "false::BOOLEAN")
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            found.append(f"{value}::BIGINT")
        elif value == "1":
            found.append("1::STRING")
        elif value is None or isinstance(value, str):
            found.append(value)
        else:
            raise No
    return tuple(found)


def one(data: bytes, columns: Sequence[str], book: dict[Any, Any]) -> tuple[Any, Any]:
    try:
        record = json.loads(data)
        json.dumps(record, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except ValueError:
        raise No from None
    if not isinstance(record, dict):
        raise No
    scope = scope_of(record, columns)
    known = book.get(scope)
    after = pruned(kind(known, record))
    if after is None:
        raise No
    if repr(shown(after)) != repr(shown(known)):
        if fields(after) > CAPS.fields or depth(after) - 1 > CAPS.depth:
            raise No
        if longest(after) > CAPS.name:
            raise No
    row = seen(after, record)
    book[scope] = after
    return scope, row


def shown(known: Any) -> Any:
    if isinstance(known, Many):
        return [shown(known.of)]
    if isinstance(known, dict):
        return {name: shown(each) for name, each in known.items()}
    return known


def arrow(known: Any) -> Any:
    if isinstance(known, dict):
        return pa.struct([arrow_field(name, each) for name, each in known.items()])
    if isinstance(known, Many):
        return pa.list_(arrow_field("item", known.of))
    names = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_()}
    return names[known]


def arrow_field(name: str, known: Any) -> pa.Field:
    return large(name) if known == "large" else pa.field(name, arrow(known))


def reference(values: list[bytes], columns: Sequence[str]) -> tuple[dict[Any, Any], set[int], Any]:
    """Rows by record (of the schema at that time), refused records, schemas."""
    book: dict[Any, Any] = {}
    rows: dict[int, Any] = {}
    refused: set[int] = set()
    for index, data in enumerate(values):
        try:
            rows[index] = one(data, columns, book)
        except No:
            refused.add(index)
    return rows, refused, {scope: pa.schema(list(arrow(known))) for scope, known in book.items()}


def by_record(found: Inferred, first: int, last: dict[Any, pa.Schema]) -> dict[int, Any]:
    rows: dict[int, Any] = {}
    for part in found.parts:
        assert part.rows.schema == part.schema
        part.rows.validate(full=True)
        records = part.row_record.to_pylist()
        assert records == sorted(records)
        assert part.rows.num_rows == len(records) > 0
        assert same_schema(part.rows.schema, part.schema)
        wide = widen(part.rows, last[part.scope]).to_pylist()
        rows |= {first + r: (part.scope, row) for r, row in zip(records, wide, strict=True)}
    return rows


def column(values: list[bytes]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, pa.binary())])


def filled(row: Any, of: Any) -> Any:
    if row is None:
        return None
    if isinstance(of, pa.Schema) or pa.types.is_struct(of):
        return {field.name: filled(row.get(field.name), field.type) for field in of}
    if pa.types.is_list(of):
        return [filled(item, of.value_type) for item in row]
    return float(row) if pa.types.is_float64(of) else row


SCALARS = [None, True, 0, -1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 2**60, ""]
SCALARS += [1.5, -0.0, 1e300, 1.5, 3]
SCALARS += ["x", "1", "2026-11-21", "é😀", 7, 8, None]
NAMES = ["a", "b", "c", "a", "b", 'q"', "", "a.b", "long1", "é"]
USERS = ["u", "u", "u", "v", 1, "1", True, None, 1.5, [], ""]
BROKEN = [
    b"",
    b"{}",
    b"[]",
    b"1",
    b"\xff",
    b'{"a":1',
    b'{"user":"u"} x',
    b'{"user":"u","a":"\xff"}',
    b'{"user":"u","a":1,"a":"x"}',
    b'{"user":"u","a":"x","a":1}',
    b'{"user":"u","a":-0}',
    b'{"user":"u","a":1e400}',
    b'{"user":"u","a":"\\ud800"}',
    b'{"user":[],"user":"u","a":1}',
]


def value(random: Random, deep: int) -> Any:
    match random.randrange(6 if deep else 3):
        case 3:
            return [value(random, deep - 1) for _ in range(random.randrange(3))]
        case 4 | 5:
            return member_values(random, deep - 1, random.randrange(3))
        case _:
            return random.choice(SCALARS)


def member_values(random: Random, deep: int, most: int) -> dict[str, Any]:
    return {random.choice(NAMES): value(random, deep) for _ in range(most)}


def like(random: Random, record: Any) -> Any:
    """A record of the same form, now and then with a hole in it or another value."""
    if random.random() < 0.05:
        return random.choice([None, [], {}, value(random, 2)])
    if isinstance(record, dict):
        return {name: like(random, inner) for name, inner in record.items()}
    if isinstance(record, list):
        return [like(random, item) for item in record]
    return record


def made(random: Random) -> list[bytes]:
    """Records of a few forms, each many times over: most of what comes has come before."""
    forms = [
        member_values(random, 3, random.randrange(1, 5)) for _ in range(random.randrange(1, 5))
    ]
    users = random.sample(USERS, random.randrange(1, 4))
    texts = []
    for _ in range(random.randrange(1, 120)):
        record = {name: like(random, inner) for name, inner in random.choice(forms).items()}
        record["user"] = random.choice(users)
        texts.append(json.dumps(record, ensure_ascii=random.random() < 0.5).encode())
    for _ in range(random.randrange(3)):
        texts.insert(random.randrange(len(texts)), random.choice(BROKEN))
    return texts


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(0, 2**64), st.sampled_from([(), ("user",), ("user", "a")]), st.booleans())
def test_inference_is_the_reference(seed: int, columns: tuple[str, ...], eager: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if eager:  # then a decoder is made for every single record
            patch.setattr(infer_module, "_FEW", 1)
        check(Random(seed), columns)


def check(random: Random, columns: tuple[str, ...]) -> None:
    values = made(random)
    rows, refused, schemas = reference(values, columns)
    decoder = InferringJson(columns, CAPS)
    found = decoder.infer(column(values), {})
    assert all(same_schema(found.known[scope], schema) for scope, schema in schemas.items())
    assert found.known == schemas
    assert [str(found.known[scope]) for scope in schemas] == [str(s) for s in schemas.values()]
    assert {rejection.record for rejection in found.rejections} == refused
    expected = {index: (scope, filled(row, schemas[scope])) for index, (scope, row) in rows.items()}
    assert same(by_record(found, 0, schemas), expected)
    for part in found.parts:
        assert part.schema == schemas[part.scope]

    # Cut into calls, by decoders of other processes too: the same.
    cuts = sorted(random.randrange(len(values) + 1) for _ in range(random.randrange(5)))
    known: dict[Any, pa.Schema] = {}
    cut_rows: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
        if random.random() < 0.5:
            decoder = InferringJson(columns, CAPS)
        call = decoder.infer(column(values[start:end]), known)
        known = call.known
        cut_rows |= by_record(call, start, schemas)
        reasons |= {start + rejection.record: rejection.reason for rejection in call.rejections}
    assert all(same_schema(known[scope], schema) for scope, schema in schemas.items())
    assert known == schemas
    assert same(cut_rows, expected)
    assert reasons == {rejection.record: rejection.reason for rejection in found.rejections}


def same(one: Any, other: Any) -> bool:
    return repr(sorted(one.items())) == repr(sorted(other.items()))  # -0.0 is not 0.0
