"""Jobs: the tasks of a batch, and how their answers come back. The port, and jobs on processes of
this machine, without Spark and Java.

A job runs one task for each share of a batch, and returns their answers. A task is repeated if it
raises, or if its process dies. Errors that a repetition would not correct (a newer run, a spent
reject budget) are answers: if they were raised, the task would be repeated.

The processes live as long as the run, so that modules are imported once. A process that dies breaks
the pool: it is made anew, and the tasks without answers are repeated, as Spark does.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from oncely.errors import OncelyError, Unavailable, WrongInput
from oncely.phases import Seconds, into, longest
from oncely.secrets import carried
from oncely.users_function import without_pandas

Share = TypeVar("Share")
Given = TypeVar("Given")  # an answer


@dataclass(frozen=True)
class Attempt:
    """One attempt of a task.

    Attributes:
        number: unique among the attempts of all tasks of a run.
        again: an earlier attempt has failed, or its process has died.
    """

    number: int
    again: bool = False


Task = Callable[[Share, Attempt], Generator[Given, None, None]]
"""Works on a share, and yields its answers; picklable, like the shares and the answers."""


class ShuffleBlock(NamedTuple):
    """Data that a task sends to the task of a bucket.

    Attributes:
        bucket: a number from 0 on.
        data: Arrow's IPC format.
        about: an answer about it, for the driver.
    """

    bucket: int
    data: bytes
    about: object = None


Send: TypeAlias = Task[Share, Given | ShuffleBlock]
Stage: TypeAlias = Task[Iterable[Any], Given]
"""The tasks before and after a shuffle. The share of the second one is the packets of a bucket."""


@dataclass(frozen=True)
class Spent:
    """The last answer of a task: its seconds by phase."""

    seconds: Seconds


Found: TypeAlias = Given | Spent | OncelyError
"""What a task has told: its answers; and at its end its seconds, or an error."""


class Jobs(Protocol):
    """Runs jobs, one at a time; all methods but :meth:`cancel` are called by one thread."""

    def enter(self, described: str) -> None:
        """Called by the thread of a batch at its start.

        Args:
            described: the text of the batch's jobs in the runtime's own pages.
        """

    def run(self, task: Task[Share, Given], shares: Sequence[Share]) -> list[Found[Given]]:
        """Run a task for each share; all answers, those of a share together.

        Raises:
            Exception: a task has failed as often as it may, or the job was cancelled; see
                :meth:`meaning`.
        """

    def shuffled(
        self, send: Send[Share, Given], shares: Sequence[Share], stage: Stage[Given], buckets: int
    ) -> list[Found[Given]]:
        """Run ``send`` for each share, then ``stage`` for each bucket, with the packets of all.

        Returns:
            The answers of both.
        """

    def require(self) -> None:
        """Called while there is nothing to do.

        Raises:
            Exception: no job can run any more.
        """

    def cancel(self) -> None:
        """End the running job, if there is one. Its tasks may commit until they have ended."""

    def meaning(self, error: Exception) -> Exception:
        """The reason of a job's failure: an error of Oncely, if one explains it."""

    def close(self) -> None:
        """Free what belongs to this object."""


def answers(
    task: Task[Share, Given], share: Share, attempt: Attempt
) -> Generator[Found[Given], None, None]:
    """What a task tells of its share."""
    spent = Spent({})
    with closing(task(share, attempt)) as given, into(spent.seconds):
        try:
            yield from given
            yield spent
        except OncelyError as error:
            yield error


def sort_out(found: Iterable[Found[Given]]) -> tuple[list[Given], OncelyError | None]:
    """The answers, and the error that a task told; Fenced takes precedence.

    The tasks' seconds are added to those of the caller.
    """
    found = list(found)
    errors = [one for one in found if isinstance(one, OncelyError)]
    worst = max(errors, key=lambda error: (error.exit_code == 3, not error.retryable), default=None)
    longest(one.seconds for one in found if isinstance(one, Spent))
    return [one for one in found if not isinstance(one, Spent | OncelyError)], worst


def all_of(found: Iterable[Found[Given]]) -> list[Given]:
    """Like :func:`sort_out`, but raises the error.

    Raises:
        OncelyError: the error that a task told; Fenced takes precedence.
    """
    given, error = sort_out(found)
    if error is not None:
        raise error
    return given


def by_bucket(
    found: Iterable[Found[Given | ShuffleBlock]], buckets: int
) -> tuple[list[Found[Given]], list[list[bytes]]]:
    """What is no packet, and the packets of each bucket in their order."""
    passed: list[Found[Given]] = []
    packets: list[list[bytes]] = [[] for _ in range(buckets)]
    for one in found:
        if isinstance(one, ShuffleBlock):
            packets[one.bucket].append(one.data)
        else:
            passed.append(one)
    return passed, packets


# -- processes ------------------------------------------------------------------------------

log = logging.getLogger(__name__)

_SAFE_PATH = "PYTHONSAFEPATH"
_ATTEMPTS = 4  # of a task, as spark.task.maxFailures
_NOT_STARTED = (EOFError, OSError)  # the process that starts the others has died
# Imported once for all processes, beside the start of the driver. A name that is not installed is
# left out.
_PRELOADED = [
    "oncely.runtimes.batches.commit",
    "oncely.runtimes.row_transform",
    "oncely.kafka.reader",
    "oncely.kafka.source",
    "oncely.decode.json",
    "oncely.kinds.sql.sink",
    "oncely.stores.sql.postgres",
]

_OF_THE_GROUP = {signal.SIGTERM, signal.SIGHUP}

