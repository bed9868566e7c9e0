"""The destination table: its compatibility with the rows, and its DDL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from oncely.core.digest import Kind, Recipe
from oncely.decode.schema import is_json
from oncely.errors import TableMismatch
from oncely.kinds.tables import SOURCE_COLUMNS
from oncely.stores.sql.connection import (
    LONGEST_NAME,
    Column,
    ColumnFit,
    Connection,
    Dialect,
    Relation,
    Separately,
    TableAltered,
    TableName,
    TableTypes,
    transaction,
)
from oncely.stores.sql.tables import LedgerTables
from oncely.stores.sql.takeover import require_fit

RESERVED = "_oncely_"
"""The prefix of names that statements use beside those of the table."""


@dataclass(frozen=True)
class TableSpec:
    """The requirements of the pipeline on the table.

    Attributes:
        table: the destination.
        schema: the rows' columns, ``keep_source`` columns included.
        keys: columns that identify a row in an upsert; empty for append.
        version: column that guards an upsert against older values, or None.
        may_round: values may lose digits that a column does not keep.
    """

    table: TableName
    schema: pa.Schema
    keys: tuple[str, ...] = ()
    version: str | None = None
    may_round: bool = False


@dataclass(frozen=True)
class BoundTable:
    """A table that accepts the rows.

    Attributes:
        relation: how statements refer to it.
        fits: per written column, the conversion of its values.
        types: per written column, the table's own type.
        kinds: per written column, the kind of its values in digests; None: not covered.
        identity: an id that distinguishes the table from others of its name.
        separately: whether rows are written by separate statements.
    """

    table: TableName
    relation: Relation
    fits: tuple[ColumnFit, ...]
    types: tuple[str, ...]
    keys: tuple[str, ...] = ()
    version: str | None = None
    identity: str | None = None
    kinds: tuple[Kind | None, ...] = ()
    separately: Separately = "never"

    @property
    def columns(self) -> list[str]:
        """Names of the written columns."""
        return [fit.name for fit in self.fits]

    @property
    def inexact_keys(self) -> list[str]:
        """Keys of which values of different bytes are equal to the server: by a collation, by the
        padding or rounding of their type, as 0.0 and -0.0, or after a cast."""
        return [
            fit.name
            for fit, type_ in zip(self.fits, self.types, strict=True)
            if fit.name in self.keys
            and (fit.cast or fit.collation or "(" in type_ or pa.types.is_floating(fit.arrow_type))
        ]

    def may_repeat_keys(self, rows: pa.Table) -> bool:
        """True if two rows may have the same key in the table."""
        different = rows.group_by(list(self.keys)).aggregate([]).num_rows
        return bool(self.inexact_keys) or different < rows.num_rows

    @property
    def notes(self) -> list[str]:
        """The columns that give some texts another form, without an error; and policies."""
        every = zip(self.fits, self.types, strict=True)
        found = [f"column {fit.name!r} is {of}: it {fit.form}" for fit, of in every if fit.form]
        if self.relation.is_secured:
            found.append(
                f"row-level security of {self.table} applies to the role in sink.url: a row that a"
                " policy refuses ends the run"
            )
        return found

    @property
    def direct(self) -> bool:
        """True if rows may be copied directly into the table."""
        plain = not (self.keys or self.relation.is_view or self.relation.is_secured)
        return plain and all(fit.cast is None for fit in self.fits)

    def recipe(self, keep_source: bool) -> Recipe | None:
        """The recipe of digests; None for an upsert, which replaces rows of earlier ranges."""
        return None if self.keys else self.recipe_of_rows(keep_source)

    def recipe_of_rows(self, keep_source: bool, other: Kind | None = None) -> Recipe:
        """The recipe of single rows; columns that a digest does not cover have another kind."""
        own = {*SOURCE_COLUMNS.names} if keep_source else set[str]()
        every = zip(self.columns, self.kinds, strict=True)
        return Recipe.of({c: k or other for c, k in every if c not in own}, offset=keep_source)


def create_statement(dialect: Dialect, wanted: TableSpec) -> str:
    """The DDL of a table that accepts the rows.

    Raises:
        TableMismatch: a name is not allowed.
    """
    _refuse_names(dialect, wanted)
    lines = [
        f"    {dialect.quote(field.name)} {_column_type(dialect, field)}"
        + (" NOT NULL" if field.name in wanted.keys or not field.nullable else "")
        for field in wanted.schema
    ]
    if wanted.keys:
        lines.append(f"    PRIMARY KEY ({', '.join(dialect.quote(k) for k in wanted.keys)})")
    name = ".".join(dialect.quote(part) for part in wanted.table if part)
    return dialect.translate(f"CREATE TABLE IF NOT EXISTS {name} (\n" + ",\n".join(lines) + "\n)")


def _refuse_names(dialect: Dialect, wanted: TableSpec) -> None:
    for name in (wanted.table.name, *wanted.schema.names):
        if name.startswith(RESERVED):
            reason = f"names that begin with {RESERVED} are Oncely's own"
        elif "\0" in name:
            reason = "no name contains a NUL"
        elif dialect.name == "postgresql" and len(name.encode()) > LONGEST_NAME:
            reason = f"PostgreSQL truncates it to {LONGEST_NAME} bytes"
        else:
            continue
        raise TableMismatch(
            f"{name!r}: {reason}",
            key="sink.table",
            way_out="rename it, in decode.schema or a transform, or in sink.table",
        )


def _column_type(dialect: Dialect, field: pa.Field) -> str:
    """The type of a new column; JSON is stored as nested values are."""
    return dialect.column_type(pa.struct([]) if is_json(field) else field.type)


def create_tables(connection: Connection, tables: LedgerTables, wanted: TableSpec) -> None:
    """Create the destination table and the ledger's tables if they are missing.

    Raises:
        TableMismatch: the table would not accept the rows; nothing was created.
    """
    if not tables.missing(connection) and tables.dialect.columns(connection, wanted.table):
        return
    with transaction(connection):
        tables.dialect.lock_for_setup(connection)
        connection.execute(create_statement(tables.dialect, wanted))
        for statement in tables.missing(connection):
            connection.execute(statement)
        inspect(tables.dialect, connection, wanted)


def inspect(dialect: Dialect, connection: Connection, wanted: TableSpec) -> BoundTable:
    """Compare the table with the requirements.

    Raises:
        TableMismatch: the error names every column that does not fit, and the way out.
    """
    _refuse_names(dialect, wanted)
    (facts,) = dialect.facts(connection, [wanted.table])
    require_fit(facts)
    columns = dialect.columns(connection, wanted.table)
    if not columns:
        raise TableMismatch(
            f"there is no table {wanted.table} in {dialect.endpoint}",
            key="sink.table",
            way_out="set sink.create = true, or create it with the DDL of `oncely plan --ddl`",
        )
    by_name = {column.name: column for column in columns}
    problems = [_problem(dialect, by_name, field) for field in wanted.schema]
    problems += [
        f"column {c.name!r} must have a value and the pipeline gives none"
        for c in columns
        if c.required and c.name not in wanted.schema.names
    ]
    problems += _key_problems(dialect, connection, wanted)
    found = [problem for problem in problems if problem]
    if found:
        raise TableMismatch(
            f"{wanted.table} does not accept the pipeline's rows:\n    - " + "\n    - ".join(found),
            key="sink.table",
            way_out="change decode.schema, add a transform, or alter the table",
        )
    fits = tuple(_fit(dialect, by_name[field.name], field) for field in wanted.schema)
    kinds = tuple(dialect.digest_kind(by_name[fit.name], fit) for fit in fits)
    if wanted.may_round:
        fits = tuple(replace(fit, rounds=False, scale=None) for fit in fits)
    else:
        _refuse_rounding(wanted, by_name, fits)
    _refuse_policies(dialect, connection, wanted)
    types = tuple(by_name[field.name].type for field in wanted.schema)
    folds = dialect.collations(connection, wanted.table) if wanted.keys else {}
    fits = tuple(
        replace(f, collation=folds.get(f.name) if f.name in wanted.keys else None) for f in fits
    )
    separately = dialect.separately(connection, wanted.table, wanted.keys, wanted.schema.names)
    keyed = (wanted.keys, wanted.version, facts.identity, kinds, separately)
    return BoundTable(wanted.table, facts.relation, fits, types, *keyed)


def check_unaltered(
    dialect: Dialect, connection: Connection, target: BoundTable, found: TableTypes | None = None
) -> None:
    """Compare the table with the types for which the rows were encoded.

    A binary COPY accepts any eight bytes for a column of eight. The caller's transaction has
    written to the table, so it holds a lock and the types do not change until COMMIT.

    Args:
        dialect, connection, target: the table.
        found: its types, if the transaction has read them since it holds the lock.

    Raises:
        TableAltered: a column that is written has another type, one that is not written is required
            (read if ``found`` is not given), or the table was replaced.
    """
    identity, types = found or dialect.column_types(connection, target.table)
    changed = (
        []
        if found
        else [
            f"column {one.name!r} must have a value and the pipeline gives none"
            for one in dialect.columns(connection, target.table)
            if one.required and one.name not in target.columns
        ]
    )
    changed += [
        f"column {name!r} was {bound} and is {types.get(name, 'gone')}"
        for name, bound in zip(target.columns, target.types, strict=True)
        if types.get(name) != bound
    ]
    if identity != target.identity:
        changed.insert(0, "it was dropped and made again")
    if changed:
        raise TableAltered(f"{target.table}: {'; '.join(changed)}")


def _refuse_rounding(
    wanted: TableSpec, columns: dict[str, Column], fits: Sequence[ColumnFit]
) -> None:
    """Refuse columns that keep fewer digits than the declared types have.

    Raises:
        TableMismatch: the error names every such column.
    """
    found = [
        f"column {fit.name!r} is {columns[fit.name].type}, the pipeline gives"
        f" {wanted.schema.field(fit.name).type}"
        for fit in fits
        if fit.rounds
    ]
    if found:
        raise TableMismatch(
            f"values would be rounded on their way into {wanted.table}:\n    - "
            + "\n    - ".join(found),
            key="sink.table",
            way_out="give the columns more digits; or declare or cast what they keep; or"
            ' sink.rounding = "allow"',
        )


def _refuse_policies(dialect: Dialect, connection: Connection, wanted: TableSpec) -> None:
    """Refuse a table whose row-level security refuses all rows, or may hide some from the delete of
    an upsert, which the database does not report.

    Raises:
        TableMismatch: the error names the table.
    """
    barred = dialect.barred(connection, wanted.table, deletes=bool(wanted.keys))
    of = f"row-level security of {wanted.table}"
    if barred == "hides":
        raise TableMismatch(
            f"{of} may hide rows from the role in"
            " sink.url: a tombstone would delete no row that is hidden, silently",
            key="sink.table",
            way_out="use a role with BYPASSRLS, or give the role a policy for all commands with"
            " USING (true)",
        )
    if barred:
        raise TableMismatch(
            f"{of} has no policy by which the role in sink.url may insert rows",
            key="sink.table",
            way_out="create one, or use a role with BYPASSRLS",
        )


def _fit(dialect: Dialect, column: Column, field: pa.Field) -> ColumnFit:
    found = dialect.fit(column, field.type)
    if found is None:
        raise TableMismatch(f"column {field.name!r}: {field.type} into {column.type}")
    return found


def _problem(dialect: Dialect, columns: dict[str, Column], field: pa.Field) -> str | None:
    column = columns.get(field.name)
    if column is None:
        return f"no column {field.name!r} ({_column_type(dialect, field)})"
    if column.generated:
        return f"column {field.name!r} is generated by the database"
    if dialect.fit(column, field.type) is None:
        return f"column {field.name!r} is {column.type}, the pipeline gives {field.type}"
    return None


def _key_problems(dialect: Dialect, connection: Connection, wanted: TableSpec) -> Sequence[str]:
    if not wanted.keys:
        return []
    names = wanted.schema.names
    version = wanted.version
    missing = [k for k in (*wanted.keys, wanted.version) if k and k not in names]
    problems = [f"sink.keys or sink.version: the rows have no column {one!r}" for one in missing]
    if version in names and not dialect.keeps_order(wanted.schema.field(version).type):
        problems.append(f"sink.version: {version!r} does not sort in {dialect.name} by its value")
    if frozenset(wanted.keys) not in dialect.unique_keys(connection, wanted.table):
        keys = ", ".join(wanted.keys)
        problems.append(f"upsert needs a primary key or unique constraint on exactly ({keys})")
    return problems
