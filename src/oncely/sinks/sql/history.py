"""The history: every range that was committed, old neighbours joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oncely.core.offsets import Position, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.sinks.base import RangeKind, Written
from oncely.sinks.sql.connection import Connection
from oncely.sinks.sql.ledger_tables import LedgerTables


class History:
    """The committed ranges of one pipeline, over a connection that the caller holds."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables

    def append(
        self,
        connection: Connection,
        ranges: Iterable[tuple[TopicPartition, OffsetRange, Written]],
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

    def join(self, connection: Connection, keep_newest: int) -> int:
        """Join adjacent old ranges below the position; the newest of a partition stay as they are.

        Gaps and what a reset superseded are never joined: they are evidence. The caller's
        transaction has locked the pipeline's row, so two joiners never meet.

        Returns:
            How many rows the history lost.
        """
        rows = connection.query(
            self._tables.sql(
                'SELECT r.topic, r."partition", r.range_start, r.range_end, r.epoch, r.records,'
                " r.written, r.rejected, r.filtered FROM {oncely_ranges} r"
                " JOIN {oncely_positions} p ON p.pipeline = r.pipeline AND p.topic = r.topic"
                ' AND p."partition" = r."partition" WHERE r.pipeline = %s'
                " AND r.kind <> 'gap' AND r.superseded = 0 AND r.range_end <= p.\"position\""
                ' ORDER BY r.topic, r."partition", r.range_start'
            ),
            (self._tables.pipeline,),
        )
        by_partition: dict[TopicPartition, list[Sequence[int]]] = {}
        for topic, partition, *rest in rows:
            by_partition.setdefault(TopicPartition(topic, partition), []).append(rest)
        saved = 0
        for tp, ranges in by_partition.items():
            for run in _adjacent(ranges[: max(0, len(ranges) - keep_newest)]):
                self._replace(connection, tp, run)
                saved += len(run) - 1
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

    def _replace(
        self, connection: Connection, tp: TopicPartition, run: list[Sequence[int]]
    ) -> None:
        where = (self._tables.pipeline, tp.topic, tp.partition)
        connection.execute_many(
            self._tables.sql(
                "DELETE FROM {oncely_ranges} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND range_start = %s AND epoch = %s'
            ),
            [(*where, one[0], one[2]) for one in run],
        )
        sums = [sum(one[i] for one in run) for i in range(3, 7)]
        whole = OffsetRange(run[0][0], run[-1][1])
        self.append(connection, [(tp, whole, Written(*sums))], "joined", run[-1][2])


def _adjacent(ranges: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Runs of two or more ranges, each beginning where the one before it ends."""
    runs: list[list[Sequence[int]]] = []
    for one in ranges:
        if runs and runs[-1][-1][1] == one[0]:
            runs[-1].append(one)
        else:
            runs.append([one])
    return [run for run in runs if len(run) > 1]


def _counts(done: Written) -> tuple[int, int, int, int]:
    return done.records, done.rows, done.rejects, done.filtered
