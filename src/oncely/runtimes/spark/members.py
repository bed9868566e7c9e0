"""Members of a consumer group as the tasks of one Spark job: Spark places them, and starts one that
has failed, or whose executor was lost, again.

A task is a member from its start to its end, and a member like any other: the group and the ledger
decide, and the driver only listens. A task tells its events to the driver, and waits until the
driver has taken a plan before it commits anything of it, as the driver may write an event log.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, get_args

import msgspec

from oncely.clients.driver_link import Address, Driver, Take, Task
from oncely.core import events
from oncely.errors import ConfigError, InstanceTaken, OncelyError, Unavailable
from oncely.runtimes.stop import StopSignal
from oncely.secrets import redact

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_LOOK = 0.2  # seconds between two looks at requests to stop
_EMPTY = (
    10.0  # seconds without a running task after which a job that was asked to stop is cancelled
)
_KINDS = {one.__name__: one for one in get_args(events.Event)}
_AWAITED = events.BatchPlanned | events.RunClosed
_AGAIN = (Unavailable, InstanceTaken)
"""Errors after which Spark starts a task again. The others end all members."""

Work = Callable[[int, StopSignal, events.Listener], bool]
"""What a member does, by its number; True if it has ended by itself."""

Opened = Callable[[], AbstractContextManager[events.Listener]]
"""Makes the listener of one member."""


def run_members(
    spark: SparkSession, members: int, work: Work, stop: StopSignal, opened: Opened
) -> bool:
    """Run members until all have ended; True if all of them have ended by themselves.

    Raises:
        OncelyError: the error of a member that a new start does not correct.
        Exception: of Spark: a task has failed as often as it may.
    """
    conf = spark.sparkContext.getConf()
    host = conf.get("spark.driver.host") or "127.0.0.1"
    bind = conf.get("spark.driver.bindAddress") or host
    failed = threading.Event()
    with (
        Driver(host, bind, lambda: _heard(opened, failed)) as driver,
        ThreadPoolExecutor(1, "oncely-members") as thread,  # with local properties of its own
    ):
        job = _Job(spark.sparkContext, members, work, driver)
        try:
            answers = job.wait(thread.submit(job.run), stop, failed)
        except BaseException:
            job.cancel()
            raise
    for one in answers:
        if isinstance(one, OncelyError):
            raise one
    return bool(answers) and all(answers)


@dataclass
class _Job:
    """The job, and requests to stop on their way to its tasks."""

    context: SparkContext
    members: int
    work: Work
    driver: Driver

    def __post_init__(self) -> None:
        self._group = f"oncely-members-{uuid.uuid4().hex}"

    def run(self) -> list[bool | OncelyError]:
        """Run it, in a thread of its own.

        Raises:
            ConfigError: Spark can't send ``work`` to tasks.
        """
        self.context.setJobGroup(self._group, f"{self.members} members")
        numbers = self.context.parallelize(range(self.members), self.members)
        task = partial(run_task, self.driver.address, self.work)
        try:
            answers: list[bool | OncelyError] = numbers.mapPartitionsWithIndex(task).collect()
        except pickle.PicklingError as error:
            raise ConfigError(
                "--on spark",
                f"a handler can't be sent to tasks: {error}",
                way_out="define it in a module, and open what it uses inside the function",
            ) from None
        return answers

    def cancel(self) -> None:
        """Cancel it; uncommitted records are read again."""
        self.context.cancelJobGroup(self._group)

    def wait(
        self, job: Future[list[bool | OncelyError]], stop: StopSignal, failed: threading.Event
    ) -> list[bool | OncelyError]:
        """Wait for its end. Meanwhile requests to stop are passed on; a member that has ``failed``
        ends the others."""
        asked, seen = 0, time.monotonic()
        while not wait([job], _LOOK).done:
            wanted = 2 if stop.now else int(stop.draining or failed.is_set())
            for _ in range(asked, wanted):
                self.driver.stop()
            asked = max(asked, wanted)
            if not asked or self._tasks():
                seen = time.monotonic()
            elif time.monotonic() - seen > _EMPTY:  # the others wait for executors
                self.cancel()
                return []
        return job.result()

    def _tasks(self) -> int:
        """The number of its running tasks."""
        tracker = self.context.statusTracker()
        jobs = [tracker.getJobInfo(one) for one in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(one) for job in jobs if job for one in job.stageIds]
        return sum(one.numActiveTasks for one in stages if one)


@contextmanager
def _heard(opened: Opened, failed: threading.Event) -> Iterator[Take]:
    """Takes the messages of one member."""
    with opened() as listener:

        def take(message: bytes) -> None:
            if not message:
                failed.set()
                return
            name, fields = msgspec.msgpack.decode(message, type=tuple[str, msgspec.Raw])
            listener(msgspec.msgpack.decode(fields, type=_KINDS[name]))

        yield take


# -- the task ---------------------------------------------------------------------------------


def run_task(
    driver: Address, work: Work, number: int, _: Iterator[int]
) -> Iterator[bool | OncelyError]:
    """One member; its answer is what ``work`` returns, or the error that ends all members.

    Raises:
        Unavailable: Spark starts it again.
    """
    yield _member(driver, work, number)


def _member(driver: Address, work: Work, number: int) -> bool | OncelyError:
    stop = StopSignal()
    link = Task(driver, stop.ask)
    try:
        done = work(number, stop, partial(_tell, link))
        if link.broken:
            raise Unavailable("the driver is gone")
        return done
    except _AGAIN as error:
        raise Unavailable(error.message) from None  # Spark logs the text of causes, too
    except OncelyError as error:
        link.tell(b"", asking=True)
        return error
    finally:
        link.close()


def _tell(link: Task, event: events.Event) -> None:
    if isinstance(event, events.BatchFailed | events.RunClosed):
        event = replace(event, error=redact(event.error))
    message = msgspec.msgpack.encode((type(event).__name__, event))
    link.tell(message, asking=isinstance(event, _AWAITED))
