"""The port of an offset store: positions of a pipeline, kept apart from its rows.

Two places can't be written in one step. A pipeline that saves its positions here is therefore at
least once (rows first, then the position) or at most once (the position first), and never exactly
once: that takes the sink's own ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from oncely.core.topics import Position, TopicPartition


@dataclass(frozen=True)
class Stored:
    """The store's word on one topic-partition.

    Attributes:
        position: next offset to read.
        epoch: of the run that wrote it.
        cluster_id: Kafka's cluster id.
        topic_id: of the topic that the offset counts in (KIP-516).
    """

    position: Position
    epoch: int
    cluster_id: str
    topic_id: str


class OffsetStore(Protocol):
    """The positions of one pipeline. A store holds several pipelines side by side.

    Picklable. Connects at first use, anew in each process, and may be used from several threads.
    Several processes save different partitions at the same time, and none undoes another's save.
    Nobody is fenced: of two that save the *same* partition, the later one wins.
    """

    @property
    def where(self) -> str:
        """What the store is and where, for people: never a password."""

    def load(self) -> dict[TopicPartition, Stored]:
        """All positions of the pipeline, read now. Creates nothing.

        Raises:
            Unavailable: no answer.
            ConfigError: the store does not let us in, or a setting can't work (``offsets.…``).
            Stopped: it holds something that no offset store has written.
        """

    def save(self, positions: Mapping[TopicPartition, Stored]) -> None:
        """Write these positions and leave all others alone; durable when it returns.

        After an error it is unknown which of them were written. Saving them again is safe.

        Raises:
            Unavailable: no answer.
            ConfigError: the store does not let us write, or a setting can't work (``offsets.…``).
            Stopped: what is there already is not an offset store's.
        """

    def warning(self) -> str:
        """What weakens "durable" in this very place; empty when nothing is known to.

        Raises as :meth:`load` does.
        """
        return ""

    def close(self) -> None:
        """End the connection; the next call makes a new one. Never raises."""
