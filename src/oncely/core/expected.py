"""What records should have become: recomputed to compare it with a destination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core.batch import Rejection
from oncely.core.ranges import OffsetRange, TopicPartition

ROWS, REJECT, FILTERED = range(3)
"""The outcomes of a record."""


class Span(NamedTuple):
    """Offsets of one topic-partition."""

    partition: TopicPartition
    range: OffsetRange


class ExpectedRecords(NamedTuple):
    """What decode and transform make of some readable records, in ascending order of offset.

    Attributes:
        offset: int64.
        outcome: int8, of :data:`ROWS`, :data:`REJECT`, :data:`FILTERED`.
        rows: int64, the number of rows; -1 if it is not known.
        digest: the digest sum of the rows of each; None if it can't be computed.
    """

    offset: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.int8]
    rows: npt.NDArray[np.int64]
    digest: npt.NDArray[np.uint64] | None = None


class Changes(NamedTuple):
    """What some readable records do to the rows of an upsert: one line for each row or tombstone,
    in the order in which they take effect.

    Attributes:
        records: int64, the offsets of all of these records.
        rejected: int64, the offsets of those that are dead letters.
        offset: int64, the record of each line.
        key: the digest of the key of each line.
        deleted: bool, true for a tombstone, which deletes the row of its key.
        version: of each line, null for a tombstone; None without a version column.
        digest: the digest of the row of each line; None if it can't be computed.
    """

    records: npt.NDArray[np.int64]
    rejected: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    deleted: npt.NDArray[np.bool_]
    version: pa.ChunkedArray | None
    digest: npt.NDArray[np.uint64] | None


class Expected(Protocol):
    """Recomputes the rows of records, by the pipeline's decode and transform of today.

    A transform may have changed since. So its answer is used for a committed range only if it has
    that range's digest; otherwise the offsets alone are compared.

    Attributes:
        unfit: the reason why the destination does not accept today's rows; empty if it does.
    """

    unfit: str

    @property
    def recipe(self) -> str:
        """The recipe of today's rows; empty if they have no digest."""

    @property
    def others(self) -> str:
        """The recipe of the columns that digests in a ledger do not cover; empty if there are
        none. An audit compares them by the server's texts."""

    @property
    def keys(self) -> str:
        """The recipe of the keys of an upsert; empty if a part of them has no digest."""

    def of(self, span: Span, recipe: str) -> Iterable[ExpectedRecords]:
        """The readable records of a span, in ascending order of offset, in batches.

        Args:
            span: the offsets.
            recipe: of the digests; empty: without.

        Raises:
            ConfigError: decode or transform can't run.
            Unavailable: Kafka does not answer.
        """

    def refused(self, tp: TopicPartition, messages: Sequence[Any]) -> Mapping[int, Rejection]:
        """Those of some records, ascending messages of confluent-kafka, that are refused, by
        offset. Raises the errors of :meth:`of`."""

    def changes(self, span: Span) -> Iterable[Changes]:
        """The same for a destination in which rows are replaced by their keys, with digests by
        :attr:`recipe`. Raises the errors of :meth:`of`."""

    def close(self) -> None:
        """Close the connections."""
