"""Totals in ledger records and in the metadata of group offsets."""

from __future__ import annotations

import json

import pytest

from oncely.core.claim import NO_RECORDS, Counts
from oncely.stores.document import Totals, add_amendment, add_range
from oncely.stores.topic.records import OffsetMetadata, PositionRecord, read_stamp, stamp

DONE = Counts(4, 3, 1, 0, 2**64 - 2, "r")


def test_ranges_add_up_from_the_first() -> None:
    first = add_range(None, 10, DONE, 3)
    assert first == Totals(10, 3, 4, 3, 1, 0, 2**64 - 2, "r")
    assert add_range(first, 14, DONE, 4) == Totals(10, 3, 8, 6, 2, 0, 2**64 - 4, "r")
    assert add_range(first, 14, NO_RECORDS, 4) == first


@pytest.mark.parametrize("other", [Counts(1, 1, 0, 0, 5, "s"), Counts(1, 1, 0, 0)])
def test_another_recipe_begins_anew(other: Counts) -> None:
    first = add_range(None, 10, DONE, 3)
    found = add_range(first, 14, other, 4)
    assert (found.since, found.counts, found.digest) == (14, other, other.digest)
    assert add_range(found, 15, DONE, 4).since == 15


def test_ranges_without_rows_do_not_begin_anew() -> None:
    first = add_range(None, 10, Counts(2, 0, 2, 0), 3)
    assert add_range(first, 12, DONE, 3) == Totals(10, 3, 6, 3, 3, 0, 2**64 - 2, "r")


def test_rows_without_a_digest_are_counted() -> None:
    """Those of files: each file has a checksum."""
    first = add_range(None, 0, Counts(2, 2, 0, 0), 3)
    assert add_range(first, 2, Counts(3, 3, 0, 0), 3) == Totals(0, 3, 5, 5, 0, 0, None, "")


def test_metadata_carries_them() -> None:
    totals = add_range(None, 10, DONE, 3)
    moved = PositionRecord(14, 3, "c", "id", 10, 14, "data", 0, 0, 0, 0, "partition", totals)
    found = read_stamp(14, stamp(moved, "p"))
    assert found == OffsetMetadata(14, 3, "c", "id", "partition", "p", moved.totals)


@pytest.mark.parametrize("totals", [[], [["a"]], [[1, 2, 3, 4, 5, "x"]], [7]])
def test_metadata_without_totals_that_can_be_read(totals: list[object]) -> None:
    """Of a later version: the position counts."""
    text = json.dumps(["oncely", 3, "c", "id", "batch", "p", *totals])
    assert read_stamp(14, text) == OffsetMetadata(14, 3, "c", "id", "batch", "p")


def test_changes_of_other_totals_are_void() -> None:
    totals, change = add_range(None, 10, DONE, 3), Counts(0, 1, -1, 0, 7, "r")
    first = add_amendment(None, totals, change)
    assert first == Totals(10, 3, 0, 1, -1, 0, 7, "r")
    assert add_amendment(first, totals, change) == Totals(10, 3, 0, 2, -2, 0, 14, "r")
    again = add_range(None, 10, DONE, 5)
    assert add_amendment(first, again, change) == Totals(10, 5, 0, 1, -1, 0, 7, "r")
