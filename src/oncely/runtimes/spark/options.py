"""Options of Spark's Kafka reader, and its checkpoint format. Does not use Spark.

The formats of the checkpoint's files are Spark's own: ``OffsetSeqLog`` for ``offsets/N`` and
``KafkaSourceInitialOffsetWriter`` for ``sources/0/0``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from oncely.clients.kafka import security
from oncely.core.topics import Position, TopicPartition
from oncely.errors import InvariantViolation

REDACTION_REGEX = r"(?i)secret|password|token|credential|access[.]?key|keystore[.]key|jaas"
"""For Spark's ``spark.redaction.regex``: its own pattern does not match a private key in PEM,
and the Kafka source writes all of its options into the log at level DEBUG."""

_POLL_RECORDS = "kafka.max.poll.records"
_POLL_BYTES = 16 << 20

IN_BULK = {
    # The Java client's defaults (500 records a poll, 1 MB a fetch) are for consumers with much work
    # per record; a task only copies it. A quarter more records per second, measured.
    _POLL_RECORDS: "10000",
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.receive.buffer.bytes": "-1",  # the system's own choice; the default is 64 KB at most
    # Having read up to the newest record, the client requests more, and the broker answers no other
    # request on that connection (such as Spark's request for the topic's end) until data arrive or
    # this time is over: half a second for each partition, by default. No consumer waits for more
    # records.
    "kafka.fetch.max.wait.ms": "10",
}
"""Fetch settings of our own queries if records are small: see :func:`reader_options`."""

_JAVAS_POLL_RECORDS = 500

_VERSION = "v1"
_NOTHING_YET = "-"


def reader_options(
    brokers: str,
    topics: Sequence[str],
    positions: Mapping[TopicPartition, Position],
    *,
    kafka: Mapping[str, object] | None = None,
    max_records: int | None = None,
    headers: bool = False,
    largest_record: int = 0,
) -> dict[str, str]:
    """Options for ``readStream.format("kafka")``.

    Args:
        brokers: ``host:port``, separated by commas.
        topics: the topics to subscribe to.
        positions: the start of each partition. Spark requires exactly the partitions that the
            topics have when the query starts, or it ends with an assertion error: after a partition
            was added in between, the query must be started again.
        kafka: librdkafka's properties, from ``[source.kafka]``.
        max_records: the maximum number of offsets in one micro-batch, over all partitions.
        headers: also read the records' headers.
        largest_record: bytes of the largest record of a sample, decompressed. The Java client keeps
            all records of a poll in memory, and none of its settings bounds their bytes:
            ``max.partition.fetch.bytes`` counts them compressed.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``.
    """
    options = {
        "kafka.bootstrap.servers": brokers,
        "subscribe": ",".join(topics),
        "startingOffsets": format_offsets(positions),
        # Otherwise Spark skips lost records with a log line only.
        "failOnDataLoss": "true",
        "includeHeaders": "true" if headers else "false",
    }
    if max_records is not None:
        options["maxOffsetsPerTrigger"] = str(max_records)
    options |= IN_BULK
    a_poll = max(1, _POLL_BYTES // max(1, largest_record))
    if a_poll < int(options.get(_POLL_RECORDS, _JAVAS_POLL_RECORDS)):
        options[_POLL_RECORDS] = str(a_poll)
    options |= {f"kafka.{key}": value for key, value in security.java(kafka or {}).items()}
    # Last, so that no entry above can override it.
    return options | {"kafka.isolation.level": "read_committed"}


def format_offsets(positions: Mapping[TopicPartition, Position]) -> str:
    """Spark's JSON for offsets: ``{"topic": {"0": 23}}``."""
    nested: dict[str, dict[str, int]] = {}
    for tp in sorted(positions):
        nested.setdefault(tp.topic, {})[str(tp.partition)] = positions[tp]
    return json.dumps(nested)


def parse_offset_log(text: str) -> list[dict[TopicPartition, Position]]:
    """Parse a file of the checkpoint's ``offsets`` folder: the ends of a micro-batch.

    Returns:
        For each source of the query, in order, the end of each topic-partition; an empty dict for a
            source without data.

    Raises:
        InvariantViolation: the text is not such a file.
    """
    version, _, rest = text.partition("\n")
    metadata, _, sources = rest.partition("\n")
    if version != _VERSION or not metadata.startswith("{"):
        raise InvariantViolation(f"not an offset log of version {_VERSION}: {text[:200]!r}")
    return [{} if line == _NOTHING_YET else _offsets(line) for line in sources.split("\n") if line]


def parse_initial_offsets(text: str) -> dict[TopicPartition, Position]:
    """Parse the checkpoint's ``sources/0/0``: the start of the query's first micro-batch.

    Spark puts a zero byte before the version, for readers of Spark 2.1 (SPARK-19517).

    Raises:
        InvariantViolation: the text is not such a file.
    """
    version, _, line = text.removeprefix("\0").partition("\n")
    if version != _VERSION:
        raise InvariantViolation(f"not a file of initial offsets: {text[:200]!r}")
    return _offsets(line)


def _offsets(line: str) -> dict[TopicPartition, Position]:
    """``{"topic": {"0": 23}}`` as positions; any other text is not an offset of Kafka."""
    try:
        return {
            TopicPartition(topic, int(partition)): _natural(offset)
            for topic, partitions in json.loads(line).items()
            for partition, offset in partitions.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise InvariantViolation(f"not offsets of a Kafka source: {line[:200]!r}") from error


def _natural(offset: object) -> Position:
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(offset)
    return offset
