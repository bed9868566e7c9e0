"""Changes that a page asks for: a replay or a discard of dead letters, and a reset of positions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from oncely.kafka.reset import Verb
from oncely.pipeline import Pipeline
from oncely.pipeline.rejects import RejectFilter
from oncely.web.model import Problem, tried
from oncely.wording import plural


@dataclass(frozen=True)
class Change:
    """A change, and its result.

    Attributes:
        title: what was asked for.
        state: running, done or failed.
        text: the progress, or the result.
        problem: why it failed.
        at: the time of its begin.
    """

    title: str
    state: Literal["running", "done", "failed"]
    text: str = ""
    problem: Problem | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)


class RunningChanges:
    """The last change of each pipeline; one at a time of each, in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Change] = {}
        self._threads: dict[str, threading.Thread] = {}

    def of(self, name: str) -> Change | None:
        """The last change of a pipeline."""
        with self._lock:
            return self._jobs.get(name)

    def replay(self, name: str, pipeline: Pipeline, after: Callable[[], None]) -> bool:
        """Begin a replay of all dead letters; False while another change goes on.

        Args:
            name: the pipeline's name.
            pipeline: the pipeline.
            after: called when it has ended.
        """

        def told(moved: int, kept: int) -> None:
            self._set(name, Change(title, "running", f"{moved:,} written, {kept:,} kept so far"))

        def work() -> str:
            moved, kept = pipeline.replay(progress=told)
            return f"written: {plural(moved, 'dead letter')}; kept: {kept:,}"

        title = "Replay of dead letters"
        return self._start(name, title, pipeline, work, after)

    def discard(
        self,
        name: str,
        pipeline: Pipeline,
        which: RejectFilter,
        shown: str,
        after: Callable[[], None],
    ) -> bool:
        """Begin a discard; as :meth:`replay`.

        Args:
            name, pipeline, after: as of :meth:`replay`.
            which: the dead letters.
            shown: that of the dry run; if others are chosen now, nothing is discarded.
        """

        def work() -> str:
            done = pipeline.discard(which, execute=True, shown=shown)
            return f"discarded: {plural(done.total, 'dead letter')}"

        return self._start(name, "Discard of dead letters", pipeline, work, after)

    def reset(
        self,
        name: str,
        pipeline: Pipeline,
        verb: Verb,
        topics: list[str],
        after: Callable[[], None],
    ) -> bool:
        """Begin a reset; as :meth:`replay`."""

        def work() -> str:
            done = pipeline.reset(verb, topics, execute=True)
            return f"positions were reset with epoch {done.epoch}; a running pipeline is fenced"

        return self._start(name, "Reset of positions", pipeline, work, after)

    def wait(self, name: str, timeout: float) -> None:
        """Wait for the end of a pipeline's change."""
        with self._lock:
            thread = self._threads.get(name)
        if thread is not None:
            thread.join(timeout)

    def _start(
        self,
        name: str,
        title: str,
        pipeline: Pipeline,
        work: Callable[[], str],
        after: Callable[[], None],
    ) -> bool:
        def go() -> None:
            done = tried(pipeline, work)
            if isinstance(done, Problem):
                self._set(name, Change(title, "failed", problem=done))
            else:
                self._set(name, Change(title, "done", done))
            after()

        with self._lock:
            last = self._jobs.get(name)
            if last is not None and last.state == "running":
                return False
            self._jobs[name] = Change(title, "running")
            thread = threading.Thread(target=go, name="change", daemon=True)
            self._threads[name] = thread
        thread.start()
        return True

    def _set(self, name: str, job: Change) -> None:
        with self._lock:
            self._jobs[name] = job
