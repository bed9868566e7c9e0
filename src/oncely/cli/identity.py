"""The parts of a pipeline for ``oncely audit FILE --id EXPR``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from oncely.audit.by_identity import Views
from oncely.audit.datasets import frame_of, spark_conf
from oncely.audit.evidence import Log
from oncely.audit.of_pipeline import no_rows
from oncely.audit.spark_rows import sqlite_rows, topic_rows
from oncely.audit.spec import Dataset
from oncely.audit.window import window_of
from oncely.clients.sql.connection import brief_session, connect
from oncely.clients.sql.dialects import dialect_for
from oncely.config import (
    DeltaSinkSettings,
    FilesSinkSettings,
    HandlersSinkSettings,
    KafkaSinkSettings,
    PipelineSettings,
    SqlSinkSettings,
)
from oncely.errors import ConfigError
from oncely.pipeline import Pipeline
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.expected_rows import RowPlan, expected_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def views_of(pipeline: Pipeline, spark: SparkSession, log: Log) -> Views:
    """The parts of a pipeline that the view needs.

    Raises:
        ConfigError: there is no view of this sink.
    """
    # After a Spark transform, the ids of decoded records are compared.
    unchanged = pipeline.spark_transform is not None
    plan = RowPlan(pipeline.decoder, Unchanged() if unchanged else pipeline.row_transform)
    settings = pipeline.settings
    return Views(
        settings,
        partial(expected_rows, plan),
        partial(_rows, pipeline, spark, TemporaryDirectory(prefix="oncely-audit-")),
        partial(window_of, settings),
        log,
    )


def spark_conf_of(settings: PipelineSettings) -> dict[str, str]:
    """The settings of a session that reads the destination."""
    found = _dataset(settings.sink)
    return {} if found is None else spark_conf(found)


def _rows(pipeline: Pipeline, spark: SparkSession, folder: TemporaryDirectory[str]) -> DataFrame:
    from oncely import files

    settings, sink = pipeline.settings, pipeline.settings.sink
    if isinstance(sink, FilesSinkSettings):
        return files.read(spark, pipeline)
    if isinstance(sink, KafkaSinkSettings):
        return topic_rows(spark, settings, sink, pipeline.row_schema())
    if isinstance(sink, HandlersSinkSettings):
        raise no_rows()
    found = _dataset(sink)
    if isinstance(sink, SqlSinkSettings) and found is None:
        return sqlite_rows(spark, settings, sink, pipeline.row_schema(), Path(folder.name))
    assert found is not None  # noqa: S101 - for mypy
    return frame_of(spark, found)


def _dataset(
    sink: object,
) -> Dataset | None:
    """The destination for Spark's own readers; None if none of them gives its rows."""
    if isinstance(sink, SqlSinkSettings) and sink.dialect == "postgresql":
        return _postgres(sink)
    if isinstance(sink, DeltaSinkSettings):
        path = sink.url.replace("s3://", "s3a://", 1)
        return Dataset("right", "delta", path)
    return None


def _postgres(sink: SqlSinkSettings) -> Dataset:
    """The table for Spark's JDBC reader, which knows hosts and ports only."""
    to = urlsplit(sink.url.get_secret_value())
    query = dict(parse_qsl(to.query))
    host = query.pop("host", None) or to.netloc.rpartition("@")[2]
    if not host or host.startswith("/"):
        raise ConfigError(
            "sink.url", "Java's driver can't connect to a Unix socket",
            way_out="write host and port: postgresql://user@host:5432/database",
        )  # fmt: skip
    named = {"sslmode", "sslrootcert", "sslcert", "sslkey", "options"}
    url = f"jdbc:postgresql://{host}{to.path}"
    more = "&".join(f"{key}={value}" for key, value in query.items() if key in named)
    dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
    with brief_session(dialect, "audit", connect) as look:
        table = dialect.relation(look, sink.table).rows.replace("%%", "%")
    options = {"url": f"{url}?{more}" if more else url, "dbtable": table}
    login = {"user": to.username, "password": to.password}
    return Dataset(
        "right", "jdbc", options=options | {k: unquote(v) for k, v in login.items() if v}
    )
