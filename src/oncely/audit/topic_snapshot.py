"""A consistent view of a pipeline's ledger topic, of its dead letters, and of what is read between.

Rows, dead letters and positions of a commit become visible together, but in several topics, one
after the other. So the ledger is read before and after the others: what is below the positions of
the first reading is in every topic that is read after it, and what is beyond those of the second
one belongs to no commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from oncely.audit.evidence import Committed, Span, moment
from oncely.audit.layout import ENTRIES, skips
from oncely.audit.stored.log import Topics
from oncely.audit.stored.topic_ledger import (
    Letter,
    PositionEntry,
    StoredLetter,
    StoredTotals,
    TopicLedger,
    read_ledger,
    read_letters,
)
from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition, grouped
from oncely.errors import SourceMismatch, Unavailable

T = TypeVar("T")

_TRIES = 100


@dataclass(frozen=True)
class TopicSnapshot(Generic[T]):
    """The state of a pipeline in topics.

    Attributes:
        ledger: the ledger before the rest was read.
        reached: the positions after that.
        letters: all dead letters of the pipeline.
        content: what was read between the two.
    """

    ledger: TopicLedger
    reached: Mapping[TopicPartition, Position]
    letters: Sequence[StoredLetter]
    content: T

    @property
    def source(self) -> SourceIdentity:
        """Cluster and topics that were read."""
        return self.ledger.source

    @property
    def positions(self) -> dict[TopicPartition, Position]:
        """The position of each partition; a reset that has begun counts as not done."""
        return {tp: one.position for tp, one in self.ledger.positions.items()}

    @cached_property
    def committed(self) -> list[Committed]:
        """All ranges that the ledger knows of, ascending; see :func:`entries`."""
        skipped = self.ledger.skipped
        return [
            one
            for tp in sorted(self.positions)
            for one in sorted(
                [*entries(self.ledger, tp), *skips(tp, skipped.get(tp, ()))],
                key=lambda it: it.span.range,
            )
        ]

    def is_backfilled(self, span: Span) -> bool:
        """True if records of the span were backfilled: the history does not tell their rows."""
        tp = span.partition
        own = self.ledger.rewritten.get(tp)
        return own is not None and any(
            OffsetRange(start, end).overlaps(span.range) and not self.ledger.undone(tp, by, start)
            for start, end, by in own.backfilled
        )

    def started(
        self, known: Iterable[tuple[TopicPartition, Position]]
    ) -> dict[TopicPartition, int]:
        """The smallest offset of each partition that ledger, dead letters or others know of."""
        found = dict(self.positions)
        read = (one for one in self.committed if one.kind != SKIPPED)
        own = [(one.span.partition, one.span.range.start) for one in read]
        for tp, at in [*own, *((one.of, one.offset) for one in self.letters), *known]:
            if tp in found:
                found[tp] = min(found[tp], at)
        return found

    def waiting(self, spans: Iterable[Span]) -> list[tuple[TopicPartition, int]]:
        """The records of these spans that have a dead letter which was not replayed."""
        inside = _inside(spans)
        found = {(one.of, one.offset) for one in self.letters if one.waits}
        return sorted(one for one in found if inside(*one))

    def kept(self) -> list[Letter]:
        """The content of those that wait."""
        return sorted(one.kept for one in self.letters if one.kept is not None)

    def replayed(self, spans: Iterable[Span]) -> int:
        """The number of records of these spans whose dead letters were all replayed."""
        inside, waits = _inside(spans), {(o.of, o.offset) for o in self.letters if o.waits}
        undone = self.ledger.undone
        done = {(o.of, o.offset) for o in self.letters if not undone(o.of, o.epoch, o.offset)}
        return sum(inside(*one) for one in done - waits)

    def beyond(self) -> list[StoredLetter]:
        """Dead letters of records that no position has reached."""
        return [
            one for one in self.letters if one.waits and one.offset >= self.reached.get(one.of, 0)
        ]


def take(
    topics: Topics,
    ledger_topic: str,
    rejects_topic: str,
    pipeline: str,
    read: Callable[[TopicLedger], T | None],
) -> TopicSnapshot[T]:
    """Read the ledger, then the rest, then the ledger again.

    Args:
        topics: the cluster.
        ledger_topic, rejects_topic: the topics.
        pipeline: the pipeline's name.
        read: reads everything else; called again if a replay or a reset came in between, or if it
            returns None.

    Raises:
        SourceMismatch: the pipeline never ran, or its ledger topic is another one.
        Unavailable: a transaction stayed open, or no answer; or resets and replays came in between
            all the time.
    """
    before = _known(topics, ledger_topic, pipeline)
    for _ in range(_TRIES):
        content = read(before)
        if content is None:
            before = _known(topics, ledger_topic, pipeline)
            continue
        letters = list(read_letters(topics, rejects_topic, pipeline, before))
        after = _known(topics, ledger_topic, pipeline)
        if _settings(before) == _settings(after):
            reached = {tp: one.position for tp, one in after.positions.items()}
            return TopicSnapshot(before, reached, letters, content)
        before = after
    raise Unavailable(
        f"pipeline {pipeline!r}: it was never still long enough to be compared",
        way_out="try again, or stop the pipeline for the audit",
    )


def in_force(ledger: TopicLedger, tp: TopicPartition) -> list[Committed]:
    """The ranges of a partition, ascending; a reset back makes those behind it void."""
    found: list[Committed] = []
    before: StoredTotals | None = None
    for message in ledger.history(tp):
        entry = message.entry
        if not isinstance(entry, PositionEntry):
            continue
        while found and found[-1].span.range.end > entry.start:
            found.pop()
        if entry.kind in ENTRIES and entry.start < entry.end:
            span, at = Span(tp, OffsetRange(entry.start, entry.end)), moment(message.at_ms)
            found.append(Committed(span, entry.kind, _counts(entry, before), entry.epoch, at))
        before = entry.totals
    return found


def entries(ledger: TopicLedger, tp: TopicPartition) -> list[Committed]:
    """Ranges that are disjoint and reach from the earliest offset that the ledger knows of to the
    position.

    The topic still contains the newest ranges; the totals cover the earlier ones as one range.
    Replays change the totals only: after one, they are the only entry.
    """
    newest, history = ledger.positions[tp], in_force(ledger, tp)
    totals, changed = newest.totals, ledger.amended.get(tp)
    if totals is None or totals.since >= newest.position:
        return history
    counts = totals.counts
    if changed is not None and (changed.since, changed.begun) == (totals.since, totals.begun):
        counts, history = counts + changed.counts, []
    inside = _up_to(
        [one for one in history if one.span.range.start >= totals.since], newest.position
    )
    before = [one for one in history if one.span.range.end <= totals.since]
    end = inside[0].span.range.start if inside else newest.position
    if totals.since < end:
        rest = Span(tp, OffsetRange(totals.since, end))
        less = sum((one.counts for one in inside), NO_RECORDS)
        amended = counts != totals.counts
        own = Committed(rest, "joined", _minus(counts, less), amended=amended)
        inside = [own, *inside]
    return [*before, *inside]


def _up_to(history: Sequence[Committed], position: Position) -> list[Committed]:
    """The last ranges without a gap up to a position."""
    found: list[Committed] = []
    for one in reversed(history):
        if one.span.range.end != (found[0].span.range.start if found else position):
            break
        found.insert(0, one)
    return found


def _minus(whole: Counts, part: Counts) -> Counts:
    known = whole.digest is not None and (not part.rows or part.recipe == whole.recipe)
    known = known and (not part.rows or part.digest is not None)
    digest = ((whole.digest or 0) - (part.digest or 0)) % (1 << 64) if known else None
    return Counts(
        whole.records - part.records,
        whole.rows - part.rows,
        whole.rejects - part.rejects,
        whole.filtered - part.filtered,
        digest,
        whole.recipe if known else "",
    )


def _counts(entry: PositionEntry, before: StoredTotals | None) -> Counts:
    """The counts of a range; its digest is the difference of the totals."""
    counts = Counts(entry.records, entry.rows, entry.rejects, entry.filtered)
    after = entry.totals
    if after is None or after.digest is None or not after.recipe:
        return counts
    digest = after.digest if after.since == entry.start else None
    same = before is not None and (before.since, before.begun) == (after.since, after.begun)
    if same and before is not None and before.digest is not None:
        digest = (after.digest - before.digest) % (1 << 64)
    return replace(counts, digest=digest, recipe="" if digest is None else after.recipe)


def _known(topics: Topics, ledger_topic: str, pipeline: str) -> TopicLedger:
    found = read_ledger(topics, ledger_topic, pipeline)
    if found.pipeline is None:
        raise SourceMismatch(
            f"the ledger topic {ledger_topic!r} contains nothing of pipeline {pipeline!r}",
            way_out="run the pipeline first; or correct name, or sink.ledger_topic",
        )
    return found


def _settings(ledger: TopicLedger) -> object:
    return ledger.resets, ledger.replayed


def _inside(spans: Iterable[Span]) -> Callable[[TopicPartition, int], bool]:
    ranges = grouped(spans)
    return lambda tp, offset: any(offset in one for one in ranges.get(tp, ()))
