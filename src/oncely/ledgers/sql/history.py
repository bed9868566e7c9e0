"""The history: every range that was committed, old neighbours joined."""

from __future__ import annotations

from collections.abc import Iterable

from oncely.clients.sql.connection import Connection
from oncely.core.claim import Counts, RangeKind
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import check
from oncely.ledgers.sql.tables import LedgerTables

# Runs of two or more ranges, each beginning where the one before it ends.
_ADJACENT = """
WITH kept AS (
    SELECT range_start, range_end, epoch, records, written, rejected, filtered,
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
    CAST(SUM(written) AS BIGINT), CAST(SUM(rejected) AS BIGINT), CAST(SUM(filtered) AS BIGINT)
FROM old GROUP BY run HAVING COUNT(*) > 1 ORDER BY 1
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
        """Write committed ranges into the history."""
        connection.execute_many(
            self._tables.sql(
                'INSERT INTO {oncely_ranges} (pipeline, topic, "partition", range_start, range_end,'
                " epoch, kind, records, written, rejected, filtered)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            ),
            [
                (self._tables.pipeline, *tp, r.start, r.end, epoch, kind, *_counts(done))
                for tp, r, done in ranges
            ],
        )

    def crowded(self, connection: Connection, more_than: int) -> list[TopicPartition]:
        """The partitions that have more ranges than so many."""
        rows = connection.query(
            self._tables.sql(
                'SELECT topic, "partition" FROM {oncely_ranges} WHERE pipeline = %s'
                ' AND superseded = 0 GROUP BY topic, "partition" HAVING COUNT(*) > %s'
            ),
            (self._tables.pipeline, more_than),
        )
        return sorted(TopicPartition(*row) for row in rows)

    def join(self, connection: Connection, partition: TopicPartition, keep_newest: int) -> int:
        """Join adjacent old ranges below the position; the newest stay as they are.

        Gaps and what a reset superseded are never joined: they are evidence. The caller's
        transaction has locked the pipeline's row, so two joiners never meet.

        Returns:
            How many rows the history lost.
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
            whole = (partition, OffsetRange(start, end), Counts(*sums))
            self.append(connection, [whole], "joined", epoch)
            saved += ranges - 1
        return saved

    def supersede(
        self, connection: Connection, partition: TopicPartition, beyond: Position, epoch: int
    ) -> None:
        """Mark what ends beyond a position as superseded in ``epoch``: it no longer counts."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_ranges} SET superseded = %s WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND range_end > %s AND superseded = 0'
            ),
            (epoch, self._tables.pipeline, *partition, beyond),
        )


def _counts(done: Counts) -> tuple[int, int, int, int]:
    return done.records, done.rows, done.rejects, done.filtered
