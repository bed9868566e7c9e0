"""Writing of rows to the table: append, or upsert with deletes, inside the commit's transaction.

Rows that the database refuses are isolated, and the others are written. All of it happens inside
the commit's transaction, under savepoints, so that rejects and rows still take effect together.
Only errors that belong to a row are handled (``BadData``): a full disk or a deadlock is unrelated
to it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from oncely.core.batch import Formed, IntArray, Rejection
from oncely.errors import TableMismatch, WrongInput
from oncely.kinds.rows import DELETED
from oncely.kinds.sql.form import ORDINAL
from oncely.kinds.sql.table import BoundTable, check_unaltered
from oncely.stores.sql.connection import (
    BadData,
    ColumnFit,
    Connection,
    Dialect,
    RowByRow,
    RowsDropped,
    TableName,
    TableTypes,
)

_STAGED = TableName(None, "_oncely_rows")
_EACH = TableName(None, "_oncely_each")
_ROW = "_oncely_row."


def write_rows(
    connection: Connection,
    dialect: Dialect,
    target: BoundTable,
    formed: Formed[pa.Table],
    still_ours: Callable[[], None],
    refused: Callable[[Sequence[Rejection]], None],
) -> Formed[pa.Table]:
    """Write the rows; refused ones become rejections, each with all rows of its record.

    Rows that were encoded for other types than the table has are not written, and refusals of such
    rows are no rejections (:func:`check_unaltered`).

    Returns:
        The written rows and the rejections.
    """
    writer = RowWriter(dialect, target)
    writer.begin(connection, ordered=DELETED in formed.rows.column_names)
    still_right = _still_right(still_ours, partial(check_unaltered, dialect, connection, target))
    bad = _write_once(connection, writer, formed, still_right, refused)
    writer.end(connection)
    check_unaltered(dialect, connection, target, writer.types)
    return formed.without(bad)


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
    formed: Formed[pa.Table],
    still_right: Callable[[], None],
    refused: Callable[[Sequence[Rejection]], None],
) -> list[Rejection]:
    """Write the rows that the table accepts; returns a rejection for each record of other rows."""
    bad: list[Rejection] = []
    first = np.flatnonzero(np.diff(formed.row_record, prepend=-1))  # row of each record

    def refuse(at: int, reason: str) -> None:
        bad.append(Rejection(int(formed.row_record[first[at]]), "write", reason))
        refused(bad[-1:])

    def insert(rows: pa.Table) -> None:
        writer.insert(connection, rows, last=rows.num_rows == formed.rows.num_rows)

    insert_or_isolate(
        connection,
        insert,
        formed.rows,
        still_right,
        refuse,
        partial(writer.insert_each, connection),
        first=first,
        separately=writer.separately(formed.rows),
    )
    return bad


class RowWriter:
    """Writes slices of rows that were cast to the target's types.

    Attributes:
        types: the table's types after the last slice, if they were read with it.
    """

    def __init__(self, dialect: Dialect, target: BoundTable) -> None:
        self._dialect = dialect
        self._target = target
        self._used = False
        self._collected = 0
        self.types: TableTypes | None = None

    @property
    def upserts(self) -> bool:
        """True if rows replace and delete those of their keys."""
        return bool(self._target.keys)

    def separately(self, rows: pa.Table) -> bool:
        """True if one statement of all these rows could have another effect than one for each."""
        target = self._target
        if target.separately != "same keys":
            return target.separately == "always"
        return target.may_repeat_keys(rows)

    def begin(self, connection: Connection, *, ordered: bool) -> None:
        """Create the staging table, unless rows are copied directly into the target.

        Once for a transaction and before its savepoints: each created table takes several locks
        that the server keeps until COMMIT.

        Args:
            connection: the session, in a transaction.
            ordered: the rows have DELETED, or are collected.
        """
        self._used = False
        if not self._target.direct:
            columns = staging_columns(self._dialect, self._target, ordered=ordered)
            connection.defer(self._dialect.create_staging(_STAGED, columns))

    def end(self, connection: Connection) -> None:
        """Drop the staging table."""
        if not self._target.direct:
            connection.defer(f"DROP TABLE {self._dialect.quote(_STAGED.name)}")

    def insert(
        self,
        connection: Connection,
        rows: pa.Table,
        *,
        constraints: bool = True,
        last: bool = False,
    ) -> None:
        """Write ``rows`` in order; for an upsert they include ORDINAL and DELETED.

        Args:
            connection: the session, in a transaction.
            rows: the rows.
            constraints: check deferred constraints.
            last: read :attr:`types`: no other slice is expected.

        Raises:
            BadData: the database refuses a value; the caller rolls back and isolates it.
            RowsDropped: a trigger has dropped rows. Not detected for an upsert, in which a row may
                also be skipped because of an older version.
        """
        dialect, target = self._dialect, self._target
        table, then = target.table, list[str]()
        if not target.direct:
            table, staged = _STAGED, dialect.quote(_STAGED.name)
            if self._used:
                connection.defer(f"{dialect.clear_table} {staged}")
            self._used = True
            if ORDINAL not in rows.column_names:
                rows = rows.append_column(ORDINAL, pa.array(range(rows.num_rows), pa.int64()))
            rest = f"FROM {staged} ORDER BY {dialect.quote(ORDINAL)}"
            if self.upserts:
                then += upserts(dialect, target, staged, repeated=target.may_repeat_keys(rows))
            else:
                then.append(insert_select(dialect, target, rest))
        then += dialect.check_constraints if constraints else ()
        types = dialect.types_statement(target.table) if last else ()
        answers = connection.copy(table, rows, [*then, *types])
        self.types = dialect.types_of(answers[-1].rows) if types else None
        if not (target.direct or target.keys) and answers[0].changed != rows.num_rows:
            raise RowsDropped(target.table, rows.num_rows, answers[0].changed)

    def collect(self, connection: Connection, rows: pa.Table) -> None:
        """Add rows to the staging table, for :meth:`upsert`."""
        first, self._collected = self._collected, self._collected + rows.num_rows
        numbers = pa.array(range(first, self._collected), pa.int64())
        none = pa.array([0] * rows.num_rows, pa.int64())
        connection.copy(_STAGED, rows.append_column(ORDINAL, numbers).append_column(DELETED, none))

    def has_a_key_twice(self, connection: Connection) -> bool:
        """True if two collected rows have the same key."""
        keys = ", ".join(self._dialect.quote(key) for key in self._target.keys)
        staged = self._dialect.quote(_STAGED.name)
        more = f"GROUP BY {keys} HAVING COUNT(*) > 1 LIMIT 1"
        return bool(connection.query(f"SELECT 1 FROM {staged} {more}"))

    def upsert(self, connection: Connection) -> None:
        """Apply the collected rows."""
        staged = self._dialect.quote(_STAGED.name)
        for one in upserts(self._dialect, self._target, staged, repeated=True):
            connection.execute(one, of_rows=True)

    def insert_each(self, connection: Connection, rows: pa.Table) -> list[tuple[int, str]]:
        """Write ``rows`` separately; return index and reason of refused rows."""
        dialect, target, q = self._dialect, self._target, self._dialect.quote
        columns, conflict = staging_columns(dialect, target, ordered=self.upserts), ""
        delete = deleted = ""
        if self.upserts:
            rows, deleted = rows.drop_columns([ORDINAL]), DELETED
            keys = [fit for fit in target.fits if fit.name in target.keys]
            same = (f"_oncely_target.{q(k.name)} = {_value(dialect, k, _ROW)}" for k in keys)
            delete = f"DELETE FROM {target.relation.rows} AS _oncely_target"
            delete += f" WHERE {' AND '.join(same)}"
            conflict = _on_conflict(dialect, target)
        insert = insert_select(dialect, target, conflict, _ROW)
        into = RowByRow(target.table, _EACH, columns, ORDINAL, insert, delete, deleted)
        return connection.insert_each(into, rows)


def staging_columns(
    dialect: Dialect, target: BoundTable, *, ordered: bool
) -> list[tuple[str, str]]:
    """Names and types of a staging table: the target's own types, text if the server casts."""
    text, number = dialect.column_type(pa.string()), dialect.column_type(pa.int64())
    columns = [
        (fit.name, text if fit.cast else type_)
        for fit, type_ in zip(target.fits, target.types, strict=True)
    ]
    return [*columns, (ORDINAL, number), *([(DELETED, number)] if ordered else [])]


