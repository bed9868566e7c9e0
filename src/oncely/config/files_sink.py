"""``[sink]`` with ``kind = "files"``: where files lie, what they are, which topics name them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from oncely.clients.files.store import S3Options, Store
from oncely.config.base import Section, as_tuple
from oncely.config.errors import Problem, all_wrong, shown, wrong
from oncely.config.kafka_sink import producer_keys, transaction_seconds
from oncely.config.source import topic_name
from oncely.config.values import RejectBudget, parse_budget, parse_seconds, parse_size
from oncely.errors import ConfigError
from oncely.lake.partitions import parse_partition_by

_TOPIC = Annotated[str, AfterValidator(topic_name)]


def _columns(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        parse_partition_by(value)
    except ConfigError as error:
        raise wrong(error.message.removeprefix(f"{error.key}: "), error.way_out) from None
    return value


def _interval(value: object) -> float:
    seconds = parse_seconds(value)
    if not 0 <= seconds <= 3600:
        raise wrong(f"found {shown(value)}; allowed: up to an hour", 'write "30 seconds"')
    return seconds


def _age(value: object) -> float:
    seconds = parse_seconds(value)
    if seconds < 60:
        raise wrong(
            f"found {shown(value)}; allowed: a minute or more",
            'write "1 hour": a batch must be staged and published within it',
        )
    return seconds


def _file_size(value: object) -> int:
    size = parse_size(value)
    if not 1 << 16 <= size <= 1 << 30:
        raise wrong(f"found {shown(value)}; allowed: 64 KiB to 1 GiB", 'write "64 MiB"')
    return size


class S3Settings(Section):
    """``[sink.s3]``: any S3-compatible server. Without keys the environment is asked for them.

    Attributes:
        endpoint: ``http(s)://host[:port]``; None for Amazon's.
        region: None: the server's default.
        access_key, secret_key, session_token: both keys or none; hidden.
        path_style: ``endpoint/bucket/key``.
        connect_timeout, request_timeout: seconds.
        retries: of a call that failed in passing.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    path_style: bool = True
    connect_timeout: Annotated[float, BeforeValidator(parse_seconds)] = 5.0
    request_timeout: Annotated[float, BeforeValidator(parse_seconds)] = 30.0
    retries: Annotated[int, Field(ge=0, le=20)] = 5

    def options(self) -> S3Options:
        """For the client.

        Raises:
            ConfigError: keys that don't go together.
        """
        given: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            given[name] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return S3Options(**given)


class FilesSinkSettings(Section):
    """``[sink]`` with ``kind = "files"``.

    Attributes:
        url: the root: ``file:///…``, ``s3://bucket/prefix``, or what else pyarrow.fs knows.
        format: of the files.
        partition_by: columns, ``date(column)`` and ``hour(column)``: the directories.
        layout: ``per_partition`` writes where a record was read; ``clustered`` brings together what
            belongs together by one shuffle first, for fewer files.
        manifest_topic: where files are named; one partition, compacted.
        schema_topic: where their schemas are; by default named after the manifest's.
        rejects_topic: of dead letters; by default named after the manifest's.
        ledger_topic: the compacted topic of positions and epochs; pipelines may share one.
        flush_interval: seconds from one micro-batch's start to the next.
        target_file_size: bytes; what a task has more of goes into several files.
        max_staging_age: seconds that files may wait to be published; nothing younger is vacuumed.
        create: create topics that are missing.
        max_rejects: beyond it the pipeline stops; counted over restarts.
        transaction_timeout: seconds after which the broker gives a transaction up.
        kafka: further keys of the producer, by librdkafka's names.
        s3: for ``s3://``.
    """

    kind: Literal["files"]
    url: Annotated[str, Field(min_length=1)]
    format: Literal["avro", "parquet"] = "avro"
    partition_by: Annotated[
        tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(_columns)
    ] = ()
    layout: Literal["per_partition", "clustered"] = "per_partition"
    manifest_topic: _TOPIC
    schema_topic: _TOPIC | None = None
    rejects_topic: _TOPIC | None = None
    ledger_topic: _TOPIC = "oncely.ledger"
    flush_interval: Annotated[float, BeforeValidator(_interval)] = 30.0
    target_file_size: Annotated[int, BeforeValidator(_file_size)] = 64 << 20
    max_staging_age: Annotated[float, BeforeValidator(_age)] = 3600.0
    create: bool = True
    max_rejects: Annotated[
        InstanceOf[RejectBudget],
        BeforeValidator(parse_budget),
        PlainSerializer(str, when_used="json"),
    ] = parse_budget("1%")
    transaction_timeout: Annotated[float, BeforeValidator(transaction_seconds)] = 60.0
    kafka: Annotated[dict[str, str], BeforeValidator(producer_keys)] = Field(default_factory=dict)
    s3: S3Settings | None = None

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
        """Every topic that is written to."""
        return (self.manifest_topic, self.schemas, self.rejects, self.ledger_topic)

    @property
    def store(self) -> Store:
        """Where the files lie.

        Raises:
            ConfigError: the URL can't be one, or its keys don't go together.
        """
        return Store(self.url, None if self.s3 is None else self.s3.options())

    @property
    def _stem(self) -> str:
        return re.sub(r"\.manifest$", "", self.manifest_topic)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        found = []
        for name in sorted({name for name in self.topics if self.topics.count(name) > 1}):
            found.append(Problem("manifest_topic", f"{name} is named for two purposes",
                                 "manifest, schemas, rejects and ledger need topics of their"
                                 " own"))  # fmt: skip
        try:
            _ = self.store
        except ConfigError as error:
            key = error.key.removeprefix("sink.")
            text = error.message.removeprefix(f"{error.key}: ")
            found.append(Problem(key, text, error.way_out))
        if found:
            raise all_wrong(found)
        return self
