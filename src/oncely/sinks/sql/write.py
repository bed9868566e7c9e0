"""Writing of rows to the table: append, or upsert with deletes, inside the commit's transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from oncely.clients.sql.connection import Connection, Dialect, RowByRow, RowsDropped, TableName
from oncely.core.batch import IntArray, Rejection
from oncely.sinks.sql.isolate import insert_or_isolate
from oncely.sinks.sql.prepare import DELETED, ORDINAL, Prepared
from oncely.sinks.sql.target import Target, check_unaltered

_STAGED = TableName(None, "_oncely_rows")
_EACH = TableName(None, "_oncely_each")


def write_rows(
    connection: Connection,
    dialect: Dialect,
    target: Target,
    prepared: Prepared,
    still_ours: Callable[[], None],
    refused: Callable[[Sequence[Rejection]], None],
) -> Prepared:
    """Write the rows; refused ones become rejections, each with all rows of its record.

    Rows that were encoded for other types than the table has are not written, and refusals of such
    rows are no rejections (:func:`check_unaltered`).

    If a record has several rows (unnest) and one is refused, its other rows may be in the
    transaction already. Then everything is undone and written again without that record.

    Returns:
        The written rows and the rejections.
    """
    writer = RowWriter(dialect, target)
    writer.begin(connection, prepared.rows)
    several = _have_several_rows(prepared.row_record)
    still_right = _still_right(still_ours, partial(check_unaltered, dialect, connection, target))
    while True:
        if several:
            connection.execute("SAVEPOINT oncely_chunk")
        bad = _write_once(connection, writer, prepared, still_right, refused)
        if bad:
            prepared = prepared.without(bad)
        if not (several and bad):
            writer.end(connection)
            check_unaltered(dialect, connection, target)
            return prepared
        connection.execute("ROLLBACK TO SAVEPOINT oncely_chunk")


def _still_right(
    still_ours: Callable[[], None], unaltered: Callable[[], None]
) -> Callable[[], None]:
    """Both checks; the second one only once, because the transaction then holds a lock."""
    compared = False

    def still_right() -> None:
        nonlocal compared
        still_ours()
        if not compared:
            unaltered()
            compared = True

    return still_right


def _write_once(
    connection: Connection,
    writer: RowWriter,
    prepared: Prepared,
    still_right: Callable[[], None],
    refused: Callable[[Sequence[Rejection]], None],
) -> list[Rejection]:
    """Write the rows that the table accepts; returns a rejection for each record of other rows."""
    bad: dict[int, Rejection] = {}

    def refuse(row: int, reason: str) -> None:
        record = int(prepared.row_record[row])
        if record not in bad:
            bad[record] = Rejection(record, "write", reason)
            refused([bad[record]])

    insert_or_isolate(
        connection,
        partial(writer.insert, connection),
        prepared.rows,
        still_right,
        refuse,
        # An upsert of a row is more than one statement, and the order matters.
        None if writer.upserts else partial(writer.insert_each, connection),
    )
    return list(bad.values())


def _have_several_rows(row_record: IntArray) -> bool:
    """True when a record has more than one row."""
    if (np.diff(row_record) > 0).all():  # the common case, at a tenth of the cost of sorting
        return False
    return len(np.unique(row_record)) < len(row_record)


class RowWriter:
    """Writes slices of rows that were cast to the target's types."""

    def __init__(self, dialect: Dialect, target: Target) -> None:
        self._dialect = dialect
        self._target = target
        self._used = False

    @property
    def upserts(self) -> bool:
        """True if rows replace and delete those of their keys."""
        return bool(self._target.keys)

    def begin(self, connection: Connection, rows: pa.Table) -> None:
        """Create the staging table, unless rows are copied directly into the target.

        Once for a transaction and before its savepoints: each created table takes several locks
        that the server keeps until COMMIT.
        """
        self._used = False
        if not self._target.direct:
            ordered = DELETED in rows.column_names
            columns = staging_columns(self._dialect, self._target, ordered=ordered)
            connection.execute(self._dialect.create_staging(_STAGED, columns, temporary=True))

    def end(self, connection: Connection) -> None:
        """Drop the staging table."""
        if not self._target.direct:
            connection.execute(f"DROP TABLE {self._dialect.quote(_STAGED.name)}")

    def insert(self, connection: Connection, rows: pa.Table) -> None:
        """Write ``rows`` in order; for an upsert they include ORDINAL and DELETED.

        Raises:
            BadData: the database refuses a value; the caller rolls back and isolates it.
            RowsDropped: a trigger has dropped rows. Not detected for an upsert, in which a row may
                also be skipped because of an older version.
        """
        if self._target.direct:
            connection.copy(self._target.table, rows)
            return
        staged = self._dialect.quote(_STAGED.name)
        if self._used:
            connection.execute(f"{self._dialect.clear_table} {staged}")
        self._used = True
        if ORDINAL not in rows.column_names:
            rows = rows.append_column(ORDINAL, pa.array(range(rows.num_rows), pa.int64()))
        connection.copy(_STAGED, rows)
        if self._target.keys:
            upsert(connection, self._dialect, self._target, staged)
        else:
            order = self._dialect.quote(ORDINAL)
            statement = insert_select(self._dialect, self._target, staged)
            taken = connection.execute(f"{statement} ORDER BY {order}")
            if taken != rows.num_rows:
                raise RowsDropped(self._target.table, rows.num_rows, taken)

    def insert_each(self, connection: Connection, rows: pa.Table) -> list[tuple[int, str]]:
        """Write ``rows`` separately; return index and reason of refused rows."""
        columns = staging_columns(self._dialect, self._target, ordered=False)
        create = self._dialect.create_staging(_EACH, columns, temporary=True)
        casts = {fit.name: fit.cast for fit in self._target.fits}
        into = RowByRow(self._target.table, _EACH, create, ORDINAL, casts)
        return connection.insert_each(into, rows)


