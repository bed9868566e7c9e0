"""The comparison of two datasets that Spark can read, written by any pipeline.

Committed records of a topic, in offsets that are fixed first, are a DataFrame of Spark: tasks read
them by :class:`~oncely.audit.stored.log.Topics`, to the proved end of each range. They are compared
by id with rows that may be of later records, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.artifacts import POSTGRES_JDBC, resolve, spark_jars
from oncely.audit.evidence import Bounds, Log
from oncely.audit.matching import excused, matched, resolved, same_kind, side
from oncely.audit.outcome import Compared, Outcome
from oncely.audit.report import Report, Undecided
from oncely.audit.spec import Dataset, Pair
from oncely.audit.stored.log import Topics
from oncely.audit.topic import KafkaLog
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import ConfigError, TopicMissing, Unavailable, WrongInput
from oncely.kafka.records import headers_of, timestamp_of
from oncely.secrets import carried

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


Records = Callable[[Mapping[TopicPartition, OffsetRange]], "DataFrame"]
"""The side of the records of some offsets, as of :func:`oncely.audit.matching.side`."""


def by_id(
    records: Records,
    rows: DataFrame,
    compared: Compared,
    bounds: Callable[[], Mapping[TopicPartition, Bounds]],
    *,
    keyed: bool,
    limit: int,
) -> Outcome:
    """Compare the records of fixed offsets with all rows.

    Args:
        records: the left side.
        rows: the right side.
        compared: the offsets.
        bounds: the offsets whose rows the destination may have now.
        keyed: True if the right side keeps one row of each id.
        limit: the number of findings of each kind that are named.
    """
    from pyspark.sql import DataFrame

    left, right = same_kind(compared.only(records(compared.ranges)), rows)

    def excuse(found: DataFrame) -> DataFrame:
        """Rows of skipped records, and of records before or beyond the compared offsets. The rows
        were read before the present ends are, so these include every record that a row is of."""
        parts = _not_compared(bounds(), compared)
        if not parts:
            return found
        others = reduce(DataFrame.unionAll, map(records, parts))
        return excused(found, same_kind(others, right)[0], keyed=keyed)

    with matched(left, right, keyed=keyed, place_bits=compared.bits, excuse=excuse) as found:
        return Outcome.of(found, compared, limit, keyed=keyed)


def doubt_deleted(
    outcome: Outcome,
    log: Log,
    deleted: Mapping[TopicPartition, OffsetRange],
    *,
    of_rows: bool = True,
    of_records: bool = True,
) -> None:
    """What retention and compaction have removed proves nothing.

    Args:
        outcome: is changed.
        log: the topics.
        deleted: offsets that were removed.
        of_rows: rows of no record may be of these.
        of_records: these records should have been compared.
    """
    if log.compacted():
        outcome.doubt("unexpected", "the topic is compacted: their records may have been removed")
    if deleted and of_rows:
        reason = "their records may be among those that were deleted from the topic"
        outcome.doubt("unexpected", reason)
    if of_records:
        reason = "these records were deleted from the topic"
        outcome.undecided += [Undecided(tp, range_, reason) for tp, range_ in deleted.items()]


def _not_compared(
    bounds: Mapping[TopicPartition, Bounds], compared: Compared
) -> list[dict[TopicPartition, OffsetRange]]:
    """The offsets before the compared ones, those beyond, and skipped ones."""
    before, beyond = {}, {}
    for tp, one in bounds.items():
        range_ = compared.ranges.get(tp, OffsetRange(one.first, one.first))
        before[tp] = OffsetRange(one.first, max(one.first, range_.start))
        beyond[tp] = OffsetRange(range_.end, max(one.end, range_.end))
    parts = ({tp: r for tp, r in part.items() if not r.is_empty} for part in (before, beyond))
    skipped = ({tp: one} for tp, own in compared.skipped.items() for one in own)
    return [part for part in (*parts, *skipped) if part]


_LEAST = 50_000  # offsets of a task, if there are enough: each has a consumer of its own
_LATEST = (2**63 - 1) // 1000  # milliseconds that a column can hold; later ones are null
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_RECORDS = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()),
     ("timestamp", pa.timestamp("us", "UTC")), ("key", pa.binary()), ("value", pa.binary()),
     ("headers", _HEADERS)]
)  # fmt: skip
_DDL = (
    "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY,"
    " headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
_PREFIX = "kafka_"
_OWN = ("key", "value", "topic", "partition", "offset", "timestamp")
KEY, VALUE, TOPIC, PARTITION, OFFSET, TIMESTAMP = (f"{_PREFIX}{name}" for name in _OWN)
"""The columns of a record; the fields of its value stand beside them, and in ``value``."""

Ranges = Mapping[TopicPartition, OffsetRange]


def committed(
    spark: SparkSession, brokers: str, kafka: Mapping[str, object], ranges: Ranges
) -> DataFrame:
    """The committed records of these offsets: topic, partition, offset, timestamp, key, value and
    headers.

    The DataFrame fails if records of them have been deleted, or if a range can't be read to its
    end.

    Args:
        spark: its executors reach the brokers.
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties.
        ranges: the offsets, of whole partitions or parts.
    """
    given = shares(ranges, 4 * spark.sparkContext.defaultParallelism)
    topics = Topics(brokers, kafka, deleted="refuse")
    numbers = spark.range(0, len(given), 1, len(given))
    return numbers.mapInArrow(carried(partial(_read, topics, given)), _DDL)


def shares(ranges: Ranges, most: int) -> list[Ranges]:
    """Divide ranges among tasks, evenly by offsets; a task has at most one part of a range."""
    total = sum(one.end - one.start for one in ranges.values())
    count = max(1, min(most, total // _LEAST))
    step = max(1, -(-total // count))
    parts = [
        (tp, OffsetRange(at, min(at + step, one.end)))
        for tp, one in ranges.items()
        for at in range(one.start, one.end, step)
    ]
    return [dict(parts[number::count]) for number in range(count)]


def _read(
    topics: Topics, given: Sequence[Ranges], numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            own = given[number]
            ends = {tp: one.end for tp, one in own.items()}
            for messages in topics.batches(ends, {tp: one.start for tp, one in own.items()}):
                yield _batch(messages)


def _batch(messages: Sequence[Any]) -> pa.RecordBatch:
    rows = [
        (one.topic(), one.partition(), one.offset(), _microseconds(timestamp_of(one)), one.key(),
         one.value(), [{"key": k, "value": v} for k, v in headers_of(one)])
        for one in messages
    ]  # fmt: skip
    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, one.type) for values, one in zip(columns, _RECORDS, strict=True)]
    return pa.record_batch(arrays, schema=_RECORDS)


def _microseconds(at: int | None) -> int | None:
    return None if at is None or abs(at) > _LATEST else at * 1000


def named(frame: DataFrame) -> DataFrame:
    """The records with their own columns under the names of this module; key and value as text."""
    from pyspark.sql import functions as F

    texts = ("key", "value")
    columns = [
        (F.col(name).cast("string") if name in texts else F.col(name)).alias(f"{_PREFIX}{name}")
        for name in _OWN
    ]
    return frame.select(*columns)


def with_json(frame: DataFrame, schema: str) -> DataFrame:
    """The records of :func:`named` with the fields of their JSON, also as the struct ``value``.

    A field that has the name of one of the record's own columns is in ``value`` only.
    """
    from pyspark.sql import functions as F

    parsed = frame.withColumn("value", F.from_json(VALUE, schema))
    taken = {name.lower() for name in parsed.columns}
    fields = [
        F.col("value").getField(name).alias(name)
        for name in parsed.select("value.*").columns
        if name.lower() not in taken
    ]
    return parsed.select("*", *fields)


def sampled_schema(spark: SparkSession, frame: DataFrame, key: str) -> str:
    """The schema that Spark infers of the values of a sample, as DDL.

    Raises:
        ConfigError: the sample contains no JSON object.
    """
    texts = frame.select(VALUE).where(f"{VALUE} IS NOT NULL").rdd.map(lambda row: row[0])
    found = spark.read.option("columnNameOfCorruptRecord", "_oncely_corrupt").json(texts).schema
    fields = [one for one in found.fields if one.name != "_oncely_corrupt"]
    if not fields:
        raise ConfigError(
            f"{key}.schema",
            "a sample of the topic's records contains no JSON object",
            way_out='give the columns: schema = "id BIGINT, ts TIMESTAMP", or value = "text"',
        )
    return str(spark.createDataFrame([], type(found)(fields))._jdf.schema().toDDL())


LIMIT = 1_000
"""The default number of findings of each kind that are named."""

_SAMPLE = 1_000  # records at either end of a partition
_FETCH = "10000"  # rows: by default PostgreSQL's driver keeps a whole table in memory
_DELTA_JARS = ("delta-spark", "delta-storage")
_DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
_POSTGRES = "jdbc:postgresql:"


def spark_conf(*datasets: Dataset) -> dict[str, str]:
    """The settings of a session that reads these datasets: jars beside Spark's own, and Delta's
    extension."""
    jars: list[str] = []
    conf: dict[str, str] = {}
    for one in datasets:
        if _is_postgres(one):
            jars += [str(jar) for jar in resolve(POSTGRES_JDBC)]
        if one.format == "delta":
            jars += [str(jar) for jar in resolve(_delta()) if jar.name.startswith(_DELTA_JARS)]
            conf |= _DELTA_CONF
    return conf | ({"spark.jars": ",".join(dict.fromkeys(jars))} if jars else {})


def _delta() -> str:
    found = spark_jars().delta
    if found is None:
        raise WrongInput(
            "the installed PySpark is newer than Delta Lake's library for Spark",
            way_out="run this audit where an earlier PySpark is installed, such as 4.0",
        )
    return found


@contextmanager
def reading() -> Iterator[None]:
    """Raise the errors of Spark, and of its tasks, as :class:`Unavailable`."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise Unavailable(
            f"Spark could not read a side: {_cause(error)}",
            way_out="correct the dataset; --debug shows Spark's traceback",
        ) from None


