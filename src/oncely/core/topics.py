"""Topic-partitions and positions.

A position is always the NEXT offset to read, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Position = int
"""The next offset to read. ``0 <= position``."""

T = TypeVar("T")
K = TypeVar("K")


class TopicPartition(NamedTuple):
    """A partition of a topic. Sorts by topic, then partition: the order of taking locks."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True)
class SourceIdentity:
    """Ids that distinguish a topic from another topic of the same name.

    Attributes:
        cluster_id: Kafka's cluster id.
        topic_ids: topic name to topic id (KIP-516), as text.
    """

    cluster_id: str
    topic_ids: Mapping[str, str]


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of each key, such as a partition's, in their order."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def by_topic(values: Mapping[TopicPartition, T]) -> dict[str, dict[int, T]]:
    """Values by topic, then partition: the form in which they are stored as JSON."""
    tree: dict[str, dict[int, T]] = {}
    for tp, value in sorted(values.items(), key=lambda item: item[0]):
        tree.setdefault(tp.topic, {})[tp.partition] = value
    return tree


def from_tree(tree: Mapping[str, Mapping[int, T]]) -> dict[TopicPartition, T]:
    """The inverse of :func:`by_topic`."""
    return {TopicPartition(t, n): value for t, own in tree.items() for n, value in own.items()}
