"""A session of PostgreSQL: its errors by consequence, frozen servers, several statements at once.

Errors that another attempt may not meet are listed: a lost connection, a shutdown, a conflict, a
lack of resources. Errors that no attempt can mend, of whatever row, are listed too. Any other
SQLSTATE belongs to the row, or to the call of a function, whose statement has raised it: a refused
value, and what a trigger, a function or an extension raises, with a SQLSTATE of its own as well.
An extension may also raise an internal error (XX000) for a value. In a statement of the ledger or
of the session it is the server's, and another attempt may not meet it.

A server whose processes are stopped (SIGSTOP, a paused container) does not respond, while its
kernel still acknowledges packets: neither keepalives nor ``tcp_user_timeout`` fire. The duration of
a statement is no criterion either, since a COPY or the publication of a batch may take minutes. But
a server that is only busy accepts new connections (docs/decisions/0035).

The new connection asks whose lock this session waits for: after the error of a lock timeout nobody
knows it any more. Outside of a transaction no such timeout applies, and this session ends the wait.

Several statements travel in one message of the simple query protocol, which may contain a COPY.
The server answers each statement before it runs the next one, and skips those after an error: the
number of answers tells the statement that has failed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo
from psycopg.copy import LibpqWriter
from psycopg.generators import execute
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from oncely.errors import OncelyError, Stopped, TableMismatch, TooLong, Unavailable, WrongInput
from oncely.secrets import redact
from oncely.stores.sql.connection import BadData, Contention, Row, TableAltered

T = TypeVar("T")

_END_IT = "wait for the end of its transaction, or end it: SELECT pg_terminate_backend(<process>)"

_POLICY = "if row-level security refuses the rows, use a role with BYPASSRLS or change the policy"
_LEDGER_HOLDS = "the pipeline continues from its ledger"
SHRINKS = (
    "commits that take longer become smaller until they pass; larger ones need a longer"
    " statement_timeout or transaction_timeout of the role: ALTER ROLE ... SET statement_timeout"
)
_OF_THE_ROW = (BadData, "")
_INTERNAL = "XX"
_KEY_TAKEN = "23505"
_CONSEQUENCES: dict[tuple[type[OncelyError], str], str] = {
    # 54000 and 54001 are a text too long for its index, and JSON too deep for the stack. 42601 is a
    # text that is no tsvector, tsquery, jsonpath or ltree: it is no error of the statement, which
    # is the same for all rows.
    _OF_THE_ROW: "42601 54000 54001",
    # 25006 and 25P02 follow from an earlier error of the session, 25P03 and 25P04 end it.
    (Unavailable, ""): "08 25006 25P02 25P03 53 57 58 72000",
    (TooLong, SHRINKS): "57014 25P04",
    (Contention, ""): "40 55P03",
    (TableMismatch, "`oncely plan --ddl` prints the DDL"): "3F000 42703 42804 42P01",
    (Stopped, "correct the trigger or function that raised it"): "25 2D",
    (Stopped, f"restore the database; {_LEDGER_HOLDS}"): "XX001",
    (Stopped, f"REINDEX, or restore the database; {_LEDGER_HOLDS}"): "XX002",
    (WrongInput, f"write to a table that supports the statement; {_POLICY}"): "0A",
    (WrongInput, "check the roles and their grants"): "0L 0P",
    (
        WrongInput,
        "two records have keys that differ, and that the unique index treats as equal (letter"
        " case, a trigger that changes them): make them equal in the transform, or change"
        " sink.keys; otherwise correct the subquery in the trigger or policy",
    ): "21",
    (WrongInput, "check user, password and role in sink.url"): "28",
    (WrongInput, "drop the dependent objects first"): "2B",
    (WrongInput, "check the database in sink.url"): "3D",
    (WrongInput, "`oncely plan` compares the table with the rows"): "42",
    (WrongInput, f"grant it, or create the tables that `plan` prints; {_POLICY}"): "42501",
    (WrongInput, "the table or the rows exceed a limit of the server: use fewer columns"): "54",
    (WrongInput, "the table does not support this statement: a view, or a publication"): "55",
    (WrongInput, "correct the server's configuration files"): "F0",
}
_MEANINGS = {one: found for found, states in _CONSEQUENCES.items() for one in states.split()}
# Of a function's own statements: a statement beyond the time limit, a transaction that it has made
# read-only, an error that it has caught.
_OF_THE_CALL = ("57014", "25006", "25P02")
# Of every call, whatever the record: a missing table, column or privilege, a damaged database.
_OF_EVERY_CALL = ("3F000", "42501", "42703", "42P01", "XX001", "XX002")


def sorted_errors(work: Callable[[], T], copied: str | None = None, *, of_rows: bool = True) -> T:
    """Run ``work``; convert an error of the driver by its consequence for the commit path.

    Args:
        copied: the table of a COPY, whose errors name a row.
        of_rows: the statement processes values of records.
    """
    try:
        return work()
    except psycopg.Error as error:
        raise sort_error(error, copied, of_rows=of_rows) from error


def sort_error(
    error: psycopg.Error, copied: str | None = None, *, of_rows: bool = True
) -> Exception:
    """Convert an error of the driver by its consequence for the commit path."""
    state = error.sqlstate or ""
    text = redact((error.diag.message_primary or str(error)).strip())
    if state == "22P03":  # our encoding, not a record: the table was altered during the run
        return TableAltered(f"PostgreSQL: {text}")
    if holders := "; ".join(getattr(error, "__notes__", ())):
        return Contention(f"PostgreSQL: {text}: {redact(holders)}", way_out=_END_IT)
    kind, way_out = _MEANINGS.get(state) or _MEANINGS.get(state[:2]) or _OF_THE_ROW
    if not state and not isinstance(error, psycopg.ProgrammingError | psycopg.DataError):
        kind = Unavailable  # the connection's; those two are psycopg's own, and nothing was sent
    if kind is BadData and not of_rows and state[:2] == _INTERNAL:
        kind = Unavailable
    if kind is BadData and not of_rows and copied and state == _KEY_TAKEN:
        kind = Contention  # another attempt has stored the row meanwhile
    if kind is BadData:
        detail = redact(error.diag.message_detail or "")
        reason = f"{text} ({detail})" if detail else text
        return BadData(reason, _line(error.diag.context, copied))
    return kind(f"PostgreSQL: {text}" if text else "PostgreSQL ended the session", way_out=way_out)


def sort_lent(error: psycopg.Error, *, lost: bool) -> Exception:
    """As :func:`sort_error`, of a statement of a function that the transaction was lent to.

    Args:
        lost: the session has ended. An error without SQLSTATE is then its end; otherwise it is of
            another connection.
    """
    found, state = sort_error(error), error.sqlstate or ""
    again = isinstance(found, Unavailable) and state not in _OF_THE_CALL and (state or lost)
    if again or state in _OF_EVERY_CALL or isinstance(found, BadData):
        return found
    return BadData(redact((error.diag.message_primary or str(error)).strip()))


def not_of_the_row(state: str) -> str:
    """The condition in SQL that a SQLSTATE, given as an expression, does not belong to the row."""
    rows = [one for one in _MEANINGS if _MEANINGS[one] == _OF_THE_ROW]
    others = [one for one in _MEANINGS if one not in rows]
    lists = (", ".join(f"'{one}'" for one in some) for some in (others, rows))
    return "({0} IN ({1}) OR left({0}, 2) IN ({1}) AND {0} NOT IN ({2}))".format(state, *lists)


def _line(context: str | None, copied: str | None) -> int | None:
    """The 0-based row that COPY names in its context: ``COPY <table>, line 3, column b``.

    Table and column may be any text, including line breaks, so the known table name is matched as a
    whole.
    """
    if copied is None:
        return None
    named = re.search(rf"^COPY {re.escape(copied)}, line (\d+)", context or "", re.MULTILINE)
    return int(named.group(1)) - 1 if named else None


LOCK_SECONDS = 10
"""The longest wait for a lock."""

SILENCE_SECONDS = 5.0
"""Seconds of silence after which a new connection to the server is tried, and tried again."""

_LOOKS = 2  # at a lock, before a wait outside of a transaction is ended

# Parts that this role may not read are NULL.
_BLOCKED = """
SELECT coalesce((SELECT CAST(CAST(relation AS regclass) AS text) FROM pg_locks
                 WHERE pid = %(pid)s AND relation IS NOT NULL
                   AND (NOT granted OR locktype = 'tuple') LIMIT 1), 'a row'),
       pid, application_name, usename, state, CAST(query_start AS timestamptz(0))
