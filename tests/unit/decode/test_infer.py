from __future__ import annotations

import json
import pickle
import time
from typing import Any

import pyarrow as pa
import pytest

from oncely.decode.avro_schema import arrow_schema_of, avro_schema_of
from oncely.decode.infer import LONGEST, Inferred, InferringJson, Scope
from oncely.decode.merging import Caps, widen

BIG, DOUBLE, TEXT, BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()


def column(*values: bytes | None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, pa.binary())])


def text(record: Any) -> bytes:
    return json.dumps(record).encode()


def infer(
    *values: Any, by: tuple[str, ...] = (), known: dict[Scope, pa.Schema] | None = None, **caps: int
) -> Inferred:
    made = [value if isinstance(value, bytes | None) else text(value) for value in values]
    return InferringJson(by, Caps(**caps)).infer(column(*made), known or {})


def rows(found: Inferred) -> dict[int, dict[str, Any]]:
    return {
        record: row
        for part in found.parts
        for record, row in zip(part.row_record.to_pylist(), part.rows.to_pylist(), strict=True)
    }


def reasons(found: Inferred) -> dict[int, str]:
    assert all(rejection.stage == "decode" for rejection in found.rejections)
    return {rejection.record: rejection.reason for rejection in found.rejections}


def test_types_are_what_the_first_value_says() -> None:
    record = {
        "t": "2026-11-21T07:00:00Z",
        "b": True,
        "i": 1,
        "d": 1.0,
        "e": [],
        "n": None,
        "o": {},
        "s": {"x": 1, "y": None},
        "l": [[1], [2.5]],
    }
    found = infer(record)
    schema = {"t": TEXT, "b": BOOL, "i": BIG, "d": DOUBLE, "s": pa.struct({"x": BIG})}
    assert found.known == {(): pa.schema({**schema, "l": pa.list_(pa.list_(DOUBLE))})}
    kept = {name: value for name, value in record.items() if name not in ("e", "n", "o")}
    assert rows(found) == {0: {**kept, "s": {"x": 1}, "l": [[1.0], [2.5]]}}


def test_the_first_record_counts_and_the_others_are_told_why() -> None:
    found = infer(
        {"who": {"age": 30}, "first name": "a"},
        {"who": {"age": "30"}, "new": 1},
        {"who": "me"},
        {"who": []},
        {"first name": [1]},
        {"who": {"age": 30.5}},
        {"who": {"age": 2**64}},
        {"tags": [1, "x"]},
        b'{"who": {"age": 1e999}}',
    )
    assert reasons(found) == {
        1: "who.age: it is BIGINT, found STRING",
        2: "who: it is STRUCT, found STRING",
        3: "who: it is STRUCT, found ARRAY",
        4: '"first name": it is STRING, found ARRAY',
        7: "tags[1]: it is BIGINT, found STRING",
        8: "who.age: 1e999 is out of range of DOUBLE",
    }
    assert found.known[()] == pa.schema({"who": pa.struct({"age": DOUBLE}), "first name": TEXT})
    assert rows(found)[6]["who"]["age"] == 2.0**64


def test_a_whole_number_beyond_64_bits_needs_a_double() -> None:
    big = 1 << 63
    found = infer({"n": big}, {"n": 1}, {"n": big}, {"n": 0.5}, {"n": big}, {"m": [big, 0.5]})
    assert reasons(found) == dict.fromkeys((0, 2), f"n: {big} is out of range of BIGINT") | {
        5: "m[1]: it is BIGINT with numbers beyond 2^53, found DOUBLE"
    }
    found = infer({"n": 1}, {"n": 0.5}, {"n": big}, {"m": [0.5]}, {"m": []}, {"m": [big, 0.5]})
    assert rows(found)[2] == {"n": float(big), "m": None}
    assert rows(found)[5] == {"n": None, "m": [float(big), 0.5]}


WIDE = 9_007_199_254_740_993  # 2**53 + 1: no DOUBLE equals it


