"""Replays and discards of dead letters.

In a replay, valid records are moved into the table, each exactly once. The reject itself is the
token. One transaction locks some rejects, writes the rows of the valid ones and deletes exactly
these rejects; those that still fail get their newer reason. A crash before COMMIT leaves every
reject in place, a crash after it leaves none of them to be replayed, and a COMMIT whose answer was
lost is settled by reading the rejects again. Of two concurrent replays, the second waits for the
row locks and then sees no rejects.

In a discard, the content of dead letters is removed, and their rows stay. One transaction locks the
pending dead letters, chooses some, and removes key, value and headers of these. A replay at the
same time has locked a dead letter before, and has deleted it, or waits for the lock and finds the
dead letter discarded. A repetition after a lost answer finds nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.session import brief_session, transaction
from oncely.core.amendments import replayed
from oncely.core.batch import Reject, Rejection
from oncely.errors import InvariantViolation
from oncely.sinks.base import LETTERS_STAY, Judged, Portion, Tried, row_refused
from oncely.sinks.sql.prepare import Prepared
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.write import write_rows

RejectKey = tuple[str, int, int]
"""Topic, partition, offset: the order in which rejects are replayed."""

FIRST: RejectKey = ("", -1, -1)
"""Before every reject."""


@dataclass
class SqlReplay:
    """A replay of all rejects, each processed once.

    Attributes:
        sink: bound to its table.
        after: the last reject of the previous transaction.
    """

    sink: SqlSink
    after: RejectKey = FIRST

    @contextmanager
    def portion(self, limit: int) -> Iterator[Portion | None]:
        """Rejects that follow ``after``, locked; the end of the context is the COMMIT."""
        ledger = self.sink.ledger
        with (
            brief_session(self.sink.dialect, "replay", self.sink.connect) as ours,
            transaction(ours),
        ):
            registered = ledger.statements.registered(ours)
            rejects = ledger.dead_letters.read(ours, self.after, limit, lock=True)
            if registered is None or not rejects:
                yield None
                return
            epoch = registered.epoch

            def commit(judged: Judged | None) -> Tried:
                failed = self._write(ours, judged, epoch) if judged else {}
                again = [judged.again(why) for why in failed.values()] if judged else []
                self._settle(ours, rejects, failed, again, epoch)
                return Tried(len(rejects) - len(failed), len(failed))

            yield Portion(rejects, commit)
        self.after = (*rejects[-1].partition, rejects[-1].offset)

    def _write(self, ours: Connection, judged: Judged, epoch: int) -> dict[int, Rejection]:
        """Write the valid rows, and amend the history; returns the rejections by record."""
        sink = self.sink
        if sink.target is None:
            raise InvariantViolation("replay before bind")
        prepared = sink.prepared(judged.chunk)
        if not judged.traceable:
            _none_refused(prepared.rejections[len(judged.chunk.rejections) :])
        if prepared.rows.num_rows:
            prepared = write_rows(
                ours,
                sink.dialect,
                sink.target,
                prepared,
                # The rejects are locked: no other process can have written these rows.
                still_ours=lambda: None,
                refused=(lambda _: None) if judged.traceable else _none_refused,
            )
        failed = {one.record: one for one in prepared.rejections}
        self._amend(ours, judged, prepared, failed, epoch)
        return failed

    def _amend(
        self,
        ours: Connection,
        judged: Judged,
        prepared: Prepared,
        failed: Mapping[int, Rejection],
        epoch: int,
    ) -> None:
        chunk, history = judged.chunk, self.sink.ledger.history
        record = judged.own(prepared.row_record, failed)
        containing = partial(history.containing, ours)
        changes = replayed(chunk, record, failed, prepared.digests, containing)
        history.amend(ours, changes, epoch)

    def _settle(
        self,
        ours: Connection,
        rejects: Sequence[Reject],
        failed: Mapping[int, Rejection],
        again: Sequence[Reject],
        epoch: int,
    ) -> None:
        """Delete the replayed rejects; store the newer reasons of the rest."""
        letters = self.sink.ledger.dead_letters
        for index, one in enumerate(rejects):
            if index not in failed and not letters.remove(ours, one.partition, one.offset):
                raise InvariantViolation(f"{one.partition}: reject {one.offset} was locked by us")
        letters.change(ours, again, epoch)


def _none_refused(refused: Sequence[Rejection]) -> None:
    if refused:
        raise row_refused(refused[0].reason, LETTERS_STAY)


# -- discards ------------------------------------------------------------------------------


_AT_ONCE = 500
"""Dead letters that are in memory, with their values."""


def discard_letters(sink: SqlSink, which: Callable[[Reject], bool], execute: bool) -> Counter[str]:
    """Discard pending dead letters: see
    :meth:`oncely.pipeline.destination.Destination.discarding`. The sink may be without columns."""
    letters, reasons = sink.ledger.dead_letters, Counter[str]()
    with (
        brief_session(sink.dialect, "discard", sink.connect) as ours,
        transaction(ours) if execute else nullcontext(),
    ):
        for found in _pending(sink, ours, lock=execute):
            chosen = [one.discarded for one in found if which(one)]
            reasons.update(one.reason for one in chosen)
            if execute:
                letters.change(ours, chosen)
    return reasons


def _pending(sink: SqlSink, ours: Connection, *, lock: bool) -> Iterator[list[Reject]]:
    after = FIRST
    while found := sink.ledger.dead_letters.read(ours, after, _AT_ONCE, lock=lock):
        yield found
        after = (*found[-1].partition, found[-1].offset)
