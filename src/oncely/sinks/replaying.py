"""What a replay of dead letters is made of, whichever sink keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oncely.core.batch import Chunk, Reject


@dataclass(frozen=True)
class Judged:
    """What a run of rejects has become.

    Attributes:
        chunk: records in the order of the rejects; rows of those that pass.
        traceable: False when no single record answers for a row (after a Spark transform).
    """

    chunk: Chunk
    traceable: bool = True


Judge = Callable[[Sequence[Reject]], Judged]
"""Decodes and transforms rejects again. They come by topic, partition and ascending offset."""


@dataclass(frozen=True)
class Tried:
    """What one transaction of a replay did.

    Attributes:
        moved: rejects that were written, or filtered.
        kept: rejects that fail still.
    """

    moved: int
    kept: int
