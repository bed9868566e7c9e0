"""Dead letters: rejected records, with the reason; and what repairs have removed.

A dead letter is pending until it is replayed, which deletes its row, or discarded: then its row
stays, without content and with the stage ``discarded``, because audits count the rows.

The table of removed rows is beside the destination, and is created by the first repair that removes
anything. A row or dead letter is moved to it by the transaction that removes it. Nothing reads it.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from oncely.core.batch import DISCARDED, Reject
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.stores.sql.connection import Connection, Params, RowsKept, TableName
from oncely.stores.sql.statements import within
from oncely.stores.sql.tables import LedgerTables
from oncely.wording import printable

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

RejectKey = tuple[str, int, int]
"""Topic, partition, offset: the order in which rejects are replayed."""
FIRST: RejectKey = ("", -1, -1)
"""Before every reject."""


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


_AT_ONCE = 10_000  # offsets in a statement
_REASON = 1000  # characters
_COLUMNS = pa.schema(
    [
        ("pipeline", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.string()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("epoch", pa.int64()),
    ]
)


class DeadLetterTable:
    """The rejects of one pipeline, over a connection that the caller holds."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables

    def add(self, connection: Connection, rejects: Sequence[Reject], epoch: int) -> None:
        """Store dead letters; one that occurs again after a reset replaces the older one.

        Raises:
            Contention: another attempt has stored some of them meanwhile.
        """
        if not rejects:
            return
        of: dict[TopicPartition, list[int]] = {}
        for one in rejects:
            of.setdefault(one.partition, []).append(one.offset)
        for tp, offsets in of.items():
            for at in range(0, len(offsets), _AT_ONCE):
                self._make_room(connection, tp, offsets[at : at + _AT_ONCE])
        rows = [(*self._key(r), *_contents(r), epoch) for r in rejects]
        columns = [
            pa.array(values, one.type)
            for values, one in zip(zip(*rows, strict=True), _COLUMNS, strict=True)
        ]
        table = self._tables.beside.sibling("oncely_rejects")
        connection.copy(table, pa.table(columns, schema=_COLUMNS), of_rows=False)

    def _make_room(
        self, connection: Connection, tp: TopicPartition, offsets: Sequence[int]
    ) -> None:
        """Delete dead letters. The offsets are written into the statement: no database limits their
        number there."""
        connection.execute(
            self._tables.sql(
                "DELETE FROM {oncely_rejects} WHERE pipeline = %s AND topic = %s"
                f' AND "partition" = %s AND "offset" IN ({", ".join(map(str, offsets))})'
            ),
            (self._tables.pipeline, *tp),
        )

    def count(self, connection: Connection, *, discarded: bool = False) -> int:
        """The number of pending, or of discarded, dead letters."""
        rows = connection.query(
            self._tables.sql(
                "SELECT COUNT(*) FROM {oncely_rejects} WHERE pipeline = %s AND " + _of(discarded)
            ),
            (self._tables.pipeline,),
        )
        return int(rows[0][0])

    def read(
        self,
        connection: Connection,
        after: RejectKey,
        limit: int,
        *,
        lock: bool = False,
        discarded: bool = False,
    ) -> list[Reject]:
        """Pending, or discarded, dead letters in (topic, partition, offset) order, beginning after
        ``after``."""
        rows = connection.query(
            self._tables.sql(
                'SELECT topic, "partition", "offset", timestamp_ms, "key", "value", headers,'
                " stage, reason FROM {oncely_rejects}"
                ' WHERE pipeline = %s AND (topic, "partition", "offset") > (%s, %s, %s)'
                f" AND {_of(discarded)}"
                ' ORDER BY topic, "partition", "offset" LIMIT %s'
                + (self._tables.dialect.for_update if lock else "")
            ),
            (self._tables.pipeline, *after, limit),
        )
        return [
            Reject(
                TopicPartition(topic, partition),
                offset,
                timestamp,
                key,
                value,
                _headers(headers),
                stage,
                reason,
            )
            for topic, partition, offset, timestamp, key, value, headers, stage, reason in rows
        ]

    def change(
        self, connection: Connection, changed: Sequence[Reject], epoch: int | None = None
    ) -> None:
        """Store newer contents of dead letters that the caller has locked, and the epoch."""
        connection.execute_many(
            self._tables.sql(
                'UPDATE {oncely_rejects} SET timestamp_ms = %s, "key" = %s, "value" = %s,'
                " headers = %s, stage = %s, reason = %s, epoch = COALESCE(%s, epoch)"
                ' WHERE pipeline = %s AND topic = %s AND "partition" = %s AND "offset" = %s'
            ),
            [(*_contents(r), epoch, *self._key(r)) for r in changed],
        )

    def _key(self, r: Reject) -> tuple[object, ...]:
        return (self._tables.pipeline, *r.partition, r.offset)

    def remove(self, connection: Connection, partition: TopicPartition, offset: int) -> bool:
        """Delete a dead letter; False if it does not exist."""
        changed = connection.execute(
            self._tables.sql(
                "DELETE FROM {oncely_rejects} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND "offset" = %s'
            ),
            (self._tables.pipeline, *partition, offset),
        )
        return changed == 1

    def count_within(
        self, connection: Connection, partition: TopicPartition, ranges: Sequence[OffsetRange]
    ) -> int:
        """The number of dead letters of these offsets."""
        condition, params = self._within(partition, ranges)
        counted = self._tables.sql("SELECT COUNT(*) FROM {oncely_rejects} WHERE ") + condition
        return int(connection.query(counted, params)[0][0])

    def remove_within(
        self,
        connection: Connection,
        partition: TopicPartition,
        ranges: Sequence[OffsetRange],
        removed: Removed,
    ) -> int:
        """Remove the dead letters of these offsets; waits for replays that have locked one.

        Returns:
            The number of removed dead letters.
        """
        table = self._tables.beside.sibling("oncely_rejects")
        where = self._within(partition, ranges)
        return removed.take(
            connection, "dead letter", table, ("topic", "partition", "offset"), where
        )

    def _within(
        self, partition: TopicPartition, ranges: Sequence[OffsetRange]
    ) -> tuple[str, Params]:
        condition, bounds = within('"offset"', ranges)
        whole = f'pipeline = %s AND topic = %s AND "partition" = %s AND {condition}'
        return whole, (self._tables.pipeline, *partition, *bounds)

    def remove_from(self, connection: Connection, partition: TopicPartition, at: Position) -> None:
        """Delete the dead letters of records from a position on."""
        connection.execute(
            self._tables.sql(
                "DELETE FROM {oncely_rejects} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND "offset" >= %s'
            ),
            (self._tables.pipeline, *partition, at),
        )


def _of(discarded: bool) -> str:
    return f"stage {'=' if discarded else '<>'} '{DISCARDED}'"


def _contents(r: Reject) -> tuple[object, ...]:
    kept = (r.timestamp_ms, r.key, r.value, _headers_text(r.headers))
    return (*kept, r.stage, printable(r.reason, _REASON))


def _headers_text(headers: Sequence[tuple[str, bytes | None]]) -> str:
    """Headers as a JSON list of [name, base64 or null]; names and order may repeat."""
    return json.dumps(
        [[name, None if v is None else base64.b64encode(v).decode()] for name, v in headers]
    )


def _headers(text: str) -> list[tuple[str, bytes | None]]:
    """None if another program has changed the text; an audit compares it with the topic."""
    try:
        pairs = [(name, None if v is None else base64.b64decode(v)) for name, v in json.loads(text)]
    except (TypeError, ValueError):
        return []
    return pairs if all(isinstance(name, str) for name, _ in pairs) else []
