"""A collection of problems, so that all of them are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from oncely.errors import ConfigError, OncelyError, WrongInput
from oncely.runtimes.spark.probe import Slots
from oncely.secrets import redact

Check = tuple[str, Callable[[], object]]
"""The key of the pipeline file for a check, and the check, which raises its problem.

`plan` collects the errors of a destination's checks; a run executes the same checks before it
starts, and ends at the first error.
"""

PROBED = (
    "a probe was written below sink.url and removed: this is the only way to check write permission"
)
"""The note of a plan for destinations with a root."""


@dataclass(frozen=True)
class Problem:
    """A reason why a pipeline cannot run.

    Attributes:
        key: the key of the pipeline file.
        message: the problem.
        way_out: the recommended action.
        wrong_input: False if a server did not answer, which may be temporary.
    """

    key: str
    message: str
    way_out: str = ""
    wrong_input: bool = True


@dataclass
class Inspection:
    """The results of `plan` so far.

    Attributes:
        problems: the reasons why the pipeline can't run.
        notes: information for the user.
        slots: the concurrent tasks of Spark; None if Spark was not started.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slots: Slots | None = None

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Add an error of the block as a problem of ``key``, and continue after the block."""
        try:
            yield
        except OncelyError as error:
            if isinstance(error, ConfigError):
                key = error.key
            message = error.message.removeprefix(f"{key}: ")
            wrong = isinstance(error, WrongInput)
            # The error may come from a thread without the pipeline's secrets.
            self._add(Problem(key, redact(message), redact(error.way_out), wrong))

    def collect(self, checks: Iterable[Check]) -> None:
        """Execute all checks, and add their errors as problems."""
        for key, check in checks:
            with self.about(key):
                check()

    def add(self, key: str, message: str, way_out: str = "") -> None:
        """Add a problem."""
        self._add(Problem(key, redact(message), redact(way_out)))

    def _add(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
