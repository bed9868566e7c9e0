"""Merging is a join: order and repetition don't matter, and Avro resolves to what comes out."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
from arrow_schemas import NAMES, datums, rows, types
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.decode.avro_schema import avro_schema_of
from oncely.decode.merging import (
    LARGE,
    NO_CAPS,
    NOTHING,
    CannotMerge,
    merge,
    schema_of,
    settled,
    tree_of,
    widen,
)
from oncely.decode.schema import is_large, large
from tests.conftest import examples

LEAVES = [pa.int64(), pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.int32(), pa.float32()]
OPEN = [*LEAVES, pa.null(), pa.list_(pa.null()), pa.struct([])]
FEW = st.sampled_from(["a", "b", "a.b", "é"])


def few(leaves: list[pa.DataType]) -> st.SearchStrategy[pa.Schema]:
    """Schemas over a few names, so that they meet."""
    inner = st.recursive(
        st.sampled_from(leaves),
        lambda types: (
            types.map(pa.list_) | st.dictionaries(FEW, types, min_size=1, max_size=3).map(pa.struct)
        ),
        max_leaves=4,
    )
    return st.dictionaries(FEW, inner, max_size=3).map(pa.schema)


@st.composite
def some_large(draw: st.DrawFn, of: st.SearchStrategy[tuple[pa.Schema, ...]]) -> Any:
    """The same schemas, where some of the columns of BIGINT have held large numbers."""

    def field(one: pa.Field) -> pa.Field:
        if pa.types.is_struct(one.type):
            return one.with_type(
                pa.struct([field(one.type.field(i)) for i in range(len(one.type))])
            )
        if pa.types.is_list(one.type):
            return one.with_type(pa.list_(field(one.type.value_field)))
        return large(one.name) if one.type == pa.int64() and draw(st.booleans()) else one

    return tuple(pa.schema([field(one) for one in schema]) for schema in draw(of))


def outcome(*schemas: pa.Schema) -> pa.Schema | None:
    first, *rest = schemas
    try:
        for schema in rest:
            first = merge(first, schema)
    except CannotMerge:
        return None
    return first


def unordered(arrow: Any) -> Any:
    if isinstance(arrow, pa.Schema):
        return {field.name: unordered(field) for field in arrow}
    if isinstance(arrow, pa.Field):
        return LARGE if is_large(arrow) else unordered(arrow.type)
    if pa.types.is_struct(arrow):
        return {arrow.field(i).name: unordered(arrow.field(i)) for i in range(len(arrow))}
    if pa.types.is_list(arrow):
        return [unordered(arrow.value_field)]
    return arrow


@settings(max_examples=examples(40))
@given(st.data())
def test_the_order_of_two_does_not_matter(data: st.DataObject) -> None:
    one, other = data.draw(some_large(friends() | st.tuples(few(LEAVES), few(LEAVES))))
    assert unordered_or_none(outcome(one, other)) == unordered_or_none(outcome(other, one))


@settings(max_examples=examples(40))
@given(st.data())
def test_which_two_come_first_does_not_matter(data: st.DataObject) -> None:
    three = three_friends() | st.tuples(few(LEAVES), few(LEAVES), few(LEAVES))
    a, b, c = data.draw(some_large(three))
    left, inner = outcome(a, b, c), outcome(b, c)
    right = None if inner is None else outcome(a, inner)
    assert unordered_or_none(left) == unordered_or_none(right)


def unordered_or_none(schema: pa.Schema | None) -> Any:
    return None if schema is None else unordered(schema)


@settings(max_examples=examples(40))
@given(few(OPEN), few(OPEN))
def test_what_is_known_twice_is_known(one: pa.Schema, other: pa.Schema) -> None:
    known = schema_of(settled(tree_of(one), NOTHING)[0])
    assert outcome(known, known) is known
    merged = outcome(known, other)
    if merged is not None:
        assert outcome(merged, other) is merged
        assert outcome(merged, known) is merged
        assert [name for name in merged.names if name in known.names] == known.names


@settings(max_examples=examples(40))
@given(few(OPEN))
def test_what_is_not_known_yet_is_left_out(one: pa.Schema) -> None:
    merged = merge(pa.schema([]), one)
    assert not any(unknown in str(unordered(merged)) for unknown in ("null", "[]", "{}: "))
    avro_schema_of(merged)


@st.composite
def weaker(draw: st.DrawFn, arrow: Any) -> Any:
    """A type, or a schema, that resolves to this one."""
    if pa.types.is_list(arrow):
        return pa.list_(draw(weaker(arrow.value_type)))
    if pa.types.is_struct(arrow):
        inside = [arrow.field(i) for i in range(arrow.num_fields)]
        kept = draw(st.permutations(inside))[: draw(st.integers(1, len(inside)))]
        return pa.struct([pa.field(f.name, draw(weaker(f.type))) for f in kept])
    return draw(st.sampled_from(NARROWER.get(arrow, [arrow])))


NARROWER = {
    pa.float64(): [pa.float64(), pa.int64(), pa.int32(), pa.float32()],
    pa.int64(): [pa.int64(), pa.int32()],
}


@st.composite
def three_friends(draw: st.DrawFn) -> tuple[pa.Schema, pa.Schema, pa.Schema]:
    """Schemas that have something to do with each other, and no conflict."""
    all_of = pa.struct(list(draw(few(LEAVES).filter(lambda schema: len(schema) > 0))))
    one, two, three = (pa.schema(list(draw(weaker(all_of)))) for _ in range(3))
    return one, two, three


def friends() -> st.SearchStrategy[tuple[pa.Schema, pa.Schema]]:
    return three_friends().map(lambda three: three[:2])


@st.composite
def two_and_rows(draw: st.DrawFn) -> tuple[pa.Schema, pa.Schema, list[dict[str, Any]]]:
    one, other = draw(friends())
    return one, other, exact(draw(st.lists(rows(one), min_size=1, max_size=4)))


def exact(value: Any) -> Any:
    """Whole numbers that equal a DOUBLE: a column that held others would say so."""
    if isinstance(value, dict):
        return {name: exact(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    whole = type(value) is int and abs(value) > 2**53
    return value >> 11 if whole else value


@settings(max_examples=examples(40))
@given(two_and_rows())
def test_rows_of_either_resolve_to_the_merged_schema(
    given: tuple[pa.Schema, pa.Schema, list[dict[str, Any]]],
) -> None:
    one, other, some = given
    merged = outcome(one, other)
    assert merged is not None
    table = pa.Table.from_pylist(some, one)
    wide = widen(table, merged)
    wide.validate(full=True)
    for target in (merged, outcome(other, one)):
        out = io.BytesIO()
        parsed = fastavro.parse_schema(json.loads(avro_schema_of(one)))
        fastavro.writer(out, parsed, datums(table.to_pylist()))
        reader = fastavro.reader(io.BytesIO(out.getvalue()), json.loads(avro_schema_of(target)))
        assert list(reader) == datums(widen(table, target).to_pylist())


@st.composite
def sliced(draw: st.DrawFn) -> tuple[pa.Table, pa.Schema, list[dict[str, Any]]]:
    one, other = draw(friends())
    merged = outcome(one, other)
    assert merged is not None
    some = exact(draw(st.lists(rows(one), max_size=6)))
    start = draw(st.integers(0, len(some)))
    count = draw(st.integers(0, len(some) - start))
    table = pa.Table.from_pylist(some, one).slice(start, count)
    return table, merged, table.to_pylist()


@settings(max_examples=examples(40))
@given(sliced())
def test_slices_widen_too(given: tuple[pa.Table, pa.Schema, list[dict[str, Any]]]) -> None:
    table, schema, some = given
    wide = widen(table, schema)
    wide.validate(full=True)
    assert wide.to_pylist() == [filled(row, schema) for row in some]


def filled(row: Any, fields: Any) -> Any:
    return {field.name: fill(row.get(field.name), field.type) for field in fields}


def fill(value: Any, arrow: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(arrow):
        return filled(value, [arrow.field(i) for i in range(arrow.num_fields)])
    if pa.types.is_list(arrow):
        return [fill(item, arrow.value_type) for item in value]
    return float(value) if pa.types.is_floating(arrow) else value


@settings(max_examples=examples(40))
@given(st.dictionaries(NAMES, types(), min_size=1, max_size=4).map(pa.schema))
def test_the_text_is_no_longer_than_it_is_taken_for(schema: pa.Schema) -> None:
    assert len(avro_schema_of(schema)) <= tree_of(schema).size.text
    assert schema_of(tree_of(schema)) == schema
    assert merge(pa.schema([]), schema, NO_CAPS) == schema
