"""The comparison of a cell finds exactly what a naive oracle finds, offset by offset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oncely.audit.compare import Rules, Stored, compare, is_exact, is_full
from oncely.audit.evidence import Cell, Readable, Span, runs_of
from oncely.audit.tally import Tallies, offset_digests, sum_of
from oncely.core.ranges import OffsetRange, TopicPartition
from tests.groupedtools import offsets_of

TP = TopicPartition("t", 0)


@dataclass(frozen=True)
class World:
    """A cell of a log with holes, and what a destination has of it."""

    start: int
    end: int
    first: int
    readable: frozenset[int]
    rows: Counter[int]
    rejects: frozenset[int]
    rules: Rules


@st.composite
def worlds(draw: st.DrawFn) -> World:
    start = draw(st.integers(0, 2**40))
    width = draw(st.integers(1, 12))
    offsets = range(start, start + width)
    some = st.frozensets(st.sampled_from(offsets))
    first = draw(st.sampled_from([0, start, start + width // 2, start + width + 5]))
    readable = frozenset(one for one in draw(some) if one >= first)
    usual = draw(st.booleans())  # most offsets as they should be
    rows = Counter(readable) if usual else Counter()
    rows.update(draw(st.lists(st.sampled_from(offsets), max_size=4)))
    for gone in draw(st.lists(st.sampled_from(offsets), max_size=3)):
        rows.pop(gone, None)
    rejects = frozenset(draw(st.frozensets(st.sampled_from(offsets), max_size=2)))
    rules = Rules(*draw(st.tuples(st.booleans(), st.booleans(), st.booleans())))
    return World(start, start + width, first, readable, rows, rejects, rules)


def read_of(world: World) -> Readable:
    span = Span(TP, OffsetRange(world.start, world.end))
    return Readable(span, runs_of(sorted(world.readable)), world.first)


def stored_of(world: World) -> Stored:
    offsets = np.array(sorted(world.rows), dtype=np.int64)
    rows = np.array([world.rows[int(one)] for one in offsets], dtype=np.int64)
    return Stored(offsets, rows, None, np.array(sorted(world.rejects), dtype=np.int64))


def oracle(world: World, offset: int) -> tuple[set[str], str]:
    """The findings at an offset, and what else it is."""
    rows, reject = world.rows[offset], offset in world.rejects
    there = rows > 0 or reject
    if offset not in world.readable and not there:
        return set(), "hole" if offset >= world.first else "deleted"
    found = set()
    if offset not in world.readable and offset >= world.first and not world.rules.compacted:
        found.add("unexpected")
        if rows and reject:
            found.add("duplicated")
        return found, "no record"
    if not there:
        return (set(), "maybe filtered") if world.rules.filters else ({"lost"}, "record")
    if (rows and reject) or (rows > 1 and not world.rules.several):
        found.add("duplicated")
    return found, "record"


@given(worlds())
def test_compare_finds_what_the_oracle_finds(world: World) -> None:
    found = compare(read_of(world), stored_of(world), world.rules)
    at = {offset: oracle(world, offset) for offset in range(world.start, world.end)}
    wanted = {(kind, offset) for offset, (kinds, _) in at.items() for kind in kinds}
    assert {(d.kind, int(o)) for d in found.damage for o in d.offsets} == wanted
    kept = Counter(what for _, what in at.values())
    assert found.records == kept["record"] + kept["maybe filtered"]
    assert found.accounted == sum(what == "record" and not k for k, what in at.values())
    assert found.holes == kept["hole"]
    assert sum(map(len, found.deleted)) == kept["deleted"]
    assert sum(map(len, found.maybe_filtered)) == kept["maybe filtered"]


@given(worlds())
def test_sums_decide_as_sets_do(world: World) -> None:
    """A cell passes by its sums if and only if it passes offset by offset."""
    range_ = OffsetRange(world.start, world.end)
    tallies = Tallies([Cell(Span(TP, range_), "")])
    tallies.add(TP, np.array(sorted(world.rows.elements()), dtype=np.int64))
    tallies.add(TP, np.array(sorted(world.rejects), dtype=np.int64), rejects=True)
    (tally,) = tallies.result()
    both = Counter(world.rows.elements()) + Counter(world.rejects)
    whole = sum_of([(world.start, world.end)])
    assert is_full(range_, tally, whole) == (both == Counter(range(world.start, world.end)))
    exact = both == Counter(world.readable) and world.first <= world.start
    assert is_exact(read_of(world), tally) == exact


@given(st.lists(st.integers(0, 2**62), unique=True).map(sorted))
def test_runs_are_the_offsets(offsets: list[int]) -> None:
    assert offsets_of(runs_of(offsets)) == offsets


def test_sums_do_not_depend_on_the_cut() -> None:
    offsets = np.arange(5, 3_000)
    assert sum_of([(5, 3_000)]) == int(offset_digests(offsets).sum(dtype=np.uint64)) % 2**64
    assert sum_of([(5, 70), (70, 3_000)]) == sum_of([(5, 3_000)])