def insert_select(dialect: Dialect, target: BoundTable, rows: str, of: str = "") -> str:
    """``INSERT INTO target (…) SELECT …``, text columns cast by the server.

    Args:
        rows: the rest of the statement: ``FROM`` a table of the rows.
        of: the prefix of the rows' columns.
    """
    names = ", ".join(dialect.quote(name) for name in target.columns)
    table = f"{quoted(dialect, target.table)} AS _oncely_target"
    return f"INSERT INTO {table} ({names}) SELECT {_values(dialect, target, of)} {rows}"


def quoted(dialect: Dialect, table: TableName) -> str:
    """The table's name for a statement."""
    return ".".join(dialect.quote(part) for part in table if part)


def _values(dialect: Dialect, target: BoundTable, of: str = "") -> str:
    fits = target.fits
    return ", ".join(f"{_value(dialect, fit, of)} AS {dialect.quote(fit.name)}" for fit in fits)


def _value(dialect: Dialect, fit: ColumnFit, of: str) -> str:
    name = of + dialect.quote(fit.name)
    value = f"CAST({name} AS {fit.cast})" if fit.cast else name
    return f"{value} COLLATE {fit.collation}" if fit.collation else value


def upserts(dialect: Dialect, target: BoundTable, staged: str, *, repeated: bool) -> list[str]:
    """Statements that apply staged rows with the effect of separate statements in order.

    Separately, a tombstone would delete its key; a row would replace the row of its key unless that
    one has a higher version. So for each key only rows after its last tombstone count, of these the
    highest version, of those the last. Keys are applied in order, so two tasks with the same keys
    wait for each other instead of deadlocking.

    Args:
        dialect, target: the table.
        staged: the table of the rows.
        repeated: several rows may have the same key. Then those that do not count are inserted
            before, unless their key is there already: the table's constraints refuse them as they
            would separately. Those that it takes are deleted or replaced by the other statements.
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
    delete = (
        f"{rows}DELETE FROM {target.relation.rows} AS _oncely_target"
        " WHERE EXISTS (SELECT 1 FROM _oncely_in AS _oncely_gone"
        f" WHERE _oncely_gone.{q(DELETED)} = 1 AND {same})"
    )
    newest = f"{q(target.version)} DESC, " if target.version else ""
    after = (
        f"SELECT *, MAX(CASE WHEN {q(DELETED)} = 1 THEN {q(ORDINAL)} ELSE -1 END)"
        f" OVER (PARTITION BY {keys}) AS _oncely_gone_at FROM _oncely_in"
    )
    ranked = (
        f"(SELECT *, {q(ORDINAL)} > _oncely_gone_at AS _oncely_live, ROW_NUMBER() OVER ("
        f"PARTITION BY {keys}, {q(ORDINAL)} > _oncely_gone_at ORDER BY {newest}{q(ORDINAL)} DESC)"
        f" AS _oncely_place FROM ({after}) AS _oncely_all) AS _oncely_ranked"
    )
    names = ", ".join(q(name) for name in target.columns)
    insert = f"{rows}INSERT INTO {table} ({names}) SELECT {names} FROM {ranked} WHERE"
    last = f"_oncely_live AND _oncely_place = 1 ORDER BY {keys} {_on_conflict(dialect, target)}"
    others = f"(NOT _oncely_live OR _oncely_place > 1) AND {q(DELETED)} = 0 ORDER BY {keys}"
    check = f"{insert} {others} ON CONFLICT ({keys}) DO NOTHING"
    return [*([check] if repeated else []), delete, f"{insert} {last}"]


def _on_conflict(dialect: Dialect, target: BoundTable) -> str:
    q = dialect.quote
    # A key that only equals the row's, such as another case of its letters, replaces it, too.
    kept = {*target.keys} - {*target.inexact_keys}
    others = [q(name) for name in target.columns if name not in kept]
    conflict = f"ON CONFLICT ({', '.join(q(key) for key in target.keys)})"
    if not others:
        return f"{conflict} DO NOTHING"
    action = f"{conflict} DO UPDATE SET " + ", ".join(f"{one} = excluded.{one}" for one in others)
    if target.version is None:
        return action
    old = f"_oncely_target.{q(target.version)}"
    return f"{action} WHERE {old} IS NULL OR excluded.{q(target.version)} >= {old}"


log = logging.getLogger(__name__)

Insert = Callable[[pa.Table], None]
Refuse = Callable[[int, str], None]
InsertEach = Callable[[pa.Table], list[tuple[int, str]]]

_SAVEPOINT = "SAVEPOINT oncely_rows"
_UNDO = "ROLLBACK TO SAVEPOINT oncely_rows"
_RELEASE = "RELEASE SAVEPOINT oncely_rows"
_FIRST_WINDOW = 8_192
_SECONDS_A_LINE = 10.0  # between lines of the log
_MANY = 16  # refused rows, beyond which it is cheaper to insert the others separately
_SLICE = 512  # rows that are inserted separately by one statement, which no signal interrupts


def insert_or_isolate(
    connection: Connection,
    insert: Insert,
    rows: pa.Table,
    still_ours: Callable[[], None],
    refuse: Refuse,
    insert_each: InsertEach | None = None,
    *,
    first: IntArray | None = None,
    separately: bool = False,
) -> None:
    """Insert the rows of records; each record of which the database refuses a row goes to
    ``refuse`` instead, with all of its rows.

    Args:
        insert: writes a slice of the rows in the open transaction, and checks deferred
            constraints.
        still_ours: raises ``PositionMoved`` if the ledger has moved. Called after every refusal: a
            unique key may be violated only because another attempt has written the same rows, which
            are then a replay and no rejects. Also raises if the table has been altered.
        refuse: called with the record's index and the reason; may raise to stop (reject budget).
        insert_each: writes rows separately, and returns the refused ones.
        first: the first row of each record, ascending; None if each record has one row.
        separately: insert no two records together.
    """
    if not rows.num_rows:
        return
    first = np.arange(rows.num_rows) if first is None else first
    insert_each = insert_each if len(first) == rows.num_rows else None
    inner = (connection, insert, rows, still_ours, refuse, insert_each)
    _Isolation(*inner, np.append(first, rows.num_rows), separately).run()


@dataclass
class _Isolation:
    """Splits the records at each refusal until a single one is refused.

    A reported line counts only after its record was refused alone. The window of records tried at
    once halves on a refusal and doubles on success, so a few bad ones among many cost little. If
    many are refused, the rest is inserted separately inside the database. All parts are in order,
    so a record sees the records before it, and only those that were accepted.
    """

    connection: Connection
    insert: Insert
    rows: pa.Table
    still_ours: Callable[[], None]
    refuse: Refuse
    insert_each: InsertEach | None
    first: IntArray
    separately: bool
    refused: int = 0
    logged: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Insert all records except the refused ones."""
        count = len(self.first) - 1
        parts = deque([(0, count)])
        window = 2 * max(_FIRST_WINDOW, count)  # all of them at first
        while parts:
            start, stop = parts.popleft()
            self._log_progress(start)
            each = self.insert_each is not None and (self.separately or self.refused >= _MANY)
            if self.separately or each:
                window = _SLICE if each else 1
            if stop - start > window:
                parts.appendleft((start + window, stop))
                stop = start + window
            if each and stop - start > 1 and self._one_by_one(start, stop):
                continue
            if self.separately and stop - start > 1:
                parts.extendleft(reversed(_cut(start, stop, None)))
                continue
            error = self._try(start, stop)
            if error is None:
                # A part that was cut off by a refusal must not enlarge the window: it would grow
                # with every bad row.
                window *= 2 if stop - start == window else 1
            elif stop - start == 1:
                self._refuse(start, error.reason)
            elif error.line is None and stop - start <= _SLICE and self._one_by_one(start, stop):
                window = _SLICE
            else:
                window = min(_FIRST_WINDOW, max(1, window // 2))
                parts.extendleft(reversed(_cut(start, stop, self._record(start, error.line))))

    def _record(self, start: int, line: int | None) -> int | None:
        """The record of a row of the part that begins with the record ``start``."""
        if line is None or line < 0:
            return None
        return int(np.searchsorted(self.first, self.first[start] + line, "right")) - 1 - start

    def _of(self, start: int, stop: int) -> pa.Table:
        return self.rows.slice(self.first[start], self.first[stop] - self.first[start])

    def _log_progress(self, done: int) -> None:
        """Log a line every few seconds: if no row is reported, isolation may take minutes.

        A warning, because a Spark worker does not log lower levels.
        """
        now = time.monotonic()
        if now - self.logged < _SECONDS_A_LINE:
            return
        self.logged = now
        text = "isolating refused rows: %d of %d rows done, %d refused"
        log.warning(text, self.first[done], self.rows.num_rows, self.refused)

    def _try(self, start: int, stop: int) -> BadData | None:
        self.connection.defer(_SAVEPOINT)
        try:
            self.insert(self._of(start, stop))
        except (BadData, TableMismatch) as error:
            self._undo()
            self.still_ours()
            if isinstance(error, TableMismatch):
                raise
            return error
        if stop - start < len(self.first) - 1:  # COMMIT releases the only one
            self.connection.defer(_RELEASE)
        return None

    def _one_by_one(self, start: int, stop: int) -> bool:
        """Insert separately; False if the database cannot do it for this part, or any."""
        if self.insert_each is None:
            return False
        self.connection.defer(_SAVEPOINT)
        try:
            refused = self.insert_each(self._of(start, stop))
            self.connection.defer(_RELEASE)
        except (BadData, WrongInput) as error:
            # A value that no table accepts, or a user who may not create temporary tables.
            self._undo()
            self.insert_each = self.insert_each if isinstance(error, BadData) else None
            return False
        if refused:
            self.still_ours()
        for row, reason in refused:
            self._refuse(start + row, reason)
        return True

    def _undo(self) -> None:
        self.connection.defer(_UNDO)
        self.connection.defer(_RELEASE)

    def _refuse(self, record: int, reason: str) -> None:
        self.refused += 1
        self.refuse(record, reason)


def _cut(start: int, stop: int, line: int | None) -> list[tuple[int, int]]:
    """Three parts around the reported record, or two halves if none is reported."""
    if line is None or not 0 <= line < stop - start:
        middle = (start + stop) // 2
        parts = [(start, middle), (middle, stop)]
    else:
        at = start + line
        parts = [(start, at), (at, at + 1), (at + 1, stop)]
    return [part for part in parts if part[0] < part[1]]
