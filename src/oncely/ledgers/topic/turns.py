"""What a run keeps between two commits of a position that two transactional ids move in turn.

While one id works, an instance of the other one is initialised for the next transaction. The
position that a commit writes names that other id. If its instance was initialised before the
commit, it alone can move the position: whoever reads the position and wants to move it initialises
the id later, and fences this instance. So the next transaction begins without reading. In every
other case the position is read after the id was initialised: the initialisation was not finished
before the commit, or the answer to the commit was lost (docs/decisions/0047).

Each instance is used for one transaction, as everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

from oncely.clients.kafka.limits import TOGETHER
from oncely.clients.kafka.transaction import Transaction
from oncely.core.ledger import Entry
from oncely.core.ranges import TopicPartition
from oncely.errors import OncelyError
from oncely.ledgers.topic.records import NEXT, Mode, PositionRecord

KEPT = 32
"""Instances that are initialised and wait for their transaction, at most."""

Initialise = Callable[[Mode], Transaction]


@dataclass
class Turn:
    """The instances of both ids of a position, by the mode that names them.

    Attributes:
        sizes: ``max.message.bytes`` of the topics that the instances were made for.
        start: begins to initialise an id.
        moved: where our own commit has put the position.
        alone: True if only our instance can move it from there.
    """

    instances: dict[Mode, Future[Transaction]]
    sizes: frozenset[int]
    start: Callable[[Mode], Future[Transaction]]
    moved: PositionRecord | None = None
    alone: bool = False

    def suits(self, sizes: Collection[int]) -> bool:
        """True if the instances can write to topics with this ``max.message.bytes``."""
        least, most = min(self.sizes, default=0), max(self.sizes, default=0)
        return all(least <= one <= most for one in sizes)

    def known(self, expected: Entry) -> PositionRecord | None:
        """The position, if it need not be read; otherwise the ids that it may name are initialised
        when this returns."""
        own = self.moved if self.moved is not None and self.moved.entry == expected else None
        for mode in NEXT if own is None else [own.mode]:
            self.instance(mode)
        return own if self.alone else None

    def instance(self, mode: Mode) -> Transaction:
        """The instance that a position with this mode names."""
        return self.instances[mode].result()

    def next(self, writer: Transaction, mode: Mode, moved: PositionRecord) -> Turn:
        """The turn of the other id, after a commit by ``writer`` that was answered.

        The id that was used is initialised again from now on.
        """
        other = self.instances[NEXT[mode]]
        ready = other.done() and not other.cancelled() and other.exception() is None
        alone = ready and other.result().is_older_than_end_of(writer)
        instances = {NEXT[mode]: other, mode: self.start(mode)}
        return Turn(instances, self.sizes, self.start, moved, alone)

    def close(self) -> None:
        """Close the instances, and wait for those that are being initialised: a later
        initialisation of the same id would be fenced by them."""
        for one in self.instances.values():
            one.add_done_callback(_close)
        wait([one for one in self.instances.values() if not one.cancel()])


class Turns:
    """The turns of a process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[TopicPartition, Turn] = {}
        self._pool: ThreadPoolExecutor | None = None

    def taken(self, tp: TopicPartition, sizes: Collection[int], initialise: Initialise) -> Turn:
        """The turn that was kept, or a new one; it belongs to the caller until it is kept."""
        with self._lock:
            turn = self._kept.pop(tp, None)
        if turn is not None and turn.suits(sizes):
            return turn
        if turn is not None:
            turn.close()

        def start(mode: Mode) -> Future[Transaction]:
            return self._executor().submit(initialise, mode)

        return Turn({mode: start(mode) for mode in NEXT}, frozenset(sizes), start)

    def keep(self, tp: TopicPartition, turn: Turn) -> None:
        """Keep a turn until the next commit; the oldest ones are dropped beyond :data:`KEPT`."""
        with self._lock:
            self._kept[tp] = turn
            for oldest in list(self._kept)[: -(KEPT // len(NEXT))]:
                self._kept.pop(oldest).close()

    def close(self) -> None:
        """Close all instances."""
        with self._lock:
            kept, self._kept = self._kept, {}
            pool, self._pool = self._pool, None
        for turn in kept.values():
            turn.close()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(TOGETHER, "oncely-init")
            return self._pool


def _close(done: Future[Transaction]) -> None:
    with contextlib.suppress(OncelyError):
        if not done.cancelled():
            done.result().close()
