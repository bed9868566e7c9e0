"""``[sink]`` of kinds that write files below a root: its location, and the sizes of files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr

from oncely.config.base import (
    Budget,
    Problem,
    Rounding,
    Section,
    between,
    invalid,
    parse_budget,
    parse_seconds,
    parse_size,
)
from oncely.config.pipeline import PipelineSettings
from oncely.config.sink import SinkSettings
from oncely.errors import ConfigError

if TYPE_CHECKING:
    from oncely.stores.objects.store import S3Options, Store

_RECORDS_A_FLUSH = 5_000_000


def partition_columns(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse the values that :func:`parse_partition_by` refuses."""
    from oncely.kinds.partitions import parse_partition_by

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
        from oncely.stores.objects.store import S3Options

        given: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            given[name] = value.get_secret_value() if isinstance(value, SecretStr) else value
        return S3Options(**given)


class RootSettings(SinkSettings):
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
        from oncely.stores.objects.store import Store

        return Store(self.url, None if self.s3 is None else self.s3.options())

    @property
    def target(self) -> str:
        """The root."""
        return self.url

    @property
    def batch_seconds(self) -> float | None:
        """The seconds between the starts of batches."""
        return self.flush_interval

    @property
    def batch_records(self) -> int | None:
        """Maximum offsets of a batch by default: many, since each batch creates files."""
        return _RECORDS_A_FLUSH

    def problems(self, pipeline: PipelineSettings) -> list[Problem]:
        """What does not go with the rest of the file."""
        if "trigger" not in pipeline.spark.model_fields_set:
            return []
        return [
            Problem("spark.trigger", "has no meaning for files: sink.flush_interval determines "
                    "how often they are written", "remove it")
        ]  # fmt: skip

    def _store_problems(self) -> list[Problem]:
        try:
            _ = self.store
        except ConfigError as error:
            return [Problem(error.key.removeprefix("sink."), error.problem, error.way_out)]
        return []
