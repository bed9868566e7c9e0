"""The comparison of two datasets that Spark can read, written by any pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from oncely.artifacts import POSTGRES_JDBC, resolve, spark_jars
from oncely.audit.by_id import by_id, doubt_deleted
from oncely.audit.evidence import Bounds
from oncely.audit.matching import matched, resolved, same_kind, side
from oncely.audit.outcome import Compared, Outcome
from oncely.audit.records import (
    OFFSET,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    committed,
    named,
    sampled_schema,
    with_json,
)
from oncely.audit.report import Report
from oncely.audit.spec import Dataset, Pair
from oncely.audit.topic import KafkaLog
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import ConfigError, TopicMissing, Unavailable, WrongInput

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

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
        problem = error.message.removeprefix(f"{error.key}: ")
        raise ConfigError(f"{one.side}.topic", problem, way_out=error.way_out) from None


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
