"""The port for jobs. A job runs one task for each share of a batch, and returns their answers.

A task is repeated if it raises, or if its process dies. Errors that a repetition would not correct
(a newer run, a spent reject budget) are answers: if they were raised, the task would be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from oncely.errors import OncelyError
from oncely.phases import Seconds, into, longest

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """One attempt of a task.

    Attributes:
        number: unique among the attempts of all tasks of a run.
        again: an earlier attempt has failed, or its process has died.
    """

    number: int
    again: bool = False


Task = Callable[[Any, Attempt], Generator[object, None, None]]
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


@dataclass(frozen=True)
class Spent:
    """The last answer of a task: its seconds by phase."""

    seconds: Seconds


class Jobs(Protocol):
    """Runs jobs, one at a time; all methods but :meth:`cancel` are called by one thread."""

    def enter(self, described: str) -> None:
        """Called by the thread of a batch at its start.

        Args:
            described: the text of the batch's jobs in the runtime's own pages.
        """

    def run(self, task: Task, shares: Sequence[object]) -> list[object]:
        """Run a task for each share; all answers, those of a share together.

        Raises:
            Exception: a task has failed as often as it may, or the job was cancelled; see
                :meth:`meaning`.
        """

    def shuffled(
        self, send: Task, shares: Sequence[object], stage: Task, buckets: int
    ) -> list[object]:
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


def answers(task: Task, share: object, attempt: Attempt) -> Iterator[object]:
    """The answers of a task; the last one is its seconds, or an error."""
    spent = Spent({})
    with closing(task(share, attempt)) as given, into(spent.seconds):
        try:
            yield from given
            yield spent
        except OncelyError as error:
            yield error


def sort_out(found: Iterable[object], kind: type[T]) -> tuple[list[T], OncelyError | None]:
    """The answers of one kind, and the error that a task answered; Fenced takes precedence.

    The tasks' seconds are added to those of the caller.
    """
    found = list(found)
    errors = [one for one in found if isinstance(one, OncelyError)]
    worst = max(errors, key=lambda error: (error.exit_code == 3, not error.retryable), default=None)
    longest(one.seconds for one in found if isinstance(one, Spent))
    return [one for one in found if isinstance(one, kind)], worst


def all_of(found: Iterable[object], kind: type[T]) -> list[T]:
    """Like :func:`sort_out`, but raises the error.

    Raises:
        OncelyError: the error that a task answered; Fenced takes precedence.
    """
    of_kind, error = sort_out(found, kind)
    if error is not None:
        raise error
    return of_kind


def by_bucket(found: Iterable[object], buckets: int) -> tuple[list[object], list[list[bytes]]]:
    """The answers that are no packets, and the packets of each bucket in their order."""
    passed: list[object] = []
    packets: list[list[bytes]] = [[] for _ in range(buckets)]
    for one in found:
        if isinstance(one, ShuffleBlock):
            packets[one.bucket].append(one.data)
        else:
            passed.append(one)
    return passed, packets
