"""The work and memory of a decoder grow no faster than the bytes of records, and of schemas."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncely.decode.avro import avro_decoder
from oncely.decode.avro_read import compile_reader
from oncely.decode.avro_schema import AvroSchema, Definition
from oncely.decode.infer import InferringJson
from oncely.decode.json import JsonDecoder
from oncely.extras import SWITCH, native
from tests.conftest import examples
from tests.properties import test_decode_json as corpus

SIZE = 4_096
WAYS = pytest.mark.parametrize(
    "way", [SWITCH, pytest.param("", marks=pytest.mark.skipif(native() is None, reason="off"))]
)


def measured(work: Callable[[], Any]) -> tuple[int, int]:
    """The calls that ``work`` makes, and the peak of the bytes that it allocates."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    before, outer = (
        tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes(),
        sys.getprofile(),
    )
    sys.setprofile(count)
    try:
        kept = work()
    finally:
        sys.setprofile(outer)
        peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before
        tracemalloc.stop()
    del kept
    return calls, peak


def check(decode: Callable[[pa.Table], Any], record: bytes) -> None:
    """Decode a record with its neighbours, which meet what is compiled and cached."""
    records = pa.table({"value": pa.array([record] * 3, pa.binary())})
    decode(records.slice(2))
    calls, peak = measured(lambda: decode(records))
    assert calls < 5_000 + 40 * records.nbytes
    assert peak < 1_000_000 + 400 * records.nbytes


NOTHING: Any = {"type": "fixed", "name": "Z", "size": 0}
LEAVES = st.sampled_from(["null", "int", "string", "Z", "boolean", "bytes"])
WRAPPED: list[Callable[[Any], Any]] = [
    lambda kind: kind,
    lambda kind: {"type": "array", "items": kind},
    lambda kind: {"type": "map", "values": kind},
    lambda kind: ["int", kind] if isinstance(kind, str) else kind,
]


def named(name: str, kinds: list[Any]) -> Any:
    fields = [{"name": f"f{at}", "type": kind} for at, kind in enumerate(kinds)]
    return {"type": "record", "name": name, "fields": fields}


@st.composite
def writers(draw: st.DrawFn) -> Definition:
    """Named types, each of which refers several times to the next one."""
    shape = draw(st.lists(st.sampled_from(WRAPPED), min_size=1, max_size=3))
    levels = draw(st.integers(1, 25))
    innermost = [wrap(draw(LEAVES)) for wrap in shape]
    types = [NOTHING, named("T0", innermost)]
    types += [named(f"T{at}", [wrap(f"T{at - 1}") for wrap in shape]) for at in range(1, levels)]
    wanted = {"type": "array", "items": draw(st.sampled_from(["Z", "int", "string"]))}
    top = named("R", [wanted, draw(st.sampled_from(WRAPPED))(f"T{levels - 1}"), innermost[0]])
    return Definition(json.dumps(top), tuple(map(json.dumps, types)))


EMPTY_ITEMS = Definition(
    json.dumps(named("R", [{"type": "array", "items": "Z"}, "int", "int"])), (json.dumps(NOTHING),)
)


def growing(*pieces: bytes) -> st.SearchStrategy[bytes]:
    """Records of SIZE bytes that repeat some pieces after others."""
    one = st.sampled_from(pieces)
    some = one | st.lists(one, min_size=1, max_size=5).map(b"".join)
    return st.tuples(some, some).map(lambda of: of[0] + of[1] * ((SIZE - len(of[0])) // len(of[1])))


@WAYS
@settings(max_examples=examples(25), deadline=None)
@example(writer=EMPTY_ITEMS, datum=b"\xfe\x0f" * (SIZE // 2))
@given(
    writer=writers(),
    datum=growing(
        b"\0", b"\x02", b"\x7e", b"\xd0\x0f", b"\xfe\x0f", b"\xcf\x0f\0", b"\x02a", b"\xff"
    ),
)
def test_avro(way: str, writer: Definition, datum: bytes) -> None:
    parsed = AvroSchema.parse(writer)
    fields = json.loads(writer.text)["fields"]
    reader = AvroSchema.parse(
        Definition(json.dumps(named("R", [fields[0]["type"]])), writer.references[:1])
    )
    texts = sum(map(len, (writer.text, *writer.references)))
    calls, peak = measured(lambda: compile_reader(parsed, reader))
    assert (calls, peak) < (500 + texts, 100_000 + 100 * texts)
    made = avro_decoder(
        Definition(json.dumps(named("R", [fields[0]["type"]])), writer.references[:1])
    )
    vars(made)["_bare"] = compile_reader(parsed, reader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(way or "ONCELY_ANY", "off")
        check(made.decode, datum)


@WAYS
@settings(max_examples=examples(25), deadline=None)
@given(
    growing(
        *(b"[", b"{", b"]", b"}", b'{"j":', b'{"deep":[', b'{"amount":', b'"d":', b'"tags":["a",'),
        *(
            b"1",
            b"-",
            b"0",
            b"e9",
            b"1e999999",
            b"9" * 40,
            b",",
            b":",
            b'"',
            b"\\u00e9",
            b"null",
            b" ",
        ),
        *(b'{"a":1}', b'{"m":{"a":1,', b'"a":1,', b"\xff"),
    )
)
def test_json(way: str, record: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(way or "ONCELY_ANY", "off")
        check(JsonDecoder(corpus.SCHEMA).decode, record)
        check(lambda records: InferringJson().infer(records["value"], {}), record)
