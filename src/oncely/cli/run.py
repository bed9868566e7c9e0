"""``oncely run``."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oncely import artifacts
from oncely.cli import options, screen
from oncely.cli.durations import seconds
from oncely.cli.opened import opened
from oncely.cli.progress import LiveLine, LogLines, Progress
from oncely.cli.signals import Interrupted, Signals
from oncely.cli.spark_log import SparkLog
from oncely.core.events import Listener
from oncely.errors import WrongInput
from oncely.pipeline import Pipeline
from oncely.pipeline.probes import Http, probed
from oncely.pipeline.running import logged, preflight
from oncely.pipeline.standby import OnFenced
from oncely.runtimes.spark import session
from oncely.runtimes.stop import StopSignal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("oncely.run")
_PATIENCE = 5.0  # seconds that an orderly end may take after the second signal


def run_file(
    file: Path,
    until: Literal["latest"] | None,
    spark_log: Path | None,
    events: Path | None = None,
    http: Http | None = None,
    on_fenced: OnFenced = "end",
) -> int:
    """Run a pipeline file until it ends or a signal ends it; returns the exit code."""
    stop = StopSignal()
    try:
        with Signals(asked_to_stop(stop, force)) as signals:
            pipeline = opened(file)
            artifacts.java()
            importable(file)
            artifacts.resolve(artifacts.SPARK_KAFKA)  # downloads here, to show the progress
            with (
                progress_of(pipeline) as progress,
                logged(pipeline, events, progress) as told,
                probed(pipeline, http, told) as listener,
                SparkLog(pipeline.settings.name, spark_log) as out,
            ):
                done = _run(pipeline, until, stop, signals, progress, listener, out, on_fenced)
    except (Interrupted, KeyboardInterrupt):  # the latter from PySpark's handler
        log.info("asked to stop before anything was done")
        return 1 if until else 0
    return ended(stop, until, done, progress)


def ended(stop: StopSignal, until: Literal["latest"] | None, done: bool, progress: Progress) -> int:
    """Tell how a run has ended; returns the exit code."""
    if stop.now:
        log.warning("ended at once: the current batch is read again at the next start")
        return 1
    screen.note(progress.tally.summary())
    if until and not done:
        log.warning("asked to stop before everything was committed: start again to continue")
        return 1
    return 0


def probes(
    address: str | None, polling: str | None, consuming: str | None, metrics: str | None = None
) -> Http | None:
    """The probes and metrics that the options ask for.

    Raises:
        WrongInput: a time is no time, or there is no address.
    """
    if address is None and (polling or consuming):
        raise WrongInput("--polling-ttl and --consuming-ttl need --http")
    if address is None and metrics is None:
        return None
    return Http(
        address,
        seconds("--polling-ttl", polling or str(Http.polling_ttl)),
        seconds("--consuming-ttl", consuming or str(Http.consuming_ttl)),
        metrics,
    )


def _run(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    stop: StopSignal,
    signals: Signals,
    progress: Progress,
    listener: Listener,
    out: SparkLog,
    on_fenced: OnFenced,
) -> bool:
    progress.say("checking topics and table")
    preflight(pipeline)

    def run(spark: SparkSession) -> bool:
        progress.say("opening the ledger")
        return pipeline.run(until, stop=stop, listener=listener, spark=spark, on_fenced=on_fenced)

    return on_spark(pipeline, stop, signals, progress, out, run)


def on_spark(
    pipeline: Pipeline,
    stop: StopSignal,
    signals: Signals,
    progress: Progress,
    out: SparkLog,
    run: Callable[[SparkSession], bool],
) -> bool:
    """Run on a Spark session that is started for it, and stopped afterwards."""
    progress.say("starting Spark")
    spark = pipeline.start_spark(out.file)
    try:
        signals.install()
        signals.idle = False
        if stop.draining:  # Interrupted is lost if it is raised inside a finalizer
            raise Interrupted
        return run(spark)
    finally:
        signals.idle = False
        session.stop(spark)


def progress_of(pipeline: Pipeline) -> Progress:
    """The output of a run: a live line on a terminal, else log lines."""
    watching = replace(pipeline.source)  # clients are not shared between threads
    if options.json_logs:
        return LogLines(watching.stable_end)
    if not screen.err.is_terminal:
        return LogLines()
    return LiveLine(pipeline.settings.name, watching.stable_end)


def importable(file: Path) -> None:
    """Let the driver and local workers import the modules beside the pipeline file."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else folder


def asked_to_stop(stop: StopSignal, force: Callable[[], None]) -> Callable[[], None]:
    """The handler of signals: drain, then end, then end at once by ``force``."""

    def asked() -> None:
        if stop.now:
            force()
        stop.ask()
        if stop.now:
            timer = threading.Timer(_PATIENCE, force)
            timer.daemon = True
            timer.start()

    return asked


def force() -> None:
    """End at once, even if a thread hangs. Safe: uncommitted records are read again."""
    process = session.java_process()
    if process is not None:
        process.kill()
    screen.err.print("error: Spark did not end in time and was killed; committed records are kept")
    screen.leave_now(1)