def test_a_whole_number_that_no_double_equals_is_kept_or_rejected() -> None:
    found = infer(
        {"n": 5}, {"n": WIDE}, {"n": 1.5}, {"n": 6}, {"m": 1.5}, {"m": WIDE}, {"m": 2**60}
    )
    assert reasons(found) == {
        2: "n: it is BIGINT with numbers beyond 2^53, found DOUBLE",
        5: f"m: {WIDE} does not fit DOUBLE exactly",
    }
    kept = {record: (row["n"], row["m"]) for record, row in rows(found).items()}
    assert kept == {0: (5, None), 1: (WIDE, None), 3: (6, None), 4: (None, 1.5), 6: (None, 2.0**60)}
    assert found.known[()] == pa.schema({"n": BIG, "m": DOUBLE})


@pytest.mark.parametrize("number", [WIDE, -WIDE, 2**63 - 1, 2**64 - 1, 10**30])
@pytest.mark.parametrize("count", [1, 100])
def test_no_number_is_rounded_whichever_way_it_is_decoded(number: int, count: int) -> None:
    at = [{"n": 0.5}] * count + [{"n": number}, {"n": [number]}, {"n": 7}]
    found = infer(*at, {"l": [{"n": 0.5}, {"n": number}]})
    assert reasons(found) == {
        count: f"n: {number} does not fit DOUBLE exactly",
        count + 1: "n: it is DOUBLE, found ARRAY",
        count + 3: f"l[1].n: {number} does not fit DOUBLE exactly",
    }


@pytest.mark.parametrize("nest", [lambda n: n, lambda n: {"s": n}, lambda n: [n]])
def test_a_column_with_large_whole_numbers_stays_one_in_later_calls(nest: Any) -> None:
    first = infer(*[{"n": nest(WIDE + i)} for i in range(40)])
    # As a later batch knows it: by the Avro schema that was published.
    known = {(): arrow_schema_of(avro_schema_of(first.known[()]))}
    found = infer({"n": nest(1.5)}, {"n": nest(WIDE)}, known=known)
    assert [*reasons(found)] == [0]
    assert rows(found) == {1: {"n": nest(WIDE)}}
    small = infer({"n": nest(7)})
    assert avro_schema_of(small.known[()]) != avro_schema_of(first.known[()])
    grown = infer({"n": nest(WIDE)}, known=small.known)
    assert avro_schema_of(grown.known[()]) == avro_schema_of(first.known[()])


def test_scopes_have_schemas_of_their_own() -> None:
    found = infer(
        {"u": "a", "x": 1},
        {"u": "b", "x": "one"},
        {"x": True},
        {"u": 7, "x": None},
        {"u": "7"},
        {"u": True},
        {"u": None, "x": False},
        {"u": 1.5},
        {"u": ["a"]},
        {"u": 1 << 64},
        b"nonsense",
        None,
        {"u": 1},
        by=("u",),
    )
    assert found.known == {
        ("a",): pa.schema({"u": TEXT, "x": BIG}),
        ("b",): pa.schema({"u": TEXT, "x": TEXT}),
        (None,): pa.schema({"x": BOOL}),
        ("7::BIGINT",): pa.schema({"u": BIG}),
        ("7::STRING",): pa.schema({"u": TEXT}),
        ("true::BOOLEAN",): pa.schema({"u": BOOL}),
        ("1::BIGINT",): pa.schema({"u": BIG}),
    }
    why = "u: files are partitioned by texts, whole numbers and booleans, found"
    assert reasons(found) == {
        7: f"{why} a number with a point or exponent, 1.5",
        8: f"{why} an array of 1",
        9: "u: 18446744073709551616 is out of range of BIGINT",
        10: "the value is not JSON: Expecting value at character 1",
        11: "the value is null",
    }
    assert [part.scope for part in found.parts] == [*found.known]


def test_a_scope_is_no_longer_than_a_key_of_kafka_can_be() -> None:
    found = infer({"u": "x" * LONGEST}, {"u": "x" * (LONGEST + 1)}, by=("u",))
    assert reasons(found) == {1: "a partition's value has 4,097 bytes; it may have 4,096 bytes"}


def test_a_record_without_a_value_needs_a_column() -> None:
    found = infer({}, {"a": None, "b": []}, {"a": 1}, {})
    assert list(reasons(found)) == [0, 1]
    assert rows(found) == {2: {"a": 1}, 3: {"a": None}}
    assert infer().known == {}


