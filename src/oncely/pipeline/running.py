"""Runs a pipeline: what can be found wrong is found before anything is started or written."""

from __future__ import annotations

import logging
import subprocess
from typing import TYPE_CHECKING, Literal

from oncely.core import events
from oncely.errors import OncelyError, Unavailable
from oncely.pipeline.sessions import check_session
from oncely.runtimes.mirror import Mirror
from oncely.runtimes.spark import session
from oncely.runtimes.spark.run import RunSettings, SparkRun
from oncely.runtimes.stop import StopSignal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.pipeline import Pipeline

log = logging.getLogger(__name__)
_OUT_OF_MEMORY = 52  # Spark's own exit code
_DYING = 1.0  # seconds: a call to a JVM fails a little before its process has ended


def run(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    stop: StopSignal,
    listener: events.Listener,
    spark: SparkSession | None,
) -> bool:
    """See :meth:`oncely.pipeline.Pipeline.run`."""
    pipeline.preflight()
    given = spark or session.existing()
    if given is not None:
        check_session(given, our_query=True)
    own = None if given is not None else pipeline.start_spark()
    started = given or own
    try:
        if started is None or stop.draining:
            return False
        return _run(pipeline, until, stop, listener, started)
    finally:
        if own is not None:
            session.stop(own)


def _run(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    stop: StopSignal,
    listener: events.Listener,
    spark: SparkSession,
) -> bool:
    settings = pipeline.settings
    batches = None
    try:
        batches = pipeline.batches(spark)
        if pipeline.spark_path is not None:  # its columns were not known before
            pipeline.destination.check(pipeline.row_schema(spark))
        return SparkRun(
            session=spark,
            source=pipeline.source,
            batches=batches,
            settings=RunSettings(
                name=settings.name,
                start=settings.source.start,
                on_gap=settings.source.on_gap,
                trigger_seconds=settings.trigger_seconds,
                max_records_per_batch=settings.max_records_per_batch,
            ),
            mirror=Mirror(pipeline.source, pipeline.mirror_group),
            stop=stop,
            listener=listener,
        ).run(until_latest=until == "latest")
    except OncelyError:
        raise
    except Exception as error:
        raise _meaning(error) from error
    finally:
        if batches is not None:
            batches.close()


def _meaning(error: Exception) -> Exception:
    """A JVM that has died leaves a different error at every place where it is called."""
    code = spark_has_died(error)
    if code is None:
        return error
    if code == _OUT_OF_MEMORY:
        return Unavailable(
            "Spark's Java process has ended: it ran out of memory",
            way_out='give it more, such as "spark.driver.memory" = "4g" in [spark.conf], and start'
            " again: what is committed stays, the batch in hand is read again",
        )
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return Unavailable(
        f"Spark's Java process has ended {how}",
        way_out="start again: what is committed stays, the batch in hand is read again. Signal 9"
        " is often the kernel's answer to a lack of memory",
    )


def spark_has_died(error: Exception) -> int | None:
    """The exit code of Spark's Java process, when its end may be what ``error`` is about."""
    process = session.java_process()
    if process is None or not type(error).__module__.startswith(("py4j", "pyspark", "builtins")):
        return None
    try:
        return process.wait(_DYING)
    except subprocess.TimeoutExpired:
        return None
