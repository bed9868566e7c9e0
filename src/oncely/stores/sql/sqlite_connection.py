"""One session of SQLite, the mapping of Arrow types to its types, errors by result code.

SQLite has five types and stores values unchanged. Types that it does not have are stored as text of
a canonical form, so that equal values are equal texts and times sort: decimals in plain digits with
their scale, dates and times as ISO 8601 with six digits after the second (``Z`` for instants),
nested values as JSON.
"""

from __future__ import annotations

import decimal
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.times import OF_DAY, without_text
from oncely.errors import Stopped, TableMismatch, Unavailable, WrongInput
from oncely.stores.sql.connection import (
    BadData,
    Column,
    ColumnFit,
    Contention,
    Params,
    Row,
    RowByRow,
    RowsDropped,
    Statement,
    StatementResult,
    TableName,
)

_FAMILY = {"INT": "INTEGER"}


def column_type(arrow_type: pa.DataType) -> str:
    """The type of a STRICT table that holds values of an Arrow type.

    Raises:
        TableMismatch: there is no such type.
    """
    types = pa.types
    if types.is_dictionary(arrow_type):
        return column_type(arrow_type.value_type)
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type):
        return "INTEGER"
    if types.is_floating(arrow_type):
        return "REAL"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return "BLOB"
    if types.is_null(arrow_type) or _sent_as_text(arrow_type) is not None:
        return "TEXT"
    raise TableMismatch(
        f"there is no SQLite type for {arrow_type}",
        way_out="cast it to another type in the transform",
    )