def test_an_empty_array_before_and_after_its_column() -> None:
    # In one call and fast: many records say what an empty array is before one says it is none.
    before, after = [{"u": "a", "t": []}] * 200, [{"u": "a", "t": []}, {"u": "a"}] * 100
    found = infer(*before, {"u": "a", "t": "x"}, *after, by=("u",))
    assert set(reasons(found).values()) == {"t: it is STRING, found ARRAY"}
    assert list(reasons(found)) == list(range(201, 401, 2))
    found = infer(*before, {"u": "a", "t": ["x"]}, *after, by=("u",))
    assert reasons(found) == {}
    assert [rows(found)[n]["t"] for n in (0, 199, 200, 201, 202)] == [None, None, ["x"], [], None]


def test_what_went_fast_and_is_looked_at_again_keeps_its_place() -> None:
    empty = {"u": "a", "t": [], "s": []}
    found = infer(*[empty] * 100, {"t": ["x"]}, empty, {"s": "y"}, empty)
    assert reasons(found) == {103: "s: it is STRING, found ARRAY"}
    assert rows(found)[101] == {"u": "a", "t": [], "s": None}


def test_a_schema_that_another_scope_has_had_before() -> None:
    decoder = InferringJson(("u",))
    known: dict[Scope, pa.Schema] = {
        ("a",): pa.schema({"u": TEXT, "n": BIG}),
        ("b",): pa.schema({"u": TEXT, "n": BIG, "m": BIG}),
    }
    empty, other = {"u": "a", "n": 1, "t": []}, {"u": "b", "n": 1, "m": 1}
    known = decoder.infer(column(*map(text, [empty, other] * 100)), known).known
    # Scope a grows to b's schema, of which no empty "t" is known, and only then a "t" comes.
    odd = [{"u": "a", "m": 1}, *[{"u": "a", "n": "x"}] * 3, {"u": "a", "t": "x"}]
    found = decoder.infer(column(*map(text, [*[empty] * 30, *odd, empty])), known)
    assert reasons(found)[35] == "t: it is STRING, found ARRAY"
    assert list(reasons(found)) == [31, 32, 33, 35]


def test_what_is_known_from_elsewhere_is_kept() -> None:
    known = {
        (): pa.schema({"at": pa.timestamp("us", "UTC"), "i": pa.int32(), "f": pa.float32()}),
        ("x",): pa.schema({"a": BIG}),
    }
    day = {"at": "2026-11-21", "i": 2**31 - 1, "f": 1}
    found = infer(day, {"at": "noon"}, {"i": 0.5}, {"f": "x"}, known=known)
    assert found.known[()] == pa.schema(
        {"at": pa.timestamp("us", "UTC"), "i": DOUBLE, "f": pa.float32()}
    )
    assert found.known[("x",)] is known[("x",)]
    assert reasons(found)[1] == 'at: expected TIMESTAMP, found the text "noon"'
    assert list(reasons(found)) == [1, 3]
    assert rows(found)[0]["at"].year == 2026
    assert infer({"i": 2**31}, known=known).known[()].field("i").type == BIG


def test_caps_are_reasons() -> None:
    wide = {f"f{n}": n for n in range(5)}
    found = infer(
        {"a": 1},
        wide,
        {"a": 2, "x" * 9: 1},
        {"d": [[[[1]]]]},
        {"a": 3, "x" * 9: None},
        {"b": 1},
        fields=4,
        depth=4,
        name=8,
    )
    assert reasons(found) == {
        1: "the schema would have 6 fields; it may have 4",
        2: "a name has 9 characters, it may have 8: xxxxxxxxx…",
        3: "the schema would have a depth of 5; it may have 4",
    }
    assert found.known[()].names == ["a", "b"]


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


HOSTILE = {
    "100,000 fields": text({f"f{n}": n for n in range(100_000)}),
    "100,000 fields, empty": text({f"f{n}": [] for n in range(100_000)}),
    "depth 10,000": deep(10_000),
    "arrays 10,000 deep": b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "depth 100": deep(100),
    "a megabyte name": text({"n" * 1_000_000: 1}),
    "a megabyte of emoji": text({"😀" * 250_000: 1}),
    "a long number": b'{"a":' + b"9" * 1_000_000 + b"}",
    "a long exponent": b'{"a":1e' + b"9" * 1_000_000 + b"}",
    "the same key 100,000 times": b'{"k":0' + b',"k":1' * 100_000 + b"}",
    "a list of 200,000": text({"list": list(range(200_000))}),
}
ROWS = {"100,000 fields, empty", "the same key 100,000 times", "a list of 200,000"}


