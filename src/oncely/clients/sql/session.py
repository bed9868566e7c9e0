"""One database session for a pipeline in each process, reused from commit to commit.

A new session costs more than a small commit, so it is kept; after any failure it is thrown
away, which is also how a transaction of unknown state is undone: the server rolls back what a
vanished client left open.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from oncely.clients.sql.connection import BadData, Connect, Connection, Dialect

_kept: dict[tuple[Dialect, str], tuple[str, Connection]] = {}


def application_prefix(pipeline: str) -> str:
    """How sessions of a pipeline are recognised, whatever their epoch (63 bytes at most).

    Plain ASCII, because PostgreSQL writes anything else in a way of its own.
    """
    digest = hashlib.sha256(pipeline.encode()).hexdigest()[:8]
    return f"oncely/{re.sub('[^!-~]', '_', pipeline[:24])}-{digest}/"


def application_name(pipeline: str, epoch: int) -> str:
    """The name of this epoch's sessions."""
    return f"{application_prefix(pipeline)}{epoch}"


@contextmanager
def session(dialect: Dialect, pipeline: str, epoch: int, connect: Connect) -> Iterator[Connection]:
    """The process's session for the pipeline; thrown away when the block raises.

    A session of an older epoch is closed first: its name would invite termination.
    """
    key = (dialect, pipeline)
    name = application_name(pipeline, epoch)
    kept_name, connection = _kept.pop(key, ("", None))
    if connection is not None and kept_name != name:
        connection.close()
        connection = None
    if connection is None:
        connection = connect(dialect, name)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    if key in _kept:  # another thread has put its own back
        connection.close()
    else:
        _kept[key] = (name, connection)


@contextmanager
def transaction(connection: Connection) -> Iterator[Connection]:
    """BEGIN … COMMIT; undone when the block raises."""
    connection.begin()
    try:
        yield connection
    except BaseException:
        with suppress(Exception):
            connection.rollback()
        raise
    # Outside the try: after a COMMIT that raised, only the ledger knows what happened.
    try:
        connection.commit()
    except BadData:
        with suppress(Exception):
            connection.rollback()
        raise


@contextmanager
def brief_session(dialect: Dialect, purpose: str, connect: Connect) -> Iterator[Connection]:
    """A session for looking or setting up, closed at the end; no takeover ends it."""
    connection = connect(dialect, f"oncely-{purpose}")
    try:
        yield connection
    finally:
        connection.close()


def close_all() -> None:
    """Close every kept session of this process."""
    while _kept:
        _kept.popitem()[1][1].close()
