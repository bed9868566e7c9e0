"""Tables as destinations: ``sink.keep_source``, the columns that tell from which record each row
comes, and what old records do in an upsert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, Protocol

import pyarrow as pa

from oncely.core.digest import Kind
from oncely.errors import ConfigError

SOURCE_COLUMNS = pa.schema(
    [("kafka_topic", pa.string()), ("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]
)
"""The columns that ``keep_source`` adds to each row."""
_KEPT = {b"oncely": b"keep_source"}


def with_source(
    schema: pa.Schema, setting: bool | None, table: Callable[[], Collection[str]]
) -> pa.Schema:
    """The columns of the rows, and those of their origin if they are kept.

    Args:
        schema: the columns of the rows.
        setting: ``sink.keep_source``. If it is unset, they are kept in a table that has them, and
            in one that does not exist, which the first start creates.
        table: returns the columns of the table; none if it does not exist.

    Raises:
        ConfigError: the rows have columns of these names, and ``sink.keep_source`` is not false.
    """
    own = set(SOURCE_COLUMNS.names)
    clash = own & set(schema.names)
    if clash and setting is not False:
        raise ConfigError(
            "sink.keep_source",
            f"the rows have columns {', '.join(sorted(clash))} already, and an audit would take"
            " them for the origin of the rows",
            way_out="rename them in a transform, or leave them out of decode.metadata; or set"
            " keep_source = false: then audit and repair can't tell from which record a row comes",
        )
    if setting is None:
        there = table()
        setting = not there or own <= set(there)
    return pa.schema([*schema, *SOURCE_COLUMNS], metadata=_KEPT) if setting else schema


def keeps_source(schema: pa.Schema) -> bool:
    """True if :func:`with_source` has added columns."""
    return (schema.metadata or {}) == _KEPT


def audit_notes(
    table: str,
    given: TableSettings,
    kinds: Mapping[str, Kind | None],
    why: str,
    *,
    kept: bool,
    rows: bool,
) -> Iterator[str]:
    """The notes of ``oncely plan`` about what an audit can't prove.

    Args:
        table: its name.
        given: the section of the pipeline file.
        kinds: the kind of each column's digest; None if its values are not covered.
        why: values that have no kind are not covered, because of this.
        kept: rows contain the offset of their record.
        rows: each row comes from one record.
    """
    names = ", ".join(SOURCE_COLUMNS.names)
    if not kept and given.mode == "upsert":
        yield f"{table} has no columns {names}: an audit compares such an upsert by --id only"
    elif not kept and rows and given.keep_source is None:
        yield (
            f"{table} has no columns {names}: its rows don't name their records, and an audit"
            " compares ranges of them only"
        )
    if given.mode == "upsert" and given.version is None:
        yield "`oncely repair` and `oncely backfill` of an upsert need sink.version, which is unset"
    if others := [name for name, kind in kinds.items() if kind is None]:
        yield f"no digest covers the values of {', '.join(others)}: {why}"


class TableSettings(Protocol):
    """What ``[sink]`` says about the rows of a table."""

    mode: Literal["append", "upsert"]
    version: str | None
    keep_source: bool | None


class TableDestination:
    """Base of the destinations with a mode.

    Attributes:
        given: the ``[sink]``.
    """

    given: TableSettings

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
