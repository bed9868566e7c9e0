"""Checks of Spark sessions that Oncely has not created, for settings that the guarantee
requires."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oncely.artifacts import SPARK_KAFKA
from oncely.config.spark import is_local, refusal
from oncely.errors import ConfigError
from oncely.runtimes.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.pipeline import Pipeline

_ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
_HIDDEN = ("password", "secret", "token", "credential", "access.key", "keystore.key", "jaas")
_NAMES_BATCHES = "spark.sql.streaming.minBatchesToRetain"

_Allows = Callable[[str], bool]
_ALLOWED: Mapping[str, _Allows] = {
    _ATTEMPTS: lambda value: value == "1",
    _NAMES_BATCHES: lambda value: value.isdecimal() and int(value) > 1,
    "spark.sql.streaming.disabledV2MicroBatchReaders": lambda value: "kafka" not in value.lower(),
    "spark.sql.streaming.kafka.useDeprecatedOffsetFetching": lambda value: value != "true",
}
"""Settings that break the guarantee in any query, and their allowed values."""

_ALLOWED_TO_OURS: Mapping[str, _Allows] = {
    "spark.sql.streaming.checkpointFileManagerClass": lambda value: (
        value.rpartition(".")[2]
        in ("FileSystemBasedCheckpointFileManager", "FileContextBasedCheckpointFileManager")
    ),
    "spark.redaction.regex": lambda value: _hides(value, _HIDDEN),
    "spark.sql.redaction.options.regex": lambda value: _hides(value, ("url", *_HIDDEN[:4])),
}
"""Likewise for a query of Oncely, with the pipeline's options and a checkpoint of its own.

A checkpoint location of the session is not included: that of the query overrides it.
"""


@contextmanager
def started(pipeline: Pipeline, given: SparkSession | None) -> Iterator[SparkSession]:
    """The session that is given; otherwise a new one, which is stopped at the end."""
    if given is not None:
        yield given
        return
    own = pipeline.start_spark()
    try:
        yield own
    finally:
        session.stop(own)


def check_session(spark: SparkSession, *, our_query: bool) -> None:
    """Refuse a session that Oncely has not created and that does not fulfil its requirements.

    Args:
        spark: a session of the user's.
        our_query: True if Oncely reads Kafka itself; False if it writes an existing DataFrame.

    Raises:
        ConfigError: names the setting, or the package of the Kafka connector.
    """
    if session.is_ours(spark):
        return
    conf = {**dict(spark.sparkContext.getConf().getAll()), **dict(spark.conf.getAll)}
    check_settings(conf, our_query=our_query)
    if our_query and not _reads_kafka(spark):
        raise ConfigError(
            "spark",
            "the Spark session that exists has no Kafka connector",
            way_out=f'begin it with .config("spark.jars.packages", "{SPARK_KAFKA}"), or stop it:'
            " then one with the connector is made",
        )


def check_settings(conf: Mapping[str, str], *, our_query: bool) -> None:
    """Refuse the settings of a session that break the guarantee.

    Raises:
        ConfigError: names the setting.
    """
    rules = {**_ALLOWED, **_ALLOWED_TO_OURS} if our_query else _ALLOWED
    wrong = [key for key, allows in rules.items() if key in conf and not allows(conf[key])]
    # In one process no shuffle output is lost, and Spark's default is harmless.
    if _ATTEMPTS not in conf and not is_local(conf.get("spark.master", "")):
        wrong.append(_ATTEMPTS)
    if our_query:
        wrong += [key for key in conf if key.startswith("spark.kafka.clusters.")]
    for key in wrong:
        found = f"is {conf[key]!r}" if key in conf else "is not set"
        reason = (refusal(key) or ("", ""))[0]
        way_out = f'begin the session with .config("{key}", "1")' if key == _ATTEMPTS else ""
        raise ConfigError(
            key,
            f"{found} in the Spark session that exists: {reason}",
            way_out=way_out or "begin the session without it",
        )


def _hides(regex: str, names: tuple[str, ...]) -> bool:
    try:
        pattern = re.compile(regex)
    except re.error:  # Java's syntax has more features
        return False
    return all(pattern.search(name) for name in names)


def _reads_kafka(spark: SparkSession) -> bool:
    jvm, state = spark._jvm, spark._jsparkSession.sessionState()
    lookup = jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource
    try:
        lookup("kafka", state.conf())
    except Exception:
        return False
    return True
