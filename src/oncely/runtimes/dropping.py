"""Records that are dropped before they are decoded; the ledger counts them as filtered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.context import Record
from oncely.core.batch import IntArray, Rejection
from oncely.decode.base import Decoded, Decoder
from oncely.errors import ConfigError
from oncely.kafka.records import RECORDS
from oncely.runtimes.row_transform import SqlTransform
from oncely.users_function import returned, said, users_function

_COLUMNS = {
    "kafka_topic": "topic",
    "kafka_partition": "partition",
    "kafka_offset": "offset",
    "kafka_timestamp": "timestamp",
    "key": "key",
    "value": "value",
}
"""The names in a condition, and those of the records' columns."""


@dataclass(frozen=True)
class DropCondition:
    """A condition in SQL over the columns of a record. A row of it is a record that is kept."""

    sql: str

    @property
    def needs(self) -> frozenset[str]:
        """The columns of records that the condition may read."""
        words = set(re.findall(r"\w+", self.sql.lower()))
        return frozenset(column for name, column in _COLUMNS.items() if name in words)

    def check(self) -> None:
        """Refuse what is no condition on a record.

        Raises:
            ConfigError: ``filter.drop``.
        """
        columns = [(name, RECORDS.field(column).type) for name, column in _COLUMNS.items()]
        try:
            self._kept.output(pa.schema(columns))
        except ConfigError as error:
            raise ConfigError(
                "filter.drop", error.problem, way_out=f"one condition on {', '.join(_COLUMNS)}"
            ) from None

    def apply(self, records: pa.Table) -> tuple[IntArray, list[Rejection]]:
        """The indices of the records that are kept, and of those for which it fails."""
        names = {name: column for name, column in _COLUMNS.items() if column in self.needs}
        given = pa.table(
            {name: records.column(column) for name, column in names.items()}
            | {"kafka_offset": records.column("offset")}
        )
        kept = self._kept.apply(given, np.arange(records.num_rows))
        return kept.row_record, list(kept.rejections)

    @property
    def _kept(self) -> SqlTransform:
        return SqlTransform(
            f"SELECT kafka_offset FROM input WHERE NOT coalesce((\n{self.sql}\n), false)"
        )


Drops = Callable[[Record], object]
"""A function of the user; what it returns is true for a record that is dropped."""


@dataclass(frozen=True)
class Functions:
    """Functions that decide on the records of their topics, which they get as ``raw`` records."""

    by_topic: Mapping[str, Drops]

    @property
    def needs(self) -> frozenset[str]:
        """All columns of records."""
        return frozenset(RECORDS.names)

    def apply(self, records: pa.Table) -> tuple[IntArray, list[Rejection]]:
        """The indices of the records that are kept, and of those for which a function fails."""
        kept, refused = list[int](), list[Rejection]()
        row_of = _rows(records)
        for number, topic in enumerate(records.column("topic").to_pylist()):
            drops = self.by_topic.get(topic)
            try:
                with users_function():
                    dropped = drops is not None and bool(
                        returned(drops(_raw(number, row_of(number))))
                    )
                if not dropped:
                    kept.append(number)
            except Exception as error:  # the user's own code: it may raise any exception
                refused.append(Rejection(number, "decode", f"the filter fails: {said(error)}"))
        return np.array(kept, dtype=np.int64), refused


def _rows(records: pa.Table) -> Callable[[int], Mapping[str, Any]]:
    """A row by its number. One whose time Python can't hold raises, and no other."""
    try:
        rows: list[Mapping[str, Any]] = records.to_pylist()
    except (OverflowError, ValueError):
        return lambda number: dict(records.slice(number, 1).to_pylist()[0])
    return rows.__getitem__


def _raw(number: int, row: Mapping[str, Any]) -> Record:
    columns = {name: row[name] for name in ("key", "value", "timestamp")}
    headers = [(one["key"], one["value"]) for one in row["headers"] or ()]
    deleted = row["value"] is None
    where = row["topic"], row["partition"], row["offset"]
    return Record(*where, columns, headers, deleted, number)


@dataclass(frozen=True)
class DroppingDecoder:
    """A decoder of the records that are not dropped.

    Attributes:
        decoder: decodes them.
        drop: decides on the records that are dropped; None: none are.
        expire: records that are older than so many seconds are dropped; None: none are.
        clock: seconds since 1970.
    """

    decoder: Decoder
    drop: DropCondition | Functions | None = None
    expire: float | None = None
    clock: Callable[[], float] = time.time

    @property
    def schema(self) -> pa.Schema:
        """The columns of every row."""
        return self.decoder.schema

    @property
    def needs(self) -> frozenset[str]:
        """The columns that decoder and filters read."""
        own = self.drop.needs if self.drop is not None else frozenset[str]()
        return self.decoder.needs | own | ({"timestamp"} if self.expire is not None else set())

    def decode(self, records: pa.Table) -> Decoded:
        """Decode what is kept. A record for which the condition fails is a rejection."""
        kept, refused = np.arange(records.num_rows), list[Rejection]()
        if self.drop is not None:
            kept, refused = self.drop.apply(records)
        if self.expire is not None:
            fresh = self._fresh(records.column("timestamp"), self.expire)
            kept = kept[fresh[kept]]
            refused = [one for one in refused if fresh[one.record]]
        if len(kept) == records.num_rows:
            return self.decoder.decode(records)
        done = self.decoder.decode(records.take(pa.array(kept, pa.int64())))
        moved = [one._replace(record=int(kept[one.record])) for one in done.rejections]
        return Decoded(
            rows=done.rows,
            row_record=_indices(kept, done.row_record),
            rejections=sorted([*moved, *refused], key=lambda one: one.record),
            tombstones=done.tombstones,
            tombstone_record=_indices(kept, done.tombstone_record),
            dropped=records.num_rows - len(kept) - len(refused) + done.dropped,
        )

    def _fresh(self, timestamps: pa.ChunkedArray, seconds: float) -> np.ndarray:
        """True for records that are young enough, or have no timestamp."""
        oldest = pa.scalar(int((self.clock() - seconds) * 1e6), pa.timestamp("us", "UTC"))
        fresh = pc.greater_equal(timestamps.cast(pa.timestamp("us", "UTC")), oldest)
        return np.asarray(pc.fill_null(fresh, True).to_numpy(), dtype=bool)


def _indices(kept: IntArray, of_kept: pa.Int64Array) -> pa.Int64Array:
    return pa.array(kept[of_kept.to_numpy(zero_copy_only=False)], pa.int64())
