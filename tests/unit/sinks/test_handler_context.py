"""Values in headers travel through a handler into what it produces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from oncely import context
from oncely.core.batch import Chunk
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kafka.records import RECORDS
from oncely.kinds.handlers.batch import Portion
from oncely.kinds.handlers.sink import HandlersSink, _Attempt

P0 = TopicPartition("t", 0)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def batch(*records: Mapping[str, bytes | None], names: tuple[str, ...] = ("user",)) -> Portion:
    """A record for each mapping of headers."""
    headers: list[Any] = [[{"key": k, "value": v} for k, v in one.items()] for one in records]
    numbers = np.arange(len(records))
    chunk = Chunk(
        {P0: OffsetRange(0, len(records))}, (P0,), np.zeros(len(records), dtype=np.int32),
        numbers, pa.table({"id": numbers}), numbers, None, np.array([], dtype=np.int64), (),
        lambda _: [], headers=pa.chunked_array([pa.array(headers, RECORDS.field("headers").type)]),
    )  # fmt: skip
    (made,) = Portion.of(chunk, (), (*context.TRACE, *names))
    return made


def test_a_record_has_the_context_of_its_headers() -> None:
    given = {"traceparent": TRACE.encode(), "user": b"7", "other": b"x", "baggage": None}
    (record,) = batch(given)
    assert record.context == {"traceparent": TRACE, "user": "7"}
    assert dict(record.headers) == given


def test_of_a_name_that_occurs_twice_the_last_one_counts() -> None:
    assert context.of_headers([("user", b"1"), ("user", b"2")], ["user"]) == {"user": "2"}


def test_bytes_that_are_no_text_travel_unchanged() -> None:
    with context.using(context.of_headers([("user", b"\xff\x00")], ["user"])):
        assert context.headers() == [("user", b"\xff\x00")]


def test_a_batch_has_what_its_records_have_in_common() -> None:
    same = {"traceparent": TRACE.encode()}
    assert batch({**same, "user": b"1"}, {**same, "user": b"2"}).context == {"traceparent": TRACE}
    assert batch(same, {}).context == {}
    first, rest = batch(same, same, {}).halves()
    assert (first.context, rest.context) == ({"traceparent": TRACE}, {})


def test_parts_of_a_batch_have_the_context_of_their_records() -> None:
    made = batch({"user": b"1"}, {"user": b"2"})
    assert made.context == {}
    for parts in (made.halves(), made.one_by_one()):
        assert [one.context for one in parts] == [{"user": "1"}, {"user": "2"}]


def test_while_a_loop_is_at_a_record_its_context_is_current() -> None:
    seen = []
    made = batch({"user": b"1"}, {}, {"user": b"3"})
    with context.using(lambda: made.context):
        for record in made:
            assert context.current() == record.context
            seen.append(context.headers([("x", b"y")]))
        assert context.current() == made.context == {}
        for _ in made:
            break
        assert context.current() == {"user": "1"}, "until the loop goes on, or the handler ends"
    assert seen == [[("user", b"1"), ("x", b"y")], [("x", b"y")], [("user", b"3"), ("x", b"y")]]
    assert context.current() == {}


def test_a_header_that_is_given_wins() -> None:
    with context.using({"user": "1", "locale": "de"}):
        given = [("user", b"2"), ("user", b"3")]
        assert context.headers(given) == [("locale", b"de"), *given]
        assert context.headers() == [("user", b"1"), ("locale", b"de")]


def test_blocks_may_be_nested_and_coroutines_see_their_own() -> None:
    async def seen(user: str) -> context.Context:
        with context.using({"user": user}):
            await asyncio.sleep(0)
            return context.current()

    async def both() -> list[context.Context]:
        return await asyncio.gather(seen("1"), seen("2"))

    with context.using({"user": "0"}):
        assert asyncio.run(both()) == [{"user": "1"}, {"user": "2"}]
        assert context.current() == {"user": "0"}


def test_a_handler_runs_in_the_context_of_its_batch() -> None:
    seen = []
    names = (*context.TRACE, "user")
    sink: Any = HandlersSink(Any, {"t": lambda *_: seen.append(context.current())}, context=names)  # type: ignore[arg-type]
    ours: Any = SimpleNamespace(lend=nullcontext)
    chunk = batch({"user": b"1", "traceparent": TRACE.encode()})._chunk
    attempt = _Attempt(sink, chunk, Any, None, (), None, Any)  # type: ignore[arg-type]
    for made in attempt._batches(()):
        attempt._call(ours, made)
    assert seen == [{"user": "1", "traceparent": TRACE}]
    assert context.current() == {}


def test_records_without_headers_have_no_context() -> None:
    made = batch({})
    made._chunk = replace(made._chunk, headers=None)
    assert made.records[0].context == {}
    assert made.context == {}
