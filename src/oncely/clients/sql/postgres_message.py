"""Several statements in one message of the simple query protocol, which may contain a COPY.

The server answers each statement before it runs the next one, and skips those after an error: the
number of answers tells the statement that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.copy import LibpqWriter
from psycopg.generators import execute
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from oncely.clients.sql.connection import Row
from oncely.clients.sql.postgres_errors import sort_error
from oncely.clients.sql.postgres_session import WatchedSession

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
class Message:
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
