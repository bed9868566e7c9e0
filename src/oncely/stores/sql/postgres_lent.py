"""An open transaction that is lent to a function of the user.

The function gets a connection object of its own over the session's socket, so that row factories,
adapters and the like that it changes are gone with it. It may do anything inside the transaction,
and must not end it:

- ``commit``, ``rollback``, ``close`` and ``autocommit`` of the object raise an error.
- COMMIT as SQL is refused by the server: the transaction contains two equal rows of a temporary
  table with a deferred UNIQUE constraint, which are deleted at the end of the loan.
- A child of a fork sends nothing, and no thread sends anything when the function has ended.
- ROLLBACK as SQL is noticed: the object sends nothing outside of the transaction, also after
  ``ROLLBACK; BEGIN``. The server reports a setting that was changed for this transaction alone,
  and that has no effect in it (PostgreSQL 14 and later). If the function has changed that setting,
  the server is asked for the two rows. And the savepoint of the loan is gone.

Everything that the function does is in a savepoint. After an error the transaction is as before. At
its end cursors are closed, and temporary tables that it has created are dropped: the next call of
the same transaction may use their names.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import psycopg
from psycopg import pq, sql
from psycopg.abc import PQGen

from oncely.errors import Unavailable
from oncely.stores.sql.connection import Contention, LoanBroken, Row
from oncely.stores.sql.postgres_session import LOCK_SECONDS, WatchedSession, sort_lent

T = TypeVar("T")

_LOOKS = 16  # within the time limit
_CANCELED = "57014"
_IDLE_SECONDS = 60  # beyond the time limit: how long a paused process holds its locks
_REPORTED = b"default_transaction_read_only"
_ENDED = (
    "it has ended its transaction (COMMIT is refused by the database; after a ROLLBACK, what the"
    " same string of statements did may have taken effect, without the positions)"
)
_GUARD = "oncely_lent_is_not_yours_to_commit"
# Statements that meet the table which refuses COMMIT, by the SQLSTATE of their errors.
_UNSUPPORTED = {
    "23505": "SET CONSTRAINTS ALL IMMEDIATE (name the constraints; the end of a call checks all)",
    "55006": "DISCARD TEMP (temporary tables of a call are dropped at its end)",
}
_SETTINGS = (
    "SET LOCAL statement_timeout = {limit}; SET LOCAL lock_timeout = {lock};"
    " SET LOCAL idle_in_transaction_session_timeout = {idle};"
    " SET LOCAL default_transaction_read_only = on;"
)
# Relations of the function: each loan leaves none.
_CREATED = (
    "FROM pg_depend WHERE refclassid = CAST('pg_namespace' AS regclass)"
    " AND refobjid = pg_my_temp_schema() AND classid = CAST('pg_class' AS regclass)"
    " AND objid <> CAST('pg_temp.oncely_lent' AS regclass)"
)
_CREATED_TABLES = (
    "SELECT string_agg(CAST(CAST(oid AS regclass) AS text), ', ') FROM pg_class"
    f" WHERE relkind IN ('r', 'p') AND oid IN (SELECT objid {_CREATED})"
)
_BEGIN = (
    f"SAVEPOINT oncely_lent; {_SETTINGS}"
    " CREATE TEMP TABLE IF NOT EXISTS oncely_lent (n int, "
    f"CONSTRAINT {_GUARD} UNIQUE (n) DEFERRABLE INITIALLY DEFERRED) ON COMMIT DELETE ROWS;"
    " INSERT INTO pg_temp.oncely_lent VALUES (1), (1);"
    " SELECT current_setting('search_path'), current_setting('role'), pg_backend_pid()"
)
_END = (
    "SELECT set_config('search_path', {path}, false), set_config('role', {role}, false),"
    f" set_config('client_encoding', 'UTF8', false), EXISTS(SELECT {_CREATED});"
    " CLOSE ALL; SET TRANSACTION READ WRITE;"  # refused if the function has made it read-only
    " SET LOCAL statement_timeout = DEFAULT;"
    f" SET LOCAL lock_timeout = '{LOCK_SECONDS}s';"
    " DELETE FROM pg_temp.oncely_lent; SET CONSTRAINTS ALL IMMEDIATE;"
    " SET CONSTRAINTS ALL DEFERRED; RELEASE SAVEPOINT oncely_lent"
)


class LentTransaction(WatchedSession):
    """The connection that the function gets: an open transaction of another session.

    Attributes:
        failure: the last error of a statement.
        lost: the session has ended in a statement.
    """

    def __init__(
        self, owner: WatchedSession, seconds: float, backend: int, settings: bytes
    ) -> None:
        handlers = owner.pgconn.notice_handler, owner.pgconn.notify_handler
        super().__init__(owner.pgconn)
        owner.pgconn.notice_handler, owner.pgconn.notify_handler = handlers
        self.url, self.connect_timeout_seconds = owner.url, owner.connect_timeout_seconds
        self.prepare_threshold = None
        # A statement beside an open COPY of the same thread is refused; it would wait for itself.
        self.lock = threading.RLock()  # type: ignore[assignment]
        self.failure: psycopg.Error | None = None
        self._seconds, self._backend, now = seconds, backend, time.monotonic()
        self._until, self._next_look = now + seconds, now + seconds / _LOOKS
        self._owner, self._settings = owner, settings
        self._was_locked_out = self._has_ended = False
        self._returned = self.lost = False
        self._process = os.getpid()
        self._unsupported = ""
        self._reports = self.pgconn.parameter_status(_REPORTED) == b"on"

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for the server, within the transaction and the time limit."""
        if os.getpid() != self._process:
            raise psycopg.InterfaceError("the session belongs to the parent of this process")
        if self._returned:
            raise psycopg.InterfaceError("the transaction was given back when the function ended")
        self.refuse_late()
        self.require_open()
        if self.is_ended:
            raise psycopg.ProgrammingError("the function has ended its transaction")
        try:
            return super().wait(gen, *args, **kwargs)
        except psycopg.Error as error:
            self.lost = self.closed
            if not isinstance(error, psycopg.errors.InFailedSqlTransaction):
                self.failure = error
            if error.diag.constraint_name == _GUARD or '"oncely_lent"' in str(error):
                self._unsupported = _UNSUPPORTED.get(error.sqlstate or "", "")
            raise

    @property
    def is_ended(self) -> bool:
        """True if the session is known to be outside of the transaction, or in another one."""
        status = self.pgconn.transaction_status
        if status != pq.TransactionStatus.INTRANS:  # after an error, settings are reverted, too
            return self._has_ended or status == pq.TransactionStatus.IDLE
        if self._reports and self.pgconn.parameter_status(_REPORTED) != b"on":
            self._has_ended = self._has_ended or not self._is_lent()
        return self._has_ended

    def _is_lent(self) -> bool:
        """Ask the server for the rows of the loan; settings that were put back are made again."""
        if self.pgconn.pipeline_status == pq.PipelineStatus.OFF:
            with suppress(psycopg.Error):
                ask = b"SELECT count(*) FROM pg_temp.oncely_lent"
                return _last(self._owner.execute(self._settings + ask)).fetchone() == (2,)
        return False

    def refuse_unsupported(self) -> None:
        """Raises LoanBroken after a statement that meets the table which refuses COMMIT."""
        if self._unsupported and not self.is_ended:
            raise LoanBroken(f"{self._unsupported} is not supported inside of its transaction")

    def require_open(self) -> None:
        """Raises LoanBroken if the session has ended while no statement was executed."""
        if self.closed and not self.lost:
            raise LoanBroken("it has closed its connection")

    @property
    def is_late(self) -> bool:
        """True if the time limit is exceeded."""
        return time.monotonic() > self._until

    def refuse_late(self) -> None:
        """Check the time limit.

        Raises:
            QueryCanceled: it is exceeded.
        """
        if self.is_late:
            raise psycopg.errors.QueryCanceled(f"it takes longer than {self._seconds:g} s")

    def look(self) -> None:
        """Look, several times within the limit, whether the statement waits for a lock.

        ``lock_timeout`` ends a single wait; but several waits, or a wait and work before it, may
        last until the time limit. If the server accepts no other session, it is not known.
        """
        if self._was_locked_out or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._seconds / _LOOKS
        try:
            self._was_locked_out = self.holders(self._backend) != ""
        except psycopg.Error:
            self._was_locked_out = True

    def sorted(self, error: psycopg.Error) -> Exception:
        """Convert an error by its consequence; an error of the session is behind what follows."""
        behind = sort_lent(self.failure or error, lost=self.closed)
        if isinstance(behind, Unavailable):
            return behind
        if error.sqlstate == _CANCELED and self._was_locked_out:
            return Contention(
                f"PostgreSQL: it has waited for a lock of another session for a part of the"
                f" {self._seconds:g} s of sink.time_limit"
            )
        return sort_lent(error, lost=self.closed)

    def forget_recovered(self) -> None:
        """Forget the last error if the transaction goes on: a savepoint was rolled back."""
        if self.pgconn.transaction_status == pq.TransactionStatus.INTRANS:
            self.failure = None

    def give_back(self) -> None:
        """Nothing more is sent through this object.

        Raises:
            LoanBroken: another thread is in a statement, or its answer.
        """
        self._returned = True
        if not self.lock.acquire(blocking=False):
            raise LoanBroken("a thread of it still uses its transaction")
        self.lock.release()

    def commit(self) -> None:
        """Refused."""
        self._not_yours("commit")

    def rollback(self) -> None:
        """Refused."""
        self._not_yours("roll back")

    def close(self) -> None:
        """Refused."""
        self._not_yours("close")

    def set_autocommit(self, value: bool) -> None:  # noqa: ARG002
        """Refused."""
        self._not_yours("switch autocommit of")

    def _not_yours(self, verb: str) -> NoReturn:
        raise psycopg.ProgrammingError(
            f"a function can't {verb} its transaction: it is committed with the positions"
            " (use tx.transaction() for a part that may be rolled back)"
        )

    def __del__(self, *_: object) -> None:
        """The session goes on."""


