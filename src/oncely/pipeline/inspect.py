"""Inspection of a SQL sink without writing: the state of its ledger, and checks of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.session import brief_session
from oncely.clients.sql.sqlite import Sqlite
from oncely.core.batch import Reject
from oncely.errors import TableMismatch
from oncely.ledgers.sql.activity import activity
from oncely.ledgers.sql.same_table import check_known_table, check_same_table
from oncely.ledgers.sql.takeover import require_ledger
from oncely.pipeline.destination import LedgerState, refusal
from oncely.pipeline.problems import Check
from oncely.sinks.sql.replay import FIRST
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.target import SOURCE_COLUMNS, create_statement, inspect


def look(sink: SqlSink) -> LedgerState:
    """Read the ledger; empty if it was never created.

    Raises:
        WrongInput: the database refuses the login.
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
        Unavailable: no answer.
    """
    with session(sink) as connection:
        if connection is None or not sink.ledger.tables.exists(connection):
            return LedgerState()
        tables, ledger = sink.ledger.tables, sink.ledger.statements
        registered = ledger.registered(connection)
        if registered is None:
            return LedgerState()
        entries = ledger.entries(connection)
        return LedgerState(
            registered.epoch,
            registered.cluster_id,
            {tp: entry.position for tp, entry in entries.items()},
            ledger.topic_ids(connection),
            sink.ledger.dead_letters.count(connection),
            ledger.leader_epochs(connection),
            activity(connection, tables),
            refused=refusal(lambda: check_same_table(connection, ledger, registered)),
        )


def check_table(sink: SqlSink) -> None:
    """Execute all :func:`checks`.

    Raises:
        WrongInput: the first problem.
    """
    with session(sink) as connection:
        for _, check in checks(sink, connection):
            check()


def checks(sink: SqlSink, connection: Connection | None) -> Iterator[Check]:
    """The checks of a run: the database file, the ledger, the table.

    Args:
        sink: without columns only the checks that need none are returned.
        connection: None if the database is a file that does not exist yet.
    """
    tables, wanted, dialect = sink.ledger.tables, sink.wanted, sink.dialect
    if connection is None:
        if isinstance(dialect, Sqlite):
            yield "sink.url", dialect.require_creatable
        if len(wanted.schema):
            yield "sink.table", lambda: create_statement(dialect, wanted)
        return
    if not sink.create:
        yield "sink.create", lambda: require_ledger(connection, tables)
    yield "sink.table", lambda: check_known_table(connection, tables)
    if not len(wanted.schema):
        return
    if not sink.create or dialect.columns(connection, wanted.table):
        yield "sink.table", lambda: inspect(dialect, connection, wanted)
    else:
        yield "sink.table", lambda: create_statement(dialect, wanted)


def dead_letters(
    sink: SqlSink, limit: int, *, discarded: bool = False
) -> tuple[Sequence[Reject], int]:
    """The first pending, or discarded, dead letters, and their total number."""
    with session(sink) as connection:
        if connection is None or not sink.ledger.tables.exists(connection):
            return (), 0
        letters = sink.ledger.dead_letters
        found = letters.read(connection, FIRST, limit, discarded=discarded)
        return found, letters.count(connection, discarded=discarded)


def has_rows(sink: SqlSink, topics: Sequence[str]) -> bool:
    """True if the table has rows of these topics; rows that name no topic count for all topics."""
    table, q = sink.wanted.table, sink.dialect.quote
    with session(sink) as connection:
        columns = sink.dialect.columns(connection, table) if connection is not None else ()
        if connection is None or not columns:
            return False
        statement, names = f"SELECT 1 FROM {sink.ledger.tables.quoted(table)}", tuple[str, ...]()
        if set(SOURCE_COLUMNS.names) <= {one.name for one in columns}:
            topic = q(SOURCE_COLUMNS.names[0])
            statement += f" WHERE {topic} IN ({', '.join(['%s'] * len(topics))})"
            names = tuple(topics)
        return bool(connection.query(f"{statement} LIMIT 1", names))


@contextmanager
def session(sink: SqlSink) -> Iterator[Connection | None]:
    """A session for inspection; None if the database is a file that does not exist yet."""
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
