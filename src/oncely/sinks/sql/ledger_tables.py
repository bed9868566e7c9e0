"""The ledger's tables, by which every statement about them is made.

They stand beside the destination table, in the same database, so that one transaction covers
both. All statements work on every dialect.

    oncely_pipelines   one row a pipeline: the epoch given out last, the Kafka cluster, the table
    oncely_positions   one row a topic-partition: position and the epoch that may move it
    oncely_ranges      the history: each committed range, old neighbours joined
    oncely_rejects     dead letters
"""

from __future__ import annotations

from oncely.sinks.sql.connection import Connection, Dialect, TableName

TABLES = ("oncely_pipelines", "oncely_positions", "oncely_ranges", "oncely_rejects")

_DDL = (
    """CREATE TABLE IF NOT EXISTS {oncely_pipelines} (
    pipeline TEXT NOT NULL PRIMARY KEY,
    epoch BIGINT NOT NULL,
    run TEXT NOT NULL DEFAULT '',
    cluster_id TEXT NOT NULL,
    target TEXT NOT NULL,
    query_id TEXT,
    query_batch BIGINT,
    created_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP
)""",
    """CREATE TABLE IF NOT EXISTS {oncely_positions} (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "position" BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    topic_id TEXT NOT NULL,
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
    committed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", range_start, epoch)
)""",
    # "What is done beyond the position" is asked before every commit.
    """CREATE INDEX IF NOT EXISTS oncely_ranges_by_end
    ON {oncely_ranges} (pipeline, topic, "partition", range_end)""",
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
)


class LedgerTables:
    """The tables of one pipeline's ledger: what they are called, what they are made of.

    Args:
        dialect: which database.
        beside: the destination table; the ledger's have its schema.
        pipeline: the ledger's key.
    """

    def __init__(self, dialect: Dialect, beside: TableName, pipeline: str) -> None:
        self.dialect = dialect
        self.beside = beside
        self.pipeline = pipeline
        self._names = {table: self.quoted(beside.sibling(table)) for table in TABLES}

    def quoted(self, table: TableName) -> str:
        """The table's name, quoted for a statement."""
        return ".".join(self.dialect.quote(part) for part in table if part)

    def sql(self, template: str) -> str:
        """A statement, with the tables' names where ``{oncely_…}`` stands in the template."""
        return template.format(**self._names)

    def ddl(self) -> list[str]:
        """The statements that create the tables where they are missing."""
        return [self.dialect.translate(self.sql(one)) for one in _DDL]

    def exists(self, connection: Connection) -> bool:
        """True when all of the tables are there."""
        return all(self.dialect.columns(connection, self.beside.sibling(t)) for t in TABLES)
