"""Pipelining: a chunk is committed in a thread while the next one is read and decoded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from typing import Self, TypeVar

from oncely.commit.backoff import Backoff
from oncely.commit.path import ByKey, Delivery, Outcome, commit
from oncely.core.batch import Chunk
from oncely.core.claim import Budget, Fence
from oncely.errors import check
from oncely.kinds.base import CommitsChunks

T = TypeVar("T")
_SWITCH = 0.0005  # seconds; Python's default is ten times as long


class PipelinedCommit:
    """Commits one chunk in a thread while the caller reads and decodes the next one.

    One at a time and in order: a chunk's commit begins when the preceding one has ended. So the
    ledger has the same states as without the thread, and the task does not wait for the database.
    The ranges of a chunk were read before it is handed over; the end of the input in the meantime
    adds nothing to them.

    The committing thread waits for the interpreter's lock after each answer of the store, hundreds
    of times a chunk, and each time for as long as the decoding one may keep it.

    Args:
        budget: the reject budget of all chunks together.
        overlap: False: a chunk is committed at once, in the caller's thread.
        patience: seconds for which a store may be unavailable in a commit, up to a minute; none if
            nobody waits for it any more.
    """

    def __init__(self, budget: Budget, *, overlap: bool, patience: float = 60.0) -> None:
        self._budget, self._patience = budget, min(patience, 60.0)
        self._records = self._rejects = 0
        self._thread = ThreadPoolExecutor(1, "oncely-commit") if overlap else None
        self._asking = ThreadPoolExecutor(1, "oncely-ask") if overlap else None
        self._running: Future[list[Outcome]] | None = None
        self._by_key: ByKey | None = None
        self._given_up = threading.Event()
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> Self:
        if self._thread is not None:
            sys.setswitchinterval(min(_SWITCH, self._interval))
        return self

    def __exit__(self, *_: object) -> None:
        """Also when the task is cancelled: the running commit ends before the task does."""
        self._give_up()
        for pool in filter(None, (self._thread, self._asking)):
            pool.shutdown(wait=True)
        sys.setswitchinterval(self._interval)

    @property
    def busy(self) -> bool:
        """True from the begin of a commit until :meth:`finish`."""
        return self._running is not None

    @property
    def ended(self) -> bool:
        """True if :meth:`finish` would not wait."""
        return self._running is None or self._running.done()

    def ask(self, question: Callable[[], T]) -> Callable[[], T]:
        """Ask a server while the caller goes on; returns a function that waits for the answer, and
        raises the question's error. Without a thread the server is asked when it is called."""
        return question if self._asking is None else self._asking.submit(question).result

    def begin(
        self,
        delivery: Delivery[CommitsChunks],
        fence: Fence,
        chunk: Chunk,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to commit; :meth:`finish` must have been called since the last commit began.

        Args:
            delivery: sink, ledger and order.
            fence: the run that writes.
            chunk: the chunk.
            before: called in the thread before the commit.
        """
        self._records += chunk.records
        limit = self._budget.left(self._records, self._rejects)

        self._given_up = threading.Event()
        chunk = chunk.until(self._given_up.wait)
        if chunk.keys is not None:
            self._by_key = ByKey(delivery, chunk, fence, limit, patience=self._backoff)  # type: ignore[arg-type]
        by_key = self._by_key

        def work() -> list[Outcome]:
            before()
            if by_key is not None:
                return by_key.run()
            return list(commit(delivery, chunk, fence, limit, self._backoff()))

        self.begin_work(work)

    def _backoff(self) -> Backoff:
        return Backoff(total=self._patience, wait=self._given_up.wait)

    def begin_work(self, work: Callable[[], list[Outcome]]) -> None:
        """Begin work of another kind in the place of a commit."""
        check(self._running is None, "two chunks of a task would be committed at once")
        if self._thread is not None:
            self._running = self._thread.submit(copy_context().run, work)
        else:
            self._running = Future()
            self._running.set_result(work())

    def pause(self, seconds: float) -> None:
        """Wait for the end of the running work, but not long."""
        if self._running is not None:
            wait([self._running], seconds)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the running work; False if it has not ended in time.

        Then threads that have divided it by key begin nothing more of it, and an isolation of rows
        ends, and so do calls and retries of handlers.
        """
        if self._running is not None:
            with suppress(Exception):  # finish raises it
                self._running.exception(seconds)
        if not self.ended:
            self._give_up()
        return self.ended

    def _give_up(self) -> None:
        self._given_up.set()
        if self._by_key is not None:
            self._by_key.give_up()

    def finish(self) -> list[Outcome]:
        """Wait for the running commit, if there is one, and return its outcomes.

        Raises:
            OncelyError: see :func:`oncely.commit.path.commit`.
        """
        if self._running is None:
            return []
        running, self._running, self._by_key = self._running, None, None
        outcomes = running.result()
        self._rejects += sum(one.counts.rejects for one in outcomes)
        return outcomes