FROM pg_stat_activity WHERE pid = ANY (pg_blocking_pids(%(pid)s)) ORDER BY xact_start LIMIT 3"""


class WatchedSession(psycopg.Connection[Row]):
    """A session whose waits end if the server accepts no other connection.

    Attributes:
        url: the URL of the session.
        connect_timeout_seconds: the time limit of a new connection.
    """

    url: str
    connect_timeout_seconds: int

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for the server; psycopg calls this method for every wait.

        Raises:
            psycopg.OperationalError: no answer, and none to a new connection; the session is
                closed, and the outcome of its transaction is unknown.
        """
        return super().wait(self._watched(gen), *args, **kwargs)

    def _watched(self, gen: PQGen[T]) -> Generator[Any, Any, T]:
        """``gen``, with measured silences: psycopg resumes it several times a second."""
        looks, earlier, holders = 0, "", ""
        unbounded = self.pgconn.transaction_status == pq.TransactionStatus.IDLE
        try:
            wanted, heard = next(gen), time.monotonic()
            while True:
                ready = yield wanted
                if ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    earlier, holders = holders, self._check_server()
                    looks = looks + 1 if holders else 0
                    if unbounded and looks == _LOOKS:
                        self.cancel_safe(timeout=self.connect_timeout_seconds)
                    heard = time.monotonic()
                else:
                    self.look()
                wanted = gen.send(ready)
        except StopIteration as end:
            answer: T = end.value
            return answer
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
            if told := holders or earlier:  # the last look may have come after the lock timeout
                error.add_note(told)
            raise

    def look(self) -> None:
        """Called several times a second while the server does not respond."""

    def _check_server(self) -> str:
        """Whose lock this session waits for; empty if it waits for none, or that is unknown."""
        try:
            return self.holders(self.info.backend_pid)
        except psycopg.errors.ConnectionTimeout:
            pass
        except psycopg.OperationalError:
            # Only libpq distinguishes an error of the server (too many connections) from a failed
            # connection. This call holds the GIL, so it is not used for the first attempt, which
            # may take long.
            if pq.PGconn.ping(self._server().encode()) != pq.Ping.NO_RESPONSE:
                return ""
        except psycopg.Error:  # a server of another kind has no such views
            return ""
        # Close it here: a ROLLBACK, or the end of a COPY, would only wait again.
        self.pgconn.finish()
        raise psycopg.OperationalError(
            f"no answer for {SILENCE_SECONDS:g} s, and the server accepts no other connection"
        )

    def holders(self, backend: int) -> str:
        """Whose lock a session of the server waits for, by another session."""
        with closing(_Brief.connect(self._server(), autocommit=True)) as other:
            return other.holders(backend, self.connect_timeout_seconds)

    def _server(self) -> str:
        """The conninfo of this session's own server: the URL may name several."""
        return make_conninfo(
            self.url,
            host=self.info.host,
            hostaddr=self.info.hostaddr,
            port=self.info.port,
            target_session_attrs="any",
            load_balance_hosts="disable",
            application_name="oncely-check",
            connect_timeout=self.connect_timeout_seconds,
        )


