"""From the columns that a file has to the columns that are asked for.

The rules are those of Avro's schema resolution (Avro 1.11, "Schema Resolution"), column by column
in Arrow: fields are found by name, what a file does not have is null, int becomes long, float or
double, and the same holds inside structs and lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.avro_form import arrow_schema_of
from oncely.errors import ConfigError, InvariantViolation
from oncely.sinks.files.words import Scope, ScopeSchema

_WIDENS = (pa.int32(), pa.int64(), pa.float32(), pa.float64())
"""Numbers; each becomes any later one."""


class Clash(Exception):
    """Two types that no value has both of; the message names them."""


def wanted_schema(
    schemas: Mapping[Scope, ScopeSchema],
    scopes: Iterable[Scope],
    columns: Sequence[str] | None,
) -> pa.Schema:
    """The columns of a reading over several scopes.

    Args:
        schemas: what is published.
        scopes: those that are read.
        columns: only these; None for all.

    Raises:
        ConfigError: two scopes have a column with types that don't go together; a column that
            none of them has.
    """
    if columns is not None and not columns:
        raise ConfigError("columns", "none is named", way_out="name one, or leave it out for all")
    found: dict[str, pa.DataType] = {}
    first: dict[str, Scope] = {}
    for scope, published in _distinct(schemas, scopes).items():
        for field in arrow_schema_of(published.avro):
            name = field.name
            if columns is not None and name not in columns:
                continue
            try:
                found[name] = _both(found.get(name, field.type), field.type, name)
            except Clash as clash:
                raise ConfigError(
                    "columns",
                    f"column {name!r} differs between {_shown(first[name])} and {_shown(scope)}:"
                    f" {clash}",
                    way_out="read one of them by `where`, or name the other columns by `columns`",
                ) from None
            first.setdefault(name, scope)
    if columns is None:
        return pa.schema(list(found.items()))
    for name in columns:
        if name not in found:
            raise ConfigError(
                "columns", f"no file that is read has a column {name!r}", way_out="check the name"
            )
    return pa.schema([(name, found[name]) for name in columns])


def resolved(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A file's rows with these columns, in this order.

    Raises:
        Clash: a column's values can't become these.
    """
    made = []
    for field in schema:
        if field.name in table.column_names:
            column = table.column(field.name)
            if column.type != field.type:
                chunks = [_resolved(chunk, field.type, field.name) for chunk in column.chunks]
                column = pa.chunked_array(chunks, field.type)
        else:
            column = pa.nulls(table.num_rows, field.type)
        made.append(column)
    return pa.table(made, schema)


def _resolved(array: pa.Array, to: pa.DataType, path: str) -> pa.Array:
    if array.type == to:
        return array
    if array.type in _WIDENS and to in _WIDENS[_WIDENS.index(array.type) :]:
        return pc.cast(array, to, safe=False)  # a double has 53 bits: as Avro's promotion does
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), to)
    if array.offset:  # what is below knows nothing of it
        array = pa.concat_arrays([array, array[:0]])
    if pa.types.is_struct(array.type) and pa.types.is_struct(to):
        return _resolved_struct(array, to, path)
    if pa.types.is_list(array.type) and pa.types.is_list(to):
        items = _resolved(array.values, to.value_type, f"{path}[]")
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(array.offsets, items, to, mask=mask)
    raise Clash(f"{path}: {array.type} does not become {to}")


def _resolved_struct(array: pa.StructArray, to: pa.StructType, path: str) -> pa.Array:
    own = {array.type.field(i).name: i for i in range(array.type.num_fields)}
    fields = [to.field(i) for i in range(to.num_fields)]
    children = [
        _resolved(array.field(own[f.name]), f.type, f"{path}.{f.name}")
        if f.name in own
        else pa.nulls(len(array), f.type)
        for f in fields
    ]
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())


def _both(one: pa.DataType, other: pa.DataType, path: str) -> pa.DataType:
    """The type that values of both become."""
    if one == other:
        return one
    if one in _WIDENS and other in _WIDENS:
        wide = max(_WIDENS.index(one), _WIDENS.index(other))
        # A float has 24 bits: whole numbers become doubles.
        mixed = {pa.types.is_integer(one), pa.types.is_integer(other)} == {True, False}
        return pa.float64() if mixed else _WIDENS[wide]
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_both(one.value_type, other.value_type, f"{path}[]"))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {one.field(i).name: one.field(i).type for i in range(one.num_fields)}
        for i in range(other.num_fields):
            name, arrow = other.field(i).name, other.field(i).type
            fields[name] = _both(fields.get(name, arrow), arrow, f"{path}.{name}")
        return pa.struct(list(fields.items()))
    raise Clash(f"{path} is {one} in the one and {other} in the other")


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
