"""``[sink]`` with ``kind = "files"``: the location and format of files, and their topics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from oncely.config.base import Problem, all_invalid, as_tuple
from oncely.config.pipeline import PipelineSettings
from oncely.config.root import RootSettings, partition_columns
from oncely.config.sink import producer_keys, topic_problems, transaction_seconds
from oncely.config.source import topic_name

_TOPIC = Annotated[str, AfterValidator(topic_name)]


class FilesSinkSettings(RootSettings):
    """``[sink]`` with ``kind = "files"``.

    Attributes:
        format: the format of the files.
        partition_by: the columns, ``date(column)`` and ``hour(column)`` that make up the
            directories.
        layout: ``per_partition`` writes each record in the task that has read it; ``clustered``
            first shuffles the records by directory, for fewer files.
        manifest_topic: the topic that lists the files; one partition, compacted.
        schema_topic: the topic of their schemas; by default named after the manifest topic:
            ``events.schema`` for ``events.manifest``.
        rejects_topic: the topic of dead letters; by default named after the manifest topic.
        ledger_topic: the compacted topic of positions and epochs; pipelines may share one,
            each uses one of its 16 partitions.
        transaction_timeout: the time after which the broker aborts a transaction.
        kafka: more properties of the producer, with librdkafka's names.
    """

    infers: ClassVar[bool] = True
    examples: ClassVar[Mapping[str, str]] = {
        "url": 'url = "s3://lake/events"',
        "schema_topic": 'schema_topic = "events.schema"',
        "manifest_topic": 'manifest_topic = "events.manifest"',
        "partition_by": 'partition_by = ["user", "date(ts)", "hour(ts)"]',
    }

    kind: Literal["files"]
    format: Literal["avro", "parquet"] = "avro"
    partition_by: Annotated[
        tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(partition_columns)
    ] = ()
    layout: Literal["per_partition", "clustered"] = "per_partition"
    manifest_topic: _TOPIC
    schema_topic: _TOPIC | None = None
    rejects_topic: _TOPIC | None = None
    ledger_topic: _TOPIC = "oncely.ledger"
    transaction_timeout: Annotated[float, BeforeValidator(transaction_seconds)] = 60.0
    kafka: Annotated[dict[str, str], BeforeValidator(producer_keys)] = Field(default_factory=dict)

    @property
    def schemas(self) -> str:
        """The topic of schemas."""
        return self.schema_topic or f"{self._stem}.schema"

    @property
    def rejects(self) -> str:
        """The topic of dead letters."""
        return self.rejects_topic or f"{self._stem}.rejects"

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that the sink writes to."""
        return (self.manifest_topic, self.schemas, self.rejects, self.ledger_topic)

    @property
    def _stem(self) -> str:
        return re.sub(r"\.manifest$", "", self.manifest_topic)

    def problems(self, pipeline: PipelineSettings) -> list[Problem]:
        """What does not go with the rest of the file."""
        found = topic_problems(pipeline.source, self.topics, "sink.manifest_topic")
        return found + super().problems(pipeline)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        found = []
        for name in sorted({name for name in self.topics if self.topics.count(name) > 1}):
            found.append(Problem("manifest_topic", f"{name} is used for two purposes",
                                 "manifest, schemas, rejects and ledger need topics of their"
                                 " own"))  # fmt: skip
        found += self._store_problems()
        if found:
            raise all_invalid(found)
        return self