class _Brief(psycopg.Connection[Row]):
    """A session whose waits are bounded: behind a pooler a statement waits for a free session."""

    until = float("inf")

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait until the deadline."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: PQGen[T]) -> Generator[Any, Any, T]:
        try:
            wanted = next(gen)
            while time.monotonic() < self.until:
                wanted = gen.send((yield wanted))
        except StopIteration as end:
            answer: T = end.value
            return answer
        raise psycopg.errors.QueryCanceled("no answer in time")

    def holders(self, pid: int, seconds: float) -> str:
        """The sessions that hold the locks for which a session waits, in words."""
        self.until = time.monotonic() + seconds
        found = self.execute(_BLOCKED, {"pid": pid}).fetchall()
        said = ("application", "role", "state", "its last statement began")
        named = [
            ", ".join(
                [f"process {one}", *(f"{a} {b}" for a, b in zip(said, told, strict=True) if b)]
            )
            for _, one, *told in found
        ]
        return f"a lock on {found[0][0]} is held by {'; '.join(named)}" if found else ""


UNCHANGED = "oncely: no row has changed, but "
"""A text in the error of a statement that has to change a row and has changed none."""

_NO_NUMBER = "22P02"


class Sent(NamedTuple):
    """A statement of a message.

    Attributes:
        text: the statement, its parameters written into it.
        of_rows: it processes values of records; see :meth:`Connection.query`.
        otherwise: raised instead of the error with the text :data:`UNCHANGED`.
        refuse: called with the answer; may raise.
    """

    text: bytes
    of_rows: bool = False
    otherwise: Exception | None = None
    refuse: Callable[[PGresult], None] | None = None


