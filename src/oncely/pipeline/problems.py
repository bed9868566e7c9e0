"""Problems collected one after another, so that all of them are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from oncely.errors import ConfigError, OncelyError, WrongInput
from oncely.secrets import redact

Check = tuple[str, Callable[[], object]]
"""The key of the pipeline file that a check is about, and the check, which raises what it finds.

`plan` collects what the checks of a destination raise; a run makes the same ones before it starts,
and ends at the first that raises."""


@dataclass(frozen=True)
class Problem:
    """Why a pipeline can't run.

    Attributes:
        key: the key of the pipeline file that it is about.
        message: what is wrong.
        way_out: what to do.
        wrong_input: False when a server did not answer, which may pass.
    """

    key: str
    message: str
    way_out: str = ""
    wrong_input: bool = True


@dataclass
class Problems:
    """What was found so far."""

    problems: list[Problem] = field(default_factory=list)

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Take an error of the block as a problem of ``key`` and go on after the block."""
        try:
            yield
        except OncelyError as error:
            if isinstance(error, ConfigError):
                key = error.key
            message = error.message.removeprefix(f"{key}: ")
            wrong = isinstance(error, WrongInput)
            # The error may come from a thread that does not know the pipeline's secrets.
            self._add(Problem(key, redact(message), redact(error.way_out), wrong))

    def collect(self, checks: Iterable[Check]) -> None:
        """Make all checks, and take what they raise as problems."""
        for key, check in checks:
            with self.about(key):
                check()

    def add(self, key: str, message: str, way_out: str = "") -> None:
        """Note a problem."""
        self._add(Problem(key, redact(message), redact(way_out)))

    def _add(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
