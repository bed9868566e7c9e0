"""A sink that takes everything and keeps nothing: what the plan costs without the database."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from oncely.core.batch import Chunk
from oncely.core.claim import Claim, Counts, Entry, Fence
from oncely.core.ranges import TopicPartition

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

    @property
    def ledger(self) -> CountingSink:
        """Itself."""
        return self

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """Where this worker has counted up to."""
        del of, settled
        return {
            tp: Entry(_positions.get((self.batch, tp), at), fence.epoch)
            for tp, at in self.starts.items()
        }

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Go on."""
        del counts
        for tp in claim.ranges:
            _positions[self.batch, tp] = claim.end(tp)

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> dict[TopicPartition, Counts]:
        """Count rows by topic-partition."""
        del fence, max_rejects
        rows = np.bincount(chunk.partition[chunk.row_record], minlength=len(chunk.partitions))
        counts = {
            tp: Counts(int(n), int(n), 0, 0) for tp, n in zip(chunk.partitions, rows, strict=True)
        }
        if claim is not None:
            self.move(claim, counts)
        return counts
