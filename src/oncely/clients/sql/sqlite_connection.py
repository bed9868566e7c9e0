"""One SQLite session: statements, rows by a prepared INSERT, errors by result code."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import pyarrow as pa

from oncely.clients.sql import sqlite_types
from oncely.clients.sql.connection import (
    Answer,
    BadData,
    Contention,
    Params,
    Row,
    RowByRow,
    RowsDropped,
    Statement,
    TableName,
)
from oncely.errors import Stopped, TableMismatch, Unavailable, WrongInput

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
    ) -> Sequence[Answer]:
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

    def _answer(self, sql: str) -> Answer:
        cursor = _sorted(lambda: self._session.execute(_own_parameters(sql)))
        return Answer(cursor.rowcount, cursor.fetchall())

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
                sqlite_types.values(column, name)
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