def test_hostile_records_are_rejects_and_the_others_rows() -> None:
    good = [{"user": "u", "n": n} for n in range(50)]
    begun = time.process_time()
    found = infer(*good, *HOSTILE.values(), *good, by=("user",))
    assert time.process_time() - begun < 10
    names = list(HOSTILE)
    refused = {names[index - 50]: why for index, why in reasons(found).items()}
    assert set(names) - set(refused) == ROWS - {"100,000 fields, empty"}
    assert all(len(why) <= 401 for why in refused.values())
    assert refused["100,000 fields"].endswith("100000 fields; it may have 2000")
    assert refused["depth 10,000"] == "the value is nested more than 128 deep"
    assert refused["depth 100"] == "the schema would have a depth of 100; it may have 32"
    assert refused["a megabyte name"].startswith("a name has 1000000 characters")
    assert sum(part.rows.num_rows for part in found.parts if part.scope == ("u",)) == 100


def test_odd_names_are_names() -> None:
    record = {"a.b": 1, "": "x", "__proto__": {"": 1}, "😀": [1.5], 'q"\\\n': True, "\0": None}
    found = infer(*[record] * 40, {"q": 1, **record}, {'q"\\\n': 5})
    assert found.known[()].names == ["a.b", "", "__proto__", "😀", 'q"\\\n', "q"]
    kept = {name: value for name, value in record.items() if name != "\0"} | {"q": None}
    assert [rows(found)[n] for n in (0, 39, 40)] == [kept, kept, kept | {"q": 1}]
    assert reasons(found) == {41: '"q\\"\\\\\\n": it is BOOLEAN, found BIGINT'}


def test_a_schema_that_grows_with_every_record_takes_seconds() -> None:
    records = [text({f"f{n % 2500}": n, "user": "u"}) for n in range(5_000)]
    begun = time.process_time()
    found = InferringJson(("user",)).infer(column(*records), {})
    assert time.process_time() - begun < 20
    assert len(found.known[("u",)]) == 2_000
    assert len(found.rejections) == 2 * 501


def test_ten_thousand_scopes_share_a_schema() -> None:
    records = [text({"user": f"u{n % 10_000}", "n": n}) for n in range(30_000)]
    decoder = InferringJson(("user",))
    found = decoder.infer(column(*records), {})
    assert len(found.parts) == len(found.known) == 10_000
    assert len({id(schema) for schema in found.known.values()}) == 1
    assert found.parts[7].rows.to_pylist() == [
        {"user": "u7", "n": 7 + k} for k in (0, 10_000, 20_000)
    ]
    begun = time.process_time()
    again = decoder.infer(column(*records), found.known)
    assert time.process_time() - begun < 5
    assert {id(s) for s in again.known.values()} == {id(s) for s in found.known.values()}


def test_large_calls_are_cut_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [text({"user": f"u{n % 3}", "n": n if n < 70_000 else 0.5}) for n in range(100_000)]
    monkeypatch.setattr("oncely.decode.infer._SECTION_BYTES", 1_000_000)
    found = InferringJson(("user",)).infer(column(*records), {})
    assert len(found.parts) > 3
    last = [widen(part.rows, found.known[part.scope]) for part in found.parts]
    numbers = {
        record: n
        for part, table in zip(found.parts, last, strict=True)
        for record, n in zip(part.row_record.to_pylist(), table["n"].to_pylist(), strict=True)
    }
    assert numbers == {n: float(n) if n < 70_000 else 0.5 for n in range(100_000)}


def test_it_travels_to_workers() -> None:
    decoder = InferringJson(("user",), Caps(fields=7))
    decoder.infer(column(b'{"user":"u"}'), {})
    other = pickle.loads(pickle.dumps(decoder))
    assert other == decoder
    assert other.infer(column(b'{"user":"u"}'), {}).known == {("u",): pa.schema({"user": TEXT})}
