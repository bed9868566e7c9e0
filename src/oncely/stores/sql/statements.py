"""The statements of the ledger: epochs, and the position of each topic-partition."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from oncely.core.claim import Entry, Fence, PositionMoved, QueryBatch, RejectCount
from oncely.core.ranges import OffsetRange, Position, TopicPartition, stored_range
from oncely.stores.sql.connection import Connection, Statement
from oncely.stores.sql.tables import POSITIONS, VERSION, LedgerTables


@dataclass(frozen=True)
class Registered:
    """A pipeline's row.

    Attributes:
        epoch: the last epoch. Its run may have died or be paused.
        cluster_id: the source's cluster.
        target: the destination table.
        query_id, query_batch: streaming query and micro-batch published last, or None.
        held_epoch: the newest epoch that holds a position.
        held_by: the run with that epoch; empty if unknown.
        whole_epoch, whole_by: the epoch and run of the last takeover of all positions; older than
            the holder's if some were taken over since.
        target_identity, ledger_identity: distinguish the destination table, and the table of the
            positions, from others of the same name; None before the first takeover, or if there
            was no such table.
        schema_version: the version of the schema at the last takeover.
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
    schema_version: int = VERSION
    whole_epoch: int = 0
    whole_by: str = ""


def within(column: str, ranges: Sequence[OffsetRange]) -> tuple[str, list[int]]:
    """The condition that a column's value is in one of the ranges, and its parameters.

    The first range begins and the last one ends the values: an index on the column is used.
    """
    each = " OR ".join([f"({column} >= %s AND {column} < %s)"] * len(ranges))
    bounds = [bound for one in ranges for bound in (one.start, one.end)]
    return f"{column} >= %s AND {column} < %s AND ({each})", [bounds[0], bounds[-1], *bounds]


def partitions_among(of: Collection[TopicPartition]) -> tuple[str, list[object]]:
    """The condition that a position is one of these, and its parameters; none for all."""
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(of):
        by_topic.setdefault(topic, []).append(partition)
    each = [
        f'(topic = %s AND "partition" IN ({", ".join(["%s"] * len(partitions))}))'
        for partitions in by_topic.values()
    ]
    params = [one for topic, partitions in by_topic.items() for one in (topic, *partitions)]
    return (f" AND ({' OR '.join(each)})" if each else ""), params


