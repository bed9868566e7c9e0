"""A SQL table as a pipeline's destination."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.clients.sql.connection import Connect
from oncely.clients.sql.dialects import dialect_for
from oncely.config import PipelineSettings, SqlSinkSettings
from oncely.core.batch import Reject
from oncely.errors import ConfigError
from oncely.ledgers.sql.dead_letters import DeadLetters
from oncely.pipeline import inspect as looking
from oncely.pipeline.destination import Connections, Known, SinkFacts, SinkPlan
from oncely.pipeline.problems import Problems
from oncely.runtimes.spark.probe import Slots
from oncely.sinks.sql.privileges import Needs, Room, missing_privileges, room
from oncely.sinks.sql.replay import FIRST, Replay
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.target import SOURCE_COLUMNS, Target, Wanted, create_statement, inspect

_DRIVER_CONNECTIONS = 2  # one that commits, one for a moment that looks or opens

_NO_LATE_DELETES = (
    "a tombstone has no version: applied late, it could delete a row that is newer than it"
)


@dataclass(frozen=True)
class SqlDestination:
    """A table and the ledger beside it.

    Attributes:
        settings: the pipeline's.
        given: its ``[sink]``.
        connect: how sessions are opened; a test puts faults here.
    """

    settings: PipelineSettings
    given: SqlSinkSettings
    connect: Connect

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, and where they come from if that is written too."""
        if not self.given.keep_source:
            return schema
        clash = set(schema.names) & set(SOURCE_COLUMNS.names)
        if clash:
            raise ConfigError(
                "sink.keep_source",
                f"the rows have columns {', '.join(sorted(clash))} already",
                way_out="rename them in a transform",
            )
        return pa.schema([*schema, *SOURCE_COLUMNS])

    def sink(self, schema: pa.Schema) -> SqlSink:
        """The table for rows of these columns."""
        given = self.given
        return SqlSink(
            pipeline=self.settings.name,
            dialect=dialect_for(given.url.get_secret_value(), given.connect_timeout),
            wanted=Wanted(
                given.table, schema, tuple(given.keys), given.version, given.rounding == "allow"
            ),
            keep_source=given.keep_source,
            create=given.create,
            connect=self.connect,
        )

    @property
    def bare_sink(self) -> SqlSink:
        """The sink for work on the ledger alone."""
        return self.sink(pa.schema([]))

    def look(self) -> Known:
        """Read the ledger."""
        return looking.look(self.bare_sink)

    def check(self, schema: pa.Schema) -> None:
        """Refuse a table that doesn't take the rows."""
        looking.check_table(self.sink(schema))

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and how many there are."""
        sink = self.bare_sink
        with looking.session(sink) as connection:
            if connection is None or not sink.ledger.tables.exists(connection):
                return (), 0
            letters = DeadLetters(sink.ledger.tables.as_found(connection))
            return letters.read(connection, FIRST, limit), letters.count(connection)

    @property
    def late_delete(self) -> str | None:
        """Rows that are only appended are not deleted."""
        return _NO_LATE_DELETES if self.given.mode == "upsert" else None

    def check_replay(self) -> None:
        """Refuse to upsert old records without a version."""
        if self.given.mode == "upsert" and self.given.version is None:
            raise ConfigError(
                "sink.version",
                "is missing: a replayed record is old and would overwrite a newer row of its key",
                way_out="name a column that grows with each change; or delete the rejects by SQL",
            )

    @contextmanager
    def replaying(self, schema: pa.Schema) -> Iterator[Replay]:
        """Begin a replay into the table."""
        yield Replay(self.sink(schema).bind())

    def plan(
        self, schema: pa.Schema | None, findings: Problems, notes: list[str], slots: Slots | None
    ) -> SinkPlan:
        """Look at table, ledger, privileges and free connections."""
        sink = self.bare_sink if schema is None else self.sink(schema)
        ddl, of_ledger = [], sink.ledger.tables.ddl()
        if schema is not None:
            with findings.about("sink.table"):
                ddl.append(create_statement(sink.dialect, sink.wanted))
        facts, left = None, None
        with findings.about("sink.url"), looking.session(sink) as connection:
            findings.collect(looking.checks(sink, connection))
            target = None
            exists = bool(connection and sink.dialect.columns(connection, sink.wanted.table))
            if connection is not None:
                of_ledger = sink.ledger.tables.missing(connection) or of_ledger
                left = room(sink, connection)
                if schema is not None and (exists or not sink.create):
                    with findings.about("sink.table"):
                        target = inspect(sink.dialect, connection, sink.wanted)
                self._privileges(sink, connection, target, findings)
            facts = SinkFacts(
                "table",
                sink.dialect.endpoint,
                str(sink.wanted.table),
                exists,
                _columns(sink, schema, target),
            )
        connections = self._connections(left, notes, slots) if facts is not None else None
        statements = tuple(one.replace("%%", "%") + ";" for one in ddl + of_ledger)
        return SinkPlan(facts, connections, statements)

    def _privileges(
        self, sink: SqlSink, connection: Any, target: Target | None, findings: Problems
    ) -> None:
        transform = self.settings.transform
        batch = transform is not None and transform.spark is not None
        needs = Needs(
            upsert=bool(sink.wanted.keys),
            temporary=not batch and target is not None and not target.direct,
            staging=batch,
        )
        for one in missing_privileges(sink, connection, needs):
            findings.add("sink.url", f"this user lacks: {one}", "have it granted")

    def _connections(self, left: Room | None, notes: list[str], slots: Slots | None) -> Connections:
        tasks = slots.slots if slots else _slots(self.settings.spark.master)
        needed = Connections(tasks, _DRIVER_CONNECTIONS, left)
        if left is not None and left.limit - left.used < needed.total:
            notes.append(
                f"the database has room for {left.limit - left.used} more connections, a run may"
                f" take {needed.total}: tasks wait and try again when there is none"
            )
        return needed


def _columns(
    sink: SqlSink, schema: pa.Schema | None, target: Target | None
) -> tuple[tuple[str, str, str], ...]:
    if schema is None:
        return ()
    known = dict(zip(target.columns, target.types, strict=True)) if target else {}
    return tuple(
        (one.name, str(one.type), known.get(one.name) or sink.dialect.column_type(one.type))
        for one in schema
    )


def _slots(master: str) -> int:
    """Tasks at the same time, from ``local[N,F]``; for a cluster only the cluster knows."""
    match = re.fullmatch(r"local(?:\[\s*(\d+|\*).*\])?", master)
    if match is None:
        return 0
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
