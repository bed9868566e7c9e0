"""The rows of an upsert that have some keys, whoever has written them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Digests = npt.NDArray[np.uint64]


class Keys(NamedTuple):
    """Keys of which the rows are looked for.

    Attributes:
        recipe: the columns of a key.
        digest: the digest of each key, ascending.
        version: the name of the version column; None if there is none.
        versions: the version of each key's record; None without a version column.
    """

    recipe: str
    digest: Digests
    version: str | None
    versions: pa.Array | None


class Holder(NamedTuple):
    """The row that has a key.

    Attributes:
        key: the digest.
        topic, partition, offset: of its record, as the row names it.
        newer: its version is higher than that which is asked for.
    """

    key: int
    topic: str | None
    partition: int | None
    offset: int | None
    newer: bool


def among(keys: Keys, digests: Digests, places: pa.Table, versions: pa.Array) -> Iterator[Holder]:
    """Those of some rows that have one of the keys.

    Args:
        keys: the keys.
        digests: the digest of each row's key.
        places: topic, partition and offset of each row.
        versions: of each row; without a version column they are not used.
    """
    at = np.searchsorted(keys.digest, digests)
    hit = np.flatnonzero(np.append(keys.digest, np.uint64(0))[at] == digests)
    hit = hit[at[hit] < len(keys.digest)]
    newer: list[bool | None] = [False] * len(hit)
    if keys.versions is not None:
        asked = keys.versions.take(pa.array(at[hit]))
        newer = pc.greater(versions.take(pa.array(hit)).cast(asked.type), asked).to_pylist()
    topic, number, offset = places.take(pa.array(hit)).to_pydict().values()
    found = zip(digests[hit].tolist(), topic, number, offset, newer, strict=True)
    yield from (Holder(key, t, p, at, bool(above)) for key, t, p, at, above in found)
