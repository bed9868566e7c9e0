"""Committed records of a topic, in offsets that are fixed first, as a DataFrame of Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from oncely.clients.kafka import security
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition, by_topic
from oncely.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_IN_BULK = {
    # The Java client's defaults are for consumers with much work per record.
    "kafka.max.poll.records": "10000",
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.receive.buffer.bytes": "-1",
    "kafka.fetch.max.wait.ms": "10",
}
_PREFIX = "kafka_"
_OWN = ("key", "value", "topic", "partition", "offset", "timestamp")
KEY, VALUE, TOPIC, PARTITION, OFFSET, TIMESTAMP = (f"{_PREFIX}{name}" for name in _OWN)
"""The columns of a record; the fields of its value stand beside them, and in ``value``."""


def committed(
    spark: SparkSession,
    brokers: str,
    kafka: Mapping[str, object],
    ranges: Mapping[TopicPartition, OffsetRange],
    **more: str,
) -> DataFrame:
    """The committed records of these offsets, with the columns of Spark's Kafka source.

    Args:
        spark: with the Kafka connector.
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties.
        ranges: the offsets, of whole partitions or parts.
        more: options of Spark's Kafka source.

    Raises:
        ConfigError: a property of Kafka's is wrong.
    """
    options = {
        "kafka.bootstrap.servers": brokers,
        "assign": json.dumps({topic: sorted(own) for topic, own in by_topic(ranges).items()}),
        "startingOffsets": _json({tp: one.start for tp, one in ranges.items()}),
        "endingOffsets": _json({tp: one.end for tp, one in ranges.items()}),
        "failOnDataLoss": "true",
        **_IN_BULK,
        **{f"kafka.{key}": value for key, value in security.java(kafka).items()},
        "kafka.isolation.level": "read_committed",
        **more,
    }
    return spark.read.format("kafka").options(**options).load()


def _json(positions: Mapping[TopicPartition, Position]) -> str:
    return json.dumps(
        {topic: {str(n): at for n, at in own.items()} for topic, own in by_topic(positions).items()}
    )


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
