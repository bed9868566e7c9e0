"""``[spark]``: the master, and the settings that would break the guarantee; and ``[worker]``: the
consumer group of `oncely work`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from oncely.config.base import (
    MASTER,
    PROPERTIES,
    Problem,
    Section,
    all_invalid,
    between,
    filled,
    invalid,
    parse_seconds,
    parse_size,
    plain_table,
    revealed,
    shown,
    written,
)

_LOCAL = re.compile(r"local(\[\s*(\d+|\*)\s*(,\s*\d+\s*)?\])?")
_CLUSTER = re.compile(r"(spark|k8s)://\S+|yarn|local-cluster\[\d+,\d+,\d+\]")

REFUSED: Mapping[str, tuple[str, str]] = {
    "spark.master": ("it has its own setting", "write it as master in [spark]"),
    "spark.app.name": ("it is the pipeline's name", "write it as name at the top of the file"),
    "spark.submit.deployMode": (
        "the driver is the process that runs `oncely run`; it can't be elsewhere",
        "start `oncely run` on the driver's machine",
    ),
    "spark.remote": ("Spark Connect's server would hold the driver", "use master in [spark]"),
    "spark.api.mode": ("Spark Connect's server would hold the driver", "remove it"),
    "spark.stage.maxConsecutiveAttempts": (
        "a partial rerun of a stage mixes two results of order-dependent operations",
        "remove it: the whole batch is repeated",
    ),
}  # fmt: skip
"""Settings that are refused: the reason, and the way out.

All other settings are safe. Retries (``spark.task.maxFailures``), ``spark.speculation``, dynamic
allocation and lost executors end in one compare-and-set, in any order. Adaptive execution, shuffle
and Arrow settings change batches of rows, never which offsets a task is given.
"""


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


def _conf_problem(key: str, value: object) -> list[Problem]:
    refused = REFUSED.get(key)
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
        trigger: the time between the starts of two batches; ``"0 seconds"`` for no pause.
        max_records_per_batch: the maximum number of offsets in one batch.
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


_named = filled("name it, or remove it")
LONGEST_SESSION = 300.0
"""Seconds; librdkafka refuses more than the longest time between two polls."""

_session = between(
    parse_seconds,
    1,
    LONGEST_SESSION,
    "1 second to 5 minutes, within which a member polls (max.poll.interval.ms)",
    'write "10 seconds"; the broker has limits of its own (group.min.session.timeout.ms)',
)
_revoke = between(parse_seconds, 1, 3600, "1 second to 1 hour", 'write "10 seconds"')
_memory = between(parse_size, 32 << 20, 8 << 30, "32 MiB to 8 GiB", 'write "256 MiB"')

_patience = between(
    parse_seconds,
    1,
    86_400,
    "1 second to 24 hours",
    'write "5 minutes"; the process then ends with exit code 1, for its supervisor to start it',
)


class WorkerSettings(Section):
    """``[worker]``: how the processes of `oncely work` share the partitions.

    Attributes:
        group: the consumer group; by default that of ``source.group``, or ``oncely-<name>``.
        protocol: the protocol of its rebalances: ``eager`` and ``cooperative`` are those of all
            brokers, ``consumer`` is KIP-848 and needs brokers of version 4.0 or later.
        instance: the name of a static member (KIP-345); different in each process, and the same
            after its restart.
        session_timeout: the time after which a silent member loses its partitions. With
            ``consumer`` the broker decides.
        revoke_timeout: the time for which the commit in hand is awaited when partitions are
            revoked.
        on_rebalance: ``keep``: partitions that stay with the member go on undisturbed. ``restart``:
            what is in memory of all partitions is committed, within ``revoke_timeout``, and those
            that stay begin again.
        patience: the time of errors without a commit, after which the process ends with exit
            code 1.
        max_records: of a commit.
        buffer: the records in memory of the process: fetched, buffered and being committed.
    """

    group: Annotated[str, AfterValidator(_named)] | None = None
    protocol: Literal["eager", "cooperative", "consumer"] = "cooperative"
    instance: Annotated[str, AfterValidator(_named)] | None = None
    session_timeout: Annotated[float, BeforeValidator(_session)] = 10.0
    revoke_timeout: Annotated[float, BeforeValidator(_revoke)] = 10.0
    on_rebalance: Literal["keep", "restart"] = "keep"
    patience: Annotated[float, BeforeValidator(_patience)] = 300.0
    max_records: Annotated[int, Field(ge=1, le=1_000_000)] = 100_000
    buffer: Annotated[int, BeforeValidator(_memory)] = 256 << 20
