"""``[sink]`` with ``kind = "kafka"``: the topics, and the contents of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from oncely.config.base import Budget, Problem, Rounding, all_invalid, parse_budget
from oncely.config.decode import FileName
from oncely.config.pipeline import PipelineSettings
from oncely.config.sink import SinkSettings, producer_keys, topic_problems, transaction_seconds
from oncely.config.source import broker_list, topic_name


class KafkaSinkSettings(SinkSettings):
    """``[sink]`` with ``kind = "kafka"``: topics on the source's cluster.

    Attributes:
        topic: the topic of every record. Exactly one of topic and topic_column.
        topic_column: a text column that names each record's topic; it is not part of the value.
        key: the column that becomes the key; without it records have no key.
        value: ``json`` (an object of all columns), ``avro``, or a column's name: its bytes.
        decimals: JSON: ``text`` writes a decimal as ``"1.50"``, which every reader keeps exactly;
            ``number`` as ``1.50``, of which many readers make a double.
        schema_file: Avro: the schema of every record.
        schema_id: Avro: its id in a registry, for Confluent's framing; without it bare records.
        timestamp: the timestamp of a record: ``write``, the time at which it is written; or
            ``source``, that of the source's record. The topic's retention counts from it.
        headers: copy the source record's headers, and with them its trace context.
        keep_source: add a header with topic, partition and offset of the source's record.
        rejects_topic: the topic of dead letters; ``<topic>.rejects`` by default. Required with
            topic_column.
        ledger_topic: the compacted topic of positions and epochs; pipelines may share one,
            each uses one of its 16 partitions.
        partitions: the number of partitions of the output topic, if it is created; by default as
            many as the largest of the source's topics has.
        create: create the ledger topic, and topics to write to, when they are missing.
        transaction_timeout: the time after which the broker aborts a transaction.
        brokers: the sink's cluster, if you want to name it; any other than the source's is refused.
        kafka: more properties of the producer, with librdkafka's names.
    """

    examples: ClassVar[Mapping[str, str]] = {
        "topic": 'topic = "flights.delayed"',
        "topic_column": 'topic_column = "to_topic"',
        "key": 'key = "carrier"',
        "schema_file": 'schema_file = "order.avsc"',
        "schema_id": "schema_id = 7",
        "partitions": "partitions = 12",
        "brokers": 'brokers = "127.0.0.1:9092"',
    }

    kind: Literal["kafka"]
    topic: Annotated[str, AfterValidator(topic_name)] | None = None
    topic_column: Annotated[str, Field(min_length=1)] | None = None
    key: Annotated[str, Field(min_length=1)] | None = None
    value: Annotated[str, Field(min_length=1)] = "json"
    decimals: Literal["text", "number"] = "text"
    schema_file: FileName | None = None
    schema_id: Annotated[int, Field(ge=1)] | None = None
    timestamp: Literal["write", "source"] = "write"
    headers: bool = False
    keep_source: bool = False
    rejects_topic: Annotated[str, AfterValidator(topic_name)] | None = None
    ledger_topic: Annotated[str, AfterValidator(topic_name)] = "oncely.ledger"
    partitions: Annotated[int, Field(ge=1, le=10_000)] | None = None
    create: bool = True
    rounding: Rounding = "refuse"
    max_rejects: Budget = parse_budget("1%")
    transaction_timeout: Annotated[float, BeforeValidator(transaction_seconds)] = 60.0
    brokers: Annotated[str, AfterValidator(broker_list)] | None = None
    kafka: Annotated[dict[str, str], BeforeValidator(producer_keys)] = Field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The column of the key, if there is one."""
        return (self.key,) if self.key else ()

    @property
    def rejects(self) -> str:
        """The topic of dead letters."""
        return self.rejects_topic or f"{self.topic}.rejects"

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that the sink writes to and whose name is known."""
        return tuple(filter(None, (self.topic, self.rejects, self.ledger_topic)))

    @property
    def target(self) -> str:
        """The topic, or the column that names it."""
        return self.topic or self.topic_column or ""

    def problems(self, pipeline: PipelineSettings) -> list[Problem]:
        """What does not go with the rest of the file."""
        given = {"headers": self.headers, "timestamp": self.timestamp == "source"}
        return topic_problems(pipeline.source, self.topics, "sink.topic") + [
            Problem(f"sink.{name}", "a row of a Spark transform comes from no single record",
                    "remove it, or use transform.sql or .python")
            for name, by_record in given.items()
            if by_record and pipeline.by_spark
        ]  # fmt: skip

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if found := [*_topic_problems(self), *_value_problems(self)]:
            raise all_invalid(found)
        return self


def _topic_problems(sink: KafkaSinkSettings) -> list[Problem]:
    found = []
    if (sink.topic is None) == (sink.topic_column is None):
        both = "both are given" if sink.topic else "one of the two is needed"
        found.append(Problem("topic", f"topic and topic_column: {both}",
                             'keep one: topic = "flights.delayed"'))  # fmt: skip
    if sink.topic is None and sink.topic_column is not None and sink.rejects_topic is None:
        found.append(Problem("rejects_topic", "is missing; with topic_column it has no default",
                             'add rejects_topic = "flights.rejects"'))  # fmt: skip
    named = [name for name in sink.topics if name]
    for name in sorted({name for name in named if named.count(name) > 1}):
        found.append(Problem("topic", f"{name} is used for two purposes",
                             "records, rejects and ledger need topics of their own"))  # fmt: skip
    if sink.topic_column is not None and sink.partitions is not None:
        found.append(Problem("partitions", "has no meaning with topic_column: topics that it names"
                             " are not created", "remove it"))  # fmt: skip
    if sink.topic_column is not None and sink.topic_column in (sink.key, sink.value):
        found.append(Problem("topic_column", "is the column of key or value",
                             "use a column of its own"))  # fmt: skip
    return found


def _value_problems(sink: KafkaSinkSettings) -> list[Problem]:
    if sink.value != "json" and sink.decimals != "text":
        return [Problem("decimals", 'has no meaning unless value = "json"', "remove it")]
    if sink.value == "avro" and sink.schema_file is None:
        return [Problem("schema_file", 'is missing; value = "avro" needs the schema',
                        'add schema_file = "delayed.avsc"')]  # fmt: skip
    if sink.value == "avro":
        return []
    given = {"schema_file": sink.schema_file, "schema_id": sink.schema_id}
    return [
        Problem(name, 'has no meaning unless value = "avro"', "remove it")
        for name, value in given.items()
        if value is not None
    ]
