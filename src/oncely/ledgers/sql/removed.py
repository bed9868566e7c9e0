"""What repairs have removed, as JSON, so that it can be put back.

The table is beside the destination, and is created by the first repair that removes anything. A row
or dead letter is moved to it by the transaction that removes it. Nothing reads it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from oncely.clients.sql.connection import Connection, Params, RowsKept, TableName
from oncely.ledgers.sql.tables import LedgerTables

_DDL = """CREATE TABLE IF NOT EXISTS {table} (
    pipeline TEXT NOT NULL,
    repair TEXT NOT NULL,
    kind TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "offset" BIGINT NOT NULL,
    content TEXT NOT NULL,
    removed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP
)"""


@dataclass(frozen=True)
class Removed:
    """Removes the rows and dead letters of one transaction.

    Attributes:
        tables: of the ledger.
        keep: False for a backfill: what it replaces is not kept.
        repair: the transaction's id.
    """

    tables: LedgerTables
    keep: bool = True
    repair: str = field(default_factory=lambda: uuid.uuid4().hex)

    def take(
        self,
        connection: Connection,
        kind: Literal["row", "dead letter"],
        table: TableName,
        place: Sequence[str],
        where: tuple[str, Params],
    ) -> int:
        """Remove the rows of a table that a condition selects, and return their number.

        Args:
            connection: in the transaction.
            kind: of these rows.
            table: the table.
            place: its columns of topic, partition and offset.
            where: the condition, with its parameters.

        Raises:
            RowsKept: rows of the table are still there.
        """
        (facts,) = self.tables.dialect.facts(connection, [table])
        rows = f"FROM {facts.relation.rows} WHERE {where[0]}"
        if self.keep:
            gone = self._move(connection, kind, table, place, (rows, where[1]))
        else:
            gone = connection.execute(f"DELETE {rows}", where[1])
        # A replay may have stored a dead letter again. Nobody else writes rows of these records.
        if kind == "row" and connection.query(f"SELECT 1 {rows} LIMIT 1", where[1]):
            raise RowsKept(table)
        return gone

    def _move(
        self,
        connection: Connection,
        kind: str,
        table: TableName,
        place: Sequence[str],
        rows: tuple[str, Params],
    ) -> int:
        """Move rows, given by FROM and WHERE, to the table of what was removed."""
        dialect, kept = self.tables.dialect, self.tables.beside.sibling("oncely_removed")
        names = [one.name for one in dialect.columns(connection, table)]
        returned = [*map(dialect.quote, place), *map(dialect.as_json, names)]
        gone = connection.query(f"DELETE {rows[0]} RETURNING {', '.join(returned)}", rows[1])
        if gone:
            if not dialect.columns(connection, kept):
                dialect.lock_for_setup(connection)
                ddl = _DDL.format(table=self.tables.quoted(kept))
                connection.execute(dialect.translate(ddl))
            of = (self.tables.pipeline, self.repair, kind)
            connection.execute_many(
                f"INSERT INTO {self.tables.quoted(kept)} (pipeline, repair, kind, topic,"
                ' "partition", "offset", content) VALUES (%s, %s, %s, %s, %s, %s, %s)',
                [(*of, *row[: len(place)], _json(names, row[len(place) :])) for row in gone],
            )
        return len(gone)


def _json(names: Sequence[str], values: Sequence[str]) -> str:
    """A row as PostgreSQL's ``json_populate_record`` reads it."""
    members = (f"{json.dumps(name)}: {one}" for name, one in zip(names, values, strict=True))
    return f"{{{', '.join(members)}}}"
