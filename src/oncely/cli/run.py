"""``oncely run`` and ``oncely work``, until their end or a signal."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Self

from oncely import artifacts
from oncely.cli import options, screen, verbs
from oncely.cli.opened import files_of, opened, opened_app, opened_together, seconds
from oncely.cli.progress import (
    LiveLine,
    LiveLines,
    LogLines,
    Progress,
    Run,
    SparkLog,
    each,
    finished,
    refuse_failed,
    telling,
)
from oncely.commit.backoff import Retries
from oncely.errors import Interrupted, OncelyError, WrongInput
from oncely.pipeline import Pipeline
from oncely.pipeline.running import Http, Probed, logged, preflight, probed, probed_together
from oncely.telemetry import configure
from oncely.threads import StopSignal
from oncely.users_function import without_pandas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.application import Application

log = logging.getLogger("oncely.run")
_PATIENCE = 5.0  # seconds that an orderly end may take after the second signal


def run_files(asked: verbs.Run) -> int:
    """Run pipeline files in one Spark application until they end or a signal ends them.

    Returns the exit code.
    """
    http = probes(asked.serving)

    def begun(stop: StopSignal, signals: Signals) -> Sequence[Run]:
        application = opened_together(files_of(asked.files))
        configure()
        if application.on_spark:
            artifacts.java()
        with (
            _runs_of(application, asked.events, http) as runs,
            SparkLog(application.name, asked.spark_log) as out,
        ):
            _run(application, runs, asked, stop, signals, out)
        return runs

    return until_stopped(asked.until, force, begun)


def until_stopped(
    until: verbs.Ending | None,
    force: Callable[[], None],
    begun: Callable[[StopSignal, Signals], Sequence[Run]],
) -> int:
    """Run pipelines until they end or a signal ends them.

    Args:
        until: the condition under which they end by themselves.
        force: ends the process, if an orderly end takes too long.
        begun: opens and runs them.

    Returns:
        The exit code.
    """
    stop = StopSignal()
    try:
        with Signals(asked_to_stop(stop, force)) as signals:
            runs = begun(stop, signals)
    except (Interrupted, KeyboardInterrupt):  # the latter from PySpark's handler
        log.info("asked to stop before anything was done")
        return 1 if until else 0
    return ended(stop, until, runs)


def ended(stop: StopSignal, until: verbs.Ending | None, runs: Sequence[Run]) -> int:
    """Tell how runs have ended; returns the exit code.

    Raises:
        The errors of those that have failed.
    """
    if stop.now:
        log.warning("ended at once: the current batch is read again at the next start")
        return 1
    for one in runs:
        screen.note("\n".join(one.end()))
    if until and not all(one.done for one in runs):
        log.warning("asked to stop before everything was committed: start again to continue")
        return 1
    return 0


@contextmanager
def _runs_of(
    application: Application, events: Path | None, http: Http | None
) -> Iterator[Sequence[Run]]:
    """The runs of the pipelines with their output, event logs and probes."""
    pipelines = application.pipelines
    if events is not None and len(pipelines) > 1 and not events.is_dir():
        raise WrongInput(
            f"--events {events}: no folder", way_out="several pipelines need a folder: create it"
        )
    lines = LiveLines()
    with ExitStack() as stack:
        outputs = [stack.enter_context(progress_of(one, lines)) for one in pipelines]
        told = [
            stack.enter_context(logged(one, events, output))
            for one, output in zip(pipelines, outputs, strict=True)
        ]
        given = [Probed(one, listener) for one, listener in zip(pipelines, told, strict=True)]
        heard = stack.enter_context(probed_together(given, http))
        alone = len(pipelines) == 1
        yield [Run(*one, alone) for one in zip(pipelines, outputs, heard, strict=True)]


def probes(given: verbs.Serving) -> Http | None:
    """The probes and metrics that the options ask for.

    Raises:
        WrongInput: a time is no time, or there is no address.
    """
    if given.http is None and (given.polling_ttl or given.consuming_ttl):
        raise WrongInput("--polling-ttl and --consuming-ttl need --http")
    if given.http is None and given.metrics is None and given.allow_host:
        raise WrongInput("--allow-host needs --http or --metrics")
    if given.http is None and given.metrics is None:
        return None
    return Http(
        given.http,
        seconds("--polling-ttl", given.polling_ttl or str(Http.polling_ttl)),
        seconds("--consuming-ttl", given.consuming_ttl or str(Http.consuming_ttl)),
        given.metrics,
        tuple(given.allow_host or ()),
    )


def _run(
    application: Application,
    runs: Sequence[Run],
    asked: verbs.Run,
    stop: StopSignal,
    signals: Signals,
    out: SparkLog,
) -> None:
    for one in runs:
        one.say("checking topics and table")
    if application.on_spark or len(runs) > 1:
        # Before Spark's start, which takes seconds; and a run that fails here fails alone, in its
        # own check.
        each(runs, lambda run: preflight(run.pipeline))
        refuse_failed(runs, unless_any_is_left=True)

    def work(spark: SparkSession | None) -> None:
        def one(run: Run) -> object:
            if not run.alone:
                _await_servers(run, stop)
                if stop.draining:
                    return False
            if application.on_spark or not run.alone:
                run.say("opening the ledger")
            own = None
            if spark is not None and run.pipeline.settings.runtime == "spark":
                own = application.enter(spark, run.pipeline)
            return run.pipeline.run(
                asked.until,
                stop=stop,
                listener=run.listener,
                spark=own,
                on_fenced=asked.on_fenced,
            )

        each(runs, telling(one))

    if application.on_spark:
        _on_spark(application.start_spark, stop, signals, [one.say for one in runs], out, work)
    else:
        without_pandas()
        signals.idle = False
        work(None)
    refuse_failed(runs)


def _await_servers(run: Run, stop: StopSignal) -> None:
    """Wait while a server of one of several pipelines is away: no supervisor restarts it alone.

    Any other error, and one that stays, is raised by the run, which makes the checks again.
    """
    retries = Retries(run.listener)
    with suppress(OncelyError):
        while not stop.draining:
            try:
                preflight(run.pipeline)
            except OncelyError as error:
                stop.wait(retries.pause(error))
            else:
                break


def _on_spark(
    start: Callable[[IO[bytes] | None], SparkSession],
    stop: StopSignal,
    signals: Signals,
    say: Sequence[Callable[[str], None]],
    out: SparkLog,
    run: Callable[[SparkSession], None],
) -> None:
    """Run on a Spark session that is started for it, and stopped afterwards."""
    from oncely.runtimes.spark import session

    for one in say:
        one("starting Spark")
    spark = start(out.file)
    try:
        signals.install()
        signals.idle = False
        if stop.draining:  # Interrupted is lost if it is raised inside a finalizer
            raise Interrupted
        run(spark)
    finally:
        signals.idle = False
        session.stop(spark)


def progress_of(pipeline: Pipeline, lines: LiveLines | None = None) -> Progress:
    """The output of a run: a live line (one of ``lines``) on a terminal, else log lines."""
    watching = replace(pipeline.source)  # clients are not shared between threads
    if options.log["log_format"] == "json":
        return LogLines(watching.stable_end)
    if not screen.err.is_terminal:
        return LogLines()
    return LiveLine(pipeline.settings.name, watching.stable_end, lines)


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
    from oncely.runtimes.spark import session

    process = session.java_process()
    if process is not None:
        process.kill()
    screen.err.print(
        "error: the run did not end in time and was killed; committed records are kept"
    )
    screen.leave_now(1)


# -- work ----------------------------------------------------------------------------------


_APP = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def work_file(asked: verbs.Work) -> int:
    """Work on a pipeline file, or ``module:app``, until it ends or a signal ends it.

    Returns the exit code.
    """
    http = probes(asked.serving)

    def begun(stop: StopSignal, signals: Signals) -> list[Run]:
        pipeline = _worker_of(asked.file)
        with (
            progress_of(pipeline) as progress,
            logged(pipeline, asked.events, progress) as told,
            probed(pipeline, http, told, pipeline.settings.worker_group) as listener,
        ):
            progress.say("checking topics and table")
            signals.idle = False
            done = pipeline.work(
                asked.until, stop=stop, listener=listener, on_fenced=asked.on_fenced
            )
        return [finished(pipeline, progress, done=bool(done))]

    return until_stopped(asked.until, _force, begun)


def _worker_of(file: Path) -> Pipeline:
    if _APP.fullmatch(str(file)) and not file.exists():
        pipeline = opened_app(str(file))
    else:
        without_pandas()
        pipeline = opened(file, imports=True)
    configure()
    return pipeline


def _force() -> None:
    """End at once, even if a thread hangs. Safe: uncommitted records are read again."""
    screen.err.print(
        "error: a server did not answer, or a function did not return, in time; committed records"
        " are kept"
    )
    screen.leave_now(1)


# -- signals --------------------------------------------------------------------------------

_ASKED_BY = (signal.SIGINT, signal.SIGTERM)
_entered: list[Signals] = []


class Signals:
    """Catches SIGINT and SIGTERM within a ``with`` block: the first ends the run after the current
    batch, the second ends it at once. For the main thread.

    Python runs a signal handler only when its main thread gets back to Python code, and that thread
    may be in a call to a hanging JVM. So a separate thread reads the signals' numbers from a pipe
    to which the C-level handler writes them (``signal.set_wakeup_fd``). The handlers themselves do
    nothing, except while there is no batch to finish: then they raise.

    A forked child, for example of a function of the user, has the same pipe. The numbers of its own
    signals are not written to it: SIGTERM ends the child, and SIGINT, which a terminal sends to it,
    too, does nothing there.

    A signal can arrive as soon as a handler is installed, so :class:`Interrupted` is caught around
    the block, not in it.

    Args:
        asked: called in a separate thread for each signal.

    Attributes:
        idle: while true, a signal also raises :class:`Interrupted` here.
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        self.idle = True
        self._asked = asked
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.getsignal(number) for number in _ASKED_BY}
        _entered.append(self)
        try:
            self.install()
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        except Interrupted:  # a signal has arrived before the block has begun
            self.__exit__()
            raise
        return self

    def install(self) -> None:
        """Install the handlers (again): a SparkContext installs a SIGINT handler of its own."""
        for number in _ASKED_BY:
            signal.signal(number, self._handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._fd_before)
        _entered.remove(self)
        self._writing.close()  # ends the thread

    def _listen(self) -> None:
        with self._reading:
            while numbers := self._reading.recv(64):
                for number in numbers:
                    if number in _ASKED_BY:
                        self._asked()

    def _handler(self, _: int, __: FrameType | None) -> None:
        if self.idle:
            self.idle = False  # once: the cleanup must not be interrupted
            raise Interrupted

    def forked(self) -> None:
        """Called in a forked child."""
        self.idle = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])  # type: ignore[arg-type]
        self._reading.close()
        self._writing.close()


def _forked() -> None:
    for one in _entered:
        with suppress(TypeError, ValueError, OSError):
            one.forked()
    _entered.clear()


os.register_at_fork(after_in_child=_forked)
