"""The port for jobs in one thread at a time: attempts die, are copied, and commit late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

from oncely.commit.path import Outcome
from oncely.core.claim import Budget
from oncely.errors import Unavailable
from oncely.runtimes.chunks import PipelinedCommit
from oncely.runtimes.jobs import Attempt, Found, Given, Share, Task, answers
from simulate.schedule import Killed, Schedule, Steps, Violation, step

_ATTEMPTS = 4


@dataclass
class _Share:
    """One task.

    Attributes:
        running: its attempts.
        tried: the number of attempts so far.
        answers: those of the first attempt that has ended well.
    """

    share: Any
    running: list[Steps] = field(default_factory=list)
    tried: int = 0
    answers: list[Any] | None = None


class ScriptedJobs:
    """Runs jobs step by step.

    Args:
        schedule: decides which attempt goes on, and what becomes of it.
        zombies: receives the attempts whose job has ended.
        tell: is told what happens to attempts.
    """

    def __init__(
        self, schedule: Schedule, zombies: list[Steps], tell: Callable[[str], None]
    ) -> None:
        self._schedule, self._zombies, self._tell = schedule, zombies, tell
        self._numbers = 0
        self._cancelled = False

    def enter(self, described: str) -> None:
        """Nothing to show."""

    def run(self, task: Task[Share, Given], shares: Sequence[Share]) -> list[Found[Given]]:
        """See :class:`~oncely.runtimes.jobs.Jobs`."""
        tasks = [_Share(one) for one in shares]
        try:
            while left := [one for one in tasks if one.answers is None]:
                self._advance(task, self._schedule.random.choice(left))
                step()
                if self._cancelled:
                    raise Unavailable("the job was cancelled")
        finally:
            left_behind = [one for each in tasks for one in each.running]
            if left_behind:
                self._tell(f"{len(left_behind)} attempts are left behind")
            self._zombies += left_behind
        return [one for each in tasks for one in each.answers or []]

    def _advance(self, task: Task[Any, Any], of: _Share) -> None:
        """One step of an attempt; or it dies, or a copy of it begins."""
        schedule = self._schedule
        if not of.running or (of.tried < _ATTEMPTS and schedule.happens(0.02)):
            self._begin(task, of)
        one = schedule.random.choice(of.running)
        if schedule.happens(0.01):
            self._tell("an attempt dies")
            one.kill()
        one.go()
        if one.future.done():
            self._ended(of, one)

    def _begin(self, task: Task[Any, Any], of: _Share) -> None:
        if of.tried == _ATTEMPTS:
            raise RuntimeError("a task has failed in all of its attempts")
        attempt = Attempt(self._numbers, again=of.tried > 0)
        self._numbers += 1
        of.tried += 1
        if of.running:
            self._tell("a copy of a task begins")
        of.running.append(Steps(lambda: list(answers(task, of.share, attempt))))

    def _ended(self, of: _Share, one: Steps) -> None:
        of.running.remove(one)
        error = one.future.exception()
        if isinstance(error, Violation):
            raise error
        if error is None:
            of.answers = one.future.result()

    def shuffled(self, *_: object) -> list[Any]:
        """No batch of the simulation is clustered."""
        raise NotImplementedError

    def require(self) -> None:
        """Jobs can always run."""

    def cancel(self) -> None:
        """The job ends at its next step."""
        self._cancelled = True

    def meaning(self, error: Exception) -> Exception:
        """A task that has failed in all attempts is a failure that passes."""
        return Unavailable(str(error)) if isinstance(error, RuntimeError) else error

    def close(self) -> None:
        """Nothing to close."""


class TaskCommit(PipelinedCommit):
    """The commits of a task, step by step: some steps before the next chunk is read, and the rest
    after it."""

    schedule: Schedule
    _steps: Steps | None = None

    def __init__(self, budget: Budget, *, overlap: bool) -> None:
        super().__init__(budget, overlap=False)
        self._overlap = overlap

    def __exit__(self, kind: object = None, *_: object) -> None:
        """The running commit ends before the task does, and with its process."""
        try:
            while kind is not Killed and self._steps is not None and not self.ended:
                step()
                self._steps.go()
        finally:
            if self._steps is not None:
                self._steps.kill()
            super().__exit__()

    def begin_work(self, work: Callable[[], list[Any]]) -> None:
        """Begin, and do some steps."""
        if not self._overlap:
            super().begin_work(work)
            return
        self._steps = Steps(work)
        self._running = self._steps.future
        for _ in range(self.schedule.random.randint(0, 4)):
            self._steps.go()

    def finish(self) -> list[Outcome]:
        """Go on to the end of the running commit."""
        while self._steps is not None and not self.ended:
            step()
            self._steps.go()
        return super().finish()


class _Job(Steps):
    """A batch of a driver."""

    def result(self) -> Any:
        """As of a future."""
        return self.future.result()


class BatchThread:
    """The thread of a driver's batches, in the place of ``ThreadPoolExecutor``."""

    _running: _Job | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.kill()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> _Job:
        """Begin; nothing is done yet."""
        self._running = _Job(lambda: work(*arguments))
        return self._running


def wait(jobs: list[_Job], _: float) -> SimpleNamespace:
    """In the place of ``concurrent.futures.wait``: one step of the job."""
    (job,) = jobs
    step()
    job.go()
    return SimpleNamespace(done=job.future.done())
