"""Handlers as a pipeline's destination: their database holds the ledger, and no table of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NoReturn

import pyarrow as pa

from oncely.config.handlers_sink import HandlersSinkSettings
from oncely.context import TRACE
from oncely.core.batch import Reject
from oncely.errors import ConfigError
from oncely.kinds.base import Discard, Form
from oncely.kinds.destination import Inspection, LedgerState, SinkFacts, SinkPlan
from oncely.kinds.handlers.sink import Handler, HandlersSink, OnError
from oncely.kinds.sql.change import discard_letters
from oncely.kinds.sql.destination import check_table, checks, dead_letters, look, session
from oncely.kinds.sql.privileges import Needs, missing_privileges
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql.table import Wanted
from oncely.stores.sql.connection import Connect, plain
from oncely.stores.sql.dialects import dialect_for


@dataclass(frozen=True)
class HandlersDestination:
    """Handlers of the topics.

    Attributes:
        pipeline: the ledger's key.
        given: the ``[sink]``.
        handlers: by topic; None if the pipeline was not started with them.
        connect: opens sessions; tests inject faults here.
        threads: the number of threads of each topic's partitions, if there are several.
    """

    pipeline: str
    given: HandlersSinkSettings
    handlers: Mapping[str, Handler] | None
    connect: Connect
    threads: Mapping[str, int] = field(default_factory=dict)

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows."""
        return schema

    def sink(self, schema: pa.Schema) -> HandlersSink:  # noqa: ARG002
        """The sink of the handlers."""
        if self.handlers is None:
            raise ConfigError(
                "sink.kind",
                "handlers are functions of a module, which this command does not know",
                way_out="start them by `oncely work module:app`",
            )
        given = self.given
        on_error = OnError(given.retries, given.on_error == "reject")
        names = (*TRACE, *given.context)
        return HandlersSink(
            self.bare_sink.ledger, self.handlers, on_error, given.time_limit, names, self.threads
        )

    @cached_property
    def bare_sink(self) -> SqlSink:
        """The ledger alone: its own table stands for the table of rows."""
        given = self.given
        return SqlSink(
            pipeline=self.pipeline,
            dialect=dialect_for(given.url.get_secret_value(), given.connect_timeout),
            wanted=Wanted(given.table, pa.schema([])),
            create=given.create,
            connect=self.connect,
        )

    def form(self, schema: pa.Schema) -> Form:
        """The rows of handlers; what they do with them is not known."""
        del schema
        return Form()

    def look(self) -> LedgerState:
        """Read the ledger; statements of handlers have ``sink.time_limit``."""
        known = look(self.bare_sink)
        whole = {a: b for a, b in known.time_limits.items() if a.startswith("transaction_timeout")}
        return replace(known, time_limits=whole)

    def wrote(self) -> str:
        """Nothing: positions are never elsewhere."""
        return ""

    def check(self, schema: pa.Schema) -> None:
        """Check the ledger."""
        self.sink(schema)
        check_table(self.bare_sink)

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        return dead_letters(self.bare_sink, limit, discarded=discarded)

    def discarding(self) -> Discard:
        """Begin a discard in the ledger."""
        return partial(discard_letters, self.bare_sink)

    @property
    def late_delete(self) -> str | None:
        """None: there is no replay."""
        return None

    def check_replay(self) -> None:
        """Refuse."""
        self._refuse("replayed", "`oncely offsets reset` and the handler can do records again")

    def replaying(self, schema: pa.Schema) -> NoReturn:
        """Refuse."""
        del schema
        self._refuse("replayed", "`oncely offsets reset` and the handler can do records again")

    def rewriting(self, schema: pa.Schema) -> NoReturn:
        """Refuse."""
        del schema
        self._refuse("repaired", "only the handler knows what its records have done")

    def _refuse(self, verb: str, way_out: str) -> NoReturn:
        raise ConfigError("sink.kind", f"what handlers have done can't be {verb}", way_out=way_out)

    def plan(self, schema: pa.Schema | None, inspection: Inspection) -> SinkPlan:
        """Inspect the ledger and the privileges on it."""
        del schema
        sink = self.bare_sink
        statements = sink.ledger.tables.ddl()
        facts = None
        with inspection.about("sink.url"), session(sink) as connection:
            inspection.collect(checks(sink, connection))
            exists = False
            if connection is not None:
                statements = []
                with inspection.about("sink.table"):
                    statements = sink.ledger.tables.missing(connection)
                exists = sink.ledger.tables.exists(connection)
                for one in missing_privileges(sink, connection, Needs(temporary=True)):
                    inspection.add("sink.url", f"this user lacks: {one}", "have it granted")
            table = str(sink.wanted.table)
            facts = SinkFacts("ledger of handlers", sink.dialect.endpoint, table, exists, ())
        return SinkPlan(facts, None, tuple(plain(one) + ";" for one in statements))
