"""The runs of a command's pipelines: each in a thread of its own, and an error ends one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from oncely.cli import logs, options, screen
from oncely.cli.progress import Progress
from oncely.core import events
from oncely.errors import OncelyError
from oncely.pipeline import Pipeline
from oncely.threads import Thread

log = logging.getLogger("oncely.run")


@dataclass
class Run:
    """The run of a pipeline.

    Attributes:
        pipeline: it.
        progress: its output.
        listener: called with its events.
        alone: the command has no other pipeline.
        done: it has ended by itself, and all of its records are committed.
        error: why it has failed.
        summary: its counts at its end.
    """

    pipeline: Pipeline
    progress: Progress
    listener: events.Listener
    alone: bool
    done: bool = False
    error: BaseException | None = None
    summary: str = ""

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self.pipeline.settings.name

    def naming(self) -> AbstractContextManager[None]:
        """Name the pipeline in log entries of this context."""
        return nullcontext() if self.alone else logs.among_others(self.name)

    def say(self, what: str) -> None:
        """Show what is being done."""
        with self.naming():
            self.progress.say(what)

    def end(self) -> list[str]:
        """Lines that tell how it has ended."""
        told = self.summary
        if self.error is not None:
            message, way_out = screen.complaint(self.error, debug=options.log["debug"])
            told = message + (f"\n  way out: {way_out}" if way_out else "")
        return (told if self.alone else f"{self.name}: {told}").splitlines()


def finished(pipeline: Pipeline, progress: Progress, *, done: bool) -> Run:
    """A run that has ended, the only one of its command."""
    summary = progress.tally.summary()
    return Run(pipeline, progress, progress, alone=True, done=done, summary=summary)


class Failed(OncelyError):
    """Some of several pipelines have failed.

    Args:
        runs: all of the command.

    Attributes:
        errors: the errors by pipeline.
        exit_code: the highest of them: 3 before 2 before 1.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        failed = sum(one.error is not None for one in runs)
        super().__init__(f"{failed} of {len(runs)} pipelines failed")
        self.errors = {one.name: one.error for one in runs if one.error is not None}
        self.exit_code = max(
            one.exit_code if isinstance(one, OncelyError) else 1 for one in self.errors.values()
        )
        self._runs = runs

    @property
    def details(self) -> list[str]:
        """How each has ended."""
        return [line for one in self._runs for line in one.end()]


def each(runs: Sequence[Run], work: Callable[[Run], object]) -> None:
    """Do a work for all runs side by side, until all are through; errors are kept in the runs."""
    threads = [Thread(partial(_attempt, run, work), run.name) for run in runs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def _attempt(run: Run, work: Callable[[Run], object]) -> None:
    with run.naming():
        try:
            run.error = None
            run.done = bool(work(run))
        except BaseException as error:
            run.error = error
        finally:
            run.summary = run.progress.tally.summary()


def telling(work: Callable[[Run], object]) -> Callable[[Run], object]:
    """The work, whose end is logged at once if other pipelines go on."""

    def told(run: Run) -> object:
        if run.alone:
            return work(run)
        try:
            done = work(run)
        except BaseException as error:
            message, _ = screen.complaint(error, debug=True)
            trace = error if options.log["debug"] else None
            log.error("failed, and ends alone: %s", message.splitlines()[0], exc_info=trace)
            raise
        log.info("ended: %s", run.progress.tally.summary())
        return done

    return told


def refuse_failed(runs: Sequence[Run], *, unless_any_is_left: bool = False) -> None:
    """Raise the errors of runs that have failed.

    Args:
        runs: all of the command.
        unless_any_is_left: only if all have failed.

    Raises:
        Failed: there are several pipelines.
        BaseException: the error of the only one.
    """
    failed = [one for one in runs if one.error is not None]
    if not failed or (unless_any_is_left and len(failed) < len(runs)):
        return
    raise (failed[0].error if failed[0].alone else None) or Failed(runs)
