"""Runs a pipeline, with ``/livez``, ``/readyz`` and ``/metrics``.

Problems are detected before the start as far as possible.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oncely.core import events
from oncely.core.progress import RunResult, RunState, TimesToLive
from oncely.errors import ConfigError, Fenced, OncelyError, Unavailable, WrongInput
from oncely.extras import WITHOUT_SPARK, require
from oncely.kafka.client import at_start
from oncely.kinds.destination import LOST_WAY_OUT
from oncely.secrets import scope
from oncely.telemetry import consumer_of, using
from oncely.threads import StopSignal, Thread, repeat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.http_server import Page
    from oncely.pipeline.parts import Parts
    from oncely.pipeline.standby import OnFenced
    from oncely.runtimes.health import Health
    from oncely.runtimes.jobs import Jobs


log = logging.getLogger(__name__)
_LOOK_SECONDS = 5.0
_AGES_SECONDS = 15.0
_REJECTS_SECONDS = 60.0


@dataclass(frozen=True)
class Http:
    """The HTTP servers of a run: its probes, and its metrics.

    Attributes:
        address: ``HOST:PORT`` of probes and metrics; without a host only this machine can connect.
        polling_ttl: seconds without a look for records after which ``/livez`` answers 500.
        consuming_ttl: the same without a commit, though there are records.
        metrics: ``HOST:PORT`` of a server of the metrics alone.
        names: host names under which the servers may be reached.
    """

    address: str | None = None
    polling_ttl: float = TimesToLive.polling
    consuming_ttl: float = TimesToLive.consuming
    metrics: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.polling_ttl, self.consuming_ttl) <= 0:
            raise WrongInput("a time to live must be longer than 0 s")


@contextmanager
def probed(
    pipeline: Parts,
    http: Http | None,
    listener: events.Listener,
    group: str | None = None,
) -> Iterator[events.Listener]:
    """The listener, and before it the probes if they are wanted.

    ``group``: the group whose lag is shown; None: that of the pipeline file.

    Raises:
        WrongInput: the address is malformed, or can't be listened at.
    """
    with probed_together([Probed(pipeline, listener, group)], http) as (heard,):
        yield heard


class Probed(NamedTuple):
    """A pipeline, its listener, and the group whose lag is shown."""

    pipeline: Parts
    listener: events.Listener
    group: str | None = None


@contextmanager
def probed_together(
    given: Sequence[Probed], http: Http | None
) -> Iterator[Sequence[events.Listener]]:
    """As :func:`probed`, for pipelines whose probes and metrics are served together.

    Raises:
        WrongInput: the address is malformed, or can't be listened at.
    """
    if http is None:
        yield [one.listener for one in given]
        return

    from oncely.http_server import Server

    healths = [_health(one, http) for one in given]
    with ExitStack() as servers:
        if http.address is not None:
            servers.enter_context(Server("--http", http.address, _pages(healths), http.names))
        if http.metrics is not None:
            page = _pages(healths)["/metrics"]
            pages = {"/": page, "/metrics": page}
            servers.enter_context(Server("--metrics", http.metrics, pages, http.names))
        for one, health in zip(given, healths, strict=True):
            servers.enter_context(_watched(one.pipeline, health))
        yield [_both(health, one.listener) for one, health in zip(given, healths, strict=True)]


def _health(given: Probed, http: Http) -> Health:
    from oncely.runtimes.health import Health

    settings, pause = given.pipeline.settings, given.pipeline.settings.trigger_seconds
    return Health(
        settings.name,
        given.group or settings.shown_group or settings.name,
        TimesToLive(http.polling_ttl + pause, http.consuming_ttl + pause),
        given.pipeline.secrets,
    )


def _both(first: events.Listener, second: events.Listener) -> events.Listener:
    def heard(event: events.Event) -> None:
        first(event)
        second(event)

    return heard


def _pages(healths: Sequence[Health]) -> dict[str, Callable[[], Page]]:
    from oncely.http_server import CONTENT_TYPE, Page
    from oncely.runtimes.health import liveness, metrics, readiness

    def probe(answer: tuple[bool, dict[str, Any]], bad: int) -> Page:
        good, document = answer
        return Page(json.dumps(document) + "\n", "application/json", 200 if good else bad)

    return {
        "/livez": lambda: probe(liveness(healths), 500),
        "/readyz": lambda: probe(readiness(healths), 503),
        "/metrics": lambda: Page(metrics(healths), CONTENT_TYPE),
    }


@contextmanager
def _watched(pipeline: Parts, health: Health) -> Iterator[None]:
    """Ask for the ends of the topics in a thread, until the end of the block."""
    over = threading.Event()
    looks = _Looks(pipeline.replaced(), health)  # its clients are not shared with other threads
    every = min(_LOOK_SECONDS, health.limits.consuming / 4)

    def watch() -> None:
        with scope(pipeline.secrets):
            repeat(over, every, looks.look)

    Thread(watch, "ends").start()
    try:
        yield
    finally:
        over.set()


@dataclass
class _Looks:
    """Looks at topics and ledger, for what no event contains; each kind in its own interval."""

    pipeline: Parts
    health: Health
    clock: Callable[[], float] = time.monotonic
    _ages_at: float = 0.0
    _rejects_at: float = 0.0

    def look(self) -> None:
        """Look at whatever is due."""
        for one in (self._ends, self._ages, self._ledger):
            try:
                one()
            except OncelyError as error:
                log.debug("%s: %s", one.__name__, error.message)

    def _ends(self) -> None:
        self.health.ends(self.pipeline.source.stable_end())

    def _ages(self) -> None:
        if self.clock() < self._ages_at:
            return
        self._ages_at = self.clock() + _AGES_SECONDS
        unread = self.health.unread()
        source = self.pipeline.source
        self.health.aged(source.timestamps_at(unread, timeout=_LOOK_SECONDS) if unread else {})

    def _ledger(self) -> None:
        if self.clock() < self._rejects_at and not self.health.suspicious:
            return
        self._rejects_at = self.clock() + _REJECTS_SECONDS
        known = self.pipeline.destination.look()
        self.health.stored(known.positions)
        self.health.rejected(known.rejects)


_OUT_OF_MEMORY = 52  # Spark's own exit code


@dataclass(frozen=True)
class RunOptions:
    """The arguments of :meth:`oncely.pipeline.Pipeline.run`, ``log`` being its ``events``."""

    until: Literal["latest"] | None
    stop: StopSignal
    listener: events.Listener
    log: str | Path | None
    http: Http | None
    on_fenced: OnFenced
    spark: SparkSession | None = None


def run(pipeline: Parts, given: RunOptions) -> RunResult:
    """See :meth:`oncely.pipeline.Pipeline.run`."""
    settings = pipeline.settings
    return observed(pipeline, given, settings.shown_group or settings.name, _started)


def observed(
    pipeline: Parts,
    given: RunOptions,
    group: str,
    run: Callable[[Parts, RunOptions], bool],
    *,
    spans: bool = True,
) -> RunResult:
    """Run with event log, probes and traces, and tell them how it has ended.

    Args:
        pipeline: the pipeline.
        given: the options.
        group: the group whose lag is shown.
        run: runs with a listener that all of them hear.
        spans: as of :func:`traced`.
    """
    with (
        logged(pipeline, given.log, given.listener) as told,
        probed(pipeline, given.http, told, group) as heard,
        traced(pipeline.settings.name, group, heard, spans=spans) as listener,
    ):
        return telling_the_end(
            listener, lambda heard: run(pipeline, replace(given, listener=heard))
        )


@contextmanager
def traced(
    pipeline: str, group: str, listener: events.Listener, *, spans: bool = True
) -> Iterator[events.Listener]:
    """The listener, with spans and metrics before it if the process uses OpenTelemetry.

    Args:
        pipeline: its name.
        group: the consumer group.
        listener: called with each event first.
        spans: make a span for each topic-partition of a batch; False where the sink makes them.
    """
    consumer = consumer_of(pipeline, group)
    with using(consumer):
        if consumer is None:
            yield listener
            return
        from oncely.runtimes.health import Telemetry

        yield Telemetry(consumer, listener, spans)


@at_start()
def preflight(pipeline: Parts) -> None:
    """Check the pipeline before Spark's start, or beside that of processes, also for what only a
    worker does.

    Raises the errors of :meth:`oncely.pipeline.Pipeline.preflight`.
    """
    if pipeline.settings.runtime == "spark":
        require("spark", "spark", "a run on Spark", WITHOUT_SPARK)
    else:
        from oncely.runtimes.jobs import prepare

        prepare()
    key = pipeline.settings.filter.waits
    if key is not None:
        raise ConfigError(
            f"filter.{key}",
            "`oncely run` does not wait for single records",
            way_out="start it by `oncely work`, or remove it",
        )
    pipeline.preflight()


def logged(
    pipeline: Parts,
    path: str | Path | None,
    listener: events.Listener,
    *,
    resets: bool = False,
) -> AbstractContextManager[events.Listener]:
    """The listener, with an event log before it if there is a path.

    In a folder each pipeline has a file of its own. Unless the positions are about to be reset, an
    empty offset store beside the log of an earlier run is refused.

    Raises:
        WrongInput: the log can't be written, or the store was lost.
    """
    if path is None:
        return nullcontext(listener)

    from oncely.pipeline.event_log import EventLog, has_opened

    name, store = pipeline.settings.name, pipeline.store
    file = Path(path) / f"{name}.jsonl" if Path(path).is_dir() else path
    if store is not None and not resets and has_opened(file) and not store.store.load():
        from oncely.pipeline.stored_destination import lost

        said = lost(store.store, f"the event log {file} has an earlier run")
        raise ConfigError("offsets.store", said, way_out=LOST_WAY_OUT)
    return EventLog(file, name, pipeline.secrets, then=listener)


def telling_the_end(listener: events.Listener, run: Callable[[events.Listener], bool]) -> RunResult:
    """Run, counting events; tell the listener, and return, how it has ended."""
    complete, said, kind, state, began = False, "", "", RunState(), time.monotonic()
    try:
        complete = run(_both(state.take, listener))
        done, seconds = state.counts, time.monotonic() - began
        ended: Literal["complete", "stopped"] = "complete" if complete else "stopped"
        return RunResult(ended, done.records, done.rows, done.rejects, done.filtered, seconds)
    except Fenced as error:
        from oncely.pipeline.standby import fenced

        listener(fenced(error))
        said, kind = error.message, type(error).__name__
        raise
    except BaseException as error:
        kind = type(error).__name__
        said = error.message if isinstance(error, OncelyError) else kind
        raise
    finally:
        listener(events.RunClosed(complete, said, kind))


def _started(pipeline: Parts, given: RunOptions) -> bool:
    preflight(pipeline)
    with _jobs(pipeline, given.spark) as jobs:
        if given.stop.draining:
            return False
        work = partial(pipeline.with_newest_schema, partial(_run, pipeline, given, jobs))
        if given.on_fenced == "wait":
            from oncely.pipeline.standby import run_when_elected

            return run_when_elected(pipeline, work, given.stop, given.listener)
        return work()


@contextmanager
def _jobs(pipeline: Parts, spark: SparkSession | None) -> Iterator[Jobs]:
    """Where the tasks of the pipeline run."""
    settings = pipeline.settings
    if settings.runtime == "processes":
        from oncely.runtimes.jobs import ProcessJobs

        with closing(ProcessJobs(settings.process_count)) as jobs:
            yield jobs
        return
    from oncely.runtimes.spark import session
    from oncely.runtimes.spark.jobs import SparkJobs

    given = spark or session.existing()
    if given is not None:
        session.check_session(given)
    with session.started(pipeline.start_spark, given) as running:
        yield SparkJobs(running, settings.name)


def _run(pipeline: Parts, given: RunOptions, jobs: Jobs) -> bool:
    from oncely.runtimes.batches.run import BatchRun, GroupOffsetPublisher

    batches = None
    try:
        batches = pipeline.batches(jobs)
        return BatchRun(
            jobs,
            batches,
            pipeline.takeovers(batches.ledger, given.listener),
            GroupOffsetPublisher(pipeline.source, pipeline.mirror_group),
            pipeline.settings.trigger_seconds,
            pipeline.settings.max_records_per_batch,
            given.stop,
        ).run(until_latest=given.until == "latest")
    except OncelyError:
        raise
    except Exception as error:
        raise meaning(error) from error
    finally:
        if batches is not None:
            batches.ledger.close()


def meaning(error: Exception) -> Exception:
    """Replace errors of a dead JVM, which differ by the place of the call."""
    from oncely.runtimes.spark import session

    code = session.death(error)
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
