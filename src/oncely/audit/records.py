"""Committed records of a topic, in offsets that are fixed first, as a DataFrame of Spark.

Tasks read them by :class:`~oncely.audit.stored.log.Topics`, to the proved end of each range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.audit.stored.log import Topics
from oncely.clients.kafka.records import headers_of, timestamp_of
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import ConfigError
from oncely.secrets import carried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
