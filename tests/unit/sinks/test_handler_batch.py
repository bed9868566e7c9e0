"""The batches that handlers get of a chunk."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from oncely.core.batch import Chunk
from oncely.decode.metadata import RawDecoder
from oncely.kinds.handlers.batch import Portion
from tests.sinktools import SCHEMA, T0, T1, Rec, chunk, numbered, rec

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def with_headers(given: Chunk) -> Chunk:
    """Each record has its index as a header, twice."""
    values = [[{"key": "n", "value": b"%d" % n}] * 2 for n in range(given.records)]
    return replace(given, headers=pa.chunked_array([values], HEADERS))


def test_a_batch_has_the_records_of_one_partition_in_order() -> None:
    two = Rec(5, ({"id": 5, "name": "a"}, {"id": 6, "name": "b"}))
    gone = Rec(7, deletes={"id": 3})
    parts = {T0: (4, [rec(4, id=4, name="x"), two, Rec(6), gone, Rec(8, bad="no JSON")]),
             T1: (0, numbered(0, 1))}  # fmt: skip
    first, second = Portion.of(with_headers(chunk(parts, keys=["id"])), ())
    assert (first.topic, first.partition, first.offsets, len(first)) == ("t", 0, (4, 7), 4)
    assert [(one.offset, dict(one.row), one.deleted) for one in first] == [
        (4, {"id": 4, "name": "x"}, False),
        (5, {"id": 5, "name": "a"}, False),
        (5, {"id": 6, "name": "b"}, False),
        (7, {"id": 3}, True),
    ]
    assert [one.headers for one in first][1] == [("n", b"1"), ("n", b"1")]
    assert first.table == pa.Table.from_pylist(
        [{"id": 4, "name": "x"}, {"id": 5, "name": "a"}, {"id": 6, "name": "b"}], schema=SCHEMA
    )
    assert (second.partition, second.table.num_rows) == (1, 1)


def test_halves_keep_the_rows_of_a_record_together() -> None:
    two = Rec(1, ({"id": 1, "name": "a"}, {"id": 2, "name": "b"}))
    (whole,) = Portion.of(chunk({T0: (0, [rec(0, id=0), two, rec(2, id=3)])}), {0})
    first, rest = whole.halves()
    assert [[one["id"] for one in batch] for batch in (whole, first, rest)] == [
        [1, 2, 3], [1, 2], [3],
    ]  # fmt: skip
    assert (whole.only, first.only, rest.only) == (None, 1, 2)


def test_a_partition_without_records_has_no_batch() -> None:
    assert list(Portion.of(chunk({T0: (0, [Rec(0), Rec(1, bad="no JSON")])}), ())) == []
    assert list(Portion.of(chunk({T0: (0, numbered(0, 2))}), {0, 1})) == []


def test_raw_records_have_key_value_and_timestamp() -> None:
    given = pa.table(
        {
            "key": pa.array([b"k"]),
            "value": pa.array([None], pa.binary()),
            "timestamp": pa.array([1_700_000_000_000], pa.timestamp("ms", tz="UTC")),
        }
    )
    rows = RawDecoder().decode(given).rows
    ((record,),) = Portion.of(replace(chunk({T0: (0, numbered(0, 1))}), rows=rows), ())
    assert (record.key, record.value) == (b"k", None)
    assert record.timestamp.isoformat() == "2023-11-14T22:13:20+00:00"
    assert record.headers == []


def test_columns_that_decode_does_not_give_are_named() -> None:
    ((record,),) = Portion.of(chunk({T0: (0, numbered(0, 1))}), ())
    with pytest.raises(AttributeError, match="no column 'value', but id, name"):
        _ = record.value
