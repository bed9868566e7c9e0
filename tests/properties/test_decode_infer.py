"""Inference against a plain reference, record by record; and cut into calls in any way."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import event, given, settings
from hypothesis import strategies as st

from oncely.decode.infer import Inferred, InferringJson
from oncely.decode.merging import Caps
from oncely.decode.widening import widen

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
        return {**(known or {}), **{n: kind((known or {}).get(n), v) for n, v in value.items()}}
    if isinstance(value, list):
        if not (known is None or isinstance(known, Many)):
            raise No
        of = known.of if known else None
        for item in value:
            of = kind(of, item)
        return Many(of)
    own = {bool: "bool", str: "text", int: "int", float: "float"}[type(value)]
    if known is None or known == own:
        return own
    if {known, own} == {"int", "float"} if isinstance(known, str) else False:
        return "float"
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
    if known == "int" and not -(2**63) <= value < 2**63:
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
            found.append("true" if value else "false")
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            found.append(str(value))
        elif value is None or isinstance(value, str):
            found.append(value)
        else:
            raise No
    return tuple(found)


def one(data: bytes, columns: Sequence[str], book: dict[Any, Any]) -> tuple[Any, Any]:
    try:
        record = json.loads(data)
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
        return pa.struct([pa.field(name, arrow(each)) for name, each in known.items()])
    if isinstance(known, Many):
        return pa.list_(arrow(known.of))
    names = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_()}
    return names[known]


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


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30])
    | st.sampled_from([1.5, -0.0, 1.0, 1e300])
    | st.sampled_from(["", "x", "1", "2026-11-21", "é😀"])
)
NAMES = st.sampled_from(["a", "b", "c", "a", "b", 'q"', "", "a.b", "long1", "é"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
USERS = st.sampled_from(["u", "u", "u", "v", 1, "1", True, None, 1.5, [], ""])


@st.composite
def records(draw: st.DrawFn) -> list[bytes]:
    """A few sorts of records, each many times over: most of what comes has come before."""
    sorts = draw(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=6))
    chosen = draw(st.lists(st.integers(0, len(sorts) - 1), min_size=1, max_size=40))
    made = []
    for sort in chosen:
        record = {**sorts[sort], "user": draw(USERS)}
        text = json.dumps(record, ensure_ascii=draw(st.booleans()))
        made.append(text.encode())
    broken = draw(st.lists(st.tuples(st.integers(0, len(made) - 1), BROKEN), max_size=2))
    for index, data in broken:
        made[index] = data
    return made * draw(st.sampled_from([1, 1, 20]))


BROKEN = st.sampled_from(
    [b"", b"{}", b"[]", b'{"a":1', b'{"user":"u"} x', b'{"a":1,"a":"x","user":"u"}', b"\xff", b"1"]
)


@settings(max_examples=300, deadline=None)
@given(records(), st.sampled_from([(), ("user",), ("user", "a")]), st.data())
def test_inference_is_the_reference(
    values: list[bytes], columns: tuple[str, ...], data: st.DataObject
) -> None:
    rows, refused, schemas = reference(values, columns)
    event(f"scopes {min(len(schemas), 4)}, refused {bool(refused)}")
    decoder = InferringJson(columns, CAPS)
    found = decoder.infer(column(values), {})
    assert found.known == schemas
    assert [str(found.known[scope]) for scope in schemas] == [str(s) for s in schemas.values()]
    assert {rejection.record for rejection in found.rejections} == refused
    expected = {index: (scope, filled(row, schemas[scope])) for index, (scope, row) in rows.items()}
    assert same(by_record(found, 0, schemas), expected)
    for part in found.parts:
        assert part.schema == schemas[part.scope]

    # Cut into calls, by decoders of other processes too: the same.
    cuts = sorted(data.draw(st.sets(st.integers(0, len(values)), max_size=4)))
    known: dict[Any, pa.Schema] = {}
    cut_rows: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
        if data.draw(st.booleans()):
            decoder = InferringJson(columns, CAPS)
        call = decoder.infer(column(values[start:end]), known)
        known = call.known
        cut_rows |= by_record(call, start, schemas)
        reasons |= {start + rejection.record: rejection.reason for rejection in call.rejections}
    assert known == schemas
    assert same(cut_rows, expected)
    assert reasons == {rejection.record: rejection.reason for rejection in found.rejections}


def same(one: Any, other: Any) -> bool:
    return repr(sorted(one.items())) == repr(sorted(other.items()))  # -0.0 is not 0.0