_GUARD = (
    "a script that runs a pipeline on processes does so below `if __name__ == '__main__':`, because"
    " each process imports it"
)


def prepare() -> ForkServerContext:
    """Start the process that others are forked from, if there is none: it imports their modules
    while the caller checks servers and opens a ledger.

    It has no threads: those of Kafka's clients are not copied. It ends with the caller, and not by
    signals to the caller's group: its end would break the pool, and a batch that a first request to
    stop lets finish would begin again.

    Raises:
        WrongInput: the caller is such a process, which imports a script that runs a pipeline.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WrongInput("a process of a pipeline runs the pipeline again", way_out=_GUARD)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Python begins these two by `python -c`, with the working directory before its own modules.
    safe_path = os.environ.get(_SAFE_PATH, "")  # empty: as if it were not set
    os.environ[_SAFE_PATH] = "1"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        resource_tracker.ensure_running()  # its first start unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ[_SAFE_PATH] = safe_path
    return context


class ProcessJobs:
    """Runs jobs on a pool of processes.

    Args:
        slots: the number of processes.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._numbers = itertools.count()
        self._cancelled = False
        self._has_started = False
        self._pool = self._new()

    def enter(self, described: str) -> None:
        """Nothing to do."""

    def run(self, task: Task[Share, Given], shares: Sequence[Share]) -> list[Found[Given]]:
        """See :class:`~oncely.runtimes.jobs.Jobs`.

        Raises:
            WrongInput: the task can't be pickled, or no process can start.
            Unavailable: a task has failed in each of its attempts.
        """
        work = _pickled(carried(partial(_answers, task)))
        found: dict[int, list[Found[Given]]] = {}
        failure: Exception | None = None
        for attempt in range(_ATTEMPTS):
            if self._cancelled:
                break
            failure = self._round(work, shares, found, again=attempt > 0)
            if failure is None:
                return [one for at in range(len(shares)) for one in found[at]]
        raise failure or Unavailable("the job was cancelled")

    def _round(
        self,
        work: bytes,
        shares: Sequence[Share],
        found: dict[int, list[Found[Given]]],
        *,
        again: bool,
    ) -> Exception | None:
        """Run the tasks without answers once; a failure, if there was one. A broken pool is
        replaced: one of its processes has died, in this job or since the last one."""
        failures: list[Exception] = []
        has_started = self._has_started
        futures = {}
        try:
            for at in range(len(shares)):
                if at not in found:
                    item = shares[at], Attempt(next(self._numbers), again)
                    futures[self._pool.submit(_listed, work, item)] = at
        except BrokenProcessPool as error:
            failures.append(error)
        except _NOT_STARTED as error:
            failures.append(BrokenProcessPool(repr(error)))
            has_started = True
        for future in as_completed(futures):
            try:
                found[futures[future]] = future.result()
                self._has_started = True
            except Exception as error:
                failures.append(error)
        if any(isinstance(one, BrokenProcessPool) for one in failures) and not self._cancelled:
            if not (has_started or self._has_started or any(map(_is_done_well, self._first))):
                raise WrongInput("no process of the pipeline has started", way_out=_GUARD)
            self._pool.shutdown()
            self._pool = self._new()
        return failures[-1] if failures else None

    def shuffled(
        self, send: Send[Share, Given], shares: Sequence[Share], stage: Stage[Given], buckets: int
    ) -> list[Found[Given]]:
        """See :class:`~oncely.runtimes.jobs.Jobs`. All packets pass through this process."""
        passed, packets = by_bucket(self.run(send, shares), buckets)
        return [*passed, *self.run(stage, packets)]

    def require(self) -> None:
        """Nothing to do: processes that have died are replaced."""

    def cancel(self) -> None:
        """Kill the processes; nothing runs afterwards."""
        self._cancelled = True
        for process in list((self._pool._processes or {}).values()):
            process.kill()

    def meaning(self, error: Exception) -> Exception:
        """Failures of a task in all of its attempts are temporary: the batch is repeated."""
        if isinstance(error, BrokenProcessPool):
            return Unavailable(
                "a process of the batch has died, again and again",
                way_out="look for a lack of memory: [sink] and decode need some for each process",
            )
        return Unavailable(f"a task of the batch failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)

    def _new(self) -> ProcessPoolExecutor:
        for attempt in range(_ATTEMPTS):
            pool = ProcessPoolExecutor(self._slots, prepare(), _begin)
            try:
                # Started now, beside the preparation of the first batch.
                self._first = [pool.submit(os.getpid) for _ in range(self._slots)]
                return pool
            except _NOT_STARTED as error:
                log.debug("attempt %d to start processes: %r", attempt, error)
        raise Unavailable("the processes of the pipeline can't be started")


def _is_done_well(future: Future[int]) -> bool:
    return future.done() and future.exception() is None


def _begin() -> None:
    """In a new process: signals to the group of its parent are not for it, but the parent's end
    is."""
    without_pandas()
    os.environ.pop(_SAFE_PATH, None)  # for this process, not for programs of the user
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_GROUP)
    threading.Thread(target=_end_with_parent, name="oncely-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answers(task: Task[Share, Given], item: tuple[Share, Attempt]) -> Iterator[Found[Given]]:
    yield from answers(task, *item)


def _pickled(work: Callable[[Any], Iterator[object]]) -> bytes:
    """Once for all shares; an error here is none of the task's process, so no repetition helps."""
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WrongInput(
            f"a part of the pipeline can't be sent to other processes: {error}",
            way_out="define its functions and classes at the top of a module",
        ) from error


def _listed(pickled: bytes, item: object) -> list[Any]:
    return list(pickle.loads(pickled)(item))  # noqa: S301 - our own
