from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.decode.columns import Columns, Misfits, RowCollector, fit, slices

BY_NAME = Columns(pick=lambda _, name: lambda members: members.get(name))


def build(arrow: pa.DataType, values: Sequence[Any]) -> pa.Array:
    column = BY_NAME.build(arrow, values)
    column.validate(full=True)
    assert column.type == arrow
    return column


def test_nested_columns_are_what_arrow_makes_of_the_same_values() -> None:
    inner = pa.struct([("n", pa.int32()), pa.field("s", pa.string(), nullable=False)])
    arrow = pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(inner))), ("x", inner)]))
    values: list[Any] = [
        None,
        [],
        [None, {}, {"m": None, "x": {"n": 1, "s": "a"}}],
        [{"m": {"k": [{"n": None, "s": "b"}, None], "l": None}}, {"m": {}}],
    ]
    expected: list[Any] = [
        None,
        [],
        [None, {"m": None, "x": None}, {"m": None, "x": {"n": 1, "s": "a"}}],
        [
            {"m": [("k", [{"n": None, "s": "b"}, None]), ("l", None)], "x": None},
            {"m": [], "x": None},
        ],
    ]
    assert build(arrow, values).to_pylist() == expected
    assert build(arrow, []).to_pylist() == []
    assert build(arrow, [None]).to_pylist() == [None]


def test_misfits_are_named_by_row_however_deep_they_lie() -> None:
    arrow = pa.struct([("a", pa.list_(pa.map_(pa.string(), pa.int8())))])
    values = [{"a": [{"k": 1}]}, None, {"a": [None, {"k": 1, "l": 300}, {"m": 400}]}, {"a": []}]
    with pytest.raises(Misfits) as caught:
        BY_NAME.batch(pa.schema([("x", arrow)]), [[*values, {"a": [{"k": 500}]}]])
    assert caught.value.positions.tolist() == [2, 4]
    assert caught.value.why.startswith("x.a[][]: ")


def test_fit_leaves_out_the_misfits_and_keeps_the_order() -> None:
    def ints(rows: Sequence[Any]) -> pa.RecordBatch:
        return BY_NAME.batch(pa.schema([("x", pa.int8())]), [rows])

    rows = [n if n % 7 else 1000 for n in range(100)]
    (piece,), misfits = fit(rows, np.arange(100), ints)
    assert piece[0].tolist() == piece[1]["x"].to_pylist() == [n for n in range(100) if n % 7]
    assert sorted(misfits) == [n for n in range(100) if not n % 7]
    assert fit([1000, 1000], np.array([3, 5]), ints)[0] == []
    assert fit([], np.arange(0), ints) == ([], {})


def test_fit_names_rows_by_their_records() -> None:
    def ints(rows: Sequence[Any]) -> pa.RecordBatch:
        return BY_NAME.batch(pa.schema([("x", pa.int8())]), [rows])

    ((records, batch),), misfits = fit([1, 1000, 3], np.array([4, 6, 9]), ints)
    assert (records.tolist(), batch["x"].to_pylist()) == ([4, 9], [1, 3])
    assert list(misfits) == [6]


def test_fit_halves_when_no_row_alone_is_to_blame() -> None:
    calls = []

    def at_most_thirty(rows: Sequence[Any]) -> pa.RecordBatch:
        calls.append(len(rows))
        if len(rows) > 30 or rows == [13]:
            raise Misfits(np.array([], np.int64), "too many bytes")
        if 13 in rows:
            raise Misfits(np.array([], np.int64), "not by itself")
        return pa.record_batch({"x": rows})

    pieces, misfits = fit(range(100), np.arange(100), at_most_thirty)
    assert [n for _, batch in pieces for n in batch["x"].to_pylist()] == [
        n for n in range(100) if n != 13
    ]
    assert misfits == {13: "too many bytes"}


def test_a_defect_is_no_misfit() -> None:
    broken = Columns(pick=lambda _, name: lambda members: members[name])
    with pytest.raises(KeyError):
        broken.build(pa.struct([("a", pa.int32())]), [{"b": 1}])


def test_slices_are_bounded_by_rows_and_bytes_and_cover_everything() -> None:
    chunks = [[b"x" * 10] * 5, [], [b"y" * 100, None, b"z" * 3]]
    column = pa.chunked_array([pa.array(chunk, pa.binary()) for chunk in chunks])
    parts = list(slices(column, rows=3, size=60))
    assert [part.first for part in parts] == [0, 3, 5, 6]
    assert [v for part in parts for v in part.values.to_pylist()] == list(chain(*chunks))


def test_pieces_of_a_slice_are_put_in_record_order() -> None:
    def piece(*records: int) -> tuple[Any, pa.RecordBatch]:
        return np.array(records, np.int64), pa.record_batch({"x": [f"r{n}" for n in records]})

    rows = RowCollector(pa.schema([("x", pa.string())]))
    reason = "one\nline, no \0 and not " + "long " * 1000
    rows.add(0, [piece(0, 1, 4), piece(2, 6), piece()], {5: reason})
    rows.add(7, [piece(0), piece(1, 2)], {})
    rows.add(10, [], {})
    decoded = rows.decoded()
    assert decoded.row_record.to_pylist() == [0, 1, 2, 4, 6, 7, 8, 9]
    assert decoded.rows["x"].to_pylist() == [f"r{n}" for n in (0, 1, 2, 4, 6, 0, 1, 2)]
    (rejection,) = decoded.rejections
    assert rejection.reason.startswith("one\\nline, no \\x00 and not long long")
    assert len(rejection.reason) < 450
