"""The definitions of the ledger's tables, and the names in statements.

They are beside the destination table, in the same database, so that one transaction covers both.
All statements work on every dialect.

A column that a later version adds is in its table's definition, one per line, and is either
nullable or has a constant default; :data:`MIGRATIONS` names it. Tables of an earlier version get it
at the next open (:meth:`LedgerTables.missing`). Read-only commands, such as ``oncely plan``, read
the column's default until then (:meth:`LedgerTables.as_found`). A pipeline that a newer version has
taken over is refused (docs/decisions/0052).

    oncely_pipelines   one row a pipeline: the epoch given out last, the one that holds the
                       positions, the Kafka cluster, the table, the count of rejects, the version
                       of the schema
    oncely_positions   one row a topic-partition: position, and epoch and name of the run that may
                       move it
    oncely_ranges      the history: each committed range, old neighbours joined
    oncely_rejects     dead letters
    oncely_amendments  changes to the content of committed ranges: replayed dead letters, repairs,
                       backfills. The audit adds them to the history; no decision reads them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

from oncely.clients.sql.connection import Connection, Dialect, TableName
from oncely.errors import NewerFormat

PIPELINES = "oncely_pipelines"
POSITIONS = "oncely_positions"
AMENDMENTS = "oncely_amendments"
TABLES = (PIPELINES, POSITIONS, "oncely_ranges", "oncely_rejects", AMENDMENTS)

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    2: (
        "oncely_pipelines.query_id",
        "oncely_pipelines.query_batch",
        "oncely_pipelines.held_epoch",
        "oncely_pipelines.held_by",
        "oncely_pipelines.query_plan",
        "oncely_pipelines.target_identity",
        "oncely_pipelines.ledger_identity",
        "oncely_pipelines.max_rejects",
        "oncely_pipelines.counted_records",
        "oncely_pipelines.counted_rejects",
        "oncely_positions.leader_epoch",
        "oncely_positions.run",
        "oncely_ranges.superseded",
    ),
    3: ("oncely_ranges.digest", "oncely_ranges.recipe", AMENDMENTS),
    4: ("oncely_pipelines.schema_version",),
}
"""By version, the columns and tables that it adds to the version before.

A database without ``schema_version`` counts as version 1 and may have columns of 2 and 3: a step
skips those that exist. A step only adds, so that runs of earlier versions, of other pipelines too,
can continue; a step that was released never changes.
"""

VERSION = max(MIGRATIONS)

_COUNTED_RANGE = """\
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
"""
"""Columns of a range, and of an amendment."""

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
    schema_version BIGINT NOT NULL DEFAULT 1,
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
"""
    + _COUNTED_RANGE
    + """    PRIMARY KEY (pipeline, topic, "partition", range_start, epoch)
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
"""
    + _COUNTED_RANGE
    + """    PRIMARY KEY (pipeline, topic, "partition", amendment)
)""",
)

_CREATES = dict(zip(TABLES, (one for one in _DDL if one.startswith("CREATE TABLE")), strict=True))
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

        Empty if the ledger is complete. Tables of an earlier version lack columns, which are added
        version by version.

        Raises:
            NewerFormat: a newer version has taken the pipeline over.
        """
        there = self._columns(connection)
        self._require_known(connection, there)
        added = list(self._migrations(there))
        if all(there.values()) and not added:
            return []
        tables = [one for table, one in _CREATES.items() if not there[table]]
        others = [one for one in _DDL if one not in _CREATES.values()]
        return [self.dialect.translate(self.sql(one)) for one in (*tables, *added, *others)]

    def _migrations(self, there: Mapping[str, Set[str]]) -> Iterator[str]:
        lacking = _lacking(there)
        for names in MIGRATIONS.values():
            for table, _, name in (one.partition(".") for one in names):
                if name in lacking.get(table, {}):
                    quoted, definition = self.dialect.quote(name), lacking[table][name]
                    yield f"ALTER TABLE {{{table}}} ADD COLUMN {quoted} {definition}"

    def _require_known(self, connection: Connection, there: Mapping[str, Set[str]]) -> None:
        if "schema_version" not in there[PIPELINES]:
            return
        rows = connection.query(
            self.sql("SELECT schema_version FROM {oncely_pipelines} WHERE pipeline = %s"),
            (self.pipeline,),
        )
        for (version,) in rows:
            self.require_known(version)

    def require_known(self, version: int) -> None:
        """Refuse the version of a pipeline's row if it is newer than :data:`VERSION`.

        Raises:
            NewerFormat: it is; this version may not know how to change the tables.
        """
        if version > VERSION:
            what = f"the ledger of pipeline {self.pipeline!r} in {self.dialect.endpoint}"
            raise NewerFormat(what, version, VERSION)

    def as_found(self, connection: Connection) -> LedgerTables:
        """The same tables for SELECT only: a missing column is read as its default.

        Such a table is read through a WITH query in front of the statement.

        Raises:
            NewerFormat: a newer version has taken the pipeline over.
        """
        there = self._columns(connection)
        self._require_known(connection, there)
        found = LedgerTables(self.dialect, self.beside, self.pipeline)
        parts = []
        for table, columns in _lacking(there).items():
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
    lacking = {
        table: {
            name: definition
            for _, name, definition in _COLUMN.findall(ddl)
            if there[table] and name not in there[table] and name != "PRIMARY"
        }
        for table, ddl in _CREATES.items()
    }
    return {table: columns for table, columns in lacking.items() if columns}


def _default(definition: str) -> str:
    """The default of a column's definition, of its type."""
    value = definition.partition(" DEFAULT ")[2] or "NULL"
    return f"CAST({value} AS {definition.split(maxsplit=1)[0]})"
