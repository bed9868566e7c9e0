"""The ledger's tables and the only statements that touch them.

They stand beside the destination table, in the same database, so that one transaction covers
both. All statements work on every dialect.

    oncely_pipelines   one row a pipeline: the epoch given out last, the Kafka cluster, the table
    oncely_positions   one row a topic-partition: position and the epoch that may move it
    oncely_ranges      the history: each committed range, old neighbours joined
    oncely_rejects     dead letters
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.sinks.base import RangeKind, Reject, Written
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


@dataclass(frozen=True)
class Registered:
    """A pipeline's row: the epoch given out last, the source and the table it belongs to."""

    epoch: int
    cluster_id: str
    target: str
    query_id: str | None = None
    query_batch: int | None = None


class Ledger:
    """The ledger of one pipeline, spoken to over a connection that the caller holds."""

    def __init__(self, dialect: Dialect, beside: TableName, pipeline: str) -> None:
        self._dialect = dialect
        self._beside = beside
        self._pipeline = pipeline
        self._names = {table: self.quoted(beside.sibling(table)) for table in TABLES}

    def quoted(self, table: TableName) -> str:
        """The table's name, quoted for a statement."""
        return ".".join(self._dialect.quote(part) for part in table if part)

    def _sql(self, template: str) -> str:
        return template.format(**self._names)

    # -- setting up ------------------------------------------------------------------------

    def ddl(self) -> list[str]:
        """The statements that create the ledger's tables where they are missing."""
        return [self._dialect.translate(self._sql(one)) for one in _DDL]

    def exists(self, connection: Connection) -> bool:
        """True when all of the ledger's tables are there."""
        return all(self._dialect.columns(connection, self._beside.sibling(t)) for t in TABLES)

    def register(self, connection: Connection, cluster_id: str) -> None:
        """Make the pipeline's row if it is missing."""
        connection.execute(
            self._sql(
                "INSERT INTO {oncely_pipelines} (pipeline, epoch, cluster_id, target)"
                " VALUES (%s, 0, %s, %s) ON CONFLICT (pipeline) DO NOTHING"
            ),
            (self._pipeline, cluster_id, self._beside.name),
        )

    def next_epoch(self, connection: Connection, run: str, *, held: bool) -> int | None:
        """Give the next epoch to ``run``; when it says it ``held`` one, only if it still does.

        The run's own name decides, not the epoch's number: a run whose answer was lost must
        find itself again, and not take itself for a newer one.

        Returns:
            The epoch, or None when another run has come since.
        """
        sql = "UPDATE {oncely_pipelines} SET epoch = epoch + 1, run = %s WHERE pipeline = %s"
        params = [run, self._pipeline]
        if held:
            sql += " AND run = %s"
            params.append(run)
        rows = connection.query(self._sql(sql + " RETURNING epoch"), params)
        return int(rows[0][0]) if rows else None

    def registered(self, connection: Connection, *, lock: bool = False) -> Registered | None:
        """The pipeline's row, locked until the transaction's end when asked."""
        rows = connection.query(
            self._sql(
                "SELECT epoch, cluster_id, target, query_id, query_batch FROM {oncely_pipelines}"
                " WHERE pipeline = %s" + (self._dialect.for_update if lock else "")
            ),
            (self._pipeline,),
        )
        return Registered(int(rows[0][0]), *rows[0][1:]) if rows else None

    def retarget(self, connection: Connection) -> None:
        """Note the table that the pipeline writes from now on; the ledger stands beside it."""
        connection.execute(
            self._sql("UPDATE {oncely_pipelines} SET target = %s WHERE pipeline = %s"),
            (self._beside.name, self._pipeline),
        )

    # -- positions -------------------------------------------------------------------------

    def topic_ids(self, connection: Connection) -> dict[str, str]:
        """The id of each topic that the pipeline has a position in; unknown ones are left out.

        Where a topic's partitions disagree (it was made again with more of them, in the middle
        of a batch) all of its ids are named, which equals none.
        """
        rows = connection.query(
            self._sql(
                "SELECT DISTINCT topic, topic_id FROM {oncely_positions} WHERE pipeline = %s"
            ),
            (self._pipeline,),
        )
        ids: dict[str, list[str]] = {}
        for topic, topic_id in sorted(rows):
            if topic_id:
                ids.setdefault(topic, []).append(topic_id)
        return {topic: " and ".join(one) for topic, one in ids.items()}

    def take_positions(self, connection: Connection, epoch: int) -> None:
        """Fence every older epoch: from here on its compare-and-set changes no row."""
        connection.execute(
            self._sql(
                "UPDATE {oncely_positions} SET epoch = %s WHERE pipeline = %s AND epoch < %s"
            ),
            (epoch, self._pipeline, epoch),
        )

    def add_positions(
        self,
        connection: Connection,
        positions: Mapping[TopicPartition, Position],
        topic_ids: Mapping[str, str],
        epoch: int,
    ) -> None:
        """Give partitions without a position theirs; an existing position is never touched."""
        connection.execute_many(
            self._sql(
                "INSERT INTO {oncely_positions}"
                ' (pipeline, topic, "partition", "position", epoch, topic_id)'
                " VALUES (%s, %s, %s, %s, %s, %s)"
                ' ON CONFLICT (pipeline, topic, "partition") DO NOTHING'
            ),
            [
                (self._pipeline, tp.topic, tp.partition, at, epoch, topic_ids[tp.topic])
                for tp, at in sorted(positions.items())
            ],
        )

    def entries(self, connection: Connection) -> dict[TopicPartition, Entry]:
        """Position, epoch and what is done beyond the position, for every topic-partition."""
        positions = connection.query(
            self._sql(
                'SELECT topic, "partition", "position", epoch FROM {oncely_positions}'
                " WHERE pipeline = %s"
            ),
            (self._pipeline,),
        )
        done: dict[TopicPartition, list[OffsetRange]] = {}
        for topic, partition, start, end in connection.query(
            self._sql(
                'SELECT r.topic, r."partition", r.range_start, r.range_end'
                " FROM {oncely_ranges} r JOIN {oncely_positions} p ON p.pipeline = r.pipeline"
                ' AND p.topic = r.topic AND p."partition" = r."partition"'
                ' WHERE r.pipeline = %s AND r.range_end > p."position" AND r.superseded = 0'
            ),
            (self._pipeline,),
        ):
            done.setdefault(TopicPartition(topic, partition), []).append(OffsetRange(start, end))
        return {
            (tp := TopicPartition(topic, partition)): Entry(
                at, epoch, tuple(sorted(done.get(tp, ())))
            )
            for topic, partition, at, epoch in positions
        }

    def move(
        self,
        connection: Connection,
        partition: TopicPartition,
        entry: Entry,
        to: Position,
    ) -> bool:
        """Compare-and-set on (position, epoch); its row lock is held from here to COMMIT.

        False when no row changed: the ledger is not what the decision was made on.
        """
        changed = connection.execute(
            self._sql(
                'UPDATE {oncely_positions} SET "position" = %s WHERE pipeline = %s AND topic = %s'
                ' AND "partition" = %s AND "position" = %s AND epoch = %s'
            ),
            (to, self._pipeline, *partition, entry.position, entry.epoch),
        )
        return changed == 1

    def reset(
        self,
        connection: Connection,
        positions: Mapping[TopicPartition, Position],
        epoch: int,
    ) -> None:
        """Put positions where a person wants them; what was beyond them no longer counts.

        History is kept and marked. Dead letters go: their records are judged anew, and a replay
        of one that has become a row in the meantime would write it twice.
        """
        for tp, at in sorted(positions.items()):
            where = (self._pipeline, tp.topic, tp.partition)
            connection.execute(
                self._sql(
                    'UPDATE {oncely_positions} SET "position" = %s WHERE pipeline = %s'
                    ' AND topic = %s AND "partition" = %s'
                ),
                (at, *where),
            )
            connection.execute(
                self._sql(
                    "UPDATE {oncely_ranges} SET superseded = %s WHERE pipeline = %s AND topic = %s"
                    ' AND "partition" = %s AND range_end > %s AND superseded = 0'
                ),
                (epoch, *where, at),
            )
            connection.execute(
                self._sql(
                    "DELETE FROM {oncely_rejects} WHERE pipeline = %s AND topic = %s"
                    ' AND "partition" = %s AND "offset" >= %s'
                ),
                (*where, at),
            )

    def note_query(self, connection: Connection, query_id: str, batch: int) -> None:
        """Remember the streaming query and micro-batch whose rows were published last."""
        connection.execute(
            self._sql(
                "UPDATE {oncely_pipelines} SET query_id = %s, query_batch = %s WHERE pipeline = %s"
            ),
            (query_id, batch, self._pipeline),
        )

    # -- history ---------------------------------------------------------------------------

    def append_ranges(
        self,
        connection: Connection,
        ranges: Iterable[tuple[TopicPartition, OffsetRange, Written]],
        kind: RangeKind,
        epoch: int,
    ) -> None:
        """Write committed ranges into the history."""
        connection.execute_many(
            self._sql(
                'INSERT INTO {oncely_ranges} (pipeline, topic, "partition", range_start, range_end,'
                " epoch, kind, records, written, rejected, filtered)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            ),
            [
                (self._pipeline, *tp, r.start, r.end, epoch, kind, *_counts(done))
                for tp, r, done in ranges
            ],
        )

    def join_history(self, connection: Connection, keep_newest: int) -> int:
        """Join adjacent old ranges below the position; the newest of a partition stay as they are.

        Gaps and what a reset superseded are never joined: they are evidence. The caller's
        transaction has locked the pipeline's row, so two joiners never meet.

        Returns:
            How many rows the history lost.
        """
        rows = connection.query(
            self._sql(
                'SELECT r.topic, r."partition", r.range_start, r.range_end, r.epoch, r.records,'
                " r.written, r.rejected, r.filtered FROM {oncely_ranges} r"
                " JOIN {oncely_positions} p ON p.pipeline = r.pipeline AND p.topic = r.topic"
                ' AND p."partition" = r."partition" WHERE r.pipeline = %s'
                " AND r.kind <> 'gap' AND r.superseded = 0 AND r.range_end <= p.\"position\""
                ' ORDER BY r.topic, r."partition", r.range_start'
            ),
            (self._pipeline,),
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

    def _replace(
        self, connection: Connection, tp: TopicPartition, run: list[Sequence[int]]
    ) -> None:
        where = (self._pipeline, tp.topic, tp.partition)
        connection.execute_many(
            self._sql(
                "DELETE FROM {oncely_ranges} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND range_start = %s AND epoch = %s'
            ),
            [(*where, one[0], one[2]) for one in run],
        )
        sums = [sum(one[i] for one in run) for i in range(3, 7)]
        whole = OffsetRange(run[0][0], run[-1][1])
        self.append_ranges(connection, [(tp, whole, Written(*sums))], "joined", run[-1][2])

    # -- rejects ---------------------------------------------------------------------------

    def add_rejects(self, connection: Connection, rejects: Sequence[Reject], epoch: int) -> None:
        """Keep dead letters; one that is met again after a reset replaces its older self."""
        if not rejects:
            return
        kept = ("timestamp_ms", '"key"', '"value"', "headers", "stage", "reason", "epoch")
        connection.execute_many(
            self._sql(
                'INSERT INTO {oncely_rejects} (pipeline, topic, "partition", "offset", '
                + ", ".join(kept)
                + ") VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
                ' ON CONFLICT (pipeline, topic, "partition", "offset") DO UPDATE SET '
                + ", ".join(f"{one} = excluded.{one}" for one in kept)
            ),
            [(self._pipeline, *r.partition, r.offset, *_contents(r), epoch) for r in rejects],
        )

    def count_rejects(self, connection: Connection) -> int:
        """How many dead letters wait."""
        rows = connection.query(
            self._sql("SELECT COUNT(*) FROM {oncely_rejects} WHERE pipeline = %s"),
            (self._pipeline,),
        )
        return int(rows[0][0])

    def rejects(
        self, connection: Connection, after: tuple[str, int, int], limit: int, *, lock: bool = False
    ) -> list[Reject]:
        """Dead letters in (topic, partition, offset) order, beginning after ``after``."""
        rows = connection.query(
            self._sql(
                'SELECT topic, "partition", "offset", timestamp_ms, "key", "value", headers,'
                " stage, reason FROM {oncely_rejects}"
                ' WHERE pipeline = %s AND (topic, "partition", "offset") > (%s, %s, %s)'
                ' ORDER BY topic, "partition", "offset" LIMIT %s'
                + (self._dialect.for_update if lock else "")
            ),
            (self._pipeline, *after, limit),
        )
        return [
            Reject(
                TopicPartition(topic, partition),
                offset,
                timestamp,
                key,
                value,
                _headers(headers),
                stage,
                reason,
            )
            for topic, partition, offset, timestamp, key, value, headers, stage, reason in rows
        ]

    def remove_reject(self, connection: Connection, partition: TopicPartition, offset: int) -> bool:
        """Take a dead letter out; False when it was not there."""
        changed = connection.execute(
            self._sql(
                "DELETE FROM {oncely_rejects} WHERE pipeline = %s AND topic = %s"
                ' AND "partition" = %s AND "offset" = %s'
            ),
            (self._pipeline, *partition, offset),
        )
        return changed == 1


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


def _contents(r: Reject) -> tuple[object, ...]:
    kept = (r.timestamp_ms, r.key, r.value, _headers_text(r.headers))
    return (*kept, r.stage, _printable(r.reason))


def _headers_text(headers: Sequence[tuple[str, bytes | None]]) -> str:
    """Headers as a JSON list of [name, base64 or null]; names and order may repeat."""
    return json.dumps(
        [[name, None if v is None else base64.b64encode(v).decode()] for name, v in headers]
    )


def _headers(text: str) -> list[tuple[str, bytes | None]]:
    return [(name, None if v is None else base64.b64decode(v)) for name, v in json.loads(text)]


def _printable(text: str, longest: int = 1000) -> str:
    """A text that every database takes: no NUL, no lone surrogate, bounded."""
    clean = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"
