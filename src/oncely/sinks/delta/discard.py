"""Discards of dead letters: their content is removed, in one commit of the table.

A file with chosen dead letters is replaced by a file in which these are without content. As any
other, the commit is refused unless it follows the version of its decision: a replay at the same
time comes before it, or finds the file replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from oncely.core.batch import Reject
from oncely.core.claim import Fence
from oncely.sinks.delta.sink import DeltaSink


@dataclass(frozen=True)
class DeltaDiscards:
    """Discards in the files of the ledger.

    Attributes:
        sink: for operations on the ledger; it may be without columns.
    """

    sink: DeltaSink

    def discard(self, which: Callable[[Reject], bool], *, execute: bool) -> Counter[str]:
        """Discard the pending dead letters that are chosen, in one commit.

        Raises:
            PositionMoved: another commit came first; repeat.
        """
        ledger, reasons = self.sink.ledger, Counter[str]()
        state = ledger.read()
        rejects, replaced = list(state.document.rejects), dict[str, str]()
        for at, (path, pending) in enumerate(rejects):
            letters = ledger.letters(path) if pending else []
            left = [one.discarded if one.pending and which(one) else one for one in letters]
            chosen = [new for new, old in zip(left, letters, strict=True) if new is not old]
            reasons.update(one.reason for one in chosen)
            if chosen and execute:
                [rejects[at]] = ledger.keep(state, left)
                replaced[rejects[at][0]] = path
        if replaced:
            document = msgspec.structs.replace(state.document, rejects=rejects)
            ledger.commit(state, document, {"kind": "discard", "replaced": replaced})
        if execute:  # the replaced files, also those of an attempt whose answer was lost
            ledger.tidy(Fence(self.sink.pipeline, state.document.epoch))
        return reasons
