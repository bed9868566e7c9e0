"""``oncely run``."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from oncely import artifacts
from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.progress import LiveLine, LogLines, Progress
from oncely.cli.signals import Interrupted, Signals
from oncely.cli.spark_log import SparkLog
from oncely.pipeline import Pipeline
from oncely.runtimes.spark import session
from oncely.runtimes.stop import StopSignal

log = logging.getLogger("oncely.run")
_PATIENCE = 5.0  # seconds that an orderly end may take after the second signal


def run_file(file: Path, until: Literal["latest"] | None, spark_log: Path | None) -> int:
    """Run a pipeline file until it ends or a signal ends it; returns the exit code."""
    stop = StopSignal()
    with Signals(_asked(stop)) as signals:
        try:
            pipeline = opened(file)
            artifacts.java()
            importable(file)
            artifacts.resolve(artifacts.SPARK_KAFKA)  # here, where its progress can be seen
            with (
                _progress(pipeline) as progress,
                SparkLog(pipeline.settings.name, spark_log) as out,
            ):
                done = _run(pipeline, until, stop, signals, progress, out)
        except (Interrupted, KeyboardInterrupt):  # the latter by PySpark's own handler
            log.info("asked to stop before anything was done")
            return 1 if until else 0
    if stop.now:
        log.warning("ended at once: the batch in hand is read again at the next start")
        return 1
    screen.note(progress.tally.summary())
    if until and not done:
        log.warning("asked to stop before everything was committed: start again to go on")
        return 1
    return 0


def _run(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    stop: StopSignal,
    signals: Signals,
    progress: Progress,
    out: SparkLog,
) -> bool:
    progress.say("looking at topics and table")
    pipeline.preflight()
    progress.say("starting Spark")
    spark = pipeline.start_spark(out.file)
    try:
        signals.install()
        signals.nothing_in_hand = False
        if stop.draining:  # raised while Python tidied an object up, Interrupted goes unheard
            raise Interrupted
        progress.say("opening the ledger")
        return pipeline.run(until, stop=stop, listener=progress, spark=spark)
    finally:
        signals.nothing_in_hand = False
        session.stop(spark)


def _progress(pipeline: Pipeline) -> Progress:
    if not screen.err.is_terminal:
        return LogLines()
    watching = replace(pipeline.source)  # clients are not shared between threads
    return LiveLine(pipeline.settings.name, watching.stable_end)


def importable(file: Path) -> None:
    """Let the driver and local workers import the modules that lie beside the pipeline file."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else folder


def _asked(stop: StopSignal) -> Callable[[], None]:
    """What a signal does: drain, then end, then end without waiting for Spark."""

    def asked() -> None:
        if stop.now:
            _force()
        stop.ask()
        if stop.now:
            timer = threading.Timer(_PATIENCE, _force)
            timer.daemon = True
            timer.start()

    return asked


def _force() -> None:
    """End now, whatever hangs. Safe: what is not committed is read again."""
    process = session.java_process()
    if process is not None:
        process.kill()
    screen.err.print("error: Spark did not end in time and was killed; what is committed stays")
    screen.leave_now(1)