@dataclass
class ServerMessage:
    """A message to the server of a session.

    Attributes:
        session: the session.
        statements: the statements.
        answers: the server's answers so far, of each statement one; the last may be an error.
    """

    session: WatchedSession
    statements: Sequence[Sent]
    answers: list[PGresult] = field(default_factory=list)

    def send(self, copied: str | None = None) -> list[PGresult]:
        """Send the statements, and return their answers; of a COPY that it waits for rows.

        Args:
            copied: the table of a COPY, whose errors name a row.

        Raises:
            OncelyError: a statement has failed, as :func:`sort_error` classifies it.
            the ``otherwise`` of a statement, or the error of its ``refuse``.
        """
        conn = self.session.pgconn
        try:
            # Before the wait, which is bounded by lock_timeout if the message begins a transaction.
            conn.send_query(b";\n".join(one.text for one in self.statements))
            self.session.wait(self._answered(conn))
        except psycopg.Error as error:
            self._check()
            raise self._sorted(error, copied) from error
        self._check()
        return self.answers

    def copy(self, rows: Iterable[bytes], copied: str) -> list[PGresult]:
        """Send the statements, one of which is a COPY of ``rows``, and return their answers."""
        self.send(copied)
        self.answers.pop()
        conn, writer = self.session.pgconn, LibpqWriter(self.session.cursor())
        try:
            for data in rows:
                writer.write(data)
            self.session.wait(self._ended(conn))
        except psycopg.Error as error:
            raise self._sorted(error, copied) from error
        except BaseException as error:
            with suppress(psycopg.Error):
                self.session.wait(self._ended(conn, repr(error).encode()))
            raise
        return self.answers

    def rows(self, answer: PGresult) -> list[Row]:
        """The rows of an answer, their values as texts."""
        coded = self.session.info.encoding
        values = [
            [answer.get_value(row, column) for column in range(answer.nfields)]
            for row in range(answer.ntuples)
        ]
        return [tuple(None if v is None else v.decode(coded) for v in row) for row in values]

    def _answered(self, conn: PGconn) -> PQGen[None]:
        """Wait for answers, up to the first error, which is raised where the session can add to
        it whose lock was waited for."""
        self.answers += yield from execute(conn)
        if self.answers and self.answers[-1].status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(
                self.answers[-1], encoding=self.session.info.encoding
            )

    def _ended(self, conn: PGconn, error: bytes | None = None) -> PQGen[None]:
        """End the rows of a COPY, and wait for the answers that follow."""
        while conn.put_copy_end(error) == 0:
            yield Wait.W
        yield from self._answered(conn)

    def _check(self) -> None:
        for statement, answer in zip(self.statements, self.answers, strict=False):
            if statement.refuse is not None and answer.status == pq.ExecStatus.TUPLES_OK:
                statement.refuse(answer)

    def _sorted(self, error: psycopg.Error, copied: str | None) -> Exception:
        failed = self.statements[max(0, len(self.answers) - 1)]
        unchanged = error.sqlstate == _NO_NUMBER and UNCHANGED in (error.diag.message_primary or "")
        if failed.otherwise is not None and unchanged:
            return failed.otherwise
        return sort_error(error, copied, of_rows=failed.of_rows)
