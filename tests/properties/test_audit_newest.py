"""The newest row of each key is the one that separate statements in order would leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from oncely.audit.newest import NewestRows
from oncely.core.expected import Changes
from oncely.core.ranges import TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Line(NamedTuple):
    """A row of a key with a version, or a tombstone."""

    key: int
    version: int | None


LINES = st.lists(st.builds(Line, st.integers(0, 4), st.none() | st.integers(0, 3)), max_size=20)


def oracle(lines: Sequence[Line], *, versioned: bool) -> dict[int, int]:
    """The record of the row of each key, by statements in order."""
    rows: dict[int, int] = {}
    for offset, (key, version) in enumerate(lines):
        if version is None:
            rows.pop(key, None)
        elif not versioned or key not in rows or version >= (lines[rows[key]].version or 0):
            rows[key] = offset
    return rows


def changes(lines: Sequence[Line], first: int) -> Changes:
    offset = np.arange(first, first + len(lines))
    return Changes(
        offset,
        np.zeros(0, np.int64),
        offset,
        np.array([one.key for one in lines], np.uint64),
        np.array([one.version is None for one in lines], bool),
        pa.chunked_array([pa.array([one.version for one in lines], pa.int64())]),
        offset.astype(np.uint64) + np.uint64(7),
    )


def batches(lines: Sequence[Line], size: int) -> list[Changes]:
    return [changes(lines[at : at + size], at) for at in range(0, len(lines), size)]


@given(LINES, st.integers(1, 5), st.booleans())
def test_one_partition(lines: list[Line], size: int, versioned: bool) -> None:
    rows = NewestRows(versioned=versioned, lines=3)
    rows.add(T0, batches(lines, size), np.zeros(0, np.int64))
    settled = rows.settle()
    wanted = oracle(lines, versioned=versioned)
    found = settled.rows(T0)
    assert found.offset.tolist() == sorted(wanted.values())
    assert found.digest.tolist() == [at + 7 for at in found.offset.tolist()]
    assert not len(settled.rows(T0, sure=False).offset)
    for key in {one.key for one in lines}:
        fate = settled.fate(key)
        assert fate is not None
        assert fate.deleted == (key not in wanted)
        assert fate.deleted or fate.offset == wanted[key]


@given(LINES, LINES, st.booleans())
def test_keys_of_two_partitions_are_sure_by_version_only(
    left: list[Line], right: list[Line], versioned: bool
) -> None:
    rows = NewestRows(versioned=versioned)
    rows.add(T0, batches(left, 3), np.zeros(0, np.int64))
    rows.add(T1, batches(right, 3), np.zeros(0, np.int64))
    settled = rows.settle()
    both = {one.key for one in left} & {one.key for one in right}
    for tp, own in ((T0, left), (T1, right)):
        alone = {k: at for k, at in oracle(own, versioned=versioned).items() if k not in both}
        assert set(alone.values()) <= set(settled.rows(tp).offset.tolist())
    for key in both:
        fate = settled.fate(key)
        assert fate is not None
        if fate.sure:
            ends = [oracle(own, versioned=True).get(key) for own in (left, right)]
            assert versioned
            assert None not in ends
            versions = [left[ends[0] or 0].version or 0, right[ends[1] or 0].version or 0]
            assert (left, right)[fate.partition.partition][fate.offset].version == max(versions)


def test_dead_letters_have_no_effect() -> None:
    rows = NewestRows(versioned=False)
    lines = [Line(1, 0), Line(1, None), Line(1, 5)]
    rows.add(T0, batches(lines, 3), np.array([1, 2]))
    assert rows.settle().rows(T0).offset.tolist() == [0]
