"""Offsets for which the ledgers of other pipelines account, in the same destination."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oncely.core.batch import IntArray
from oncely.core.ranges import OffsetRange, TopicPartition, normalize
from oncely.stores.sql.claims import Claim

Claims = Sequence[Claim]


def claimed(claims: Claims, tp: TopicPartition, offsets: IntArray) -> npt.NDArray[np.bool_]:
    """True for each offset that another pipeline has committed."""
    found = np.zeros(len(offsets), np.bool_)
    for one in normalize(range_ for _, of, range_ in claims if of == tp):
        found |= (offsets >= one.start) & (offsets < one.end)
    return found


def claimants(claims: Claims, tp: TopicPartition, within: OffsetRange) -> str:
    """The pipelines that have committed offsets of a range, as text; empty: none."""
    names = {name for name, of, one in claims if of == tp and one.overlaps(within)}
    return ", ".join(map(repr, sorted(names)))


def told(claims: Claims) -> list[str]:
    """The other pipelines, for the limits of a report."""
    return [
        f"pipeline {name!r} writes into the same table: rows of offsets that only its ledger"
        " contains are its rows, and are not compared"
        for name in sorted({name for name, *_ in claims})
    ]
