"""Discards of dead letters: their content is removed, and their rows stay.

One transaction locks the pending dead letters, chooses some, and removes key, value and headers of
these. A replay at the same time has locked a dead letter before, and has deleted it, or waits for
the lock and finds the dead letter discarded. A repetition after a lost answer finds nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.session import brief_session, transaction
from oncely.core.batch import Reject
from oncely.sinks.sql.replay import FIRST
from oncely.sinks.sql.sink import SqlSink

_AT_ONCE = 500
"""Dead letters that are in memory, with their values."""


@dataclass(frozen=True)
class SqlDiscards:
    """Discards in the ledger's table.

    Attributes:
        sink: for operations on the ledger; it may be without columns.
    """

    sink: SqlSink

    def discard(self, which: Callable[[Reject], bool], *, execute: bool) -> Counter[str]:
        """Discard the pending dead letters that are chosen, in one transaction."""
        letters, reasons = self.sink.ledger.dead_letters, Counter[str]()
        with (
            brief_session(self.sink.dialect, "discard", self.sink.connect) as ours,
            transaction(ours) if execute else nullcontext(),
        ):
            for found in self._pending(ours, lock=execute):
                chosen = [one.discarded for one in found if which(one)]
                reasons.update(one.reason for one in chosen)
                if execute:
                    letters.change(ours, chosen)
        return reasons

    def _pending(self, ours: Connection, *, lock: bool) -> Iterator[list[Reject]]:
        after = FIRST
        while found := self.sink.ledger.dead_letters.read(ours, after, _AT_ONCE, lock=lock):
            yield found
            after = (*found[-1].partition, found[-1].offset)
