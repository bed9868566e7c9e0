"""Tables as destinations: the rows of a chunk with tombstones and keys, ``sink.keep_source``, the
columns that tell from which record each row comes, and what old records do in an upsert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.digest import Kind
from oncely.errors import ConfigError, TableMismatch
from oncely.stores.sql.cast import cast_values
from oncely.stores.sql.connection import ColumnFit

if TYPE_CHECKING:
    from oncely.kinds.kind import Parts

SOURCE_COLUMNS = pa.schema(
    [("kafka_topic", pa.string()), ("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]
)
"""The columns that ``keep_source`` adds to each row."""
_KEPT = {b"oncely": b"keep_source"}


def keeps_source(schema: pa.Schema) -> bool:
    """True if the columns of origin were added to the rows'."""
    return (schema.metadata or {}) == _KEPT


class TableSettings(Protocol):
    """What ``[sink]`` says about the rows of a table."""

    mode: Literal["append", "upsert"]
    version: str | None
    keep_source: bool | None


class TableDestination(ABC):
    """Base of the destinations with columns and a mode.

    Args:
        parts: the pipeline.
    """

    given: TableSettings

    def __init__(self, parts: Parts) -> None:
        self.settings = parts.settings
        self.given = cast("Any", parts.settings.sink)

    @property
    @abstractmethod
    def columns_there(self) -> Collection[str]:
        """The columns of the table, read once; none if it does not exist."""

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, and those of their origin if they are kept.

        If ``sink.keep_source`` is unset, they are kept in a table that has them, and in one that
        does not exist, which the first start creates.

        Raises:
            ConfigError: the rows have columns of these names, and ``sink.keep_source`` is not
                false.
        """
        kept, own = self.given.keep_source, set(SOURCE_COLUMNS.names)
        clash = own & set(schema.names)
        if clash and kept is not False:
            raise ConfigError(
                "sink.keep_source",
                f"the rows have columns {', '.join(sorted(clash))} already, and an audit would take"
                " them for the origin of the rows",
                way_out="rename them in a transform, or leave them out of decode.metadata; or set"
                " keep_source = false: then audit and repair can't tell from which record a row"
                " comes",
            )
        if kept is None:
            kept = not self.columns_there or own <= set(self.columns_there)
        return pa.schema([*schema, *SOURCE_COLUMNS], metadata=_KEPT) if kept else schema

    @property
    def late_delete(self) -> str | None:
        """The reason: append mode deletes no rows."""
        if self.given.mode == "append":
            return None
        return (
            "a tombstone has no version: applied late, it could delete a row that is newer than it"
        )

    def check_replay(self) -> None:
        """Refuse to upsert old records without a version."""
        if self.given.mode == "upsert" and self.given.version is None:
            raise ConfigError(
                "sink.version",
                "is missing: a replayed record is old and would overwrite a newer row of its key",
                way_out="name a column that grows with each change; or delete the rejects by SQL",
            )

    def check_origin(self, *, tells: bool) -> None:
        """Refuse to rewrite an upsert without a version, and rows of which none ``tells`` its
        record."""
        self.check_replay()
        if not tells:
            raise ConfigError(
                "sink.keep_source",
                "is false: nothing tells which rows a record has produced",
                way_out="the rows of a table without offsets can't be repaired; for a new table set"
                " sink.keep_source = true",
            )

    def audit_notes(
        self, table: str, kinds: Mapping[str, Kind | None], why: str, *, kept: bool
    ) -> Iterator[str]:
        """The notes of ``oncely plan`` about what an audit can't prove.

        Args:
            table: its name.
            kinds: the kind of each column's digest; None if its values are not covered.
            why: values that have no kind are not covered, because of this.
            kept: rows contain the offset of their record.
        """
        given, names = self.given, ", ".join(SOURCE_COLUMNS.names)
        by_ranges = given.mode == "append" and given.keep_source is None
        if not kept and by_ranges and not self.settings.by_spark:
            yield (
                f"{table} has no columns {names}: its rows don't name their records, and an audit"
                " compares ranges of them only"
            )
        if others := [name for name, kind in kinds.items() if kind is None]:
            yield f"no digest covers the values of {', '.join(others)}: {why}"


# -- rows of a chunk -------------------------------------------------------------------------


def with_tombstones(
    chunk: Chunk, rows: pa.Table, keys: Sequence[str]
) -> tuple[pa.Table, IntArray, IntArray, dict[int, str]]:
    """Rows and tombstones in the order of their records; without keys the rows alone.

    Returns:
        The rows, the record of each, 1 for each tombstone and 0 for the others, and the reason for
            each row whose key cannot be cast.
    """
    row_record = chunk.row_record
    deleted = np.zeros(len(row_record), dtype=np.int64)
    if not keys or chunk.deletes is None or not len(chunk.delete_record):
        return rows, row_record, deleted, {}
    deletes, bad = keys_like_rows(chunk.deletes, rows.schema, keys)
    rows = pa.concat_tables([rows, deletes], promote_options="default")
    row_record = np.concatenate([row_record, chunk.delete_record])
    deleted = np.concatenate([deleted, np.ones(len(chunk.delete_record), dtype=np.int64)])
    order = np.argsort(row_record, kind="stable")
    now_at = np.argsort(order)[-len(chunk.delete_record) :]
    bad = {int(now_at[row]): reason for row, reason in bad.items()}
    return rows.take(pa.array(order)), row_record[order], deleted[order], bad


def keys_like_rows(
    deletes: pa.Table, rows: pa.Schema, keys: Sequence[str]
) -> tuple[pa.Table, dict[int, str]]:
    """Cast the keys of tombstones, which bypass the transform and may have other types than the
    rows' keys.

    Returns:
        The keys in the types of the rows, and the reason for each tombstone whose key cannot be
            cast.

    Raises:
        TableMismatch: the transform has renamed a key or changed its kind of value.
    """
    bad: dict[int, str] = {}
    try:
        fits = [ColumnFit(key, rows.field(key).type) for key in keys]
        values = [cast_values(deletes.column(fit.name), fit, bad) for fit in fits]
    except (KeyError, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise TableMismatch(
            f"a tombstone's key does not fit the transformed rows: {error}",
            way_out="let the transform pass the key columns through as they are",
        ) from None
    return pa.table(values, schema=pa.schema([rows.field(key) for key in keys])), bad


def rows_with_source(chunk: Chunk) -> pa.Table:
    """Rows with their origin, in :data:`SOURCE_COLUMNS`."""
    partition = chunk.partition[chunk.row_record]
    topics = pa.array([tp.topic for tp in chunk.partitions], pa.string())
    numbers = pa.array([tp.partition for tp in chunk.partitions], pa.int32())
    return (
        chunk.rows.append_column("kafka_topic", topics.take(pa.array(partition)))
        .append_column("kafka_partition", numbers.take(pa.array(partition)))
        .append_column("kafka_offset", pa.array(chunk.offset[chunk.row_record]))
    )


def refuse_missing_keys(
    rows: pa.Table,
    deleted: IntArray,
    keys: Sequence[str],
    version: str | None,
    bad: dict[int, str],
) -> None:
    """Refuse null keys, which identify no row, and null versions, which cannot be compared."""
    for name in keys:
        for row in np.flatnonzero(pc.is_null(rows.column(name)).to_numpy()):
            bad.setdefault(int(row), f"sink.keys: column {name!r} is null")
    if version is not None:
        missing = pc.is_null(rows.column(version)).to_numpy() & (deleted == 0)
        for row in np.flatnonzero(missing):
            bad.setdefault(int(row), f"sink.version: column {version!r} is null")


def rejections_of(row_record: IntArray, bad: dict[int, str]) -> list[Rejection]:
    """One rejection for each record, for the first of its bad rows."""
    first: dict[int, str] = {}
    for row in sorted(bad):
        first.setdefault(int(row_record[row]), bad[row])
    return [Rejection(record, "write", reason) for record, reason in sorted(first.items())]
