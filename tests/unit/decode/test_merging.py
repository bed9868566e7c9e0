from __future__ import annotations

import pyarrow as pa
import pytest

from oncely.decode.avro_schema import arrow_schema_of, avro_schema_of
from oncely.decode.merging import Caps, Conflict, TooMuch, merge, tree_of, widen
from oncely.decode.schema import large, same_schema
from oncely.errors import InvariantViolation

INT, BIG, DOUBLE, TEXT = pa.int32(), pa.int64(), pa.float64(), pa.string()


@pytest.mark.parametrize(
    ("known", "found", "merged"),
    [
        (BIG, DOUBLE, DOUBLE),
        (DOUBLE, BIG, DOUBLE),
        (INT, BIG, BIG),
        (INT, pa.float32(), DOUBLE),
        (pa.null(), TEXT, TEXT),
        (TEXT, pa.null(), TEXT),
        (pa.list_(pa.null()), pa.list_(BIG), pa.list_(BIG)),
        (pa.struct([]), pa.struct({"x": BIG}), pa.struct({"x": BIG})),
        (
            pa.struct({"b": BIG, "a": TEXT}),
            pa.struct({"c": TEXT, "b": DOUBLE}),
            pa.struct({"b": DOUBLE, "a": TEXT, "c": TEXT}),
        ),
        (
            pa.list_(pa.struct({"a": pa.list_(BIG)})),
            pa.list_(pa.struct({"a": pa.list_(DOUBLE), "b": TEXT})),
            pa.list_(pa.struct({"a": pa.list_(DOUBLE), "b": TEXT})),
        ),
    ],
)
def test_types_meet(known: pa.DataType, found: pa.DataType, merged: pa.DataType) -> None:
    of = merge(pa.schema({"f": known}), pa.schema({"f": found}))
    assert of == pa.schema({"f": merged})
    assert str(of) == str(pa.schema({"f": merged}))  # the order of fields too


@pytest.mark.parametrize(
    ("known", "found", "words"),
    [
        (TEXT, BIG, ("STRING", "BIGINT")),
        (pa.bool_(), DOUBLE, ("BOOLEAN", "DOUBLE")),
        (pa.struct({"a": BIG}), TEXT, ("STRUCT", "STRING")),
        (pa.list_(BIG), pa.struct({"a": BIG}), ("ARRAY", "STRUCT")),
        (pa.list_(pa.null()), BIG, ("ARRAY", "BIGINT")),
        (pa.date32(), TEXT, ("DATE", "STRING")),
        (pa.decimal128(4, 2), DOUBLE, ("DECIMAL(4,2)", "DOUBLE")),
    ],
)
def test_types_that_have_no_common_one(
    known: pa.DataType, found: pa.DataType, words: tuple[str, str]
) -> None:
    inside = pa.schema({"who": pa.struct({"tags": pa.list_(known)})})
    with pytest.raises(Conflict) as conflict:
        merge(inside, pa.schema({"who": pa.struct({"tags": pa.list_(found)})}))
    assert conflict.value.path == "who.tags[]"
    assert (conflict.value.known, conflict.value.found) == words
    assert str(conflict.value) == f"who.tags[]: it is {words[0]}, found {words[1]}"


def nested(depth: int) -> pa.Schema:
    arrow = TEXT
    for level in range(depth - 1):
        arrow = pa.list_(arrow) if level % 2 else pa.struct({"x": arrow})
    return pa.schema({"f": arrow})


EMPTY = pa.schema([])


def test_caps_say_which_one_it_is() -> None:
    caps = Caps(fields=3, depth=4, name=5)
    wide = pa.schema({"a": pa.struct({"b": BIG, "c": BIG})})
    assert merge(EMPTY, wide, caps) == wide
    with pytest.raises(TooMuch, match="would have 4 fields; it may have 3"):
        merge(wide, pa.schema({"d": BIG}), caps)
    assert merge(EMPTY, nested(4), caps) == nested(4)
    with pytest.raises(TooMuch, match="would have a depth of 5; it may have 4"):
        merge(EMPTY, nested(5), caps)
    with pytest.raises(TooMuch, match="name has 6 characters, it may have 5: abcdef"):
        merge(EMPTY, pa.schema({"a": pa.list_(pa.struct({"abcdef": BIG}))}), caps)
    with pytest.raises(TooMuch, match="has 300 characters"):
        merge(wide, pa.schema({"a": pa.struct({"x" * 300: BIG})}), Caps())


