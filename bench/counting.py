"""A sink that takes everything and keeps nothing: what the plan costs without the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oncely.core.ledger import Entry, advance
from oncely.core.offsets import TopicPartition
from oncely.sinks.base import Chunk, Fence, RangeKind, Written

_positions: dict[tuple[str, TopicPartition], int] = {}


@dataclass(frozen=True)
class CountingSink:
    """Its ledger is the memory of one Python worker, which is enough for one task's chunks.

    Attributes:
        batch: a name of its own for each batch, as workers live on.
        starts: where the batch's ranges begin.
    """

    batch: str
    starts: Mapping[TopicPartition, int]

    @property
    def one_store(self) -> bool:
        """Nothing is stored."""
        return False

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Where this worker has counted up to."""
        return {
            tp: Entry(_positions.get((self.batch, tp), at), fence.epoch)
            for tp, at in self.starts.items()
        }

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """The same."""
        return self.entries(fence)

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,  # noqa: ARG002 - the port's
        max_rejects: int | None,  # noqa: ARG002
        kind: RangeKind = "data",  # noqa: ARG002
    ) -> dict[TopicPartition, Written]:
        """Count rows by topic-partition."""
        rows = np.bincount(chunk.partition[chunk.row_record], minlength=len(chunk.partitions))
        for tp, range_ in chunk.ranges.items():
            _positions[self.batch, tp] = advance(entries[tp], [range_])
        return {
            tp: Written(int(n), int(n), 0, 0) for tp, n in zip(chunk.partitions, rows, strict=True)
        }
