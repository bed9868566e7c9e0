"""PostgreSQL asked by the plain driver: the main thread of a test process keeps one session.

A session costs more than most statements: a process of the server, and a login. Other threads
have a new one for each statement, because the kept one may be waiting for a lock.
"""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass
from typing import Any

import psycopg


@dataclass(frozen=True)
class _Kept:
    process: int
    url: str
    options: str | None
    session: psycopg.Connection[Any]

    @property
    def alive(self) -> bool:
        """An idle session has something to read only when the server has ended it."""
        return not self.session.closed and not select.select([self.session], [], [], 0)[0]


_kept: list[_Kept] = []  # of a parent process, too: to close its session here would end it there


def ask(
    url: str, statement: str, params: tuple[object, ...] = (), options: str | None = None
) -> list[tuple[Any, ...]]:
    """Run one statement in autocommit; its rows."""
    if threading.current_thread() is not threading.main_thread():
        with _connect(url, options) as session:
            return _rows(session, statement, params)
    return _rows(_session(url, options), statement, params)


def _session(url: str, options: str | None) -> psycopg.Connection[Any]:
    here = os.getpid()
    for one in [one for one in _kept if one.process == here]:
        if (one.url, one.options) == (url, options) and one.alive:
            return one.session
        _kept.remove(one)
        one.session.close()
    _kept.append(_Kept(here, url, options, _connect(url, options)))
    return _kept[-1].session


def _connect(url: str, options: str | None) -> psycopg.Connection[Any]:
    # A statement is not prepared when it is repeated: tests change tables between.
    return psycopg.connect(url, autocommit=True, prepare_threshold=None, options=options)


def _rows(
    session: psycopg.Connection[Any], statement: str, params: tuple[object, ...]
) -> list[tuple[Any, ...]]:
    cursor = session.execute(statement.encode(), params or None)
    return cursor.fetchall() if cursor.description else []
