"""The algebra of ranges, against sets of offsets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from oncely.core.ranges import OffsetRange, gaps, normalize

LIMIT = 24


@st.composite
def ranges(draw: st.DrawFn) -> OffsetRange:
    start = draw(st.integers(0, LIMIT))
    return OffsetRange(start, draw(st.integers(start, LIMIT)))


MANY = st.lists(ranges(), max_size=8)


def offsets(*many: OffsetRange) -> set[int]:
    return {at for one in many for at in range(one.start, one.end)}


def is_canonical(many: tuple[OffsetRange, ...]) -> bool:
    """Ascending, none empty, at least one offset between any two."""
    return all(not one.is_empty for one in many) and all(
        a.end < b.start for a, b in itertools.pairwise(many)
    )


@given(MANY)
def test_normalize_keeps_the_offsets_and_is_canonical(many: list[OffsetRange]) -> None:
    found = normalize(many)
    assert offsets(*found) == offsets(*many)
    assert is_canonical(found)


@given(MANY, st.randoms(use_true_random=False))
def test_normalize_forgets_order_and_cuts(many: list[OffsetRange], random: object) -> None:
    shuffled = [*many, *many]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert normalize(shuffled) == normalize(many)
    assert normalize(normalize(many)) == normalize(many)


@given(ranges(), MANY)
def test_minus(one: OffsetRange, done: list[OffsetRange]) -> None:
    left = one.minus(done)
    assert offsets(*left) == offsets(one) - offsets(*done)
    assert is_canonical(left)


@given(ranges(), MANY, MANY)
def test_minus_twice_is_minus_both(
    one: OffsetRange, first: list[OffsetRange], second: list[OffsetRange]
) -> None:
    twice = [rest for part in one.minus(first) for rest in part.minus(second)]
    assert tuple(twice) == one.minus([*first, *second])


@given(ranges(), MANY)
def test_what_is_left_and_what_was_done_make_the_whole(
    one: OffsetRange, done: list[OffsetRange]
) -> None:
    assert normalize([*one.minus(done), *done]) == normalize([one, *done])


@given(ranges(), ranges())
def test_overlaps_and_touches(a: OffsetRange, b: OffsetRange) -> None:
    assert a.overlaps(b) == b.overlaps(a) == bool(offsets(a) & offsets(b))
    assert a.touches(b) == b.touches(a)
    if not a.is_empty and not b.is_empty:
        assert a.touches(b) == (len(normalize([a, b])) == 1)


@given(ranges(), ranges())
def test_join_covers_both_and_nothing_else(a: OffsetRange, b: OffsetRange) -> None:
    if a.touches(b):
        joined = a.join(b)
        assert joined == b.join(a)
        assert offsets(joined) == offsets(a, b)


@given(ranges(), st.integers(-1, LIMIT + 1))
def test_contains(one: OffsetRange, offset: int) -> None:
    assert (offset in one) == (offset in offsets(one))


@given(MANY)
def test_gaps_are_what_is_missing_inside(many: list[OffsetRange]) -> None:
    covered = offsets(*many)
    missing = set(range(min(covered), max(covered))) - covered if covered else set()
    assert offsets(*gaps(many)) == missing
    assert is_canonical(gaps(many))
