"""Handlers as a pipeline's destination: their database holds the ledger, and no table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn, cast

import pyarrow as pa

from oncely.context import TRACE
from oncely.core.batch import Reject
from oncely.core.change import RewriteKind
from oncely.errors import ConfigError
from oncely.kinds.destination import (
    NO_COLUMNS,
    Discard,
    Inspection,
    LedgerState,
    SinkFacts,
    SinkPlan,
)
from oncely.kinds.handlers.settings import HandlersSinkSettings
from oncely.kinds.handlers.sink import HandlersSink, OnError
from oncely.kinds.kind import Parts
from oncely.kinds.rows import Form
from oncely.kinds.sql_ledger import (
    Needs,
    dead_letters,
    discard_letters,
    ledger_checks,
    look,
    missing_privileges,
    session,
)
from oncely.stores.sql.connection import connect, plain
from oncely.stores.sql.dialects import dialect_for
from oncely.stores.sql.ledger import SqlLedger


class HandlersDestination:
    """Handlers of the topics.

    Args:
        parts: the pipeline; without handlers if it was not started with them.
    """

    late_delete: str | None = None  # there is no replay

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows."""
        return schema

    def sink(self, schema: pa.Schema = NO_COLUMNS) -> HandlersSink:
        """The sink of the handlers; that for the ledger alone needs none."""
        if schema is not NO_COLUMNS and self._parts.handlers is None:
            raise ConfigError(
                "sink.kind",
                "handlers are functions of a module, which this command does not know",
                way_out="start them by `oncely work module:app`",
            )
        return self._sink

    @cached_property
    def _sink(self) -> HandlersSink:
        parts = self._parts
        given = cast("HandlersSinkSettings", parts.settings.sink)
        dialect = dialect_for(given.url.get_secret_value(), given.connect_timeout)
        name, opens = parts.settings.name, parts.connect or connect
        ledger = SqlLedger(name, dialect, given.table, given.create, opens)
        on_error = OnError(given.retries, given.on_error == "reject")
        names = (*TRACE, *given.context)
        return HandlersSink(
            ledger, parts.handlers or {}, on_error, given.time_limit, names, parts.threads
        )

    @property
    def _ledger(self) -> SqlLedger:
        return self._sink.ledger

    def form(self, schema: pa.Schema) -> Form:
        """The rows of handlers; what they do with them is not known."""
        del schema
        return Form()

    def look(self) -> LedgerState:
        """Read the ledger; statements of handlers have ``sink.time_limit``."""
        known = look(self._ledger)
        whole = {a: b for a, b in known.time_limits.items() if a.startswith("transaction_timeout")}
        return replace(known, time_limits=whole)

    def wrote(self) -> str:
        """Nothing: positions are never elsewhere."""
        return ""

    def check(self, schema: pa.Schema) -> None:
        """Check the ledger."""
        self.sink(schema)
        with session(self._ledger) as connection:
            for _, check in ledger_checks(self._ledger, connection):
                check()

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        return dead_letters(self._ledger, limit, discarded=discarded)

    def discarding(self) -> Discard:
        """Begin a discard in the ledger."""
        return partial(discard_letters, self._ledger)

    def check_replay(self) -> NoReturn:
        """Refuse."""
        self._refuse("replayed", "`oncely offsets reset` and the handler can do records again")

    def replaying(self, schema: pa.Schema) -> NoReturn:
        """Refuse."""
        del schema
        self.check_replay()

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> NoReturn:
        """Refuse."""
        del schema, kind
        self._refuse("repaired", "only the handler knows what its records have done")

    def rewriting(self, schema: pa.Schema, kind: RewriteKind) -> NoReturn:
        """Refuse."""
        self.check_rewrite(schema, kind)

    def _refuse(self, verb: str, way_out: str) -> NoReturn:
        raise ConfigError("sink.kind", f"what handlers have done can't be {verb}", way_out=way_out)

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect the ledger and the privileges on it."""
        del schema
        ledger = self._ledger
        statements = ledger.tables.ddl()
        facts = None
        with inspection.about("sink.url"), session(ledger) as connection:
            inspection.collect(ledger_checks(ledger, connection))
            exists = False
            if connection is not None:
                statements = []
                with inspection.about("sink.table"):
                    statements = ledger.tables.missing(connection)
                exists = ledger.tables.exists(connection)
                for one in missing_privileges(ledger, connection, Needs(temporary=True)):
                    inspection.add("sink.url", f"this user lacks: {one}", "have it granted")
            table = str(ledger.target)
            facts = SinkFacts("ledger of handlers", ledger.dialect.endpoint, table, exists, ())
        return SinkPlan(facts, None, tuple(plain(one) + ";" for one in statements))
