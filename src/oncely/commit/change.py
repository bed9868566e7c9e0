"""Changes to what is committed: a replay of dead letters, a repair, a backfill.

A replay makes the records that are valid now take effect, each exactly once: dead letters are read,
processed and, in one transaction that compares the position of replays, written or kept. A crash
before its commit leaves all of them in place; a commit whose answer was lost is settled by reading
them again.

By repair and backfill, records below the position are processed again, beside a running pipeline.
As every commit, a rewrite reads the ledger, decides, and acts in a transaction that compares the
ledger with that of the decision. It moves no position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.batch import Chunk
from oncely.core.change import (
    FileGroup,
    Judge,
    Produce,
    ReplayResult,
    Rewrite,
    RewriteKind,
    Rewritten,
    Tell,
    add_up,
    silent,
)
from oncely.core.claim import NO_RECORDS, Entry
from oncely.core.ranges import OffsetRange, TopicPartition, normalize
from oncely.errors import Stopped, WrongInput, check
from oncely.kinds.base import ReplaysDeadLetters, Rewrites, RewritesRecords, RewritesTogether

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


NOTHING = Rewritten(0, 0, NO_RECORDS)


@dataclass(frozen=True)
class RecordsToRepair:
    """Damaged records of one topic-partition, to repair in one transaction.

    Attributes:
        partition: the topic-partition.
        offsets: ascending. What they have produced is removed.
        surplus: those whose rows must not be there, unless the record is committed meanwhile.
        chunk: the present outcome of the records that the topic has.
        lost: those of which nothing is there, so that nothing is removed.
    """

    partition: TopicPartition
    offsets: Sequence[int]
    surplus: Set[int]
    chunk: Chunk
    lost: Set[int] = frozenset()


def repair(
    sink: RewritesRecords, damage: RecordsToRepair, patience: Backoff, tell: Tell = silent
) -> Rewritten:
    """Replace what damaged records have produced.

    Raises:
        WrongInput: a record that was committed when its damage was found is not committed now.
        Unavailable: the store did not answer within ``patience``.
    """
    done = NOTHING
    for attempt in attempts(patience):
        with attempt:
            done = _repair_once(sink, damage, tell)
    patience.reset()
    return done


def _repair_once(sink: RewritesRecords, damage: RecordsToRepair, tell: Tell) -> Rewritten:
    tp = damage.partition
    expected = entry_of(sink, tp)
    below = [one for one in damage.offsets if one < expected.position]
    beyond = [one for one in damage.offsets if one >= expected.position]
    uncommitted = set(beyond) - damage.surplus
    if uncommitted:
        raise WrongInput(
            f"{tp}: offset {min(uncommitted)} is not committed, the position is"
            f" {expected.position}: the pipeline was reset since the audit",
            way_out="audit it again, when it has read these records",
        )
    done = NOTHING
    if below:
        ours = normalize(sink.committed(tp, OffsetRange(below[0], below[-1] + 1)))
        unread = [one for one in below if not any(one in each for each in ours)]
        foreign = [one for one in unread if one not in damage.surplus]
        if foreign:
            raise WrongInput(
                f"{tp}: offset {foreign[0]} was never read by this pipeline, says its history",
                way_out="audit it again; `oncely offsets reset` reads earlier records",
            )
        chunk = damage.chunk.keep({tp: ours})
        done = sink.rewrite(Rewrite("repair", tp, spans(below), expected, chunk))
        if rewritten := spans(one for one in below if (tp, one) not in done.refused):
            tell("repair", {tp: rewritten}, done)
    if beyond:
        more = sink.remove_beyond(tp, spans(beyond), expected)
        if removed := spans(one for one in beyond if (tp, one) not in more.refused):
            tell("repair", {tp: removed}, more)
        done = add_up(done, more)
    return done


def rewrite(
    sink: RewritesRecords,
    kind: RewriteKind,
    partition: TopicPartition,
    offsets: Sequence[OffsetRange],
    chunk: Chunk,
    patience: Backoff,
    tell: Tell = silent,
) -> Rewritten:
    """Replace what offsets have produced.

    Raises:
        Stopped: they are not committed any more.
        Unavailable: the store did not answer within ``patience``.
    """
    done = NOTHING
    for attempt in attempts(patience):
        with attempt:
            expected = entry_of(sink, partition)
            if offsets[-1].end > expected.position:
                raise _went_back(partition, offsets[-1], expected.position)
            done = sink.rewrite(Rewrite(kind, partition, offsets, expected, chunk))
            tell(kind, {partition: offsets}, done)
    patience.reset()
    return done


def rewrite_together(
    sink: RewritesTogether,
    kind: RewriteKind,
    group: FileGroup,
    produce: Produce,
    patience: Backoff,
    tell: Tell,
) -> Rewritten:
    """Replace what a group of offsets has produced, in one transaction.

    Raises:
        WrongInput: it can't be rewritten any more.
        Stopped: its offsets are not committed any more.
        Unavailable: the store did not answer within ``patience``.
    """
    done = NOTHING
    for attempt in attempts(patience, stages=True):
        with attempt:
            entries, now = sink.entries(), together(sink.groups(group.spans))
            for tp, own in group.spans.items():
                if tp not in entries or own[-1].end > entries[tp].position:
                    raise _went_back(tp, own[-1], entries[tp].position if tp in entries else 0)
            if now.problem:
                raise WrongInput(now.problem, way_out="audit it again")
            done = NOTHING
            if now.spans:
                done = sink.rewrite_together(kind, now, entries, produce)
                tell(kind, now.spans, done)
    patience.reset()
    return done


def remove_unexpected(
    sink: RewritesTogether, names: Sequence[str], patience: Backoff, tell: Tell
) -> Rewritten:
    """Remove what must not be there, if it still must not.

    Raises:
        Unavailable: the store did not answer within ``patience``.
    """
    done = NOTHING
    for attempt in attempts(patience):
        with attempt:
            done = sink.remove_unexpected(names)
            tell("repair", {}, done)
    patience.reset()
    return done


def together(groups: Sequence[FileGroup]) -> FileGroup:
    """Groups as one, for one transaction."""
    spans = {
        tp: normalize(one for group in groups for one in group.spans.get(tp, ()))
        for tp in sorted({tp for group in groups for tp in group.spans})
    }
    names = tuple(name for group in groups for name in group.names)
    return FileGroup(spans, names, next((one.problem for one in groups if one.problem), ""))


def _went_back(partition: TopicPartition, last: OffsetRange, position: int) -> Stopped:
    return Stopped(
        f"{partition}: the position went back to {position}, before the end of"
        f" {last}: the pipeline was reset meanwhile",
        way_out="it reads these records again; nothing beyond was changed",
    )


def entry_of(sink: Rewrites, partition: TopicPartition) -> Entry:
    """The ledger's entry of a partition.

    Raises:
        WrongInput: it has none.
    """
    entry = sink.entries().get(partition)
    if entry is None:
        raise WrongInput(
            f"{partition} has no position in the ledger: nothing of it was committed",
            way_out="run the pipeline first",
        )
    return entry


def spans(offsets: Iterable[int]) -> tuple[OffsetRange, ...]:
    """Single offsets as few ranges."""
    return normalize(OffsetRange(one, one + 1) for one in offsets)
