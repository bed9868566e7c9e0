"""Dead letters tried again: what passes now moves into the table, each exactly once.

The reject itself is the token. One transaction locks a run of rejects, writes the rows of those
that pass and deletes exactly these rejects; those that still fail get their newer reason. A
crash before COMMIT leaves every reject where it was, a crash after it leaves none of them to be
tried again, and a COMMIT whose answer was lost is settled by reading the rejects anew. Two
replays at once meet at the row locks; the second one finds the rejects gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.session import brief_session, transaction
from oncely.core.batch import Reject, Rejection
from oncely.errors import InvariantViolation, Stopped, check
from oncely.sinks.replaying import Judge, Judged, Tried
from oncely.sinks.sql.prepare import Prepared, prepare
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.target import Target
from oncely.sinks.sql.write import write_rows

RejectKey = tuple[str, int, int]
"""Topic, partition, offset: the order in which rejects are gone through."""

FIRST: RejectKey = ("", -1, -1)
"""Before every reject."""


@dataclass
class Replay:
    """One replay of all rejects, each tried once.

    Attributes:
        sink: bound to its table.
        after: where the next transaction goes on; None when there are no more rejects.
    """

    sink: SqlSink
    after: RejectKey | None = FIRST

    def step(self, limit: int, judge: Judge) -> Tried | None:
        """Try up to ``limit`` rejects in one transaction; None: no more are left.

        Raises as :func:`replay_run` does.
        """
        if self.after is None:
            return None
        done, self.after = replay_run(self.sink, self.after, limit, judge)
        return done


def replay_run(
    sink: SqlSink, after: RejectKey, limit: int, judge: Judge
) -> tuple[Tried, RejectKey | None]:
    """Try up to ``limit`` rejects that follow ``after``, in one transaction.

    Args:
        sink: bound to its table.
        after: where to begin.
        limit: how many.
        judge: decodes and transforms; called inside the transaction.

    Returns:
        What was done, and where the next transaction goes on; None when no rejects are left.

    Raises:
        Stopped: the table refuses a row of a Spark transform; nothing was changed.
        Unavailable: the outcome is unknown; ask again from the same place.
    """
    target = sink.target
    if target is None:
        raise InvariantViolation("replay before bind")
    with (
        brief_session(sink.dialect, "replay", sink.connect) as ours,
        transaction(ours),
    ):
        registered = sink.ledger.statements.registered(ours)
        rejects = sink.ledger.dead_letters.read(ours, after, limit, lock=True)
        if registered is None or not rejects:
            return Tried(0, 0), None
        judged = judge(rejects)
        check(judged.chunk.records == len(rejects), "a replayed reject was lost on the way")
        failed = _write(sink, ours, target, judged)
        _settle(sink, ours, rejects, failed, registered.epoch)
    last = rejects[-1]
    done = Tried(len(rejects) - len(failed), len(failed))
    return done, (*last.partition, last.offset)


def _write(sink: SqlSink, ours: Connection, target: Target, judged: Judged) -> dict[int, Rejection]:
    """Write what passes; the rejections by record."""
    prepared = prepare(judged.chunk, target, sink.keep_source)
    if not judged.traceable:
        _none_refused(prepared.rejections[len(judged.chunk.rejections) :])
    if prepared.rows.num_rows:
        prepared = _write_rows(sink, ours, target, prepared, judged.traceable)
    return {one.record: one for one in prepared.rejections}


def _write_rows(
    sink: SqlSink, ours: Connection, target: Target, prepared: Prepared, traceable: bool
) -> Prepared:
    return write_rows(
        ours,
        sink.dialect,
        target,
        prepared,
        still_ours=lambda: None,  # the rejects are locked: nobody else can have written these
        refused=(lambda _: None) if traceable else _none_refused,
    )


def _none_refused(refused: Sequence[Rejection]) -> None:
    if refused:
        raise Stopped(
            f"a row of the Spark transform can't be written: {refused[0].reason}",
            way_out="mend the transform; all of these rejects were left as they are",
        )


def _settle(
    sink: SqlSink,
    ours: Connection,
    rejects: Sequence[Reject],
    failed: dict[int, Rejection],
    epoch: int,
) -> None:
    """Take out what has passed; write the newer reasons of the rest."""
    still = []
    for index, reject in enumerate(rejects):
        again = failed.get(index)
        if again is not None:
            still.append(_with_reason(reject, again))
        elif not sink.ledger.dead_letters.remove(ours, reject.partition, reject.offset):
            raise InvariantViolation(f"{reject.partition}: reject {reject.offset} was locked by us")
    sink.ledger.dead_letters.add(ours, still, epoch)


def _with_reason(reject: Reject, why: Rejection) -> Reject:
    return Reject(
        reject.partition,
        reject.offset,
        reject.timestamp_ms,
        reject.key,
        reject.value,
        reject.headers,
        why.stage,
        why.reason,
    )
