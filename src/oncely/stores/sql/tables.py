"""The definitions of the ledger's tables, the names in statements, and its newest commits.

They are beside the destination table, in the same database, so that one transaction covers both.
All statements work on every dialect.

A pipeline of another version than :data:`VERSION` is refused (docs/decisions/0052).

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from oncely.core.ranges import TopicPartition
from oncely.errors import NewerFormat, OlderFormat
from oncely.stores.sql.connection import Connection, Dialect, TableFacts, TableName

PIPELINES = "oncely_pipelines"
POSITIONS = "oncely_positions"
AMENDMENTS = "oncely_amendments"
RANGES = "oncely_ranges"
REJECTS = "oncely_rejects"
TABLES = (PIPELINES, POSITIONS, RANGES, REJECTS, AMENDMENTS)

VERSION = 4
"""The version of the schema. Versions 1 to 3 were before the first release."""

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
    # The ranges beyond the position are queried before every commit.
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
    # Counts are changes, and may be negative.
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

    def quoted(self, table: TableName) -> str:
        """The table's name, quoted for a statement."""
        return ".".join(self.dialect.quote(part) for part in table if part)

    def all(self) -> list[TableName]:
        """The ledger's tables, and the destination table."""
        return [*map(self.beside.sibling, TABLES), self.beside]

    def sql(self, template: str) -> str:
        """A statement, with the tables' names in place of ``{oncely_…}`` in the template."""
        return template.format(**self._names)

    def ddl(self) -> list[str]:
        """The statements that create missing tables."""
        return [self.dialect.translate(self.sql(one)) for one in _DDL]

    def exists(self, connection: Connection) -> bool:
        """True if all tables exist.

        Raises:
            NewerFormat, OlderFormat: another version has written the pipeline's ledger.
        """
        return not self._absent(connection)

    def missing(self, connection: Connection) -> list[str]:
        """The statements that create missing tables, and indexes on them.

        Raises:
            NewerFormat, OlderFormat: another version has written the pipeline's ledger.
        """
        absent = self._absent(connection)
        if not absent:
            return []
        tables = [one for table, one in _CREATES.items() if table in absent]
        others = [one for one in _DDL if one not in _CREATES.values()]
        return [self.dialect.translate(self.sql(one)) for one in (*tables, *others)]

    def _absent(self, connection: Connection) -> set[str]:
        return {name for name, one in self.facts(connection).items() if one.identity is None}

    def require_known(self, version: int) -> None:
        """Refuse the version of a pipeline's row unless it is :data:`VERSION`.

        Raises:
            NewerFormat, OlderFormat: it is another one.
        """
        if version > VERSION:
            raise NewerFormat(self._what, version, VERSION)
        if version < VERSION:
            raise OlderFormat(self._what)

    @property
    def _what(self) -> str:
        return f"the ledger of pipeline {self.pipeline!r} in {self.dialect.endpoint}"

    def facts(self, connection: Connection) -> dict[str, TableFacts]:
        """What the database tells of each table; the version of the pipeline's row is compared.

        Raises:
            NewerFormat, OlderFormat: another version has written the pipeline's ledger.
        """
        ours = [self.beside.sibling(table) for table in TABLES]
        facts = dict(zip(TABLES, self.dialect.facts(connection, ours), strict=True))
        if facts[PIPELINES].identity is not None:
            columns = self.dialect.columns(connection, self.beside.sibling(PIPELINES))
            if "schema_version" not in {one.name for one in columns}:
                raise OlderFormat(self._what)
            rows = connection.query(
                self.sql("SELECT schema_version FROM {oncely_pipelines} WHERE pipeline = %s"),
                (self.pipeline,),
            )
            for (version,) in rows:
                self.require_known(version)
        return facts


WINDOW = timedelta(minutes=5)
_NEWEST = 2_000


@dataclass(frozen=True)
class Activity:
    """The newest commits of a pipeline.

    Attributes:
        last_commit: when the last range was committed; None if there is none.
        seconds: its age, by the clock of the database.
        rate: records a second of the last five minutes.
        partitions: the age of the last commit of each partition.
    """

    last_commit: datetime | None
    seconds: float | None
    rate: float
    partitions: Mapping[TopicPartition, float] = field(default_factory=dict)


class _Range(NamedTuple):
    kind: str
    at: datetime
    records: int


def activity(connection: Connection, tables: LedgerTables) -> Activity:
    """Read the newest ranges of the history."""
    ((now,),) = connection.query("SELECT CURRENT_TIMESTAMP")
    rows = connection.query(
        tables.sql(
            "SELECT kind, committed_at, records FROM {oncely_ranges} WHERE pipeline = %s"
            f" AND kind <> 'skipped' ORDER BY committed_at DESC LIMIT {_NEWEST}"
        ),
        (tables.pipeline,),
    )
    last = connection.query(
        tables.sql(
            'SELECT topic, "partition", MAX(committed_at) FROM {oncely_ranges} WHERE pipeline = %s'
            " AND kind <> 'skipped' GROUP BY topic, \"partition\""
        ),
        (tables.pipeline,),
    )
    found = recent([_Range(kind, _time(at), records) for kind, at, records in rows], _time(now))
    ages = {TopicPartition(t, p): (_time(now) - _time(at)).total_seconds() for t, p, at in last}
    return replace(found, partitions=ages)


def recent(ranges: Sequence[_Range], now: datetime) -> Activity:
    """The activity of ranges, the newest first.

    Housekeeping joins old ranges: a joined range has the time of the join and the records of a
    longer time. Then, and beyond the limit, the time is that since the oldest range that is left.
    """
    if not ranges:
        return Activity(None, None, 0.0)
    last = ranges[0].at
    new = [one for one in ranges if one.at > now - WINDOW]
    kept = [one for one in new if one.kind != "joined"]
    span = WINDOW
    if kept and (len(kept) < len(new) or len(new) == _NEWEST):
        span = max(now - kept[-1].at, timedelta(seconds=1))
    rate = sum(one.records for one in kept) / span.total_seconds()
    return Activity(last, max(0.0, (now - last).total_seconds()), rate)


def _time(value: datetime | str) -> datetime:
    """SQLite has times as text, in UTC."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value if value.tzinfo else value.replace(tzinfo=UTC)
