"""Runs a pipeline: problems are detected before the start as far as possible."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oncely.core import events
from oncely.errors import ConfigError, Fenced, OncelyError, Unavailable
from oncely.extras import require
from oncely.pipeline.event_log import EventLog
from oncely.pipeline.probes import Http, probed
from oncely.pipeline.sessions import check_session, started
from oncely.pipeline.standby import OnFenced, fenced, run_when_elected
from oncely.runtimes.mirror import Mirror
from oncely.runtimes.spark import session
from oncely.runtimes.spark.run import RunSettings, SparkRun
from oncely.runtimes.stop import StopSignal
from oncely.runtimes.telemetry import traced

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.pipeline import Pipeline

log = logging.getLogger(__name__)
_OUT_OF_MEMORY = 52  # Spark's own exit code
_DYING = 1.0  # seconds: a call to a JVM fails shortly before its process has ended


def run(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    stop: StopSignal,
    listener: events.Listener,
    spark: SparkSession | None,
    path: str | Path | None = None,
    http: Http | None = None,
    on_fenced: OnFenced = "end",
) -> bool:
    """See :meth:`oncely.pipeline.Pipeline.run`."""
    name, group = pipeline.settings.name, pipeline.settings.shown_group
    with (
        logged(pipeline, path, listener) as told,
        probed(pipeline, http, told) as heard,
        traced(name, group or name, heard) as observed,
    ):
        return telling_the_end(
            observed, lambda: _started(pipeline, until, stop, observed, spark, on_fenced)
        )


def preflight(pipeline: Pipeline) -> None:
    """Check the pipeline before Spark's start, also for what only a worker does.

    Raises the errors of :meth:`oncely.pipeline.Pipeline.preflight`.
    """
    require("spark", "spark", "a run on Spark")
    key = pipeline.settings.filter.waits
    if key is not None:
        raise ConfigError(
            f"filter.{key}",
            "a run on Spark does not wait for single records",
            way_out="start it by `oncely work`, or remove it",
        )
    pipeline.preflight()


def logged(
    pipeline: Pipeline, path: str | Path | None, listener: events.Listener
) -> AbstractContextManager[events.Listener]:
    """The listener, with an event log before it if there is a path.

    In a folder each pipeline has a file of its own.

    Raises:
        WrongInput: the log can't be written.
    """
    if path is None:
        return nullcontext(listener)
    name = pipeline.settings.name
    file = Path(path) / f"{name}.jsonl" if Path(path).is_dir() else path
    return EventLog(file, name, pipeline.secrets, then=listener)


def telling_the_end(listener: events.Listener, run: Callable[[], bool]) -> bool:
    """Run, and tell the listener how it has ended."""
    complete, said, kind = False, "", ""
    try:
        complete = run()
        return complete
    except Fenced as error:
        listener(fenced(error))
        said, kind = error.message, type(error).__name__
        raise
    except BaseException as error:
        kind = type(error).__name__
        said = error.message if isinstance(error, OncelyError) else kind
        raise
    finally:
        listener(events.RunClosed(complete, said, kind))


def _started(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    stop: StopSignal,
    listener: events.Listener,
    spark: SparkSession | None,
    on_fenced: OnFenced,
) -> bool:
    preflight(pipeline)
    given = spark or session.existing()
    if given is not None:
        check_session(given, our_query=True)
    with started(pipeline, given) as running:
        if stop.draining:
            return False
        work = partial(_run, pipeline, until, stop, listener, running)
        if on_fenced == "wait":
            return run_when_elected(pipeline, work, stop, listener)
        return work()


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
        raise meaning(error) from error
    finally:
        if batches is not None:
            batches.close()


def meaning(error: Exception) -> Exception:
    """Replace errors of a dead JVM, which differ by the place of the call."""
    code = spark_has_died(error)
    if code is None:
        return error
    if code == _OUT_OF_MEMORY:
        return Unavailable(
            "Spark's Java process has ended: it ran out of memory",
            way_out='give it more, such as "spark.driver.memory" = "4g" in [spark.conf], and start'
            " again: committed records are kept, the current batch is read again",
        )
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return Unavailable(
        f"Spark's Java process has ended {how}",
        way_out="start again: committed records are kept, the current batch is read again. Signal 9"
        " is often the kernel's answer to a lack of memory",
    )


def spark_has_died(error: Exception) -> int | None:
    """The exit code of Spark's Java process, if its end may be the cause of ``error``."""
    process = session.java_process()
    if process is None or not type(error).__module__.startswith(("py4j", "pyspark", "builtins")):
        return None
    try:
        return process.wait(_DYING)
    except subprocess.TimeoutExpired:
        return None
