"""The port for jobs. A job runs one task for each share of a batch, and returns their answers.

A task is repeated if it raises, or if its process dies. Errors that a repetition would not correct
(a newer run, a spent reject budget) are answers: if they were raised, the task would be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from oncely.errors import OncelyError
from oncely.phases import Seconds, into, longest

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
