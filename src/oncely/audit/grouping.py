"""Groups of offsets whose rows can't be told apart: ranges that overlap, directly or by a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.audit.content import Rows
from oncely.audit.evidence import Span
from oncely.core.digest import Recipe, kind_of, row_digests
from oncely.core.ranges import OffsetRange, TopicPartition, grouped, normalize


@dataclass(frozen=True)
class Node:
    """Something that covers offsets: a file, or an entry of the history.

    Attributes:
        spans: the offsets, of one or several partitions.
        what: the thing itself.
    """

    spans: tuple[Span, ...]
    what: Any


@dataclass(frozen=True)
class Component:
    """Nodes whose offsets overlap, and all their offsets: ascending, disjoint, not touching within
    a partition."""

    spans: tuple[Span, ...]
    nodes: tuple[Node, ...]


def components(
    nodes: Sequence[Node], whole: Mapping[TopicPartition, OffsetRange]
) -> list[Component]:
    """Connected nodes, and the offsets that no node covers, ascending.

    Args:
        nodes: their offsets may reach beyond ``whole``.
        whole: the offsets that the components cover.
    """
    leader = _connected(nodes)
    by_leader = grouped((leader(at), node) for at, node in enumerate(nodes))
    found = [_component(own) for own in by_leader.values()]
    covered = grouped(span for one in found for span in one.spans)
    for tp, range_ in whole.items():
        found += [Component((Span(tp, gap),), ()) for gap in range_.minus(covered.get(tp, ()))]
    return sorted(found, key=lambda one: one.spans)


def _connected(nodes: Sequence[Node]) -> Any:
    """A function from a node's index to that of the first node of its component."""
    parent = list(range(len(nodes)))

    def leader(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    edges = grouped((tp, (one, at)) for at, node in enumerate(nodes) for tp, one in node.spans)
    for own in edges.values():
        end, before = -1, 0
        for range_, at in sorted(own):
            if range_.start < end:
                first, second = sorted((leader(at), leader(before)))
                parent[second] = first
            end, before = max(end, range_.end), at
    return leader


def _component(nodes: Sequence[Node]) -> Component:
    ranges = grouped(span for node in nodes for span in node.spans)
    spans = [Span(tp, one) for tp, own in sorted(ranges.items()) for one in normalize(own)]
    return Component(tuple(spans), tuple(nodes))


def recipe_of(schema: pa.Schema) -> Recipe:
    """The recipe of all columns that a digest can cover."""
    return Recipe.of({one.name: kind_of(one.type) for one in schema}, offset=False)


def digests_of(rows: pa.Table, recipe: Recipe, at: str) -> Rows:
    """The digest of each row. A column that the rows lack is null in all of them."""
    there = tuple(one for one in recipe.columns if one[0] in rows.column_names)
    uncovered = frozenset(rows.column_names) - {name for name, _ in there}
    return Rows(row_digests(rows, None, Recipe(there, recipe.offset)), lambda _: at, uncovered)
