"""The view by identity: the ids of a pipeline's records and those of its destination, by group.

The rows that records should have become are made by the pipeline's decode and transform of today,
which are passed in. So this view trusts more than the comparison by offset, and its findings name
what a user knows: an id, an hour.

The present rows of destinations that Spark's own readers don't turn into columns are read here; a
destination knows of its source, too: positions, and records that became dead letters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from oncely.audit.datasets import by_id, committed, doubt_deleted, reading, right_side
from oncely.audit.delta_snapshot import snapshot_of
from oncely.audit.evidence import Bounds, Log, Span, Stated, skipped
from oncely.audit.files import open_files
from oncely.audit.kafka import SOURCE_HEADER
from oncely.audit.matching import PLACE, side
from oncely.audit.outcome import Compared, Outcome
from oncely.audit.report import Report, Undecided
from oncely.audit.spec import Dataset
from oncely.audit.sql import open_ledger
from oncely.audit.sqlite import as_written
from oncely.audit.stored.log import Topics
from oncely.audit.topic_snapshot import take
from oncely.config import PipelineSettings
from oncely.core.digest import kind_of
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import ConfigError, SourceMismatch
from oncely.stores.sql.connection import brief_session, connect, plain
from oncely.stores.sql.dialects import dialect_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC, PARTITION, OFFSET, TIME, DELETES = (
    f"_oncely_{name}" for name in ("topic", "partition", "offset", "timestamp", "deletes")
)
"""The columns of expected rows beside the rows' own: their record, and whether it deletes."""


@dataclass(frozen=True)
class Views:
    """What the view needs of a pipeline.

    Attributes:
        expected: makes rows of :func:`~oncely.audit.datasets.committed` records: the columns of the
            destination, and the columns above. Records that become dead letters or are filtered
            have no row; tombstones have one.
        rows: the present rows of the destination.
        window: reads the ledger.
        log: the topics.
    """

    settings: PipelineSettings
    expected: Callable[[DataFrame], DataFrame]
    rows: Callable[[], DataFrame]
    window: Callable[[], Window]
    log: Log


@reading()
def audit_by_id(
    spark: SparkSession,
    views: Views,
    id_left: str,
    id_right: str,
    by: str | None,
    *,
    until: datetime | None = None,
    limit: int = 1_000,
) -> Report:
    """Compare the ids of a pipeline's records with those of its destination.

    Args:
        spark: a session that reads both.
        views: the pipeline.
        id_left, id_right: the expressions of the id, over expected rows and present ones.
        by: the expression of the group, or None.
        until: compare only records before this time.
        limit: the number of findings of each kind that are named.

    Raises:
        SourceMismatch: the topic is not that of the ledger.
        ConfigError: an expression is wrong.
        Unavailable: a server does not answer.
    """
    began, log = time.monotonic(), views.log
    window = views.window()
    at = datetime.now(UTC)
    _require_same(window.source, log.identity())
    bounds = log.bounds()
    compared = _compared(log, bounds, window, until)
    letters = _letters(spark, window, compared)
    sink = views.settings.sink
    keyed = getattr(sink, "mode", "append") == "upsert"
    records = _records(spark, views, id_left, by, compared, letters, keyed)
    rows = right_side(views.rows(), id_right, by)

    now = partial(_present, views, window)
    outcome = by_id(records, rows, compared, now, keyed=keyed, limit=limit)
    _doubts(outcome, log, bounds, window)
    seconds = time.monotonic() - began
    return outcome.report(views.settings.name, at, seconds, source=window.source, until=until)


def _present(views: Views, window: Window) -> Mapping[TopicPartition, Bounds]:
    """The offsets that the destination has rows of by now.

    Rows from before the positions at which the pipeline began are of no record that it has read.
    """
    present, later = views.log.bounds(), views.window()
    began = window.started if window.begins else {}
    return {
        tp: Bounds(max(present[tp].first, began.get(tp, 0)), min(end, present[tp].end))
        for tp, end in later.positions.items()
        if tp in present
    }


def _require_same(ours: object, now: object) -> None:
    if ours != now:
        raise SourceMismatch(
            "the topic is not that of the ledger: cluster or topic ids differ",
            way_out="oncely audit without --id tells what can still be proved",
        )


def _compared(
    log: Log,
    bounds: Mapping[TopicPartition, Bounds],
    window: Window,
    until: datetime | None,
) -> Compared:
    ends = log.offsets_at(until) if until is not None else {}
    ends = {tp: min(at, ends.get(tp, at)) for tp, at in window.positions.items()}
    own = {tp: one for tp, one in bounds.items() if tp in ends}
    return Compared.between(window.started, ends, own, skipped=window.skipped)


def _letters(spark: SparkSession, window: Window, compared: Compared) -> DataFrame | None:
    """The places of dead letters; None if there is none."""
    places = {tp: at << compared.bits for at, tp in enumerate(compared.places)}
    found = [(places[tp] + offset,) for tp, offset in window.letters if tp in places]
    return spark.createDataFrame(found, f"{PLACE} BIGINT") if found else None


