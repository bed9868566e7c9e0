"""Checks of Spark sessions that Oncely has not created, for settings that the guarantee
requires."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from oncely.config.runtimes import REFUSED, is_local
from oncely.errors import ConfigError
from oncely.runtimes.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.parts import Parts

_ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
Allowed = Mapping[str, tuple[Callable[[str], bool], str]]
"""Settings that break the guarantee: their allowed values, and the reason."""
_ALLOWED: Allowed = {_ATTEMPTS: (lambda value: value == "1", REFUSED[_ATTEMPTS][0])}
STREAMING: Allowed = {
    "spark.sql.streaming.minBatchesToRetain": (
        lambda value: value.isdecimal() and int(value) > 1,
        "with fewer batches kept in the checkpoint, the start of a batch is not known",
    ),
    "spark.sql.streaming.disabledV2MicroBatchReaders": (
        lambda value: "kafka" not in value.lower(),
        "the older Kafka reader plans its ranges in another way",
    ),
    "spark.sql.streaming.kafka.useDeprecatedOffsetFetching": (
        lambda value: value != "true",
        "the older way of fetching offsets joins a consumer group and can wait forever",
    ),
}
"""Those of Structured Streaming, which ``write_stream`` uses."""


@contextmanager
def started(pipeline: Parts, given: SparkSession | None) -> Iterator[SparkSession]:
    """The session that is given; otherwise a new one, which is stopped at the end."""
    if given is not None:
        yield given
        return
    own = pipeline.start_spark()
    try:
        yield own
    finally:
        session.stop(own)


def check_session(spark: SparkSession, more: Allowed = MappingProxyType({})) -> None:
    """Refuse a session that Oncely has not created and that does not fulfil its requirements.

    Args:
        spark: the session.
        more: requirements beside those of every run, such as :data:`STREAMING`.

    Raises:
        ConfigError: names the setting.
    """
    if not session.is_ours(spark):
        asked = {key: spark.conf.get(key, None) for key in (*_ALLOWED, *more)}
        given = {key: value for key, value in asked.items() if value is not None}
        check_settings({**dict(spark.sparkContext.getConf().getAll()), **given}, more)


def check_settings(conf: Mapping[str, str], more: Allowed = MappingProxyType({})) -> None:
    """Refuse the settings of a session that break the guarantee.

    Raises:
        ConfigError: names the setting.
    """
    allowed = {**_ALLOWED, **more}
    wrong = [key for key, (allows, _) in allowed.items() if key in conf and not allows(conf[key])]
    # In one process no shuffle output is lost, and Spark's default is harmless.
    if _ATTEMPTS not in conf and not is_local(conf.get("spark.master", "")):
        wrong.append(_ATTEMPTS)
    for key in wrong:
        found = f"is {conf[key]!r}" if key in conf else "is not set"
        way_out = f'begin the session with .config("{key}", "1")' if key == _ATTEMPTS else ""
        raise ConfigError(
            key,
            f"{found} in the Spark session that exists: {allowed[key][1]}",
            way_out=way_out or "begin the session without it",
        )
