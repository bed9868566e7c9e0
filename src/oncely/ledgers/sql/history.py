"""The history: every committed range, with old neighbours joined, and its amendments."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from oncely.clients.sql.connection import Connection, Row
from oncely.core.claim import Amendment, Counts, RangeKind
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import check
from oncely.ledgers.sql.tables import LedgerTables

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
    WHERE pipeline = %s AND topic = %s AND "partition" = %s AND superseded = 0 AND kind <> 'gap'
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
        """Write committed ranges into the history.

        Their times ascend with their positions, also if a thread's transaction has begun before
        that of another one which has committed first: the position is locked.
        """
        connection.execute_many(
            self._tables.sql(
                'INSERT INTO {oncely_ranges} (pipeline, topic, "partition", range_start, range_end,'
                " epoch, kind, records, written, rejected, filtered, digest, recipe, committed_at)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, "
                + self._tables.dialect.clock
                + ")"
            ),
            [
                (self._tables.pipeline, *tp, r.start, r.end, epoch, kind, *_counts(done))
                for tp, r, done in ranges
            ],
        )

    def committed(
        self, connection: Connection, partition: TopicPartition, within: OffsetRange
    ) -> list[OffsetRange]:
        """The ranges in force that overlap a range, ascending."""
        rows = connection.query(
            self._tables.sql(
                "SELECT range_start, range_end FROM {oncely_ranges} WHERE pipeline = %s"
                ' AND topic = %s AND "partition" = %s AND superseded = 0'
                " AND range_end > %s AND range_start < %s ORDER BY 1"
            ),
            (self._tables.pipeline, *partition, within.start, within.end),
        )
        return [OffsetRange(*row) for row in rows]

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

        Gaps and superseded ranges are never joined: they are evidence. The caller's transaction has
        locked the pipeline's row, so two joiners never run at the same time.

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
                    " AND \"partition\" = %s AND superseded = 0 AND kind <> 'gap'"
                    " AND range_start >= %s AND range_end <= %s"
                ),
                (*where, start, end),
            )
            check(gone == ranges, f"{partition}: {gone} ranges were joined instead of {ranges}")
            whole = (partition, OffsetRange(start, end), _joined(*sums))
            self.append(connection, [whole], "joined", epoch)
            saved += ranges - 1
        return saved

    def supersede(
        self, connection: Connection, partition: TopicPartition, beyond: Position, epoch: int
    ) -> None:
        """Mark ranges that end beyond a position as superseded in ``epoch``: they no longer
        count."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_ranges} SET superseded = %s WHERE pipeline = %s AND topic = %s"
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
        ranges = [OffsetRange(*one) for one in ends]
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

    def supersede_amendments(
        self, connection: Connection, partition: TopicPartition, beyond: Position, epoch: int
    ) -> None:
        """Mark amendments that end beyond a position, like ranges."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_amendments} SET superseded = %s WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND range_end > %s AND superseded = 0'
            ),
            (epoch, self._tables.pipeline, *partition, beyond),
        )


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
