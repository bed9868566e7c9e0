"""One database session for each pipeline and process, reused across commits; in a worker one for
each thread that commits.

A new session costs more than a small commit, so it is kept; after any failure it is discarded,
which also undoes a transaction of unknown state: the server rolls back the open transaction of a
closed connection. One that was ended while it was idle is replaced: a takeover of some partitions
ends the sessions of a run that goes on with its others. What the new session finds decides.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

from oncely.clients.sql.connection import BadData, Connect, Connection, Dialect
from oncely.phases import phase

_kept: dict[tuple[Dialect, str], list[tuple[str, Connection]]] = {}
_lock = threading.Lock()
_MOST = 4  # kept sessions of a pipeline of which this process holds partitions under many epochs


@lru_cache(maxsize=64)
def application_prefix(pipeline: str) -> str:
    """The common prefix of the names of a pipeline's sessions, for all epochs (63 bytes at most).

    Plain ASCII, because PostgreSQL replaces other characters.
    """
    digest = hashlib.sha256(pipeline.encode()).hexdigest()[:8]
    return f"oncely/{re.sub('[^!-~]', '_', pipeline[:24])}-{digest}/"


def application_name(pipeline: str, epoch: int) -> str:
    """The name of this epoch's sessions."""
    return f"{application_prefix(pipeline)}{epoch}"


@contextmanager
def session(
    dialect: Dialect, pipeline: str, epoch: int, connect: Connect, *, several: bool = False
) -> Iterator[Connection]:
    """The process's session for the pipeline; discarded if the block raises.

    A session of an older epoch is closed first: its name would make others terminate it.

    Args:
        dialect: the kind of database, and its address.
        pipeline, epoch: the run.
        connect: opens the session.
        several: the process holds partitions under several epochs in turn, and keeps sessions for
            each of the last ones used: as many as threads have used at the same time.
    """
    name = application_name(pipeline, epoch)
    key = (dialect, name if several else pipeline)
    connection = _reused(key, name)
    if connection is None:
        connection = connect(dialect, name)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    with _lock:
        idle = _kept.pop(key, [])
        keeps = several or not idle
        if keeps:
            idle.append((name, connection))
        _kept[key] = idle  # the last one used
    if not keeps:  # another thread has put its own session back
        connection.close()
    if several:
        _close_beyond(_MOST, dialect, application_prefix(pipeline))


def _reused(key: tuple[Dialect, str], name: str) -> Connection | None:
    """A kept session of this name, which is then this thread's; others of the key are closed, and
    so is one that has ended."""
    with _lock:
        idle = _kept.pop(key, [])
        found = idle.pop() if idle and idle[-1][0] == name else None
        if found is not None and idle:
            _kept[key], idle = idle, []
    for _, other in idle:
        other.close()
    if found is None:
        return None
    if found[1].is_ended():
        found[1].close()
        return _reused(key, name)
    return found[1]


def _close_beyond(most: int, dialect: Dialect, prefix: str) -> None:
    """Close the sessions of a pipeline that were not used for the longest time."""
    with _lock:
        own = [key for key in _kept if key[0] == dialect and key[1].startswith(prefix)]
        gone = [_kept.pop(key) for key in own[: max(0, len(own) - most)]]
    for _, connection in itertools.chain(*gone):
        connection.close()


@contextmanager
def transaction(connection: Connection) -> Iterator[Connection]:
    """BEGIN … COMMIT; rolled back if the block raises. BEGIN may be sent with its first call."""
    connection.begin()
    try:
        yield connection
    except BaseException:
        with suppress(Exception):
            connection.rollback()
        raise
    # Outside the try: after a COMMIT that raised, only the ledger shows the outcome.
    try:
        with phase("commit"):
            connection.commit()
    except BadData:
        with suppress(Exception):
            connection.rollback()
        raise


@contextmanager
def brief_session(dialect: Dialect, purpose: str, connect: Connect) -> Iterator[Connection]:
    """A session for reading or setup, closed at the end; no takeover ends it."""
    connection = connect(dialect, f"oncely-{purpose}")
    try:
        yield connection
    finally:
        connection.close()


def close_all() -> None:
    """Close every kept session of this process."""
    while _kept:
        for _, connection in _kept.popitem()[1]:
            connection.close()
