"""Topic-partitions and positions.

A position is always the NEXT offset to read, in Kafka's own sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

Position = int
"""The next offset to read. ``0 <= position``."""


class TopicPartition(NamedTuple):
    """One partition of one topic. Sorts by topic, then partition: the order locks are taken in."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True)
class SourceIdentity:
    """What tells a topic from another one by the same name.

    Attributes:
        cluster_id: Kafka's cluster id.
        topic_ids: topic name to topic id (KIP-516), as text.
    """

    cluster_id: str
    topic_ids: Mapping[str, str]
