"""A psycopg session that fails if its server is frozen.

A server whose processes are stopped (SIGSTOP, a paused container) does not respond, while its
kernel still acknowledges packets: neither keepalives nor ``tcp_user_timeout`` fire. The duration of
a statement is no criterion either, since a COPY or the publication of a batch may take minutes. But
a server that is only busy accepts new connections (docs/decisions/0035).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo

from oncely.clients.sql.connection import Row

SILENCE_SECONDS = 30.0
"""Seconds of silence after which a new connection to the server is tried, and tried again."""

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
        try:
            wanted, heard = next(gen), time.monotonic()
            while True:
                ready = yield wanted
                if ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    self._check_server()
                    heard = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as end:
            answer: T = end.value
            return answer

    def _check_server(self) -> None:
        if _answers(self._server()):
            return
        # Close it here: a ROLLBACK, or the end of a COPY, would only wait again.
        self.pgconn.finish()
        raise psycopg.OperationalError(
            f"no answer for {SILENCE_SECONDS:g} s, and the server accepts no other connection"
        )

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


def _answers(server: str) -> bool:
    """True if a server responds to a new connection, possibly by an error (too many
    connections)."""
    try:
        psycopg.connect(server).close()
    except psycopg.errors.ConnectionTimeout:
        return False
    except psycopg.OperationalError:
        # Only libpq distinguishes an error of the server from a failed connection. This call holds
        # the GIL, so it is not used for the first attempt, which may take long.
        return pq.PGconn.ping(server.encode()) != pq.Ping.NO_RESPONSE
    return True
