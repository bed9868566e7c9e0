"""``[spark]``: the master, and the settings that would break the guarantee."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr

from oncely.config.base import Section, plain_table, revealed
from oncely.config.errors import Problem, all_invalid, invalid, shown
from oncely.config.values import parse_seconds
from oncely.config.written import MASTER, PROPERTIES, written

_LOCAL = re.compile(r"local(\[\s*(\d+|\*)\s*(,\s*\d+\s*)?\])?")
_CLUSTER = re.compile(r"(spark|k8s)://\S+|yarn|local-cluster\[\d+,\d+,\d+\]")

_OFFSETS = "the exact ranges of a batch are read from the checkpoint that Oncely makes"
REFUSED: Mapping[str, tuple[str, str]] = {
    "spark.master": ("it has its own setting", "write it as master in [spark]"),
    "spark.app.name": ("it is the pipeline's name", "write it as name at the top of the file"),
    "spark.submit.deployMode": (
        "the driver is the process that runs `oncely run`; it can't be elsewhere",
        "start `oncely run` on the driver's machine",
    ),
    "spark.remote": ("Spark Connect's server would hold the driver", "use master in [spark]"),
    "spark.api.mode": ("Spark Connect's server would hold the driver", "remove it"),
    "spark.sql.streaming.checkpointLocation": (_OFFSETS, "remove it: positions are in the sink"),
    "spark.sql.streaming.checkpointFileManagerClass": (_OFFSETS, "remove it"),
    "spark.sql.streaming.minBatchesToRetain": (
        f"{_OFFSETS}; with fewer batches kept, the range before is gone",
        "remove it",
    ),
    "spark.stage.maxConsecutiveAttempts": (
        "a partial rerun of a stage mixes two results of order-dependent operations",
        "remove it: the whole batch is repeated",
    ),
    "spark.sql.streaming.disabledV2MicroBatchReaders": (
        "the older Kafka reader plans its ranges in another way",
        "remove it",
    ),
    "spark.sql.streaming.kafka.useDeprecatedOffsetFetching": (
        "the older way of fetching offsets joins a consumer group and can wait forever",
        "remove it",
    ),
    "spark.redaction.regex": ("it decides which secrets Spark hides in its logs", "remove it"),
    "spark.redaction.string.regex": ("it decides which secrets Spark hides", "remove it"),
    "spark.sql.redaction.options.regex": ("it decides which secrets Spark hides", "remove it"),
    "spark.sql.redaction.string.regex": ("it decides which secrets Spark hides", "remove it"),
}  # fmt: skip
"""Settings that are refused: the reason, and the way out.

All other settings are safe. Retries (``spark.task.maxFailures``), ``spark.speculation``, dynamic
allocation and lost executors end in one compare-and-set, in any order. Adaptive execution, shuffle
and Arrow settings change batches of rows, never which offsets a task is given. ``minPartitions``,
``maxRecordsPerPartition`` and ``failOnDataLoss`` are options of the reader and not settings: Spark
reads them from the reader's options only.
"""

_REFUSED_BELOW: Mapping[str, tuple[str, str]] = {
    "spark.kafka.clusters.": (
        "it is a second way to log in to Kafka, which only one of the two clients supports",
        "write it in [source.kafka], by librdkafka's names",
    ),
}


_IS_SECRET = re.compile(
    r"secret|passw|pwd$|token|credential|access[.]?key|private[.]?key|user[._]?info|jaas",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """True if the value of a setting must not be shown: Spark's own pattern and some additions."""
    return _IS_SECRET.search(key) is not None


