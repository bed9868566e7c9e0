"""The port of an offset store: positions of a pipeline, stored separately from its rows.

Two stores cannot be written atomically. A pipeline that saves its positions here is therefore at
least once (rows first, then the position) or at most once (the position first), and never exactly
once, which requires the sink's own ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from oncely.core.ranges import Position, TopicPartition


@dataclass(frozen=True)
class Stored:
    """The stored state of one topic-partition.

    Attributes:
        position: next offset to read.
        epoch: the epoch of the run that wrote it.
        cluster_id: Kafka's cluster id.
        topic_id: the id of the topic (KIP-516).
    """

    position: Position
    epoch: int
    cluster_id: str
    topic_id: str


class OffsetStore(Protocol):
    """The positions of one pipeline. A store holds several pipelines side by side.

    Picklable. Connects at first use, separately in each process, and may be used from several
    threads. Several processes save different partitions at the same time, and do not undo each
    other's saves. There is no fencing: of two that save the *same* partition, the later one wins.
    """

    @property
    def where(self) -> str:
        """Kind and address of the store, for messages: never with a password."""

    def load(self) -> dict[TopicPartition, Stored]:
        """All present positions of the pipeline. Creates nothing.

        Raises:
            Unavailable: no answer.
            ConfigError: the store refuses the login, or a setting is invalid (``offsets.…``).
            Stopped: it contains foreign data.
        """

    def save(self, positions: Mapping[TopicPartition, Stored]) -> None:
        """Write these positions and no others; durable when it returns.

        After an error it is unknown which of them were written. Saving them again is safe.

        Raises:
            Unavailable: no answer.
            ConfigError: the store does not permit writing, or a setting is invalid (``offsets.…``).
            Stopped: it contains foreign data.
        """

    def warning(self) -> str:
        """A weakness of this store's durability; empty if none is known.

        Raises the errors of :meth:`load`.
        """
        return ""

    def close(self) -> None:
        """Close the connection; the next call opens a new one. Never raises."""