def fit(column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
    """The conversion of values of ``arrow_type`` to ``column``, or None if it would lose
    information."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    kind = column.type.upper()
    family = column_type(arrow_type) if kind == "ANY" else _FAMILY.get(kind, kind)
    if pa.types.is_null(arrow_type):
        return ColumnFit(column.name, _EMPTY.get(family, pa.string()))
    sent = _sent(family, arrow_type)
    return None if sent is None else ColumnFit(column.name, sent)


_EMPTY = {"INTEGER": pa.int64(), "REAL": pa.float64(), "BLOB": pa.binary()}


def _sent(family: str, arrow_type: pa.DataType) -> pa.DataType | None:
    """The Arrow type to which ``arrow_type`` is cast before :func:`values` converts it."""
    own = column_type(arrow_type)
    if family == "REAL" and (own == "REAL" or pa.types.is_integer(arrow_type)):
        return pa.float64()
    if family != own:
        return None
    return _EMPTY.get(family) or _sent_as_text(arrow_type)


def _sent_as_text(arrow_type: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if types.is_timestamp(arrow_type):
        return pa.timestamp("us", "UTC" if arrow_type.tz else None)
    if types.is_date(arrow_type):
        return pa.date32()
    if types.is_time(arrow_type):
        return pa.time64("us")
    if types.is_decimal(arrow_type):
        return arrow_type
    text = types.is_string(arrow_type) or types.is_large_string(arrow_type)
    return pa.string() if text or types.is_nested(arrow_type) else None


def keeps_order(arrow_type: pa.DataType) -> bool:
    """True if the stored form sorts in the order of the values; decimals as text do not ('9' >
    '10')."""
    return not (pa.types.is_decimal(arrow_type) or pa.types.is_nested(arrow_type))


def values(column: pa.Array, name: str) -> list[object]:
    """The values to bind.

    Raises:
        BadData: SQLite would accept a value, and return a different one.
    """
    for kind, encode in _ENCODERS:
        if kind(column.type):
            return encode(column, name)
    return list(column.to_pylist())


def _float(column: pa.Array, name: str) -> list[object]:
    """Refuse NaN, which SQLite binds as NULL without an error."""
    _refuse(pc.is_nan(column), name, "SQLite has no NaN")
    return list(column.to_pylist())


def _timestamp(column: pa.Array, name: str) -> list[object]:
    zone = "Z" if column.type.tz else ""
    # Without the zone it is the same instant, and no time zone database is needed.
    return _iso(column.cast(pa.timestamp("us")), "%Y-%m-%dT%H:%M:%S", zone, name)


def _date(column: pa.Array, name: str) -> list[object]:
    return _iso(column, "%Y-%m-%d", "", name)


def _iso(column: pa.Array, form: str, zone: str, name: str) -> list[object]:
    _refuse(
        pa.array(without_text(column)),
        name,
        "as ISO 8601 text a year outside 0001 to 9999 does not sort",
    )
    found: list[str | None] = pc.strftime(column, format=form).to_pylist()
    return [None if one is None else one + zone for one in found]


def _decimal(column: pa.Array, _name: str) -> list[object]:
    found: list[decimal.Decimal | None] = column.to_pylist()
    return [None if one is None else format(one, "f") for one in found]


def _time(column: pa.Array, name: str) -> list[object]:
    _refuse(pa.array(without_text(column)), name, OF_DAY)
    return list(column.cast(pa.string()).to_pylist())


_ENCODERS: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, str], list[object]]], ...
] = (
    (pa.types.is_floating, _float),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_date, _date),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_time, _time),
)


def _refuse(bad: pa.BooleanArray, name: str, reason: str) -> None:
    line = pc.index(bad, True).as_py()
    if line >= 0:
        raise BadData(f"column {name!r}: {reason}", line)


T = TypeVar("T")

_ROWS_AT_ONCE = 8_192
_PRIMARY = 0xFF  # an extended result code has the primary code in its lowest byte
_TOO_BIG = {sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_NOT_ALLOWED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}


class SqliteConnection:
    """A sqlite3 session whose errors are classified by result code."""

    def __init__(self, session: sqlite3.Connection) -> None:
        self._session = session

    def begin(self) -> None:
        """Start a transaction that holds the write lock."""
        _sorted(lambda: self._session.execute("BEGIN IMMEDIATE"))

    def commit(self) -> None:
        """End the transaction.

        Raises:
            Unavailable: its outcome is unknown.
            Stopped: a DEFERRED foreign key is violated. SQLite counts violations, does not report
                the row, and cannot check them earlier.
        """
        try:
            _sorted(lambda: self._session.execute("COMMIT"))
        except BadData as error:
            self.rollback()
            raise Stopped(
                f"SQLite, at COMMIT: {error.reason}; nothing was written",
                way_out="declare the foreign key without DEFERRED: then the record that violates"
                " it becomes a reject",
            ) from None
        except Unavailable:
            # Without WAL a reader may hold off COMMIT's lock; the transaction is still open.
            self.rollback()
            raise

    def rollback(self) -> None:
        """Undo the transaction, unless SQLite has done so itself (as for a full disk)."""
        if self._session.in_transaction:
            _sorted(lambda: self._session.execute("ROLLBACK"))

    def query(self, sql: str, params: Params = (), **_: bool) -> list[Row]:
        """Run one statement that returns rows."""
        return _sorted(
            lambda: self._session.execute(_own_parameters(sql), _bound(params)).fetchall()
        )

    def execute(self, sql: str, params: Params = (), **_: bool) -> int:
        """Run one statement, and return the number of rows that it has changed."""
        return _sorted(lambda: self._session.execute(_own_parameters(sql), _bound(params)).rowcount)

    def execute_many(self, sql: str, rows: Iterable[Params]) -> int:
        """Run one statement for each of ``rows``."""
        bound = [_bound(row) for row in rows]
        return _sorted(lambda: self._session.executemany(_own_parameters(sql), bound).rowcount)

    def defer(self, sql: str) -> None:
        """Run a statement at once: there is no round trip."""
        self.execute(sql)

    def execute_all(self, statements: Sequence[Statement]) -> None:
        """Run statements one after the other."""
        for sql, params, otherwise in statements:
            if self.execute(sql, params) == 0 and otherwise is not None:
                raise otherwise

    def copy(
        self, table: TableName, rows: pa.Table, then: Sequence[str] = (), **_: bool
    ) -> Sequence[StatementResult]:
        """Append ``rows`` by one prepared INSERT.

        ``OR ABORT`` overrides an ``ON CONFLICT IGNORE`` or ``ROLLBACK`` in the table's own
        definition: no row may vanish, and the transaction must survive to store the row as a dead
        letter.

        Raises:
            BadData: with the index of the refused row.
            RowsDropped: a trigger has dropped rows.
        """
        names = ", ".join(quoted(name) for name in rows.column_names)
        marks = ", ".join("?" * rows.num_columns)
        into = ".".join(quoted(part) for part in table if part)
        statement = f"INSERT OR ABORT INTO {into} ({names}) VALUES ({marks})"
        first = 0
        for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
            taken = self._insert(statement, batch, first)
            if taken != batch.num_rows:
                raise RowsDropped(table, batch.num_rows, taken)
            first += batch.num_rows
        return [self._answer(sql) for sql in then]

    def _answer(self, sql: str) -> StatementResult:
        cursor = _sorted(lambda: self._session.execute(_own_parameters(sql)))
        return StatementResult(cursor.rowcount, cursor.fetchall())

    def insert_each(self, into: RowByRow, rows: pa.Table) -> list[tuple[int, str]]:
        """Insert ``rows`` separately: a failed statement leaves no trace."""
        if into.delete:
            raise WrongInput("SQLite has no loop for the rows of an upsert")
        refused = []
        for at in range(rows.num_rows):
            try:
                self.copy(into.table, rows.slice(at, 1))
            except BadData as error:
                refused.append((at, error.reason))
        return refused

    def _insert(self, statement: str, batch: pa.RecordBatch, first: int) -> int:
        at = -1  # the row that was bound last: the row of an error

        def bound() -> Iterator[tuple[object, ...]]:
            nonlocal at
            for row in zip(*columns, strict=True):
                at += 1
                yield row

        try:
            columns = [
                values(column, name)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            ]
            return self._session.executemany(statement, bound()).rowcount
        except BadData as error:
            raise BadData(error.reason, first + (error.line or 0)) from None
        except sqlite3.Error as error:
            raise sort_error(error, None if at < 0 else first + at) from error

    def lend(self, seconds: float) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Refused: a statement that blocks can't be bounded in time, nor COMMIT be refused."""
        raise WrongInput("SQLite lends no transaction to handlers", way_out="use PostgreSQL")

    def check_constraints(self) -> None:
        """Does nothing: all constraints except DEFERRED foreign keys are checked by row; see
        commit."""

    def is_ended(self) -> bool:
        """False: there is no server."""
        return False

    def close(self) -> None:
        """End the session, undoing an open transaction; never raises."""
        with suppress(sqlite3.Error):
            self._session.close()


def _own_parameters(sql: str) -> str:
    """Replace ``%s`` and ``%%`` of the common statements by ``?`` and ``%``."""
    return re.sub("%[s%]", lambda found: "?" if found.group() == "%s" else "%", sql)


def _bound(params: Params) -> Params:
    return tuple(params)


def _sorted(work: Callable[[], T]) -> T:
    """Run ``work``; convert an error of the driver by its consequence for the commit path."""
    try:
        return work()
    except sqlite3.Error as error:
        raise sort_error(error) from error


def sort_error(error: sqlite3.Error, line: int | None = None) -> Exception:
    """Convert an error by its consequence.

    Args:
        line: the row that was being inserted, if there was one. Then a plain SQLITE_ERROR also
            refers to that row: a generated column or a check could not be computed from its values.
            Without a row it refers to the statement.
    """
    text = f"SQLite: {error}"
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY
    if code == sqlite3.SQLITE_CONSTRAINT or code in _TOO_BIG:
        return BadData(str(error), line)
    if code in _BUSY:
        return Contention(text)
    if code in _NOT_ALLOWED:
        return WrongInput(text, way_out="file and directory must be writable for this user")
    if code == sqlite3.SQLITE_NOTADB:
        return WrongInput(text, way_out="sink.url names a file that is no SQLite database")
    if code == sqlite3.SQLITE_CORRUPT:
        return Stopped(text, way_out="restore the file; the pipeline continues from its ledger")
    if code == sqlite3.SQLITE_ERROR:
        if line is not None:
            return BadData(str(error), line)
        return TableMismatch(text, way_out="`oncely plan --ddl` prints the DDL")
    return Unavailable(text)


def quoted(identifier: str) -> str:
    """The identifier between quotes, for any content."""
    return '"' + identifier.replace('"', '""') + '"'
