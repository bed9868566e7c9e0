"""Conversion of a file's columns to the requested columns.

The rules are those of Avro's schema resolution (Avro 1.11, "Schema Resolution"), column by column
in Arrow: fields are matched by name, missing fields are null, int becomes long, float or double,
and the same holds inside structs and lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from oncely.decode.avro_names import arrow_schema_of, storable
from oncely.decode.merging import Conflict, merge
from oncely.errors import ConfigError, InvariantViolation
from oncely.kinds.conform import conform
from oncely.kinds.file_format import Scope
from oncely.kinds.files.records import ScopeSchema


def wanted_schema(
    schemas: Mapping[Scope, ScopeSchema],
    scopes: Iterable[Scope],
    columns: Sequence[str] | None,
    *,
    rounding: bool = False,
) -> pa.Schema:
    """The columns of a query over several scopes.

    Args:
        schemas: the published schemas.
        scopes: the scopes that are read.
        columns: the requested columns, in this order; None for all.
        rounding: allow large whole numbers of one scope to become floating-point numbers because of
            another.

    Raises:
        ConfigError: a column has incompatible types in two scopes; or no scope has a requested
            column.
    """
    _check(columns)
    found, seen = pa.schema([]), list[Scope]()
    for scope, published in _distinct(schemas, scopes).items():
        own = arrow_schema_of(published.avro)
        if rounding:
            own = storable(own)  # drops the marks of large numbers
        if columns is not None:
            own = pa.schema([field for field in own if field.name in columns])
        try:
            found = merge(found, own)
        except Conflict as conflict:
            raise ConfigError(
                "columns",
                f"{_shown(scope)} and {_of_them(seen)} before it differ: {conflict}",
                way_out="read some of them by `where`, or name the other columns by `columns`",
            ) from None
        seen.append(scope)
    if columns is None:
        return found
    for name in columns:
        if name not in found.names:
            raise ConfigError(
                "columns", f"no file that is read has a column {name!r}", way_out="check the name"
            )
    return pa.schema([found.field(name) for name in columns])


def resolved(rows: pa.Table, schema: pa.Schema, *, rounding: bool = False) -> pa.Table:
    """A file's rows with these columns, in this order; other columns are left out.

    Raises:
        Rounding: a whole number would be rounded, and ``rounding`` is false.
        InvariantViolation: a column's values cannot be converted.
    """
    found = rows.select([name for name in rows.column_names if name in schema.names])
    return conform(found, schema, rounding=rounding)


def _check(columns: Sequence[str] | None) -> None:
    if columns is None:
        return
    if isinstance(columns, str):
        raise ConfigError("columns", "found a text", way_out=f"write [{columns!r}]")
    if not columns:
        raise ConfigError("columns", "none is named", way_out="name one, or leave it out for all")
    if len(set(columns)) < len(columns):
        raise ConfigError("columns", "one is named twice", way_out="name each once")


def _distinct(
    schemas: Mapping[Scope, ScopeSchema], scopes: Iterable[Scope]
) -> dict[Scope, ScopeSchema]:
    """One scope for each schema: ten thousand users may share one."""
    found: dict[str, Scope] = {}
    for scope in sorted(set(scopes), key=lambda one: [part or "" for part in one]):
        if scope not in schemas:
            raise InvariantViolation(f"the manifest has files of {_shown(scope)} without a schema")
        found.setdefault(schemas[scope].id, scope)
    return {scope: schemas[scope] for scope in found.values()}


def _shown(scope: Scope) -> str:
    return f"scope {list(scope)}" if scope else "the table"


def _of_them(scopes: Sequence[Scope]) -> str:
    shown = ", ".join(str(list(scope)) for scope in scopes[:3])
    return shown if len(scopes) <= 3 else f"{shown} and {len(scopes) - 3} more"