def staging_columns(dialect: Dialect, target: Target, *, ordered: bool) -> list[tuple[str, str]]:
    """Names and types of a staging table: the target's own types, text if the server casts."""
    text, number = dialect.column_type(pa.string()), dialect.column_type(pa.int64())
    columns = [
        (fit.name, text if fit.cast else type_)
        for fit, type_ in zip(target.fits, target.types, strict=True)
    ]
    return [*columns, (ORDINAL, number), *([(DELETED, number)] if ordered else [])]


def insert_select(dialect: Dialect, target: Target, source: str) -> str:
    """``INSERT INTO target (…) SELECT … FROM source``, text columns cast by the server."""
    names = ", ".join(dialect.quote(name) for name in target.columns)
    table = quoted(dialect, target.table)
    return f"INSERT INTO {table} ({names}) SELECT {_values(dialect, target)} FROM {source}"


def quoted(dialect: Dialect, table: TableName) -> str:
    """The table's name for a statement."""
    return ".".join(dialect.quote(part) for part in table if part)


def _values(dialect: Dialect, target: Target) -> str:
    return ", ".join(
        f"CAST({dialect.quote(fit.name)} AS {fit.cast}) AS {dialect.quote(fit.name)}"
        if fit.cast
        else dialect.quote(fit.name)
        for fit in target.fits
    )


def upsert(connection: Connection, dialect: Dialect, target: Target, staged: str) -> None:
    """Apply staged rows with the effect of separate statements in order, by two statements.

    Separately, a tombstone would delete its key; a row would replace the row of its key unless that
    one has a higher version. So for each key only rows after its last tombstone count, of these the
    highest version, of those the last. Keys are applied in order, so two tasks with the same keys
    wait for each other instead of deadlocking.
    """
    q = dialect.quote
    table = f"{quoted(dialect, target.table)} AS _oncely_target"
    keys = ", ".join(q(key) for key in target.keys)
    same = " AND ".join(f"_oncely_gone.{q(key)} = _oncely_target.{q(key)}" for key in target.keys)
    # Every name of ours has a prefix: a name of the table would be ambiguous.
    rows = (
        f"WITH _oncely_in AS (SELECT {_values(dialect, target)}, {q(ORDINAL)}, {q(DELETED)}"
        f" FROM {staged}) "
    )
    connection.execute(
        f"{rows}DELETE FROM {table} WHERE EXISTS (SELECT 1 FROM _oncely_in AS _oncely_gone"
        f" WHERE _oncely_gone.{q(DELETED)} = 1 AND {same})"
    )
    newest = f"{q(target.version)} DESC, " if target.version else ""
    live = (
        f"SELECT * FROM (SELECT *, MAX(CASE WHEN {q(DELETED)} = 1 THEN {q(ORDINAL)} ELSE -1 END)"
        f" OVER (PARTITION BY {keys}) AS _oncely_gone_at FROM _oncely_in) AS _oncely_all"
        f" WHERE {q(ORDINAL)} > _oncely_gone_at"
    )
    ranked = (
        f"(SELECT *, ROW_NUMBER() OVER (PARTITION BY {keys}"
        f" ORDER BY {newest}{q(ORDINAL)} DESC) AS _oncely_place FROM ({live}) AS _oncely_live)"
        " AS _oncely_ranked"
    )
    names = ", ".join(q(name) for name in target.columns)
    connection.execute(
        f"{rows}INSERT INTO {table} ({names}) SELECT {names} FROM {ranked}"
        f" WHERE _oncely_place = 1 ORDER BY {keys}"
        f" ON CONFLICT ({keys}) {_on_conflict(dialect, target)}"
    )


def _on_conflict(dialect: Dialect, target: Target) -> str:
    q = dialect.quote
    others = [q(name) for name in target.columns if name not in target.keys]
    if not others:
        return "DO NOTHING"
    action = "DO UPDATE SET " + ", ".join(f"{one} = excluded.{one}" for one in others)
    if target.version is None:
        return action
    old = f"_oncely_target.{q(target.version)}"
    return f"{action} WHERE {old} IS NULL OR excluded.{q(target.version)} >= {old}"
