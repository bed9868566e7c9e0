"""The history: every committed range, with old neighbours joined, and its amendments."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from oncely.core.claim import NO_RECORDS, SKIPPED, Amendment, Counts, RangeKind
from oncely.core.ranges import OffsetRange, Position, TopicPartition, stored_range
from oncely.errors import check
from oncely.stores.sql.claims import Claim, claims
from oncely.stores.sql.connection import Connection, Params, Row, Statement
from oncely.stores.sql.tables import LedgerTables

# Runs of two or more ranges, each beginning at the end of the one before. The halves of digests are
# added up separately: their sum exceeds a bigint. Without rows the digest is 0 in any recipe.
# A range that was committed beyond the position may have an older epoch than those before it, and
# does not tell what has moved the position over it. A joined range does: one of its parts has.
_ADJACENT = """
WITH kept AS (
    SELECT range_start, range_end, kind, epoch, records, written, rejected, filtered, digest,
        CASE WHEN written <> 0 THEN recipe END AS recipe,
        CASE WHEN written <> 0 THEN 1 ELSE 0 END AS has_rows,
        LAG(range_end) OVER (ORDER BY range_start) AS end_before,
        ROW_NUMBER() OVER (ORDER BY range_start DESC) AS newest
    FROM {oncely_ranges}
    WHERE pipeline = %s AND topic = %s AND "partition" = %s AND superseded = 0
        AND kind NOT IN ('gap', 'skipped')
        AND range_end <= (SELECT "position" FROM {oncely_positions}
            WHERE pipeline = %s AND topic = %s AND "partition" = %s)
), old AS (
    SELECT kept.*, SUM(CASE WHEN end_before = range_start THEN 0 ELSE 1 END)
        OVER (ORDER BY range_start) AS run
    FROM kept WHERE newest > %s
)
SELECT MIN(range_start), MAX(range_end), MAX(epoch), COUNT(*), CAST(SUM(records) AS BIGINT),
    CAST(SUM(written) AS BIGINT), CAST(SUM(rejected) AS BIGINT), CAST(SUM(filtered) AS BIGINT),
    CAST(SUM(digest & 4294967295) AS BIGINT), CAST(SUM((digest >> 32) & 4294967295) AS BIGINT),
    CASE WHEN COUNT(DISTINCT recipe) = 1 AND COUNT(recipe) = SUM(has_rows) THEN MAX(recipe) END
