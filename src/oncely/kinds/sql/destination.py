"""A SQL table as a pipeline's destination."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.core.batch import Reject
from oncely.core.change import RewriteKind
from oncely.core.digest import kind_of
from oncely.decode.schema import refuse_other_capitals
from oncely.errors import TableMismatch
from oncely.kinds.destination import (
    NO_COLUMNS,
    Check,
    Connections,
    Discard,
    Inspection,
    LedgerState,
    Room,
    SinkFacts,
    SinkPlan,
)
from oncely.kinds.kind import Parts
from oncely.kinds.rows import Form
from oncely.kinds.sql.form import form_of
from oncely.kinds.sql.settings import SqlSinkSettings
from oncely.kinds.sql.sink import SqlSink, target_of
from oncely.kinds.sql.table import BoundTable, TableSpec, create_statement, inspect
from oncely.kinds.sql_ledger import (
    Needs,
    dead_letters,
    discard_letters,
    further_privileges,
    ledger_checks,
    look,
    missing_privileges,
    room,
    session,
)
from oncely.kinds.tables import SOURCE_COLUMNS, TableDestination, keeps_source
from oncely.stores.sql.connection import Connect, Connection, connect, plain
from oncely.stores.sql.dialects import dialect_for

if TYPE_CHECKING:
    from oncely.kinds.sql.change import SqlReplay, SqlRewrites


def sink_of(name: str, given: SqlSinkSettings, schema: pa.Schema, connect: Connect) -> SqlSink:
    """The sink of a pipeline of this name for rows of these columns."""
    return SqlSink(
        pipeline=name,
        dialect=dialect_for(given.url.get_secret_value(), given.connect_timeout),
        wanted=TableSpec(given.table, schema, given.keys, given.version, given.rounding == "allow"),
        keep_source=keeps_source(schema),
        create=given.create,
        connect=connect,
    )


def check_table(sink: SqlSink) -> None:
    """Execute all :func:`checks`.

    Raises:
        WrongInput: the first problem.
    """
    with session(sink.ledger) as connection:
        for _, check in checks(sink, connection):
            check()


def checks(sink: SqlSink, connection: Connection | None) -> Iterator[Check]:
    """The checks of a run: the database file, the ledger, the table.

    Args:
        sink: without columns only the checks that need none are returned.
        connection: None if the database is a file that does not exist yet.
    """
    wanted, dialect = sink.wanted, sink.dialect
    yield from ledger_checks(sink.ledger, connection)
    if not len(wanted.schema):
        return
    if connection and (not sink.create or dialect.columns(connection, wanted.table)):
        yield "sink.table", lambda: inspect(dialect, connection, wanted)
    else:
        yield "sink.table", lambda: create_statement(dialect, wanted)


_DRIVER_CONNECTIONS = 2  # one that commits, one for brief inspections and takeovers


class SqlDestination(TableDestination):
    """A SQL table and the ledger beside it."""

    given: SqlSinkSettings

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._connect = parts.connect or connect

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, and of their origin if it is kept."""
        found = super().row_schema(schema)
        if self.sink().dialect.name == "sqlite":
            refuse_other_capitals(found, "SQLite")
        return found

    @cached_property
    def columns_there(self) -> frozenset[str]:
        """The columns of the table, read once; none if it does not exist."""
        sink = self.sink()
        with session(sink.ledger) as connection:
            if connection is None:
                return frozenset()
            columns = sink.dialect.columns(connection, sink.wanted.table)
            return frozenset(one.name for one in columns)

    def sink(self, schema: pa.Schema = NO_COLUMNS) -> SqlSink:
        """The sink for rows of these columns."""
        return sink_of(self.settings.name, self.given, schema, self._connect)

    def form(self, schema: pa.Schema) -> Form:
        """Rows with the types of the table."""
        sink = self.sink(schema).bind()
        return form_of(target_of(sink), sink.keep_source, sink.ledger.looking)

    def look(self) -> LedgerState:
        """Read the ledger."""
        return look(self.sink().ledger)

    def wrote(self) -> str:
        """The table, if it has rows of the topics, or rows that name no topic."""
        sink, table, topics = self.sink(), self.given.table, self.settings.source.topics
        with session(sink.ledger) as connection:
            columns = sink.dialect.columns(connection, table) if connection is not None else ()
            if connection is None or not columns:
                return ""
            statement, names = (
                f"SELECT 1 FROM {sink.ledger.tables.quoted(table)}",
                tuple[str, ...](),
            )
            if set(SOURCE_COLUMNS.names) <= {one.name for one in columns}:
                topic = sink.dialect.quote(SOURCE_COLUMNS.names[0])
                statement += f" WHERE {topic} IN ({', '.join(['%s'] * len(topics))})"
                names = tuple(topics)
            there = connection.query(f"{statement} LIMIT 1", names)
        return f"table {table} has rows" if there else ""

    def check(self, schema: pa.Schema) -> None:
        """Refuse a table that does not accept the rows."""
        check_table(self.sink(schema))

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        return dead_letters(self.sink().ledger, limit, discarded=discarded)

    def discarding(self) -> Discard:
        """Begin a discard in the ledger."""
        return partial(discard_letters, self.sink().ledger)

    def replaying(self, schema: pa.Schema) -> nullcontext[SqlReplay]:
        """Begin a replay into the table."""
        from oncely.kinds.sql.change import SqlReplay

        return nullcontext(SqlReplay(self.sink(schema).bind()))

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> Mapping[str, str]:
        """Refuse rows that do not contain their record's offset, unless they are an upsert's, which
        needs a version; and a table from which they can't be deleted."""
        from oncely.kinds.sql.change import SqlRewrites

        del kind
        self.check_origin(tells=keeps_source(schema) or self.given.mode == "upsert")
        SqlRewrites(self.sink()).check()
        return {}

    def rewriting(self, schema: pa.Schema, kind: RewriteKind) -> nullcontext[SqlRewrites]:
        """Begin a rewrite; a repair also in a table that accepts no row now."""
        from oncely.kinds.sql.change import SqlRewrites

        sink = self.sink(schema)
        try:
            return nullcontext(SqlRewrites(sink.bind()))
        except TableMismatch as error:
            if kind == "backfill" or not self.columns_there:
                raise
            return nullcontext(SqlRewrites(sink, error))

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect table, ledger, privileges and free connections."""
        sink, known = self.sink(schema), schema is not NO_COLUMNS
        ddl, of_ledger = [], sink.ledger.tables.ddl()
        if known:
            with inspection.about("sink.table"):
                ddl.append(create_statement(sink.dialect, sink.wanted))
        facts, left = None, None
        with inspection.about("sink.url"), session(sink.ledger) as connection:
            inspection.collect(checks(sink, connection))
            target = None
            exists = bool(connection and sink.dialect.columns(connection, sink.wanted.table))
            if connection is not None:
                ddl, of_ledger = [] if exists else ddl, []
                with inspection.about("sink.table"):
                    of_ledger = sink.ledger.tables.missing(connection)
                left = room(sink.ledger, connection)
                if known and (exists or not sink.create):
                    with inspection.about("sink.table"):
                        target = inspect(sink.dialect, connection, sink.wanted)
                if known:
                    inspection.notes += self._audit_notes(sink, target)
                    inspection.notes += target.notes if target else ()
                self._privileges(sink, connection, target, inspection)
            facts = SinkFacts(
                "table",
                sink.dialect.endpoint,
                str(sink.wanted.table),
                exists,
                _columns(sink, target),
            )
        connections = self._connections(left, inspection) if facts is not None else None
        statements = tuple(plain(one) + ";" for one in ddl + of_ledger)
        return SinkPlan(facts, connections, statements)

    def _privileges(
        self, sink: SqlSink, connection: Any, target: BoundTable | None, inspection: Inspection
    ) -> None:
        needs = Needs(
            upsert=bool(sink.wanted.keys),
            temporary=bool(sink.wanted.keys) or (target is not None and not target.direct),
            columns=sink.wanted.schema.names,
        )
        for one in missing_privileges(sink.ledger, connection, needs):
            inspection.add("sink.url", f"this user lacks: {one}", "have it granted")
        inspection.notes += further_privileges(sink.ledger, connection, needs.columns)

    def _audit_notes(self, sink: SqlSink, target: BoundTable | None) -> Iterator[str]:
        """The limits of an audit of the table."""
        kinds = {one.name: kind_of(one.type) for one in sink.wanted.schema}
        if target is not None:
            kinds = dict(zip(target.columns, target.kinds, strict=True))
        why = "the database may return others than it was sent; all records are decoded for them"
        return self.audit_notes(str(sink.wanted.table), kinds, why, kept=sink.keep_source)

    def _connections(self, left: Room | None, inspection: Inspection) -> Connections:
        if self.settings.runtime == "processes":
            tasks = self.settings.process_count
        else:
            tasks = (
                inspection.slots.slots if inspection.slots else _slots(self.settings.spark.master)
            )
        needed = Connections(tasks, _DRIVER_CONNECTIONS, left)
        if left is not None and left.limit - left.used < needed.total:
            inspection.notes.append(
                f"the database has room for {left.limit - left.used} more connections, a run may"
                f" take {needed.total}: tasks wait and try again when there is none"
            )
        return needed


def _columns(sink: SqlSink, target: BoundTable | None) -> tuple[tuple[str, str, str], ...]:
    known = dict(zip(target.columns, target.types, strict=True)) if target else {}
    return tuple(
        (one.name, str(one.type), known.get(one.name) or sink.dialect.column_type(one.type))
        for one in sink.wanted.schema
    )


def _slots(master: str) -> int:
    """Parallel tasks according to ``local[N,F]``; unknown for a cluster."""
    match = re.fullmatch(r"local(?:\[\s*(\d+|\*).*\])?", master)
    if match is None:
        return 0
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