@reading()
def audit_pair(
    spark: SparkSession,
    pair: Pair,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    proved: Mapping[TopicPartition, Position] | None = None,
    keyed: bool = False,
    limit: int = LIMIT,
) -> Report:
    """Compare two datasets.

    Args:
        spark: a session with the settings of :func:`spark_conf`.
        pair: the datasets.
        since, until: compare only records of the left topic from the first one at or after
            ``since``, up to the first one at or after ``until``.
        proved: with offsets in the rows: begin at these, because an earlier audit was clean.
        keyed: True if the right side keeps one row of each id.
        limit: the number of findings of each kind that are named.

    Raises:
        ConfigError: a dataset can't be read, or an expression is wrong.
        Unavailable: a server does not answer.
    """
    if pair.left.topics:
        return _TopicAudit(spark, pair, keyed, limit).report(since, until, proved or {})
    if since is not None or until is not None or pair.match.source_columns:
        raise WrongInput(
            "--since, --until and --source-columns need a topic on the left side",
            way_out="use --id EXPR without them",
        )
    return _tables(spark, pair, keyed, limit)


def _cause(error: Exception) -> str:
    """The innermost cause, without Java's traces; the error of a task of ours, if it is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("oncely.errors.")]
    if ours:
        return ours[-1].partition(": ")[2]
    causes = [line for line in lines if line.startswith(("Caused by: ", ": "))]
    said = (causes or lines[:1] or ["no reason"])[-1]
    return said.removeprefix("Caused by: ").removeprefix(": ")


def _tables(spark: SparkSession, pair: Pair, keyed: bool, limit: int) -> Report:
    """Two datasets without offsets."""
    began, at, match = time.monotonic(), datetime.now(UTC), pair.match
    left = side(frame_of(spark, pair.left), "left", match.id_left or "", by=match.by)
    right = right_side(frame_of(spark, pair.right), match.id_right or "", match.by)
    with matched(*same_kind(left, right), keyed=keyed) as found:
        outcome = Outcome.of(found, None, limit, keyed=keyed)
    return outcome.report(pair.name, at, time.monotonic() - began)


def right_side(frame: DataFrame, id_: str, by: str | None) -> DataFrame:
    """The right side by id. It needs no columns for the group: an id has that of its record."""
    try:
        return side(frame, "right", id_, by=by)
    except ConfigError:
        return side(frame, "right", id_)


@dataclass
class _TopicAudit:
    """A topic on the left."""

    spark: SparkSession
    pair: Pair
    keyed: bool
    limit: int

    def report(
        self,
        since: datetime | None,
        until: datetime | None,
        proved: Mapping[TopicPartition, Position],
    ) -> Report:
        began, left = time.monotonic(), self.pair.left
        log = KafkaLog(left.brokers, left.topics, left.kafka)
        bounds = _bounds(left, log)
        source, at = log.identity(), datetime.now(UTC)
        by_offset = self.pair.match.source_columns is not None
        starts = log.offsets_at(since) if since is not None else {}
        begins = {tp: max(starts.get(tp, 0), proved.get(tp, 0)) for tp in bounds}
        ends = log.offsets_at(until) if until is not None else {}
        compared = Compared.between(begins, ends, bounds, by_offset=by_offset)
        outcome = self._by_offset(log, compared) if by_offset else self._by_id(log, compared)
        deleted = {tp: OffsetRange(0, one.first) for tp, one in bounds.items() if one.first}
        whole = since is None and not proved
        doubt_deleted(outcome, log, deleted, of_rows=not by_offset, of_records=whole)
        log.close()
        seconds = time.monotonic() - began
        return outcome.report(self.pair.name, at, seconds, source=source, until=until)

    def _by_id(self, log: KafkaLog, compared: Compared) -> Outcome:
        match, schema = self.pair.match, self._schema(compared)

        def left(ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
            return side(
                self._records(ranges, schema), "left", match.id_left or "",
                by=match.by, place=_place(compared), at=_milliseconds(),
            )  # fmt: skip

        rows = right_side(frame_of(self.spark, self.pair.right), match.id_right or "", match.by)
        return by_id(left, rows, compared, log.bounds, keyed=self.keyed, limit=self.limit)

    def _by_offset(self, log: KafkaLog, compared: Compared) -> Outcome:
        from pyspark.sql import functions as F

        match = self.pair.match
        schema = self._schema(compared) if match.by else None
        place = _place(compared)
        records = self._records(compared.ranges, schema)
        left = side(records, "left", place, by=match.by, place=place, at=_milliseconds())
        rows = frame_of(self.spark, self.pair.right)
        names = [f"`{name}`" for name in match.source_columns or ()]
        for name in names:
            resolved(rows, "--source-columns", name)
        own = compared.place(*map(F.col, names))
        # Rows of records before the compared ones are left out at once: there may be many. These
        # conditions are simple, so that a database evaluates them.
        rows = rows.where(F.col(names[0]).isNull() | F.col(names[0]).isin(*self.pair.left.topics))
        for tp, range_ in compared.ranges.items():
            if range_.start:
                others = F.col(names[0]).isNull() | (F.col(names[0]) != tp.topic)
                others |= F.col(names[1]).isNull() | (F.col(names[1]) != tp.partition)
                others |= F.col(names[2]).isNull() | (F.col(names[2]) >= range_.start)
                rows = rows.where(others)
        right = side(rows, "right", own, place=own)

        def excuse(found: DataFrame) -> DataFrame:
            """Rows of records that were appended since; beyond the topic's present end there is
            none."""
            stable = {tp: one.end for tp, one in log.bounds().items()}
            for at, tp in enumerate(compared.places):
                base = at << compared.bits
                since = F.col("place") >= base + compared.ranges[tp].end
                since &= F.col("place") < base + stable.get(tp, 0)
                later = (F.col("match") == "unexpected") & since
                found = found.withColumn("match", F.when(later, "later").otherwise(F.col("match")))
            return found

        with matched(
            left, right, keyed=self.keyed, place_bits=compared.bits, excuse=excuse
        ) as found:
            return Outcome.of(found, compared, self.limit, keyed=self.keyed)

    def _schema(self, compared: Compared) -> str | None:
        return value_schema(self.spark, self.pair.left, compared.ranges)

    def _records(
        self, ranges: Mapping[TopicPartition, OffsetRange], schema: str | None
    ) -> DataFrame:
        left = self.pair.left
        frame = named(committed(self.spark, left.brokers, left.kafka, ranges))
        return frame if schema is None else with_json(frame, schema)


def _bounds(one: Dataset, log: KafkaLog) -> Mapping[TopicPartition, Bounds]:
    try:
        return log.bounds()
    except TopicMissing as error:
        raise ConfigError(f"{one.side}.topic", error.problem, way_out=error.way_out) from None


def _place(compared: Compared) -> Column:
    from pyspark.sql import functions as F

    return compared.place(F.col(TOPIC), F.col(PARTITION), F.col(OFFSET))


def _milliseconds() -> Column:
    from pyspark.sql import functions as F

    return F.unix_millis(TIMESTAMP)


# -- datasets as DataFrames -----------------------------------------------------------------------


def frame_of(spark: SparkSession, one: Dataset) -> DataFrame:
    """A dataset as a DataFrame; of a topic the records that are committed now.

    Raises:
        ConfigError: Spark can't read it.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if one.topics:
        bounds = _bounds(one, KafkaLog(one.brokers, one.topics, one.kafka))
        ranges = {tp: OffsetRange(*found) for tp, found in bounds.items()}
        frame = named(committed(spark, one.brokers, one.kafka, ranges))
        schema = value_schema(spark, one, ranges)
        return frame if schema is None else with_json(frame, schema)
    options = dict(one.options)
    if one.format == "jdbc" and "fetchsize" not in map(str.lower, options):
        options["fetchsize"] = _FETCH
    if _is_postgres(one) and "driver" not in options:
        options["driver"] = "org.postgresql.Driver"
    reader = spark.read.format(one.format).options(**options)
    try:
        if one.schema is not None:
            reader = reader.schema(one.schema)
        return reader.load(one.path) if one.path is not None else reader.load()
    except (PySparkException, Py4JError) as error:
        raise ConfigError(one.side, f"Spark can't read {one.name}: {_cause(error)}") from None


def value_schema(
    spark: SparkSession, one: Dataset, ranges: Mapping[TopicPartition, OffsetRange]
) -> str | None:
    """The columns of a topic's values: as given, or those of a sample; None for texts.

    Raises:
        ConfigError: the sample contains no JSON object.
    """
    if one.value == "text" or one.schema is not None:
        return one.schema
    first = {tp: OffsetRange(r.start, min(r.end, r.start + _SAMPLE)) for tp, r in ranges.items()}
    last = {tp: OffsetRange(max(r.start, r.end - _SAMPLE), r.end) for tp, r in ranges.items()}
    frames = [committed(spark, one.brokers, one.kafka, part) for part in (first, last)]
    return sampled_schema(spark, named(frames[0].unionAll(frames[1])), one.side)


def _is_postgres(one: Dataset) -> bool:
    urls = [value for key, value in one.options.items() if key.lower() == "url"]
    return one.format == "jdbc" and bool(urls) and urls[0].startswith(_POSTGRES)