@contextmanager
def lent(session: WatchedSession, seconds: float) -> Iterator[LentTransaction]:
    """Lend the open transaction; if the block raises, it is as before.

    Raises:
        LoanBroken: the transaction was ended by the block, or a statement of it is not finished.
        psycopg.Error: a statement has failed, also one whose error the block has caught.
    """
    limit, idle = int(seconds * 1000), int((seconds + _IDLE_SECONDS) * 1000)
    # Below half the limit, so that the server itself tells a wait for a lock.
    settings = {"limit": limit, "idle": idle, "lock": min(LOCK_SECONDS * 1000, limit // 2)}
    begun = session.execute(_BEGIN.format(**settings).encode())
    path, role, backend = _last(begun).fetchone() or ("", "", 0)
    tx = LentTransaction(session, seconds, backend, _SETTINGS.format(**settings).encode())
    try:
        try:
            yield tx
        finally:
            tx.give_back()
            tx.require_open()
            tx.refuse_unsupported()
        tx.refuse_late()
        _require_usable(tx)
        if tx.is_ended:
            raise LoanBroken(_ENDED)
        _end(session, path, role)
    except BaseException as error:
        tx.forget_recovered()
        _undo(session, tx, error)
        if tx.is_late and session.closed and not tx.lost:
            raise LoanBroken(f"it has blocked for longer than {seconds:g} s") from error
        raise


def _last(cursor: psycopg.Cursor[Row]) -> psycopg.Cursor[Row]:
    """At the answer to the last statement."""
    while cursor.nextset():
        pass
    return cursor


def _require_usable(tx: LentTransaction) -> None:
    """Raise the error of a statement if the block has caught it: the transaction has failed."""
    if tx.pgconn.transaction_status != pq.TransactionStatus.INERROR:
        return
    said = tx.failure.diag.message_primary if tx.failure else None
    caught = type(tx.failure) if tx.failure is not None else psycopg.errors.InFailedSqlTransaction
    raise caught(
        f"an SQL error was caught, and its transaction has failed: {said or 'unknown'}; use"
        " tx.transaction() for statements that may fail"
    )


def _end(session: WatchedSession, path: str, role: str) -> None:
    """Check deferred constraints and the loan, put the session's settings back, and drop temporary
    tables."""
    _require_finished(session)
    end = sql.SQL(_END).format(path=sql.Literal(path), role=sql.Literal(role))
    try:
        cursor = session.execute(end)
    except psycopg.ProgrammingError as error:
        if "oncely_lent" not in str(error):  # of a deferred trigger
            raise
        raise LoanBroken(_ENDED) from None
    *_, created = cursor.fetchone() or (False,)
    while cursor.nextset() and not (cursor.statusmessage or "").startswith("DELETE"):
        pass
    if cursor.rowcount != 2:
        raise LoanBroken(_ENDED)
    if created:
        (tables,) = session.execute(_CREATED_TABLES.encode()).fetchone() or (None,)
        if tables:
            session.execute(f"DROP TABLE {tables} CASCADE".encode(session.info.encoding))


def _require_finished(session: WatchedSession) -> None:
    pipelined = session.pgconn.pipeline_status != pq.PipelineStatus.OFF
    if pipelined or session.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
        raise LoanBroken("it has left a statement (COPY, stream or pipeline) unfinished")


def _undo(session: WatchedSession, tx: LentTransaction, error: BaseException) -> None:
    """Roll back to the begin of the loan."""
    if isinstance(error, LoanBroken):
        return
    if tx.is_ended:
        raise LoanBroken(_ENDED) from error
    if session.pgconn.status != pq.ConnStatus.OK:
        return
    _require_finished(session)
    try:
        session.execute("ROLLBACK TO SAVEPOINT oncely_lent; RELEASE SAVEPOINT oncely_lent")
    except psycopg.errors.InvalidSavepointSpecification:
        raise LoanBroken(_ENDED) from error
    except psycopg.OperationalError:
        with suppress(Exception):
            session.close()