def test_long_names_do_not_make_a_message_too_long() -> None:
    names = ["é" * 250 + str(n) for n in range(1000)]
    with pytest.raises(TooMuch, match="characters of Avro; it may have 700000"):
        merge(EMPTY, pa.schema(dict.fromkeys(names, BIG)), Caps())


def test_what_is_known_is_not_capped() -> None:
    schema = pa.schema({"abcdef": BIG, "b": BIG})
    caps = Caps(fields=1, name=1, text=1)
    assert merge(schema, pa.schema({"b": BIG, "long name": pa.list_(pa.null())}), caps) is schema
    wider = merge(schema, pa.schema({"abcdef": DOUBLE}), caps)
    assert wider == pa.schema({"abcdef": DOUBLE, "b": BIG})
    with pytest.raises(TooMuch, match="3 fields; it may have 1"):
        merge(schema, pa.schema({"c": BIG}), caps)


def test_the_deepest_schema_can_be_read_back() -> None:
    schema = merge(EMPTY, nested(32), Caps())
    assert arrow_schema_of(avro_schema_of(schema)) == schema
    with pytest.raises(TooMuch):
        merge(EMPTY, nested(33), Caps())


def test_whole_numbers_become_doubles_or_are_refused() -> None:
    table = pa.table({"n": [2**53, -(2**53), None, 7]})
    wide = widen(table, pa.schema({"m": TEXT, "n": DOUBLE}))
    assert wide["n"].to_pylist() == [2.0**53, -(2.0**53), None, 7.0]
    assert wide["m"].null_count == 4
    with pytest.raises(InvariantViolation, match="9007199254740993"):
        widen(pa.table({"n": [2**53 + 1]}), pa.schema({"n": DOUBLE}))


@pytest.mark.parametrize("other", [DOUBLE, pa.float32()])
def test_a_column_with_large_numbers_does_not_become_a_double(other: pa.DataType) -> None:
    held, plain = pa.schema([large("n")]), pa.schema({"n": BIG})
    for one, two in ((held, pa.schema({"n": other})), (pa.schema({"n": other}), held)):
        with pytest.raises(Conflict, match=r"beyond 2\^53"):
            merge(one, two)
    assert merge(held, plain) is held
    assert avro_schema_of(merge(plain, held)) == avro_schema_of(held)
    assert avro_schema_of(merge(pa.schema({"n": INT}), held)) == avro_schema_of(held)
    assert same_schema(arrow_schema_of(avro_schema_of(held)), held)


def test_nothing_gets_lost_by_widening() -> None:
    with pytest.raises(InvariantViolation, match="lost"):
        widen(pa.table({"a": [1]}), pa.schema({"b": BIG}))
    with pytest.raises(InvariantViolation, match="lost"):
        widen(pa.table({"a": [{"x": 1}]}), pa.schema({"a": pa.struct({"y": BIG})}))
    with pytest.raises(InvariantViolation, match="can't become"):
        widen(pa.table({"a": [1.5]}), pa.schema({"a": BIG}))
    with pytest.raises(InvariantViolation, match="can't become"):
        widen(pa.table({"a": ["1"]}), pa.schema({"a": BIG}))


def test_lists_in_a_slice_widen() -> None:
    table = pa.table({"n": [[1], [2, 3], None, [], [4]]}).slice(1, 4)
    wide = widen(table, pa.schema({"n": pa.list_(DOUBLE)}))
    assert wide["n"].to_pylist() == [[2.0, 3.0], None, [], [4.0]]
    assert pa.types.is_float64(wide["n"].type.value_type)


@pytest.mark.parametrize("arrow", [pa.decimal128(38, 38), pa.list_(pa.timestamp("us")), BIG])
def test_the_text_of_many_fields_is_no_longer_than_it_is_taken_for(arrow: pa.DataType) -> None:
    nested = pa.struct({"x": arrow, "y": arrow})
    for of in (arrow, nested, pa.list_(nested)):
        schema = pa.schema({f"f{n}": of for n in range(200)})
        text = avro_schema_of(schema)
        assert len(text) <= tree_of(schema).size.text < 4 * len(text)
