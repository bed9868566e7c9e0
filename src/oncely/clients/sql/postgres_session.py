"""A psycopg session that fails if its server is frozen, and tells whose lock it waits for.

A server whose processes are stopped (SIGSTOP, a paused container) does not respond, while its
kernel still acknowledges packets: neither keepalives nor ``tcp_user_timeout`` fire. The duration of
a statement is no criterion either, since a COPY or the publication of a batch may take minutes. But
a server that is only busy accepts new connections (docs/decisions/0035).

The new connection asks whose lock this session waits for: after the error of a lock timeout nobody
knows it any more. Outside of a transaction no such timeout applies, and this session ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo

from oncely.clients.sql.connection import Row

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

T = TypeVar("T")


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
