"""A chunk is committed by several threads, which divide its records by key (docs/decisions/0049).

Each thread commits its own records, in pieces. The ledger contains the ranges that they have
finished, also beyond the position. When all have ended, the position is at the chunk's end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING

from oncely.commit.backoff import Backoff
from oncely.commit.delivery import Delivery
from oncely.commit.path import Outcome, commit_parts
from oncely.core.batch import Chunk, Reject, Rejection
from oncely.core.claim import Fence
from oncely.core.lanes import Lanes, Parts
from oncely.errors import Unavailable
from oncely.phases import longest, measured

if TYPE_CHECKING:
    from oncely.sinks.handlers.sink import HandlersSink

_PIECE = 100  # records of a transaction


class ByKey:
    """The commit of one chunk.

    Args:
        delivery: sink, ledger and order.
        chunk: the chunk, with the keys of its records.
        fence: the run that writes.
        max_rejects: the number of rejects that the chunk may add. Each transaction compares it with
            those that were committed before it began, so that threads may exceed it together.
        piece: the number of records of a transaction.
        patience: makes the time for which the store may be unavailable.
    """

    def __init__(
        self,
        delivery: Delivery[HandlersSink],
        chunk: Chunk,
        fence: Fence,
        max_rejects: int | None,
        piece: int = _PIECE,
        patience: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._delivery, self._fence, self._max_rejects = delivery, fence, max_rejects
        self._patience = patience
        self._lanes = Lanes(chunk, delivery.sink.threads, piece)
        self._lock, fetching, fetch = threading.Lock(), threading.Lock(), chunk.dead_letters
        self._outcomes: list[Outcome] = []
        self._failed: list[BaseException] = []

        def one_at_a_time(rejections: Sequence[Rejection]) -> list[Reject]:
            with fetching:
                return fetch(rejections)

        self._chunk = replace(chunk, dead_letters=one_at_a_time)

    def give_up(self) -> None:
        """Begin no more pieces; those in hand are ended."""
        self._lanes.give_up()

    def run(self) -> list[Outcome]:
        """Commit, and report every range.

        What threads have committed stays, if another one fails.

        Raises:
            Unavailable: it was given up before the end.
            OncelyError: the errors of :func:`oncely.commit.path.commit`; the first one of a thread.
        """
        with ThreadPoolExecutor(len(self._lanes), "oncely-lane") as threads:
            ended = [
                threads.submit(copy_context().run, measured, self._work, lane)
                for lane in range(len(self._lanes))
            ]
        longest(one.result()[1] for one in ended)
        return self._ended()

    def _ended(self) -> list[Outcome]:
        """All threads have ended."""
        if self._failed:
            raise self._failed[0]
        if self._lanes.left:
            raise Unavailable("records were not handled: their partitions change hands")
        return sorted(self._outcomes, key=lambda one: (one.partition, one.range))

    def _work(self, lane: int) -> None:
        """The work of a thread. After an error none begins another piece."""
        try:
            while (parts := self._next(lane)) is not None:
                found = commit_parts(
                    self._delivery, self._chunk, parts, self._fence, self._rejects_left(),
                    self._patience(),
                )  # fmt: skip
                with self._lock:
                    self._outcomes += found
        except BaseException as error:
            self.give_up()
            self._failed.append(error)

    def _next(self, lane: int) -> Parts | None:
        with self._lock:
            return self._lanes.next(lane)

    def _rejects_left(self) -> int | None:
        if self._max_rejects is None:
            return None
        with self._lock:
            return max(0, self._max_rejects - sum(one.counts.rejects for one in self._outcomes))
