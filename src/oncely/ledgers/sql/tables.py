"""The definitions of the ledger's tables, and the names in statements.

They are beside the destination table, in the same database, so that one transaction covers both.
All statements work on every dialect.

A column that a later version adds is in its table's definition, one per line, and is either
nullable or has a constant default. Tables of an earlier version get it at the next open
(:meth:`LedgerTables.missing`). Read-only commands, such as ``oncely plan``, read the column's
default until then (:meth:`LedgerTables.as_found`).

    oncely_pipelines   one row a pipeline: the epoch given out last, the one that holds the
                       positions, the Kafka cluster, the table, the count of rejects
    oncely_positions   one row a topic-partition: position, and epoch and name of the run that may
                       move it
    oncely_ranges      the history: each committed range, old neighbours joined
    oncely_rejects     dead letters
    oncely_amendments  changes to the content of committed ranges: replayed dead letters, repairs,
                       backfills. The audit adds them to the history; no decision reads them
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from oncely.clients.sql.connection import Connection, Dialect, TableName

POSITIONS = "oncely_positions"
AMENDMENTS = "oncely_amendments"
TABLES = ("oncely_pipelines", POSITIONS, "oncely_ranges", "oncely_rejects", AMENDMENTS)

_DDL = (
    """CREATE TABLE IF NOT EXISTS {oncely_pipelines} (
    pipeline TEXT NOT NULL PRIMARY KEY,
    epoch BIGINT NOT NULL,
    run TEXT NOT NULL DEFAULT '',
    cluster_id TEXT NOT NULL,
    target TEXT NOT NULL,
    query_id TEXT,
    query_batch BIGINT,
    held_epoch BIGINT NOT NULL DEFAULT 0,
    held_by TEXT NOT NULL DEFAULT '',
    query_plan TEXT,
    target_identity TEXT,
    ledger_identity TEXT,
    max_rejects TEXT NOT NULL DEFAULT '',
    counted_records BIGINT NOT NULL DEFAULT 0,
    counted_rejects BIGINT NOT NULL DEFAULT 0,
    created_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP
)""",
    """CREATE TABLE IF NOT EXISTS {oncely_positions} (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "position" BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    topic_id TEXT NOT NULL,
    leader_epoch BIGINT,
    run TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (pipeline, topic, "partition")
)""",
    """CREATE TABLE IF NOT EXISTS {oncely_ranges} (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    range_start BIGINT NOT NULL,
    range_end BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    kind TEXT NOT NULL,
    records BIGINT NOT NULL,
    written BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    filtered BIGINT NOT NULL,
    superseded BIGINT NOT NULL DEFAULT 0,
    digest BIGINT,
    recipe TEXT,
    committed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", range_start, epoch)
)""",
    # The ranges beyond the position are queried before every commit. Earlier versions have created
    # oncely_ranges_by_end, which also contains ranges that a reset has undone there.
    """CREATE INDEX IF NOT EXISTS oncely_ranges_in_force
    ON {oncely_ranges} (pipeline, topic, "partition", superseded, range_end)""",
    """CREATE TABLE IF NOT EXISTS {oncely_rejects} (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "offset" BIGINT NOT NULL,
    timestamp_ms BIGINT,
    "key" BYTEA,
    "value" BYTEA,
    headers TEXT NOT NULL,
    stage TEXT NOT NULL,
    reason TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    rejected_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", "offset")
)""",
    # Counts are changes, and may be negative. Earlier versions have no such table.
    """CREATE TABLE IF NOT EXISTS {oncely_amendments} (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    amendment TEXT NOT NULL,
    range_start BIGINT NOT NULL,
    range_end BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    kind TEXT NOT NULL,
    records BIGINT NOT NULL,
    written BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    filtered BIGINT NOT NULL,
    superseded BIGINT NOT NULL DEFAULT 0,
    digest BIGINT,
    recipe TEXT,
    committed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", amendment)
)""",
)

_COLUMN = re.compile(r'^    ("?)(\w+)\1 (.+?),?$', re.MULTILINE)


class LedgerTables:
    """The tables of one pipeline's ledger: names and columns.

    Args:
        dialect: the kind of database.
        beside: the destination table; the ledger's tables are in its schema.
        pipeline: the ledger's key.
    """

    def __init__(self, dialect: Dialect, beside: TableName, pipeline: str) -> None:
        self.dialect = dialect
        self.beside = beside
        self.pipeline = pipeline
        self._names = {table: self.quoted(beside.sibling(table)) for table in TABLES}
        self._with = ""

    def quoted(self, table: TableName) -> str:
        """The table's name, quoted for a statement."""
        return ".".join(self.dialect.quote(part) for part in table if part)

    def all(self) -> list[TableName]:
        """The ledger's tables, and the destination table."""
        return [*map(self.beside.sibling, TABLES), self.beside]

    def sql(self, template: str) -> str:
        """A statement, with the tables' names in place of ``{oncely_…}`` in the template."""
        return self._with + template.format(**self._names)

    def ddl(self) -> list[str]:
        """The statements that create missing tables."""
        return [self.dialect.translate(self.sql(one)) for one in _DDL]

    def exists(self, connection: Connection) -> bool:
        """True if the tables of the first version exist, though columns may be missing."""
        there = self._columns(connection)
        return all(columns for table, columns in there.items() if table != AMENDMENTS)

    def missing(self, connection: Connection) -> list[str]:
        """The statements that create missing tables, columns and indexes on them.

        Empty if the ledger is complete. Tables of an earlier version lack columns.
        """
        there = self._columns(connection)
        added = [
            f"ALTER TABLE {{{table}}} ADD COLUMN {self.dialect.quote(name)} {definition}"
            for table, columns in _lacking(there).items()
            for name, definition in columns.items()
        ]
        if all(there.values()) and not added:
            return []
        tables = [one for one in _DDL if one.startswith("CREATE TABLE")]
        others = [one for one in _DDL if one not in tables]
        return [self.dialect.translate(self.sql(one)) for one in (*tables, *added, *others)]

    def as_found(self, connection: Connection) -> LedgerTables:
        """The same tables for SELECT only: a missing column is read as its default.

        Such a table is read through a WITH query in front of the statement.
        """
        found = LedgerTables(self.dialect, self.beside, self.pipeline)
        parts = []
        for table, columns in _lacking(self._columns(connection)).items():
            own = ", ".join(f"{_default(of)} AS {name}" for name, of in columns.items())
            found._names[table] = f"found_{table}"
            parts.append(f"found_{table} AS (SELECT *, {own} FROM {self._names[table]})")
        found._with = f"WITH {', '.join(parts)} " if parts else ""
        return found

    def _columns(self, connection: Connection) -> dict[str, set[str]]:
        """By table, the columns that it has in the database; none if it is missing."""
        return {
            table: {
                one.name for one in self.dialect.columns(connection, self.beside.sibling(table))
            }
            for table in TABLES
        }


def _lacking(there: Mapping[str, Set[str]]) -> dict[str, dict[str, str]]:
    """By existing table, the columns that it lacks, with their definitions."""
    creates = [one for one in _DDL if one.startswith("CREATE TABLE")]
    lacking = {
        table: {
            name: definition
            for _, name, definition in _COLUMN.findall(ddl)
            if there[table] and name not in there[table] and name != "PRIMARY"
        }
        for table, ddl in zip(TABLES, creates, strict=True)
    }
    return {table: columns for table, columns in lacking.items() if columns}


def _default(definition: str) -> str:
    """The default of a column's definition, of its type."""
    value = definition.partition(" DEFAULT ")[2] or "NULL"
    return f"CAST({value} AS {definition.split(maxsplit=1)[0]})"