_STATIC = frozenset(
    f"spark.sql.{key}"
    for key in (
        "broadcastExchange.maxThreadThreshold", "cache.serializer",
        "catalog.spark_catalog.defaultDatabase", "catalogImplementation",
        "codegen.cache.maxEntries", "codegen.comments", "debug",
        "defaultUrlStreamHandlerFactory.enabled", "event.truncate.length", "extensions",
        "extensions.test.loadFromCp", "filesourceTableRelationCacheSize", "globalTempDatabase",
        "hive.thriftServer.singleSession", "legacy.sessionInitWithConfigDefaults",
        "metadataCacheTTLSeconds", "queryExecutionListeners",
        "resultQueryStage.maxThreadThreshold", "shuffleExchange.maxThreadThreshold",
        "sources.disabledJdbcConnProviderList", "sources.schemaStringLengthThreshold",
        "streaming.streamingQueryListeners", "streaming.ui.enabled",
        "streaming.ui.enabledCustomMetricList", "streaming.ui.retainedProgressUpdates",
        "streaming.ui.retainedQueries", "subquery.maxThreadThreshold", "ui.retainedExecutions",
        "warehouse.dir",
    )
)  # fmt: skip
"""The entries of ``StaticSQLConf`` of Spark 4.0: all sessions of an application share them."""


def is_of_session(key: str) -> bool:
    """True for a setting that each session of a Spark application may have its own value of."""
    return key.startswith("spark.sql.") and key not in _STATIC


def is_local(master: str) -> bool:
    """True if driver and tasks are one process."""
    return _LOCAL.fullmatch(master) is not None


def local_tasks(master: str) -> int | None:
    """The number of tasks that a local master runs at a time; None if it is not local."""
    match = _LOCAL.fullmatch(master)
    if match is None:
        return None
    number = match[2] or "1"
    return os.cpu_count() or 1 if number == "*" else int(number)


@written(MASTER)
def parse_master(value: object) -> str:
    """Check ``spark.master``. Raises a problem."""
    if isinstance(value, str) and (is_local(value) or _CLUSTER.fullmatch(value)):
        return value
    raise invalid(
        f"found {shown(value)}; allowed: local[N,F], spark://host:port, yarn, k8s://...",
        'write "local[*,4]": all cores, and four tries for a task',
    )


def conf_problems(conf: Mapping[str, object]) -> list[Problem]:
    """All entries of ``[spark.conf]`` that Spark would ignore, or that break the guarantee."""
    return [problem for key, value in conf.items() for problem in _conf_problem(key, value)]


def refusal(key: str) -> tuple[str, str] | None:
    """The reason why a pipeline file may not have a setting, and the way out; None if it may."""
    for prefix, refused in _REFUSED_BELOW.items():
        if key.startswith(prefix):
            return refused
    return REFUSED.get(key)


def _conf_problem(key: str, value: object) -> list[Problem]:
    refused = refusal(key)
    if refused is not None:
        reason, way_out = refused
        return [Problem(key, f"refused: {reason}", way_out)]
    if not key.startswith("spark."):
        return [Problem(key, "Spark reads no setting that does not begin with spark.",
                        f"write spark.{key}, or spark.hadoop.{key} for Hadoop's own")]  # fmt: skip
    if not isinstance(value, str | int | float):
        return [Problem(key, f"found {shown(value)}; allowed: a text, a number, true or false")]
    return []


@written(PROPERTIES)
def _conf(value: object) -> dict[str, str | SecretStr]:
    values = plain_table(value)
    if found := conf_problems(values):
        raise all_invalid(found)
    texts = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in values.items()}
    return {k: SecretStr(v) if is_secret(k) else v for k, v in texts.items()}


class SparkSettings(Section):
    """``[spark]``: Spark, for ``oncely run``.

    Attributes:
        master: Spark's master URL.
        trigger: the time between the starts of two micro-batches; ``"0 seconds"`` for no pause.
        max_records_per_batch: the maximum number of offsets in one micro-batch.
        conf: Spark's own settings, with names that begin with ``spark.``; secret values are never
            shown.
    """

    master: Annotated[str, BeforeValidator(parse_master)] = "local[*,4]"
    trigger: Annotated[float, BeforeValidator(parse_seconds)] = 1.0
    max_records_per_batch: Annotated[int, Field(ge=1)] = 500_000
    conf: Annotated[dict[str, str | SecretStr], BeforeValidator(_conf)] = Field(
        default_factory=dict
    )

    def spark_conf(self) -> dict[str, str]:
        """The settings with their values, for Spark. Not to be shown."""
        return revealed(self.conf)

    @property
    def is_local(self) -> bool:
        """True if driver and tasks are one process."""
        return is_local(self.master)
