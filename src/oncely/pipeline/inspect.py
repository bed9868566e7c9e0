"""Looks at a SQL sink without writing: what its ledger says, whether the table takes the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.session import brief_session
from oncely.clients.sql.sqlite import Sqlite
from oncely.errors import TableMismatch
from oncely.ledgers.sql.dead_letters import DeadLetters
from oncely.ledgers.sql.same_table import check_known_table
from oncely.ledgers.sql.statements import LedgerStatements
from oncely.ledgers.sql.takeover import require_ledger
from oncely.pipeline.destination import Known
from oncely.pipeline.problems import Check
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.target import create_statement, inspect


def look(sink: SqlSink) -> Known:
    """Read the ledger; one that was never created knows nothing.

    Raises:
        WrongInput: the database does not let us in.
        Unavailable: no answer.
    """
    with session(sink) as connection:
        if connection is None or not sink.ledger.tables.exists(connection):
            return Known()
        tables = sink.ledger.tables.as_found(connection)
        ledger = LedgerStatements(tables)
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
            ledger.leader_epochs(connection),
        )


def check_table(sink: SqlSink) -> None:
    """Make all :func:`checks`.

    Raises:
        WrongInput: the first thing that is wrong.
    """
    with session(sink) as connection:
        for _, check in checks(sink, connection):
            check()


def checks(sink: SqlSink, connection: Connection | None) -> Iterator[Check]:
    """What a run would refuse: the database file, the ledger, the table.

    Args:
        sink: without columns only those checks are made that need none.
        connection: None where the database is a file that is still to be made.
    """
    if connection is None:
        if isinstance(sink.dialect, Sqlite):
            yield "sink.url", sink.dialect.require_creatable
        return
    tables, wanted, dialect = sink.ledger.tables, sink.wanted, sink.dialect
    if not sink.create:
        yield "sink.create", lambda: require_ledger(connection, tables)
    yield "sink.table", lambda: check_known_table(connection, tables)
    if not len(wanted.schema):
        return
    if not sink.create or dialect.columns(connection, wanted.table):
        yield "sink.table", lambda: inspect(dialect, connection, wanted)
    else:
        yield "sink.table", lambda: create_statement(dialect, wanted)


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
