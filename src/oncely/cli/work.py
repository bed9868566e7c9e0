"""``oncely work``."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oncely.cli import screen
from oncely.cli.opened import opened, opened_app
from oncely.cli.run import asked_to_stop, ended, force, importable, on_spark, progress_of
from oncely.cli.signals import Interrupted, Signals
from oncely.cli.spark_log import SparkLog
from oncely.cli.together import finished
from oncely.errors import WrongInput
from oncely.pipeline import Pipeline
from oncely.pipeline.on_spark import check
from oncely.pipeline.probes import Http, probed
from oncely.pipeline.running import logged
from oncely.pipeline.standby import OnFenced
from oncely.pipeline.working import group_of
from oncely.runtimes.stop import StopSignal
from oncely.telemetry import configure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("oncely.work")
_APP = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def work_file(
    file: Path,
    until: Literal["latest"] | None,
    events: Path | None = None,
    http: Http | None = None,
    on_fenced: OnFenced = "end",
) -> int:
    """Work on a pipeline file, or ``module:app``, until it ends or a signal ends it.

    Returns the exit code.
    """
    stop = StopSignal()
    try:
        with Signals(asked_to_stop(stop, _force)) as signals:
            pipeline = _opened(file)
            configure()
            with (
                progress_of(pipeline) as progress,
                logged(pipeline, events, progress) as told,
                probed(pipeline, http, told, group_of(pipeline)) as listener,
            ):
                progress.say("checking topics and table")
                signals.idle = False
                done = pipeline.work(until, stop=stop, listener=listener, on_fenced=on_fenced)
    except (Interrupted, KeyboardInterrupt):
        log.info("asked to stop before anything was done")
        return 1 if until else 0
    return ended(stop, until, [finished(pipeline, progress, done=done)])


def work_on_spark(
    file: Path,
    workers: int | None,
    until: Literal["latest"] | None,
    spark_log: Path | None,
    events: Path | None = None,
    http: Http | None = None,
) -> int:
    """Work on it by several members, as tasks of Spark; as :func:`work_file`.

    Raises:
        WrongInput: their number is missing.
    """
    if workers is None:
        raise WrongInput("--on spark: how many workers?", way_out="add --workers 4")
    stop = StopSignal()
    try:
        with Signals(asked_to_stop(stop, force)) as signals:
            pipeline = _opened(file)
            configure()
            importable(file)
            check(pipeline, workers, pipeline.settings.spark.master)
            with (
                progress_of(pipeline) as progress,
                SparkLog(pipeline.settings.name, spark_log) as out,
            ):
                progress.say("checking topics and table")
                pipeline.preflight()

                def work(spark: SparkSession) -> bool:
                    return pipeline.work(
                        until, stop=stop, listener=progress, events=events, http=http,
                        on="spark", workers=workers, spark=spark,
                    )  # fmt: skip

                done = on_spark(pipeline.start_spark, stop, signals, [progress.say], out, work)
    except (Interrupted, KeyboardInterrupt):
        log.info("asked to stop before anything was done")
        return 1 if until else 0
    return ended(stop, until, [finished(pipeline, progress, done=done)])


def _opened(file: Path) -> Pipeline:
    if _APP.fullmatch(str(file)) and not file.exists():
        return opened_app(str(file))
    pipeline = opened(file)
    importable(file)
    return pipeline


def _force() -> None:
    """End at once, even if a thread hangs. Safe: uncommitted records are read again."""
    screen.err.print("error: a server did not answer in time; committed records are kept")
    screen.leave_now(1)
