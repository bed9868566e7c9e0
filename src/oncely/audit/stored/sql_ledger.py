"""The ledger's tables in a SQL database, beside the destination table.

They are read in one snapshot, and only the version of their format is checked. Their names and
columns are written out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, Position, TopicPartition, stored_range
from oncely.errors import OlderFormat
from oncely.stores.sql.claims import Claim, claims
from oncely.stores.sql.connection import Connection, Dialect, TableName, brief_session, connect

PIPELINES, POSITIONS, RANGES, REJECTS, AMENDMENTS = (
    f"oncely_{name}" for name in ("pipelines", "positions", "ranges", "rejects", "amendments")
)
_VERSION = 4
"""The oldest version of the tables that is read."""

_STRAY = 20  # dead letters outside of all ranges that are listed

_LETTERS = """
SELECT r.topic, r."partition", r.range_start, r.epoch, COUNT(*)
FROM {ranges} r JOIN {rejects} j
    ON j.pipeline = r.pipeline AND j.topic = r.topic AND j."partition" = r."partition"
    AND j."offset" >= r.range_start AND j."offset" < r.range_end
WHERE r.pipeline = %s AND r.superseded = 0 GROUP BY 1, 2, 3, 4
"""
_OUTSIDE = f"""
SELECT j.topic, j."partition", j."offset" FROM {{rejects}} j
WHERE j.pipeline = %s AND NOT EXISTS (
    SELECT 1 FROM {{ranges}} r
    WHERE r.pipeline = j.pipeline AND r.topic = j.topic AND r."partition" = j."partition"
    AND r.superseded = 0 AND r.range_end > j."offset" AND r.range_start <= j."offset")