def _records(
    spark: SparkSession,
    views: Views,
    id_: str,
    by: str | None,
    compared: Compared,
    letters: DataFrame | None,
    keyed: bool,
) -> Callable[[Mapping[TopicPartition, OffsetRange]], DataFrame]:
    from pyspark.sql import functions as F

    source = views.settings.source

    def records(ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        kafka = source.kafka_properties()
        made = views.expected(committed(spark, source.brokers, kafka, ranges))
        own = side(
            made, "left", id_, by=by,
            place=compared.place(F.col(TOPIC), F.col(PARTITION), F.col(OFFSET)),
            at=F.unix_millis(TIME), deletes=F.col(DELETES) if keyed else None,
        )  # fmt: skip
        return own if letters is None else own.join(letters, PLACE, "left_anti")

    return records


def _doubts(
    outcome: Outcome,
    log: Log,
    bounds: Mapping[TopicPartition, Bounds],
    window: Window,
) -> None:
    """What the topic and the ledger no longer have proves nothing."""
    if not window.begins:
        outcome.undecided += [
            Undecided(tp, OffsetRange(0, at), "the ledger does not tell whether they were read")
            for tp, at in window.started.items()
            if at > 0
        ]
    gone = {
        tp: OffsetRange(at, bounds[tp].first)
        for tp, at in window.started.items()
        if tp in bounds and bounds[tp].first > at
    }
    doubt_deleted(outcome, log, gone)


# -- the present rows, by kind --------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The records that a destination should have.

    Attributes:
        source: cluster and topic ids, as stored in the destination.
        positions: the committed position of each partition.
        started: the first offset of each partition that the pipeline was to read.
        letters: dead letters below the positions.
        skipped: the offsets that a start, or a reset, has put positions behind.
        begins: True if ``started`` is where the pipeline began; False if older entries may be gone.
    """

    source: SourceIdentity
    positions: Mapping[TopicPartition, Position]
    started: Mapping[TopicPartition, Position]
    letters: Collection[tuple[TopicPartition, int]]
    skipped: Mapping[TopicPartition, Sequence[OffsetRange]]
    begins: bool = True


def window_of_database(settings: PipelineSettings) -> Window:
    """That of the tables of a ledger. Raises, as the others, the errors of
    :func:`oncely.audit.of_pipeline.window_of`."""
    sink: Any = settings.sink
    dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
    with closing(open_ledger(settings.name, dialect, sink.table)) as tables:
        known = tables.ledger()
        letters = list(tables.rejects_of(_whole(known.started, known.positions)))
        return _window(known, known.started, letters)


def window_of_files(settings: PipelineSettings) -> Window:
    """That of files, with what their manifest tells."""
    with closing(open_files(settings)) as found:
        waiting = found.rejects(_whole(found.started, found.positions))
        return _window(found, found.started, waiting)


def window_of_delta(settings: PipelineSettings) -> Window:
    """That of a Delta table."""
    sink: Any = settings.sink
    table = snapshot_of(settings.name, sink.store)
    return _window(table, table.started, table.letters, begins=table.history.is_whole)


def window_of_topics(settings: PipelineSettings) -> Window:
    """That of an output topic."""
    source = settings.source
    sink: Any = settings.sink
    with closing(Topics(source.brokers, source.kafka_properties())) as topics:
        taken = take(topics, sink.ledger_topic, sink.rejects, settings.name, lambda ledger: ledger)
    started = taken.started(())
    waiting = taken.waiting(_whole(started, taken.positions))
    return _window(taken, started, waiting, begins=False)


def _window(
    ledger: Stated,
    started: Mapping[TopicPartition, Position],
    letters: Collection[tuple[TopicPartition, int]],
    *,
    begins: bool = True,
) -> Window:
    passed = skipped(ledger.committed)
    return Window(ledger.source, ledger.positions, started, letters, passed, begins)


def _whole(
    started: Mapping[TopicPartition, Position], positions: Mapping[TopicPartition, Position]
) -> list[Span]:
    return [Span(tp, OffsetRange(started[tp], at)) for tp, at in positions.items()]


_AT_ONCE = 100_000  # rows
_FIRST = -(1 << 63)  # of rowids


def topic_rows(
    spark: SparkSession, settings: PipelineSettings, schema: Callable[[], pa.Schema], _: Path
) -> DataFrame:
    """The committed records of an output topic; with ``sink.keep_source`` those that name a source.

    Args:
        spark: its executors reach the brokers.
        settings: the pipeline's.
        schema: the columns of its rows.

    Raises:
        ConfigError: the values are not JSON, or the topics are in a column.
        Unavailable: a transaction stayed open, or no answer.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    sink: Any = settings.sink
    if sink.topic is None or sink.value != "json":
        key = "sink.value" if sink.topic else "sink.topic_column"
        raise ConfigError(
            key,
            "the view by identity reads one topic, with values in JSON",
            way_out="compare topic and destination with --left and --right",
        )
    kafka = settings.source.kafka_properties()
    ranges = _all_of(Topics(settings.source.brokers, kafka), sink.topic)
    frame = committed(spark, settings.source.brokers, kafka, ranges)
    if sink.keep_source:
        ours = ", ".join(f"'{one}'" for one in settings.source.topics)
        frame = frame.where(
            f"exists(headers, h -> h.key = '{SOURCE_HEADER}' AND"
            f" get_json_object(CAST(h.value AS STRING), '$[0]') IN ({ours}))"
        )
    columns = from_arrow_schema(schema(), prefer_timestamp_ntz=False)
    value = F.from_json(F.col("value").cast("string"), columns)
    return frame.where("value IS NOT NULL").select(value.alias("row")).select("row.*")


def _all_of(topics: Topics, topic: str) -> dict[TopicPartition, OffsetRange]:
    """All records that are committed now, of each partition.

    A transaction that is open hides records of others that have ended since: its end is awaited.
    """
    with closing(topics):
        ends = topics.ends(topic)
        last = {tp: max(one.first, one.high - 1) for tp, one in ends.items()}
        for _ in topics.batches({tp: one.high for tp, one in ends.items()}, last):
            pass
    return {tp: OffsetRange(one.first, one.high) for tp, one in ends.items()}


def sqlite_rows(
    spark: SparkSession,
    settings: PipelineSettings,
    schema: Callable[[], pa.Schema],
    folder: Path,
) -> DataFrame:
    """The rows of a table in SQLite, by way of a file: Spark has no driver for SQLite.

    Args:
        spark: on this machine, as the pipeline itself.
        settings: the pipeline's.
        schema: the columns of its rows.
        folder: where the file is written.
    """
    sink: Any = settings.sink
    dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
    columns = schema()
    with closing(open_ledger(settings.name, dialect, sink.table)) as tables:
        there = tables.columns(sink.table)
        known = [_readable(one) for one in columns if one.name in there]
        others = sorted(there - set(columns.names))
        own = pa.schema([*known, *(pa.field(name, pa.string()) for name in others)])
        names = ", ".join(dialect.quote(one.name) for one in own)
        path = folder / "rows.parquet"
        after = _FIRST
        with pq.ParquetWriter(path, own) as writer:
            while True:
                some = tables.session.query(
                    f"SELECT rowid, {names} FROM {tables.rows}"
                    " WHERE rowid > %s ORDER BY rowid LIMIT %s",
                    (after, _AT_ONCE),
                )
                if not some:
                    break
                after = some[-1][0]
                writer.write_batch(_batch(some, own))
    return spark.read.parquet(str(path))


def _readable(field: pa.Field) -> pa.Field:
    """A column whose values are compared as they were written, or as texts."""
    kind = kind_of(field.type)
    known = kind is not None and kind.name != "time"  # Spark has no type for it
    return field.with_nullable(True) if known else pa.field(field.name, pa.string())


def _batch(rows: Sequence[Sequence[object]], schema: pa.Schema) -> pa.RecordBatch:
    _, *columns = zip(*rows, strict=True)
    arrays = [_array(values, one) for values, one in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


def _array(values: Sequence[object], field: pa.Field) -> pa.Array:
    if pa.types.is_string(field.type):
        return pa.array([None if one is None else str(one) for one in values], pa.string())
    kind = kind_of(field.type)
    assert kind is not None  # noqa: S101 - for mypy; other columns are texts
    return as_written(values, kind).cast(field.type)


def database(sink: Any) -> Dataset | None:
    """A table in PostgreSQL for Spark's JDBC reader, which knows hosts and ports only."""
    if sink.dialect != "postgresql":
        return None
    to = urlsplit(sink.url.get_secret_value())
    query = dict(parse_qsl(to.query))
    host = query.pop("host", None) or to.netloc.rpartition("@")[2]
    if not host or host.startswith("/"):
        raise ConfigError(
            "sink.url", "Java's driver can't connect to a Unix socket",
            way_out="write host and port: postgresql://user@host:5432/database",
        )  # fmt: skip
    named = {"sslmode", "sslrootcert", "sslcert", "sslkey", "options"}
    url = f"jdbc:postgresql://{host}{to.path}"
    more = "&".join(f"{key}={value}" for key, value in query.items() if key in named)
    dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
    with brief_session(dialect, "audit", connect) as look:
        table = plain(dialect.facts(look, [sink.table])[0].relation.rows)
    options = {"url": f"{url}?{more}" if more else url, "dbtable": table}
    login = {"user": to.username, "password": to.password}
    return Dataset(
        "right", "jdbc", options=options | {k: unquote(v) for k, v in login.items() if v}
    )


def table_of_delta(sink: Any) -> Dataset:
    """A Delta table for Spark's reader, which knows S3 by another name."""
    return Dataset("right", "delta", sink.url.replace("s3://", "s3a://", 1))
