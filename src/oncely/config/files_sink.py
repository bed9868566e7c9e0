"""``[sink]`` with ``kind = "files"``: the location and format of files, and their topics."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    model_validator,
)

from oncely.config.base import (
    Budget,
    Problem,
    Rounding,
    Section,
    all_invalid,
    as_tuple,
    between,
    invalid,
    parse_budget,
    parse_seconds,
    parse_size,
)
from oncely.config.kafka_sink import producer_keys, transaction_seconds
from oncely.config.source import topic_name
from oncely.errors import ConfigError
from oncely.kinds.partitions import parse_partition_by
from oncely.stores.objects.store import S3Options, Store

_TOPIC = Annotated[str, AfterValidator(topic_name)]


def partition_columns(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse the values that :func:`parse_partition_by` refuses."""
    try:
        parse_partition_by(value)
    except ConfigError as error:
        raise invalid(error.problem, error.way_out) from None
    return value


_interval = between(parse_seconds, 0, 3600, "up to an hour", 'write "30 seconds"')
_age = between(
    parse_seconds,
    60,
    math.inf,
    "a minute or more",
    'write "1 hour": a batch must be staged and published within it',
)
_file_size = between(parse_size, 1 << 16, 1 << 30, "64 KiB to 1 GiB", 'write "64 MiB"')


class S3Settings(Section):
    """``[sink.s3]``: an S3-compatible server. Without keys, those of the environment are used.

    Attributes:
        endpoint: ``http(s)://host[:port]`` of the server; by default Amazon S3.
        region: the region; by default that of the server.
        access_key: the access key; never shown. Both keys or none.
        secret_key: the secret key; never shown.
        session_token: the token of temporary keys; never shown.
        connect_timeout: the time to wait for a connection.
        request_timeout: the time to wait for an answer.
        retries: retries of a call after a transient error.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    connect_timeout: Annotated[float, BeforeValidator(parse_seconds)] = 5.0
    request_timeout: Annotated[float, BeforeValidator(parse_seconds)] = 30.0
    retries: Annotated[int, Field(ge=0, le=20)] = 5

    def options(self) -> S3Options:
        """The options of the S3 client.

        Raises:
            ConfigError: keys that do not go together.
        """
        given: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            given[name] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return S3Options(**given)


class RootSettings(Section):
    """``[sink]`` of a kind that writes files below a root.

    Attributes:
        url: the root: ``file:///…``, ``s3://bucket/prefix``, or another URL that pyarrow.fs
            supports.
        flush_interval: the time from one batch's start to the next; longer: fewer and larger
            files, which are visible later.
        target_file_size: the size of a file; a task with more data writes several.
        max_staging_age: the time that files may wait to be published; younger files are not
            vacuumed.
        create: create missing topics, or a missing table and its missing columns.
        rounding: ``allow`` texts in JSON to lose digits beyond the microseconds of a TIMESTAMP;
            else the record is rejected.
        max_rejects: the reject budget, beyond which the pipeline stops; counted across restarts.
            ``"100%"`` never stops it.
        s3: the settings for ``s3://``.
    """

    url: Annotated[str, Field(min_length=1)]
    flush_interval: Annotated[float, BeforeValidator(_interval)] = 30.0
    target_file_size: Annotated[int, BeforeValidator(_file_size)] = 64 << 20
    max_staging_age: Annotated[float, BeforeValidator(_age)] = 3600.0
    create: bool = True
    rounding: Rounding = "refuse"
    max_rejects: Budget = parse_budget("1%")
    s3: S3Settings | None = None

    @property
    def store(self) -> Store:
        """The store that contains the files.

        Raises:
            ConfigError: the URL is invalid, or its keys do not go together.
        """
        return Store(self.url, None if self.s3 is None else self.s3.options())

    def _store_problems(self) -> list[Problem]:
        try:
            _ = self.store
        except ConfigError as error:
            return [Problem(error.key.removeprefix("sink."), error.problem, error.way_out)]
        return []


class FilesSinkSettings(RootSettings):
    """``[sink]`` with ``kind = "files"``.

    Attributes:
        kind: the kind of the destination.
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
