"""Looks at a SQL sink without writing: what its ledger says, whether the table takes the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oncely.errors import TableMismatch
from oncely.pipeline.destination import Known
from oncely.sinks.sql.connection import Connection
from oncely.sinks.sql.dead_letters import DeadLetters
from oncely.sinks.sql.ledger import Ledger
from oncely.sinks.sql.session import brief_session
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.takeover import require_ledger, same_table
from oncely.sinks.sql.target import inspect


def look(sink: SqlSink) -> Known:
    """Read the ledger; one that was never created knows nothing.

    Raises:
        WrongInput: the database does not let us in.
        Unavailable: no answer.
    """
    with session(sink) as connection:
        if connection is None or not sink.ledger_tables.exists(connection):
            return Known()
        tables = sink.ledger_tables.as_found(connection)
        ledger = Ledger(tables)
        registered = ledger.registered(connection)
        if registered is None:
            return Known()
        entries = ledger.entries(connection)
        return Known(
            registered.epoch,
            registered.cluster_id,
            {tp: entry.position for tp, entry in entries.items()},
            ledger.topic_ids(connection),
            DeadLetters(tables).count(connection),
        )


def check_table(sink: SqlSink) -> None:
    """Refuse a table that doesn't take the rows, and a missing one that we may not create.

    Raises:
        TableMismatch: names every column that doesn't fit, or the table that it is not.
    """
    with session(sink) as connection:
        if connection is None:
            return
        if sink.ledger_tables.exists(connection):
            ledger = Ledger(sink.ledger_tables.as_found(connection))
            same_table(ledger.registered(connection), sink.wanted.table, sink.pipeline)
        elif not sink.create:
            require_ledger(connection, sink.ledger_tables)
        if not sink.create or sink.dialect.columns(connection, sink.wanted.table):
            inspect(sink.dialect, connection, sink.wanted)


@contextmanager
def session(sink: SqlSink) -> Iterator[Connection | None]:
    """A session for looking; None where the database is a file that is still to be made."""
    try:
        opened = brief_session(sink.dialect, "look", sink.connect)
        connection = opened.__enter__()
    except TableMismatch:
        if not sink.create:
            raise
        yield None
        return
    try:
        yield connection
    finally:
        opened.__exit__(None, None, None)
