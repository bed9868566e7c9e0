"""The ledger's statements: who may write, and where each topic-partition stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from oncely.clients.sql.connection import Connection
from oncely.core.budget import RejectCount
from oncely.core.claim import Fence, QueryBatch
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.ledgers.sql.tables import LedgerTables


@dataclass(frozen=True)
class Registered:
    """A pipeline's row.

    Attributes:
        epoch: the epoch given out last. A run that died or pauses may have it.
        cluster_id: the cluster that is read.
        target: the table that is written.
        query_id, query_batch: streaming query and micro-batch published last, or None.
        held_epoch: the epoch that holds the positions: the only one that may commit.
        held_by: the run that it was given to; empty when not known.
        target_identity, ledger_identity: tell the table, and the one that holds the positions,
            from others of the same name; None in a row of an earlier version.
    """

    epoch: int
    cluster_id: str
    target: str
    query_id: str | None = None
    query_batch: int | None = None
    held_epoch: int = 0
    held_by: str = ""
    query_plan: str | None = None
    target_identity: str | None = None
    ledger_identity: str | None = None


class LedgerStatements:
    """Epoch and positions of one pipeline, spoken of over a connection that the caller holds."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables

    @property
    def tables(self) -> LedgerTables:
        """What the statements are about."""
        return self._tables

    # -- the pipeline's row ----------------------------------------------------------------

    def register(self, connection: Connection, cluster_id: str) -> None:
        """Make the pipeline's row if it is missing."""
        connection.execute(
            self._tables.sql(
                "INSERT INTO {oncely_pipelines} (pipeline, epoch, cluster_id, target)"
                " VALUES (%s, 0, %s, %s) ON CONFLICT (pipeline) DO NOTHING"
            ),
            (self._tables.pipeline, cluster_id, self._tables.beside.name),
        )

    def next_epoch(self, connection: Connection, run: str) -> int:
        """Give the next epoch to ``run``."""
        rows = connection.query(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET epoch = epoch + 1, run = %s WHERE pipeline = %s"
                " RETURNING epoch"
            ),
            (run, self._tables.pipeline),
        )
        return int(rows[0][0])

    def registered(self, connection: Connection, *, lock: bool = False) -> Registered | None:
        """The pipeline's row, locked until the transaction's end when asked."""
        rows = connection.query(
            self._tables.sql(
                "SELECT epoch, cluster_id, target, query_id, query_batch, held_epoch, held_by,"
                " query_plan, target_identity, ledger_identity, run FROM {oncely_pipelines}"
                " WHERE pipeline = %s" + (self._tables.dialect.for_update if lock else "")
            ),
            (self._tables.pipeline,),
        )
        if not rows:
            return None
        *row, run = rows[0]
        known = Registered(*row)
        # A version that did not keep the holder has taken the positions alone. A statement of its
        # own: one with the lock may have waited, and sees other tables as they were before.
        taken = self._newest_epoch(connection)
        if taken > known.held_epoch:
            by = run if known.epoch == taken else ""
            return replace(known, held_epoch=taken, held_by=by)
        return known

    def _newest_epoch(self, connection: Connection) -> int:
        rows = connection.query(
            self._tables.sql("SELECT MAX(epoch) FROM {oncely_positions} WHERE pipeline = %s"),
            (self._tables.pipeline,),
        )
        return int(rows[0][0] or 0)

    def retarget(self, connection: Connection) -> None:
        """Note the table that the pipeline writes from now on; the ledger stands beside it."""
        connection.execute(
            self._tables.sql("UPDATE {oncely_pipelines} SET target = %s WHERE pipeline = %s"),
            (self._tables.beside.name, self._tables.pipeline),
        )

    def note_table(self, connection: Connection, target: str | None, ledger: str | None) -> None:
        """Remember the identities of the table and of the ledger's positions."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET target_identity = %s, ledger_identity = %s"
                " WHERE pipeline = %s"
            ),
            (target, ledger, self._tables.pipeline),
        )

    def note_query(self, connection: Connection, query: QueryBatch) -> None:
        """Remember the streaming query and micro-batch whose rows were published last."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET query_id = %s, query_batch = %s, query_plan = %s"
                " WHERE pipeline = %s"
            ),
            (*query, self._tables.pipeline),
        )

    def counted(self, connection: Connection) -> RejectCount:
        """The count of rejects that was noted last."""
        rows = connection.query(
            self._tables.sql(
                "SELECT max_rejects, counted_records, counted_rejects FROM {oncely_pipelines}"
                " WHERE pipeline = %s"
            ),
            (self._tables.pipeline,),
        )
        return RejectCount(*rows[0]) if rows else RejectCount()

    def note_rejects(self, connection: Connection, count: RejectCount) -> None:
        """Note the count of rejects."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET max_rejects = %s, counted_records = %s,"
                " counted_rejects = %s WHERE pipeline = %s"
            ),
            (count.setting, count.records, count.rejects, self._tables.pipeline),
        )

    # -- positions -------------------------------------------------------------------------

    def begun(self, connection: Connection) -> bool:
        """Whether the pipeline has a position, or has published a query's batch."""
        of_pipeline = (self._tables.pipeline,) * 2
        return bool(
            connection.query(
                self._tables.sql(
                    "SELECT 1 FROM {oncely_pipelines} WHERE pipeline = %s AND (query_id IS NOT NULL"
                    " OR EXISTS (SELECT 1 FROM {oncely_positions} WHERE pipeline = %s))"
                ),
                of_pipeline,
            )
        )

    def topic_ids(self, connection: Connection) -> dict[str, str]:
        """The id of each topic that the pipeline has a position in; unknown ones are left out.

        Where a topic's partitions disagree (it was made again with more of them, in the middle
        of a batch) all of its ids are named, which equals none.
        """
        rows = connection.query(
            self._tables.sql(
                "SELECT DISTINCT topic, topic_id FROM {oncely_positions} WHERE pipeline = %s"
            ),
            (self._tables.pipeline,),
        )
        ids: dict[str, list[str]] = {}
        for topic, topic_id in sorted(rows):
            if topic_id:
                ids.setdefault(topic, []).append(topic_id)
        return {topic: " and ".join(one) for topic, one in ids.items()}

    def take_positions(self, connection: Connection, epoch: int, run: str) -> None:
        """Fence every older epoch: from here on its compare-and-set changes no row."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET held_epoch = %s, held_by = %s WHERE pipeline = %s"
            ),
            (epoch, run, self._tables.pipeline),
        )
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_positions} SET epoch = %s, run = %s WHERE pipeline = %s"
                " AND epoch < %s"
            ),
            (epoch, run, self._tables.pipeline, epoch),
        )

    def add_positions(
        self,
        connection: Connection,
        positions: Mapping[TopicPartition, Position],
        topic_ids: Mapping[str, str],
        fence: Fence,
    ) -> None:
        """Give partitions without a position theirs; an existing position is never touched."""
        connection.execute_many(
            self._tables.sql(
                "INSERT INTO {oncely_positions}"
                ' (pipeline, topic, "partition", "position", epoch, run, topic_id)'
                " VALUES (%s, %s, %s, %s, %s, %s, %s)"
                ' ON CONFLICT (pipeline, topic, "partition") DO NOTHING'
            ),
            [
                (self._tables.pipeline, *tp, at, fence.epoch, fence.run, topic_ids[tp.topic])
                for tp, at in sorted(positions.items())
            ],
        )

    def entries(self, connection: Connection) -> dict[TopicPartition, Entry]:
        """Position, epoch and what is done beyond the position, for every topic-partition.

        Nearly always nothing is, and one lookup in an index for each partition tells so, however
        long the history is.
        """
        positions = connection.query(
            self._tables.sql(
                'SELECT p.topic, p."partition", p."position", p.epoch, p.run,'
                " (SELECT MAX(r.range_end) FROM {oncely_ranges} r"
                " WHERE r.pipeline = p.pipeline AND r.topic = p.topic"
                ' AND r."partition" = p."partition" AND r.superseded = 0'
                ' AND r.range_end > p."position") FROM {oncely_positions} p WHERE p.pipeline = %s'
            ),
            (self._tables.pipeline,),
        )
        entries = {}
        for topic, partition, at, epoch, run, beyond in positions:
            tp = TopicPartition(topic, partition)
            done = () if beyond is None else self._done_beyond(connection, tp, at)
            entries[tp] = Entry(at, epoch, done, run)
        return entries

    def _done_beyond(
        self, connection: Connection, partition: TopicPartition, at: Position
    ) -> tuple[OffsetRange, ...]:
        rows = connection.query(
            self._tables.sql(
                "SELECT range_start, range_end FROM {oncely_ranges} WHERE pipeline = %s"
                ' AND topic = %s AND "partition" = %s AND superseded = 0 AND range_end > %s'
            ),
            (self._tables.pipeline, *partition, at),
        )
        return tuple(sorted(OffsetRange(start, end) for start, end in rows))

    def move(
        self,
        connection: Connection,
        partition: TopicPartition,
        entry: Entry,
        to: Position,
    ) -> bool:
        """Compare-and-set on (position, epoch, run); its row lock is held from here to COMMIT.

        False when no row changed: the ledger is not what the decision was made on.
        """
        changed = connection.execute(
            self._tables.sql(
                'UPDATE {oncely_positions} SET "position" = %s WHERE pipeline = %s AND topic = %s'
                ' AND "partition" = %s AND "position" = %s AND epoch = %s AND run = %s'
            ),
            (to, self._tables.pipeline, *partition, entry.position, entry.epoch, entry.run),
        )
        return changed == 1

    def leader_epochs(self, connection: Connection) -> dict[TopicPartition, int]:
        """The source's leader epochs, where they were noted."""
        rows = connection.query(
            self._tables.sql(
                'SELECT topic, "partition", leader_epoch FROM {oncely_positions}'
                " WHERE pipeline = %s AND leader_epoch IS NOT NULL"
            ),
            (self._tables.pipeline,),
        )
        return {TopicPartition(topic, number): int(noted) for topic, number, noted in rows}

    def note_leader_epochs(
        self, connection: Connection, epochs: Mapping[TopicPartition, int], fence: Fence
    ) -> None:
        """Note leader epochs at positions that are still ours."""
        connection.execute_many(
            self._tables.sql(
                "UPDATE {oncely_positions} SET leader_epoch = %s WHERE pipeline = %s"
                ' AND topic = %s AND "partition" = %s AND epoch = %s AND run = %s'
            ),
            [
                (of, self._tables.pipeline, *tp, fence.epoch, fence.run)
                for tp, of in sorted(epochs.items())
            ],
        )

    def put(self, connection: Connection, partition: TopicPartition, at: Position) -> None:
        """Put a position where a person wants it, whatever it is now.

        The log is taken as it is then: no leader epoch of what was read before counts.
        """
        connection.execute(
            self._tables.sql(
                'UPDATE {oncely_positions} SET "position" = %s, leader_epoch = NULL'
                ' WHERE pipeline = %s AND topic = %s AND "partition" = %s'
            ),
            (at, self._tables.pipeline, *partition),
        )
