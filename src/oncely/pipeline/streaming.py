"""The sink for an existing streaming DataFrame."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from oncely.config.problems import checked, explain, joined
from oncely.core.claim import Takeover
from oncely.core.ranges import SourceIdentity
from oncely.errors import ConfigError
from oncely.kafka.source import KafkaSource
from oncely.kinds.sql.destination import check_table, sink_of
from oncely.kinds.sql.settings import SqlSinkSettings
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql_ledger import look
from oncely.runtimes.spark.plugin import (
    Checkpoint,
    PublishedBatches,
    TopicIds,
    is_stateful,
    row_schema,
)
from oncely.runtimes.spark.session import STREAMING, check_session
from oncely.stores.sql.connection import connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_UNKNOWN = ""


@checked
def write_stream(
    df: DataFrame,
    *,
    name: str,
    url: str,
    table: str,
    checkpoint: str | Path,
    mode: Literal["append", "upsert"] = "append",
    keys: Sequence[str] = (),
    version: str | None = None,
    create: bool = True,
    rounding: Literal["refuse", "allow"] = "refuse",
    trigger: Mapping[str, Any] | None = None,
    output_mode: Literal["append", "update", "complete"] = "append",
    brokers: str | None = None,
    kafka: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start a query that writes a streaming DataFrame into a SQL table, exactly once.

    Each micro-batch is published in one transaction with its number, the checkpoint's id and the
    Kafka offsets that were read, so a repeated batch is recognised. Another checkpoint under the
    same name is refused, unless the query keeps no state and begins at the table's positions.

    Args:
        df: a streaming DataFrame; its columns are the table's.
        name: the ledger's key. A second query of the same name fences the first.
        url, table, mode, keys, version, create, rounding: as in ``[sink]`` of a pipeline file.
        checkpoint: the query's checkpoint location, on any file system that Spark reaches.
        trigger, output_mode: Spark's; a trigger is written as ``{"availableNow": True}``.
        brokers, kafka: as in ``[source]``; when given, a topic that was recreated is refused.

    Returns:
        The running query. It ends with an error of :mod:`oncely.errors` in its text when the
        pipeline is fenced or the checkpoint does not continue the ledger.

    Raises:
        ConfigError, TableMismatch, SourceMismatch, Unavailable: nothing was started.
    """
    _check(df, name)
    settings = _sink_settings(
        url=url, table=table, mode=mode, keys=tuple(keys), version=version, create=create,
        rounding=rounding,
    )  # fmt: skip
    sink = sink_of(name, settings, row_schema(df), connect)
    check_table(sink)
    source = None if brokers is None else KafkaSource(brokers, (), dict(kafka or {}))
    batches = _take_over(df, sink, source, str(checkpoint))
    return _start(df, name, batches, str(checkpoint), output_mode, trigger)


def _check(df: DataFrame, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "name",
            f"found {name!r}; allowed: 1 to 100 letters, digits, underscores, dots, dashes",
            way_out="use a short name: it is the ledger's key",
        )
    if not df.isStreaming:
        raise ConfigError(
            "df",
            "is not a streaming DataFrame",
            way_out="make it by spark.readStream; a batch has no checkpoint to continue from",
        )
    if any(query.name == _query_name(name) for query in df.sparkSession.streams.active):
        raise ConfigError(
            "name",
            f"a query that writes {name!r} runs in this Spark session",
            way_out="stop it first, or give this one another name",
        )
    check_session(df.sparkSession, STREAMING)


def _query_name(name: str) -> str:
    return f"oncely_{name}"


def _sink_settings(**given: Any) -> SqlSinkSettings:
    raw = {"kind": "sql", **given}
    try:
        return SqlSinkSettings.model_validate(raw)
    except ValidationError as error:
        raise joined(explain(error, raw), "write_stream") from None


def _take_over(
    df: DataFrame, sink: SqlSink, source: KafkaSource | None, checkpoint: str
) -> PublishedBatches:
    """Take over the ledger, and create the publisher of batches."""
    opened = sink.open(Takeover(SourceIdentity(_cluster_id(sink, source), {}), dict, {}))
    return PublishedBatches(
        sink.bind(),
        opened.fence,
        Checkpoint(df.sparkSession, checkpoint),
        _topic_ids(source),
        is_stateful(df),
    )


def _start(
    df: DataFrame,
    name: str,
    batches: PublishedBatches,
    checkpoint: str,
    output_mode: str,
    trigger: Mapping[str, Any] | None,
) -> StreamingQuery:
    """Start the query that passes its micro-batches to ``batches``."""
    writer = (
        df.writeStream.queryName(_query_name(name))
        .outputMode(output_mode)
        .option("checkpointLocation", checkpoint)
        .foreachBatch(batches)
    )
    return (writer.trigger(**trigger) if trigger else writer).start()


def _cluster_id(sink: SqlSink, source: KafkaSource | None) -> str:
    """The cluster that is read, if known.

    Raises:
        ConfigError: the ledger was begun without brokers, so there is nothing to compare with.
    """
    known = look(sink.ledger).cluster_id
    if source is None:
        return known or _UNKNOWN
    if known == _UNKNOWN:
        raise ConfigError(
            "brokers",
            "the ledger of this name was begun without brokers and has no cluster",
            way_out="leave brokers out, or give the pipeline a new name",
        )
    return source.identity().cluster_id


def _topic_ids(source: KafkaSource | None) -> TopicIds:
    if source is None:
        return lambda _: {}

    def ask(topics: Collection[str]) -> Mapping[str, str]:
        source.topics = sorted(topics)
        return source.identity().topic_ids if topics else {}

    return ask