class LedgerStatements:
    """Epoch and positions of one pipeline, over a connection that the caller holds."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables

    @property
    def tables(self) -> LedgerTables:
        """The tables of the statements."""
        return self._tables

    # -- the pipeline's row ----------------------------------------------------------------

    def register(self, connection: Connection, cluster_id: str) -> None:
        """Insert the pipeline's row if it is missing."""
        connection.execute(
            self._tables.sql(
                "INSERT INTO {oncely_pipelines} (pipeline, epoch, cluster_id, target,"
                " schema_version) VALUES (%s, 0, %s, %s, %s) ON CONFLICT (pipeline) DO NOTHING"
            ),
            (self._tables.pipeline, cluster_id, self._tables.beside.name, VERSION),
        )

    def identity(self, connection: Connection) -> str:
        """Distinguishes the ledger from others with a pipeline of this name; "" without a row."""
        rows = connection.query(
            self._tables.sql("SELECT created_at FROM {oncely_pipelines} WHERE pipeline = %s"),
            (self._tables.pipeline,),
        )
        if not rows:
            return ""
        made, dialect = rows[0][0], self._tables.dialect
        since = made.timestamp() if isinstance(made, datetime) else made
        (positions,) = dialect.facts(connection, [self._tables.beside.sibling(POSITIONS)])
        return f"{since} {positions.identity} {dialect.place()}"

    def next_epoch(self, connection: Connection, run: str) -> int:
        """Give the next epoch to ``run``, and store the version that it writes."""
        rows = connection.query(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET epoch = epoch + 1, run = %s, schema_version = %s"
                " WHERE pipeline = %s RETURNING epoch"
            ),
            (run, VERSION, self._tables.pipeline),
        )
        return int(rows[0][0])

    def registered(self, connection: Connection, *, lock: bool = False) -> Registered | None:
        """The pipeline's row, optionally locked until the transaction's end."""
        rows = connection.query(
            self._tables.sql(
                "SELECT epoch, cluster_id, target, query_id, query_batch, held_epoch, held_by,"
                " query_plan, target_identity, ledger_identity, schema_version, run"
                " FROM {oncely_pipelines} WHERE pipeline = %s"
                + (self._tables.dialect.for_update if lock else "")
            ),
            (self._tables.pipeline,),
        )
        if not rows:
            return None
        *row, run = rows[0]
        known = Registered(*row)
        known = replace(known, whole_epoch=known.held_epoch, whole_by=known.held_by)
        # Some positions were taken over since.
        # This is a separate statement: one with the lock may have waited, and sees other tables in
        # their earlier state.
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
        """Store the new destination table of the pipeline; the ledger is beside it."""
        connection.execute(
            self._tables.sql("UPDATE {oncely_pipelines} SET target = %s WHERE pipeline = %s"),
            (self._tables.beside.name, self._tables.pipeline),
        )

    def note_table(self, connection: Connection, target: str | None, ledger: str | None) -> None:
        """Store the identities of the table and of the ledger's positions."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET target_identity = %s, ledger_identity = %s"
                " WHERE pipeline = %s"
            ),
            (target, ledger, self._tables.pipeline),
        )

    def note_query(self, connection: Connection, query: QueryBatch) -> None:
        """Store the streaming query and micro-batch whose rows were published last."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET query_id = %s, query_batch = %s, query_plan = %s"
                " WHERE pipeline = %s"
            ),
            (*query, self._tables.pipeline),
        )

    def counted(self, connection: Connection) -> RejectCount:
        """The last stored count of rejects."""
        rows = connection.query(
            self._tables.sql(
                "SELECT max_rejects, counted_records, counted_rejects FROM {oncely_pipelines}"
                " WHERE pipeline = %s"
            ),
            (self._tables.pipeline,),
        )
        return RejectCount(*rows[0]) if rows else RejectCount()

    def note_rejects(self, connection: Connection, count: RejectCount) -> None:
        """Store the count of rejects."""
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET max_rejects = %s, counted_records = %s,"
                " counted_rejects = %s WHERE pipeline = %s"
            ),
            (count.setting, count.records, count.rejects, self._tables.pipeline),
        )

    # -- positions -------------------------------------------------------------------------

    def begun(self, connection: Connection) -> bool:
        """True if the pipeline has a position, or has published a query's batch."""
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

        If a topic's partitions disagree (it was recreated with more partitions, in the middle of a
        batch), all of its ids are returned, which equals no single id.
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

    def take_positions(self, connection: Connection, fence: Fence) -> None:
        """Fence every older epoch: from now on its compare-and-set changes no row."""
        epoch, run, pipeline = fence.epoch, fence.run, self._tables.pipeline
        older = self._tables.sql(
            "UPDATE {oncely_positions} SET epoch = %s, run = %s WHERE pipeline = %s AND epoch < %s"
        )
        if fence.partitions is not None:
            connection.execute_many(
                f'{older} AND topic = %s AND "partition" = %s',
                [(epoch, run, pipeline, epoch, *tp) for tp in sorted(fence.partitions)],
            )
            return
        connection.execute(
            self._tables.sql(
                "UPDATE {oncely_pipelines} SET held_epoch = %s, held_by = %s WHERE pipeline = %s"
            ),
            (epoch, run, pipeline),
        )
        connection.execute(older, (epoch, run, pipeline, epoch))

    def add_positions(
        self,
        connection: Connection,
        positions: Mapping[TopicPartition, Position],
        topic_ids: Mapping[str, str],
        fence: Fence,
    ) -> None:
        """Insert positions of partitions without one; an existing position is never changed."""
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

    def entries(
        self, connection: Connection, of: Collection[TopicPartition] = ()
    ) -> dict[TopicPartition, Entry]:
        """Position, epoch and the ranges that are done beyond the position, for every
        topic-partition, or for those of ``of``.

        There are rarely such ranges, which is determined by one index lookup for each partition,
        for any length of the history.
        """
        chosen, params = partitions_among(of)
        positions = connection.query(
            self._tables.sql(
                'SELECT p.topic, p."partition", p."position", p.epoch, p.run,'
                " (SELECT MAX(r.range_end) FROM {oncely_ranges} r"
                " WHERE r.pipeline = p.pipeline AND r.topic = p.topic"
                ' AND r."partition" = p."partition" AND r.superseded = 0'
                ' AND r.range_end > p."position") FROM {oncely_positions} p WHERE p.pipeline = %s'
                + chosen
            ),
            (self._tables.pipeline, *params),
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
        return tuple(sorted(stored_range(partition, start, end) for start, end in rows))

    def moves(self, moves: Mapping[TopicPartition, tuple[Entry, Position]]) -> list[Statement]:
        """Compare-and-set on (position, epoch, run) of each partition, in lock order; the row locks
        are held from there to COMMIT.

        A statement that changes no row raises PositionMoved: the ledger differs from that of the
        decision.

        Args:
            moves: per partition, the entry of the decision and the new position.
        """
        sql = self._tables.sql(
            'UPDATE {oncely_positions} SET "position" = %s WHERE pipeline = %s AND topic = %s'
            ' AND "partition" = %s AND "position" = %s AND epoch = %s AND run = %s'
        )
        return [
            Statement(
                sql,
                (to, self._tables.pipeline, *tp, entry.position, entry.epoch, entry.run),
                PositionMoved(str(tp)),
            )
            for tp, (entry, to) in sorted(moves.items())
        ]

    def locked(self, connection: Connection, partition: TopicPartition) -> Entry | None:
        """The entry of one position, whose row is locked until COMMIT; None if there is none.

        The ranges beyond the position are read by a statement of their own: that with the lock may
        have waited for another thread's commit, and sees other tables as they were before.
        """
        rows = connection.query(
            self._tables.sql(
                'SELECT "position", epoch, run FROM {oncely_positions} WHERE pipeline = %s'
                ' AND topic = %s AND "partition" = %s' + self._tables.dialect.for_update
            ),
            (self._tables.pipeline, *partition),
        )
        for at, epoch, run in rows:
            return Entry(at, epoch, self._done_beyond(connection, partition, at), run)
        return None

    def keep(
        self, connection: Connection, partition: TopicPartition, entry: Entry, upto: Position
    ) -> bool:
        """Lock the position until COMMIT, if no run or reset has taken it since ``entry`` was read.

        False if one has, or the position is before ``upto``.
        """
        return bool(
            connection.query(
                self._tables.sql(
                    "SELECT 1 FROM {oncely_positions} WHERE pipeline = %s AND topic = %s"
                    ' AND "partition" = %s AND epoch = %s AND run = %s AND "position" >= %s'
                    + self._tables.dialect.for_update
                ),
                (self._tables.pipeline, *partition, entry.epoch, entry.run, upto),
            )
        )

    def leader_epochs(self, connection: Connection) -> dict[TopicPartition, int]:
        """The stored leader epochs of the source."""
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
        """Store leader epochs at positions that are still ours."""
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
        """Set a position for a reset, regardless of its present value.

        The present log is accepted: leader epochs of earlier reads are void.
        """
        connection.execute(
            self._tables.sql(
                'UPDATE {oncely_positions} SET "position" = %s, leader_epoch = NULL'
                ' WHERE pipeline = %s AND topic = %s AND "partition" = %s'
            ),
            (at, self._tables.pipeline, *partition),
        )
