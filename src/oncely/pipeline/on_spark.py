"""Runs the members of a consumer group as the tasks of a Spark job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oncely.config.spark import local_tasks
from oncely.core import events
from oncely.errors import ConfigError, OncelyError, WrongInput
from oncely.pipeline.probes import Http, probed
from oncely.pipeline.running import logged, meaning, telling_the_end
from oncely.pipeline.sessions import started
from oncely.pipeline.working import group_of, refuse_unfit
from oncely.runtimes.spark import session
from oncely.runtimes.spark.errors import is_java, spark_error
from oncely.runtimes.spark.members import Opened, run_members
from oncely.runtimes.stop import StopSignal
from oncely.runtimes.telemetry import traced

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.pipeline import Pipeline

log = logging.getLogger("oncely.work")


def work_on_spark(
    pipeline: Pipeline,
    members: int,
    until: Literal["latest"] | None,
    stop: StopSignal,
    listener: events.Listener,
    path: str | Path | None = None,
    http: Http | None = None,
    spark: SparkSession | None = None,
) -> bool:
    """See :meth:`oncely.pipeline.Pipeline.work`."""
    with (
        probed(pipeline, http, listener, group_of(pipeline)) as heard,
        logged(pipeline, path, heard) as told,
        traced(pipeline.settings.name, group_of(pipeline), heard) as observed,
    ):
        opened = _opening(pipeline, path, _Together(observed))
        return telling_the_end(
            told, lambda: _started(pipeline, members, until, stop, opened, spark)
        )


def check(pipeline: Pipeline, members: int, master: str) -> None:
    """Refuse what can't be run so.

    Raises:
        WrongInput: what, and the way out.
    """
    if members < 1:
        raise WrongInput(f"--workers {members}: there is nobody to work", way_out="--workers 2")
    refuse_unfit(pipeline)
    given = pipeline.settings.worker
    if given.instance is not None and given.protocol == "consumer":
        raise ConfigError(
            "worker.instance",
            'with protocol = "consumer" the broker refuses a task that Spark starts again while the'
            " former one is still a member",
            way_out='remove it, or use protocol = "cooperative"',
        )
    tasks = local_tasks(master)
    if tasks is not None and tasks < members:
        raise ConfigError(
            "spark.master",
            f"{master!r} runs {tasks} tasks at a time, and each of {members} workers is one",
            way_out=f'write master = "local[{members},4]"',
        )


def planned_workers(pipeline: Pipeline, slots: int, partitions: int) -> str:
    """The members that a job can have, as a sentence of `plan`; empty if no worker can run it.

    Args:
        pipeline: the pipeline.
        slots: the task slots of the master; 0: unknown.
        partitions: the partitions of the topics; each has one member.
    """
    master = pipeline.settings.spark.master
    try:
        check(pipeline, 1, master)
    except ConfigError as error:
        refused = f"`oncely work --on spark` can't run it: {error.message}"
        return refused if error.key.startswith("worker.") else ""
    tasks = local_tasks(master) or slots
    number = f"up to {tasks} workers" if tasks else "a worker for each task slot that it is given"
    return (
        f"`oncely work --on spark --workers N`: {master} runs {number}; more than {partitions},"
        " the number of partitions, would be idle"
    )


def _started(
    pipeline: Pipeline,
    members: int,
    until: Literal["latest"] | None,
    stop: StopSignal,
    opened: Opened,
    spark: SparkSession | None,
) -> bool:
    given = spark or session.existing()
    master = pipeline.settings.spark.master if given is None else given.sparkContext.master
    check(pipeline, members, master)
    pipeline.preflight()
    with started(pipeline, given) as running:
        if stop.draining:
            return False
        work = _Work(replace(pipeline), until)  # without clients that it has made
        try:
            return run_members(running, members, work, stop, opened)
        except OncelyError:
            raise
        except Exception as error:
            known = meaning(error)
            lost = known is error and is_java(error)
            raise (spark_error(str(error)) if lost else known) from None


@dataclass(frozen=True)
class _Work:
    """One member; sent to the tasks."""

    pipeline: Pipeline
    until: Literal["latest"] | None

    def __call__(self, number: int, stop: StopSignal, listener: events.Listener) -> bool:
        return self._numbered(number).work(self.until, stop=stop, listener=listener)

    def _numbered(self, number: int) -> Pipeline:
        """Each static member has a name of its own, which a task that is started again keeps."""
        settings = self.pipeline.settings
        if settings.worker.instance is None:
            return self.pipeline
        own = {"instance": f"{settings.worker.instance}-{number}"}
        worker = settings.worker.model_copy(update=own)
        return replace(self.pipeline, settings=settings.model_copy(update={"worker": worker}))


@dataclass
class _Together:
    """The events of all members as those of one run: its end, and what only passes from one member
    to another, is left out. Called from several threads."""

    listener: events.Listener
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _draining: bool = False

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.RunClosed() | events.PartitionsChanged(change="revoked" | "lost"):
                return
        with self._lock:
            if isinstance(event, events.Draining):
                if self._draining:
                    return
                self._draining = True
            self.listener(event)


def _opening(pipeline: Pipeline, path: str | Path | None, together: events.Listener) -> Opened:
    """In the event log each member is a run of its own."""

    @contextmanager
    def opened() -> Iterator[events.Listener]:
        log.info("a worker has begun")
        with logged(pipeline, path, together) as told:
            yield told
        log.info("a worker has ended")

    return opened