FROM old GROUP BY run HAVING COUNT(*) > 1 AND COUNT(NULLIF(kind, 'ahead')) > 0 ORDER BY 1
"""


_PARAMETERS = 13  # of a range
_ROWS_AT_ONCE = 500  # SQLite binds 32,766 values to a statement at most


class History:
    """The committed ranges of one pipeline, over a connection that the caller holds."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables

    def append(
        self,
        connection: Connection,
        ranges: Iterable[tuple[TopicPartition, OffsetRange, Counts]],
        kind: RangeKind,
        epoch: int,
    ) -> None:
        """Write committed ranges into the history."""
        if statements := self.inserts(ranges, kind, epoch):
            connection.execute_all(statements)

    def inserts(
        self,
        ranges: Iterable[tuple[TopicPartition, OffsetRange, Counts]],
        kind: RangeKind,
        epoch: int,
    ) -> list[Statement]:
        """The statements of :meth:`append`, of many ranges each.

        Their times ascend with their positions, also if a thread's transaction has begun before
        that of another one which has committed first: the position is locked.
        """
        row = f"({', '.join(['%s'] * _PARAMETERS)}, {self._tables.dialect.clock})"
        insert = self._tables.sql(
            'INSERT INTO {oncely_ranges} (pipeline, topic, "partition", range_start, range_end,'
            " epoch, kind, records, written, rejected, filtered, digest, recipe, committed_at)"
            " VALUES "
        )
        rows: list[Params] = [
            (self._tables.pipeline, *tp, r.start, r.end, epoch, kind, *_counts(done))
            for tp, r, done in ranges
        ]
        parts = [rows[at : at + _ROWS_AT_ONCE] for at in range(0, len(rows), _ROWS_AT_ONCE)]
        return [
            Statement(insert + ", ".join([row] * len(part)), list(chain(*part))) for part in parts
        ]

    def committed(
        self, connection: Connection, partition: TopicPartition, within: OffsetRange
    ) -> list[OffsetRange]:
        """The ranges in force that overlap a range, ascending, without skipped ones."""
        rows = connection.query(
            self._tables.sql(
                "SELECT range_start, range_end FROM {oncely_ranges} WHERE pipeline = %s"
                ' AND topic = %s AND "partition" = %s AND superseded = 0'
                " AND kind <> 'skipped' AND range_end > %s AND range_start < %s ORDER BY 1"
            ),
            (self._tables.pipeline, *partition, within.start, within.end),
        )
        return [stored_range(partition, *row) for row in rows]

    def claims(self, connection: Connection) -> list[Claim]:
        """What other pipelines have committed into the same table."""
        ranges, pipelines = map(self._tables.sql, ("{oncely_ranges}", "{oncely_pipelines}"))
        return claims(connection, ranges, pipelines, self._tables.pipeline)

    def crowded(self, connection: Connection, more_than: int) -> list[TopicPartition]:
        """The partitions that have more than this number of ranges."""
        rows = connection.query(
            self._tables.sql(
                'SELECT topic, "partition" FROM {oncely_ranges} WHERE pipeline = %s'
                ' AND superseded = 0 GROUP BY topic, "partition" HAVING COUNT(*) > %s'
            ),
            (self._tables.pipeline, more_than),
        )
        return sorted(TopicPartition(*row) for row in rows)

    def join(self, connection: Connection, partition: TopicPartition, keep_newest: int) -> int:
        """Join adjacent old ranges below the position; the newest are not changed.

        Gaps, skipped and superseded ranges are never joined: they are evidence. The caller's
        transaction has locked the pipeline's row, so two joiners never run at the same time.

        Returns:
            The number of rows that were removed from the history.
        """
        where = (self._tables.pipeline, *partition)
        saved = 0
        for start, end, epoch, ranges, *sums in connection.query(
            self._tables.sql(_ADJACENT), (*where, *where, keep_newest)
        ):
            gone = connection.execute(
                self._tables.sql(
                    "DELETE FROM {oncely_ranges} WHERE pipeline = %s AND topic = %s"
                    " AND \"partition\" = %s AND superseded = 0 AND kind NOT IN ('gap', 'skipped')"
                    " AND range_start >= %s AND range_end <= %s"
                ),
                (*where, start, end),
            )
            check(gone == ranges, f"{partition}: {gone} ranges were joined instead of {ranges}")
            whole = (partition, OffsetRange(start, end), _joined(*sums))
            self.append(connection, [whole], "joined", epoch)
            saved += ranges - 1
        return saved

    def skip(
        self,
        connection: Connection,
        ranges: Mapping[TopicPartition, Iterable[OffsetRange]],
        epoch: int,
    ) -> None:
        """Write offsets of which a start, or a reset, has decided that they are not read."""
        skipped = [(tp, one, NO_RECORDS) for tp, own in sorted(ranges.items()) for one in own]
        self.append(connection, skipped, SKIPPED, epoch)

    def unskip(self, connection: Connection, partition: TopicPartition, beyond: Position) -> None:
        """Remove skipped offsets beyond a position: they are read after all."""
        where = (
            "WHERE pipeline = %s AND topic = %s AND \"partition\" = %s AND kind = 'skipped'"
            " AND range_end > %s"
        )
        own = (self._tables.pipeline, *partition, beyond)
        sql = self._tables.sql
        connection.execute(
            sql(f"DELETE FROM {{oncely_ranges}} {where} AND range_start >= %s"), (*own, beyond)
        )
        connection.execute(
            sql(f"UPDATE {{oncely_ranges}} SET range_end = %s {where}"), (beyond, *own)
        )

    def supersede(
        self, connection: Connection, partition: TopicPartition, beyond: Position, epoch: int
    ) -> None:
        """Mark ranges that end beyond a position, and their amendments, as superseded in ``epoch``:
        they no longer count."""
        for table in ("{oncely_ranges}", "{oncely_amendments}"):
            connection.execute(
                self._tables.sql(
                    f"UPDATE {table} SET superseded = %s WHERE pipeline = %s AND topic = %s"
                    ' AND "partition" = %s AND range_end > %s AND superseded = 0'
                ),
                (epoch, self._tables.pipeline, *partition, beyond),
            )

    # -- amendments ----------------------------------------------------------------------------

    def amend(self, connection: Connection, amendments: Iterable[Amendment], epoch: int) -> None:
        """Store changes to the content of committed ranges."""
        connection.execute_many(
            self._tables.sql(
                'INSERT INTO {oncely_amendments} (pipeline, topic, "partition", amendment,'
                " range_start, range_end, epoch, kind, records, written, rejected, filtered,"
                " digest, recipe)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            ),
            [
                (
                    self._tables.pipeline, *one.partition, uuid.uuid4().hex, one.range.start,
                    one.range.end, epoch, one.kind, *_counts(one.counts),
                )
                for one in amendments
            ],
        )  # fmt: skip

    def containing(
        self, connection: Connection, partition: TopicPartition, offsets: Sequence[int]
    ) -> dict[int, OffsetRange]:
        """The committed range of each offset; offsets of none are left out."""
        ends = connection.query(
            self._tables.sql(
                "SELECT range_start, range_end FROM {oncely_ranges} WHERE pipeline = %s"
                ' AND topic = %s AND "partition" = %s AND superseded = 0'
                " AND range_end > %s AND range_start <= %s ORDER BY range_start"
            ),
            (self._tables.pipeline, *partition, min(offsets), max(offsets)),
        )
        ranges = [stored_range(partition, *one) for one in ends]
        starts = [one.start for one in ranges]
        found = {at: bisect_right(starts, at) - 1 for at in offsets}
        return {at: ranges[i] for at, i in found.items() if i >= 0 and at in ranges[i]}

    def content(
        self, connection: Connection, partition: TopicPartition, range_: OffsetRange
    ) -> Counts | None:
        """What a committed range contains, amendments included; None if no entry has this range."""
        where = (self._tables.pipeline, *partition, range_.start, range_.end)
        counts = "records, written, rejected, filtered, digest, recipe"
        entries = connection.query(
            self._tables.sql(
                f"SELECT {counts} FROM {{oncely_ranges}} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND superseded = 0 AND range_start = %s AND range_end = %s'
            ),
            where,
        )
        changes = connection.query(
            self._tables.sql(
                f"SELECT {counts} FROM {{oncely_amendments}} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND superseded = 0 AND range_start >= %s AND range_end <= %s'
            ),
            where,
        )
        if len(entries) != 1:
            return None
        return sum(map(_counted, changes), _counted(entries[0]))


def _joined(
    records: int, rows: int, rejects: int, filtered: int, low: int, high: int, recipe: str | None
) -> Counts:
    """Sums as counts; the halves of the digests are those of unsigned numbers."""
    if recipe is None:
        return Counts(records, rows, rejects, filtered)
    return Counts(records, rows, rejects, filtered, (low + (high << 32)) % (1 << 64), recipe)


def _counts(done: Counts) -> tuple[int | str | None, ...]:
    counts = (done.records, done.rows, done.rejects, done.filtered)
    return (*counts, stored_digest(done), done.recipe or None)


def _counted(row: Row) -> Counts:
    """The inverse of :func:`_counts`."""
    records, rows, rejects, filtered, digest, recipe = row
    known = None if digest is None else digest % (1 << 64)
    return Counts(records, rows, rejects, filtered, known, recipe or "")


def stored_digest(done: Counts) -> int | None:
    """The digest as a bigint, which is signed."""
    if done.digest is None or done.digest < 1 << 63:
        return done.digest
    return done.digest - (1 << 64)
