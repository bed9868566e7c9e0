"""Replay of dead letters: the records that are valid now take effect, each exactly once.

For every kind of sink, a replay uses the commit path: dead letters are read, processed and, in one
transaction that compares the position of replays, written or kept. A crash before its commit leaves
all of them in place; a commit whose answer was lost is settled by reading them again.
"""

from __future__ import annotations

from collections.abc import Callable

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.batch import Judge, ReplayResult
from oncely.errors import check
from oncely.kinds.base import ReplaysDeadLetters

LETTERS_A_TRANSACTION = 500


def replay(
    letters: ReplaysDeadLetters,
    judge: Judge,
    patience: Backoff,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> ReplayResult:
    """Replay all dead letters, and return the counts.

    Args:
        letters: the dead letters of a sink.
        judge: decodes and transforms.
        patience: the time for which a store may be unavailable.
        limit: the number of dead letters in a transaction; ``LETTERS_A_TRANSACTION`` by default.
        progress: called with (moved, kept) after every transaction.

    Raises:
        WrongInput, Stopped: see :meth:`oncely.kinds.base.ReplaysDeadLetters.portion`.
        Unavailable: the server did not return.
    """
    moved = kept = 0
    while True:
        for attempt in attempts(patience, stages=True):
            with attempt:
                done = try_portion(letters, judge, limit or LETTERS_A_TRANSACTION)
        if done is None:
            return ReplayResult(moved, kept)
        patience.reset()
        moved, kept = moved + done.moved, kept + done.kept
        progress(moved, kept)


def try_portion(letters: ReplaysDeadLetters, judge: Judge, limit: int) -> ReplayResult | None:
    """Try one transaction once; None: no dead letters are left. Raises the errors of
    ``portion``."""
    with letters.portion(limit) as portion:
        if portion is None:
            return None
        judged = judge(portion.rejects) if portion.rejects else None
        whole = judged is None or judged.chunk.records == len(portion.rejects)
        check(whole, "a replayed reject was lost on the way")
        return portion.commit(judged)
