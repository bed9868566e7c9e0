"""Digests of rows: what changes them, what does not, and their recipes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from oncely.core import digest
from oncely.core.change import changed
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.digest import (
    Kind,
    Recipe,
    column_constant,
    digest_sum,
    digest_sums,
    kind_of,
    row_digests,
)

ROWS = pa.table({"id": [1, 2, 3], "name": ["a", None, "c"]})
OFFSETS = np.arange(3)
RECIPE = Recipe.of({"id": Kind("bigint"), "name": Kind("text")}, offset=True)


def of(rows: pa.Table, offsets: np.ndarray = OFFSETS, recipe: Recipe = RECIPE) -> int:
    return digest_sum(row_digests(rows, offsets, recipe))


def test_a_digest_of_today_is_the_digest_of_tomorrow() -> None:
    """Stored beside the rows: another result would make all of them damaged."""
    assert column_constant("id") == 16396962367751923188
    assert row_digests(ROWS, OFFSETS, RECIPE).tolist() == [
        9557299736892144817, 16915253498434559099, 58794598774687757,
    ]  # fmt: skip


def test_the_order_of_rows_and_columns_does_not_matter() -> None:
    turned = ROWS.take(pa.array([2, 0, 1])).select(["name", "id"])
    assert of(turned, OFFSETS[[2, 0, 1]]) == of(ROWS)


def test_a_row_that_is_there_twice_changes_the_digest() -> None:
    doubled = pa.concat_tables([ROWS, ROWS.slice(0, 1), ROWS.slice(0, 1)])
    assert of(doubled, np.array([0, 1, 2, 0, 0])) != of(ROWS)


@pytest.mark.parametrize(
    "change",
    [
        {"id": [1, 2, 4], "name": ["a", None, "c"]},
        {"id": [1, 2, 3], "name": ["a", "", "c"]},
        {"id": [1, 2, 3], "name": ["c", None, "a"]},
        {"id": [1, 2, None], "name": ["a", None, "c"]},
    ],
)
def test_a_changed_value_changes_the_digest(change: dict[str, list[object]]) -> None:
    assert of(pa.table(change)) != of(ROWS)


def test_values_of_two_columns_cannot_be_exchanged() -> None:
    recipe = Recipe.of({"a": Kind("bigint"), "b": Kind("bigint")}, offset=False)
    one, other = pa.table({"a": [1], "b": [2]}), pa.table({"a": [2], "b": [1]})
    assert of(one, recipe=recipe) != of(other, recipe=recipe)


def test_a_row_at_another_offset_has_another_digest() -> None:
    assert of(ROWS, OFFSETS + 1) != of(ROWS)
    without = Recipe(RECIPE.columns, offset=False)
    assert of(ROWS, OFFSETS + 1, without) == of(ROWS, OFFSETS, without)


def test_a_column_that_is_null_everywhere_does_not_matter() -> None:
    wider = ROWS.append_column("new", pa.nulls(3, pa.float64()))
    recipe = Recipe.of({**dict(RECIPE.columns), "new": Kind("float")}, offset=True)
    assert of(wider, recipe=recipe) == of(ROWS)


def test_chunks_slices_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    size = 1_000
    flags = pa.array(rng.integers(0, 2, size).astype(bool))
    texts = [None if one % 5 == 0 else "ab" * int(one) for one in rng.integers(0, 200, size)]
    whole_numbers = pa.array(range(size)).cast(pa.decimal128(19, 0))
    whole = pa.table(
        {
            "flag": flags,
            "text": texts,
            "bytes": pa.array([text and text.encode() for text in texts]),
            "real": pa.array(rng.normal(size=size).astype(np.float32)),
            "coded": pa.array(texts).dictionary_encode(),
            "money": whole_numbers.cast(pa.decimal128(21, 2)),
            "cents": whole_numbers.cast(pa.decimal128(18, 1), safe=False),
        }
    )
    recipe = Recipe.of({field.name: kind_of(field.type) for field in whole.schema}, offset=True)
    assert len(recipe.columns) == whole.num_columns
    at = np.arange(size)
    expected = row_digests(whole, at, recipe)
    cut = pa.concat_tables([whole.slice(0, 3), whole.slice(3, 500), whole.slice(503)])
    assert (row_digests(cut, at, recipe) == expected).all()
    assert (row_digests(whole.slice(13, 77), at[13:90], recipe) == expected[13:90]).all()
    monkeypatch.setattr(digest, "_BLOCK", 7)
    assert (row_digests(whole, at, recipe) == expected).all()


def test_no_rows_and_no_columns() -> None:
    assert of(ROWS.slice(0, 0), OFFSETS[:0]) == 0
    bare = Recipe((), offset=True)
    assert len(set(row_digests(ROWS, OFFSETS, bare).tolist())) == 3


def test_sums_of_several_ranges() -> None:
    digests = np.array([2**63, 2**63, 5, 7], np.uint64)
    assert digest_sums(digests, np.array([0, 0, 2, 0]), 3) == [7, 0, 5]
    assert digest_sums(digests, np.zeros(4, np.int64), 1) == [12]


@pytest.mark.parametrize(
    ("arrow_type", "kind"),
    [
        (pa.uint64(), None), (pa.uint32(), "bigint"), (pa.int32(), "integer"),
        (pa.int8(), "integer"),
        (pa.uint16(), "integer"), (pa.timestamp("ns"), None), (pa.timestamp("ms"), "timestamp"),
        (pa.timestamp("us", "Asia/Tokyo"), "instant"), (pa.list_(pa.int64()), None),
        (pa.decimal128(18, 3), "decimal3"), (pa.decimal128(19, 3), "numeric3"),
        (pa.decimal128(5, -2), None), (pa.decimal256(50, 3), None), (pa.null(), None),
        (pa.dictionary(pa.int32(), pa.string()), "text"), (pa.large_binary(), "bytes"),
        (pa.date64(), None), (pa.struct([("a", pa.int64())]), None), (pa.time32("s"), "time"),
    ],
)  # fmt: skip
def test_kinds_of_columns(arrow_type: pa.DataType, kind: str | None) -> None:
    found = kind_of(arrow_type)
    assert (found and str(found)) == kind


@pytest.mark.parametrize("name", ["id", "a b", "a=b", "ä%20", "", "a\nb", "=", "x=y z="])
def test_a_recipe_is_read_as_it_was_written(name: str) -> None:
    recipe = Recipe.of({name: Kind("decimal", 12), "other": Kind("text"), "no": None}, offset=True)
    assert Recipe.parse(str(recipe)) == recipe
    assert len(str(recipe).split(" ")) == 4


@pytest.mark.parametrize(
    "text",
    ["", "1", "2 row", "1 rows", "1 row id", "1 row id=uuid", "1 row id=decimal", "1 row id=text3"],
)
def test_what_is_no_recipe_of_this_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        Recipe.parse(text)


def test_counts_add_digests_of_the_same_recipe() -> None:
    one, other = Counts(2, 2, 0, 0, 2**64 - 1, "r"), Counts(3, 1, 2, 0, 5, "r")
    both = one + other
    assert (both, both.digest, both.recipe) == (Counts(5, 3, 2, 0), 4, "r")


def test_an_unknown_digest_makes_the_sum_unknown() -> None:
    known = Counts(2, 2, 0, 0, 9, "r")
    for other in (Counts(1, 1, 0, 0), Counts(1, 1, 0, 0, 9, "s")):
        for both in (known + other, other + known):
            assert (both.digest, both.recipe) == (None, "")


def test_changes_that_leave_the_number_of_rows_count() -> None:
    """Also when two of them cancel each other out, or are not known."""
    whole, same = Counts(2, 2, 0, 0, 7, "a"), Counts(0, 0, 0, 0, 5, "a")
    assert (whole + same).digest == 12
    other = changed(Counts(2, 2, 0, 0, 9, "b"), whole)
    assert (whole + other).digest is None
    assert (whole + (other + other)).digest is None
    assert (whole + (Counts(0, 1, 0, 0, 1, "a") + Counts(0, -1, 0, 0, 1, "b"))).digest is None
    back = changed(whole, Counts(2, 2, 0, 0, 9, "a"))
    assert (Counts(2, 2, 0, 0, 9, "a") + back).digest == 7


def test_a_range_without_rows_has_no_part_in_a_digest() -> None:
    known = Counts(2, 2, 0, 0, 9, "r")
    for both in (known + NO_RECORDS, NO_RECORDS + known, Counts(1, 0, 1, 0, 0, "s") + known):
        assert (both.digest, both.recipe) == (9, "r")