ORDER BY 1, 2, 3 LIMIT {_STRAY}
"""


class RangeRow(NamedTuple):
    """A row of the history, or of its amendments.

    Attributes:
        partition: its topic-partition.
        start, end: its offsets, as stored.
        epoch: the run that has committed it.
        kind: data, hole, gap or joined; or of an amendment.
        counts: the counts of its records, with the digest of its rows.
        superseded: the epoch of the reset that has undone it; 0 if it is in force.
        at: when its transaction began, by the database's clock.
    """

    partition: TopicPartition
    start: int
    end: int
    epoch: int
    kind: str
    counts: Counts
    superseded: int
    at: datetime | None

    @property
    def range(self) -> OffsetRange:
        """Its offsets. Raises Stopped if they are no range."""
        return stored_range(self.partition, self.start, self.end)


class PositionRow(NamedTuple):
    """A position, the epoch that may move it, and the id of its topic."""

    position: Position
    epoch: int
    topic_id: str


@dataclass
class LedgerTables:
    """Statements over a session, which is in a transaction.

    Attributes:
        session: of the snapshot.
        dialect: the database.
        table: the destination table; the ledger is in its schema.
        pipeline: the ledger's key.
    """

    session: Connection
    dialect: Dialect
    table: TableName
    pipeline: str

    @property
    def all(self) -> list[TableName]:
        """The destination table, and the ledger's tables."""
        ledger = (PIPELINES, POSITIONS, RANGES, REJECTS, AMENDMENTS)
        return [self.table, *map(self.table.sibling, ledger)]

    def missing(self, tables: Sequence[TableName]) -> list[str]:
        """Those of some tables that do not exist."""
        return [str(one) for one in tables if not self.columns(one)]

    def name(self, table: str | TableName) -> str:
        """A name for statements; one of the ledger's tables by its last part."""
        whole = self.table.sibling(table) if isinstance(table, str) else table
        return ".".join(self.dialect.quote(part) for part in whole if part)

    def columns(self, table: TableName) -> set[str]:
        """The columns of a table; none if it does not exist."""
        return {one.name for one in self.dialect.columns(self.session, table)}

    def require_known(self) -> None:
        """Refuse tables without a version, by their columns.

        Raises:
            OlderFormat: a version before the first release has created them.
        """
        columns = self.columns(self.table.sibling(PIPELINES))
        if columns and "schema_version" not in columns:
            raise self._older()

    def registered(self) -> tuple[str, int] | None:
        """The source's cluster, and the last epoch that was given out; None before the first run.

        Raises:
            OlderFormat: a version before the first release has written the pipeline's row.
        """
        rows = self._rows(f"SELECT cluster_id, epoch, schema_version FROM {self.name(PIPELINES)}")
        if not rows:
            return None
        ((cluster, epoch, version),) = rows
        if version < _VERSION:
            raise self._older()
        return str(cluster), int(epoch)

    def _older(self) -> OlderFormat:
        return OlderFormat(f"the ledger of pipeline {self.pipeline!r} in {self.dialect.endpoint}")

    def held(self) -> dict[TopicPartition, PositionRow]:
        """The positions."""
        rows = self._rows(
            f'SELECT topic, "partition", "position", epoch, topic_id FROM {self.name(POSITIONS)}'
        )
        return {
            TopicPartition(topic, int(number)): PositionRow(int(at), epoch, str(topic_id))
            for topic, number, at, epoch, topic_id in rows
        }

    def runs(self) -> Iterator[tuple[int, str]]:
        """Epochs with the runs to which they were given, of each position and of the pipeline."""
        pairs = [("epoch", "run"), ("held_epoch", "held_by")]
        for table, some in ((POSITIONS, pairs[:1]), (PIPELINES, pairs)):
            for epoch, run in some:
                rows = self._rows(f"SELECT {epoch}, {run} FROM {self.name(table)}")
                yield from ((int(number), str(name)) for number, name in rows if name)

    def entries(self, table: str) -> Iterator[RangeRow]:
        """The history or the amendments, by partition and start."""
        rows = self._rows(
            'SELECT topic, "partition", range_start, range_end, epoch, kind, records, written,'
            " rejected, filtered, committed_at, superseded, digest, recipe"
            f" FROM {self.name(table)}",
            ' ORDER BY topic, "partition", range_start, epoch',
        )
        for topic, number, start, end, epoch, kind, *counts, at, undone, digest, recipe in rows:
            unsigned = None if digest is None else int(digest) % (1 << 64)
            yield RangeRow(
                TopicPartition(topic, int(number)), start, end, epoch, kind,
                replace(Counts(*counts), digest=unsigned, recipe=recipe or ""), undone, _time(at),
            )  # fmt: skip

    def claims(self) -> list[Claim]:
        """What other pipelines have committed into the same table."""
        return claims(self.session, self.name(RANGES), self.name(PIPELINES), self.pipeline)

    def letters(self) -> dict[tuple[TopicPartition, int, int], int]:
        """The number of dead letters by partition, start and epoch of the ranges in force."""
        return {
            (TopicPartition(topic, int(number)), start, epoch): int(count)
            for topic, number, start, epoch, count in self._about_letters(_LETTERS)
        }

    def stray(self) -> list[tuple[TopicPartition, int]]:
        """The first dead letters that are in no range in force."""
        rows = self._about_letters(_OUTSIDE)
        return [(TopicPartition(topic, int(number)), offset) for topic, number, offset in rows]

    def _about_letters(self, sql: str) -> list[tuple[Any, ...]]:
        names = {"ranges": self.name(RANGES), "rejects": self.name(REJECTS)}
        return self.session.query(sql.format(**names), (self.pipeline,))

    def _rows(self, select: str, more: str = "") -> list[tuple[Any, ...]]:
        return self.session.query(f"{select} WHERE pipeline = %s{more}", (self.pipeline,))


@contextmanager
def open_ledger(dialect: Dialect, table: TableName, pipeline: str) -> Iterator[LedgerTables]:
    """The ledger's tables in one snapshot.

    Args:
        dialect: the database.
        table: the destination table; the ledger is in its schema.
        pipeline: the ledger's key.

    Raises:
        TableMismatch: a database file does not exist.
        OlderFormat: the tables are of a version before the first release.
        WrongInput: the database refuses the login.
        Unavailable: no answer.
    """
    with brief_session(dialect, "verify", connect) as session, _snapshot(dialect, session):
        tables = LedgerTables(session, dialect, table, pipeline)
        tables.require_known()
        yield tables


@contextmanager
def _snapshot(dialect: Dialect, session: Connection) -> Iterator[None]:
    how = "" if dialect.name == "sqlite" else " ISOLATION LEVEL REPEATABLE READ, READ ONLY"
    session.execute(f"BEGIN{how}")
    try:
        yield
    finally:
        session.rollback()


def _time(at: object) -> datetime | None:
    """The time; SQLite returns it as text in UTC."""
    if isinstance(at, str):
        return datetime.fromisoformat(at).replace(tzinfo=UTC)
    return at if isinstance(at, datetime) else None
