"""A consistent view of a pipeline's ledger topic, of its dead letters, and of what is read between.

Rows, dead letters and positions of a commit become visible together, but in several topics, one
after the other. So the ledger is read before and after the others: what is below the positions of
the first reading is in every topic that is read after it, and what is beyond those of the second
one belongs to no commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Generic, TypeVar

from oncely.audit.evidence import Committed, Span
from oncely.audit.stored.dead_letters import StoredLetter, read_letters
from oncely.audit.stored.log import Topics
from oncely.audit.stored.topic_ledger import (
    PositionEntry,
    StoredTotals,
    TopicLedger,
    read_ledger,
)
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, SourceIdentity, TopicPartition
from oncely.errors import SourceMismatch, Unavailable

T = TypeVar("T")

_TRIES = 100
COMMITTED = ("data", "hole", "gap", "joined")


@dataclass(frozen=True)
class InForce:
    """A range of the history that no later reset has passed.

    Attributes:
        span: its offsets.
        kind: data, hole, gap or joined.
        counts: of its records.
        epoch: of the run that has committed it; None if it is not known.
        at_ms: the time of the commit, milliseconds since 1970; None if it is not known.
        amended: the counts contain what replays have changed.
    """

    span: Span
    kind: str
    counts: Counts
    epoch: int | None
    at_ms: int | None
    amended: bool = False

    @property
    def committed(self) -> Committed:
        """The same as an entry of a history."""
        at = None if self.at_ms is None else datetime.fromtimestamp(self.at_ms / 1000, UTC)
        return Committed(self.span, self.kind, self.counts, self.epoch, at)


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
    def history(self) -> list[InForce]:
        """The ranges that the ledger topic still contains, ascending."""
        return [one for tp in sorted(self.positions) for one in in_force(self.ledger, tp)]

    @cached_property
    def entries(self) -> list[InForce]:
        """All ranges that the ledger knows of, ascending; see :func:`entries`."""
        return [one for tp in sorted(self.positions) for one in entries(self.ledger, tp)]

    @property
    def committed(self) -> list[Committed]:
        """The same as history of :class:`oncely.audit.evidence.Snapshot`."""
        return [one.committed for one in self.entries]

    def is_backfilled(self, span: Span) -> bool:
        """True if records of the span were backfilled: the history does not tell their rows."""
        tp = span.partition
        own = self.ledger.rewritten.get(tp)
        resets = self.ledger.resets.get(tp, {})
        return own is not None and any(
            OffsetRange(start, end).overlaps(span.range)
            and not any(epoch > by and at <= start for epoch, at in resets.items())
            for start, end, by in own.backfilled
        )

    def started(
        self, known: Iterable[tuple[TopicPartition, Position]]
    ) -> dict[TopicPartition, int]:
        """The smallest offset of each partition that ledger, dead letters or others know of."""
        found = dict(self.positions)
        own = [(one.span.partition, one.span.range.start) for one in self.entries]
        for tp, at in [*own, *((one.of, one.offset) for one in self.letters), *known]:
            if tp in found:
                found[tp] = min(found[tp], at)
        return found

    def waiting(self, spans: Iterable[Span]) -> list[tuple[TopicPartition, int]]:
        """The records of these spans that have a dead letter which was not replayed."""
        inside = _inside(spans)
        found = {(one.of, one.offset) for one in self.letters if one.waits}
        return sorted(one for one in found if inside(*one))

    def replayed(self, spans: Iterable[Span]) -> int:
        """The number of records of these spans whose dead letters were all replayed."""
        inside, waits = _inside(spans), {(o.of, o.offset) for o in self.letters if o.waits}
        done = {(one.of, one.offset) for one in self.letters if not self._is_void(one)}
        return sum(inside(*one) for one in done - waits)

    def beyond(self) -> list[StoredLetter]:
        """Dead letters of records that no position has reached."""
        return [
            one for one in self.letters if one.waits and one.offset >= self.reached.get(one.of, 0)
        ]

    def _is_void(self, one: StoredLetter) -> bool:
        resets = self.ledger.resets.get(one.of, {})
        return any(epoch > one.epoch and at <= one.offset for epoch, at in resets.items())


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


def in_force(ledger: TopicLedger, tp: TopicPartition) -> list[InForce]:
    """The ranges of a partition, ascending; a reset back makes those behind it void."""
    found: list[InForce] = []
    before: StoredTotals | None = None
    for message in ledger.history(tp):
        entry = message.entry
        if not isinstance(entry, PositionEntry):
            continue
        found = [one for one in found if one.span.range.end <= entry.start]
        if entry.kind in COMMITTED and entry.start < entry.end:
            span = Span(tp, OffsetRange(entry.start, entry.end))
            found.append(
                InForce(span, entry.kind, _counts(entry, before), entry.epoch, message.at_ms)
            )
        before = entry.totals
    return found


def entries(ledger: TopicLedger, tp: TopicPartition) -> list[InForce]:
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
        own = InForce(rest, "joined", _minus(counts, less), None, None, amended)
        inside = [own, *inside]
    return [*before, *inside]


def _up_to(history: Sequence[InForce], position: Position) -> list[InForce]:
    """The last ranges without a gap up to a position."""
    found: list[InForce] = []
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
    ranges: dict[TopicPartition, list[OffsetRange]] = {}
    for span in spans:
        ranges.setdefault(span.partition, []).append(span.range)
    return lambda tp, offset: any(offset in one for one in ranges.get(tp, ()))
