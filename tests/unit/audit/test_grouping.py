"""Offsets belong to one group if their rows can't be told apart."""

from __future__ import annotations

from oncely.audit.content import Node, components
from oncely.audit.evidence import Span
from oncely.core.ranges import OffsetRange
from tests.sinktools import T0, T1


def node(name: str, *spans: tuple[object, int, int]) -> Node:
    return Node(tuple(Span(tp, OffsetRange(a, b)) for tp, a, b in spans), name)  # type: ignore[arg-type]


def found(nodes: list[Node], **whole: tuple[int, int]) -> list[tuple[str, str]]:
    ranges = {tp: OffsetRange(*whole[n]) for n, tp in (("t0", T0), ("t1", T1)) if n in whole}
    return [
        (" ".join(f"{s.partition}{s.range}" for s in one.spans),
         "".join(sorted(n.what for n in one.nodes)))
        for one in components(nodes, ranges)
    ]  # fmt: skip


def test_ranges_that_share_an_offset_are_one_group_and_those_that_touch_are_two() -> None:
    nodes = [node("a", (T0, 0, 5)), node("b", (T0, 5, 9)), node("c", (T0, 8, 12))]
    assert found(nodes, t0=(0, 12)) == [("t-0[0, 5)", "a"), ("t-0[5, 12)", "bc")]


def test_a_long_range_joins_what_lies_inside_it() -> None:
    nodes = [node("a", (T0, 0, 20)), node("b", (T0, 1, 3)), node("c", (T0, 10, 12)),
             node("d", (T0, 19, 25)), node("e", (T0, 25, 26))]  # fmt: skip
    assert found(nodes, t0=(0, 26)) == [("t-0[0, 25)", "abcd"), ("t-0[25, 26)", "e")]


def test_a_node_of_two_partitions_joins_their_groups() -> None:
    nodes = [node("a", (T0, 0, 5)), node("b", (T1, 0, 5)), node("c", (T0, 4, 6), (T1, 4, 6)),
             node("d", (T1, 6, 8))]  # fmt: skip
    assert found(nodes, t0=(0, 6), t1=(0, 8)) == [
        ("t-0[0, 6) t-1[0, 6)", "abc"), ("t-1[6, 8)", "d")]  # fmt: skip


def test_offsets_that_nothing_covers_are_groups_of_their_own() -> None:
    nodes = [node("a", (T0, 2, 4)), node("b", (T0, 6, 8))]
    assert found(nodes, t0=(0, 10), t1=(3, 5)) == [
        ("t-0[0, 2)", ""), ("t-0[2, 4)", "a"), ("t-0[4, 6)", ""), ("t-0[6, 8)", "b"),
        ("t-0[8, 10)", ""), ("t-1[3, 5)", "")]  # fmt: skip
