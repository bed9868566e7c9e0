"""Claims: the ranges that a transaction commits for a run, the counts of their records, and the
decision which of them it may commit, given the state of the ledger.

The reject budget is the number of records that may be rejected, counted across restarts.

The ledger of one topic-partition is its position, the epoch that may write, and the ranges beyond
the position that are done already (work that finished out of order). Every caller that is about to
commit a range first calls :func:`decide`, with a ledger that was read *after* the last event that
could have changed it, and acts on the answer inside a transaction whose compare-and-set fails when
the ledger has moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final, Literal, NamedTuple

from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition, normalize
from oncely.errors import Fenced, RejectSummary, TooManyRejects, check


@dataclass(frozen=True)
class RejectCount:
    """Counts against ``sink.max_rejects``, kept across restarts of the pipeline.

    Attributes:
        setting: the budget at the time of counting, as text; empty when nothing was noted.
        records: records that were read.
        rejects: those of them that were rejected.
    """

    setting: str = ""
    records: int = 0
    rejects: int = 0

    def added_to(self, now: RejectCount, noted: RejectCount) -> RejectCount:
        """The count of several concurrent runs after this run has added its own.

        Args:
            now: the count in the ledger. A count for another setting is replaced.
            noted: the part of this run's count that the ledger has already.
        """
        if now.setting != self.setting:
            return self
        before = noted if noted.setting == self.setting else RejectCount()
        return RejectCount(
            self.setting,
            now.records + self.records - before.records,
            now.rejects + self.rejects - before.rejects,
        )


NOTHING_COUNTED = RejectCount()

RAISE_BUDGET = (
    "raise sink.max_rejects to keep them: rejects are counted across restarts, and a changed"
    " sink.max_rejects begins a new count"
)


@dataclass(frozen=True)
class Budget:
    """The number of records that may still be rejected.

    Attributes:
        share: the greatest share of rejects among all records, or None; exact, because 29 of 100 is
            within 29%.
        count: the greatest number of rejects, or None.
        records: records that were counted before the batch.
        rejects: rejects that were counted before the batch.
    """

    share: Fraction | None = None
    count: int | None = None
    records: int = 0
    rejects: int = 0

    JUDGED_FROM = 1_000
    """A share is computed of at least this many records: a share of a few records has no meaning.
    """

    @property
    def setting(self) -> str:
        """The budget as text, exact."""
        return str(self.share if self.count is None else self.count)

    def left(self, more_records: int, more_rejects: int) -> int | None:
        """Rejects that may still be added after ``more_records`` and ``more_rejects``."""
        limits = [] if self.count is None else [self.count]
        if self.share is not None and self.share < 1:
            limits.append(int(max(self.records + more_records, self.JUDGED_FROM) * self.share))
        return max(0, min(limits) - self.rejects - more_rejects) if limits else None


def refuse_beyond(
    limit: int | None,
    rejects: int,
    message: str,
    correctable: str,
    refused: Callable[[], RejectSummary | None] = lambda: None,
) -> None:
    """Refuse more rejects than the budget has left.

    Args:
        limit: the remaining number; None: any number.
        rejects: the number of rejects.
        message: the text of the error.
        correctable: the parts of the pipeline that the user can correct.
        refused: returns their reasons and a sample.

    Raises:
        TooManyRejects: there are more rejects.
    """
    if limit is not None and rejects > limit:
        way_out = f"{correctable}; or {RAISE_BUDGET}"
        raise TooManyRejects(message, way_out=way_out, refused=refused())


RangeKind = Literal["data", "hole", "gap", "joined", "ahead", "skipped"]
"""data: records were read; hole: the range held none; gap: the records were deleted before they
were read; ahead: records were read, and the range began beyond the position
(docs/decisions/0049); skipped: the pipeline's start, or a reset, put the position behind it."""
SKIPPED: Final = "skipped"

AmendmentKind = Literal["replay", "repair", "backfill"]
"""replay: dead letters have become rows; repair: records were written again, as they were
committed; backfill: records were written again, as the present transform makes them."""

Positions = Mapping[TopicPartition, Position]

Reset = Callable[[Positions], Positions]
"""Maps the current positions to the new ones; called when the old run is fenced."""


@dataclass(frozen=True)
class Fence:
    """The writer: a pipeline and the epoch that the ledger gave it. An older epoch cannot commit.

    Attributes:
        pipeline: the ledger's key.
        epoch: the epoch of the takeover.
        run: the unique name of the run, where the ledger keeps it beside the epoch.
        partitions: the partitions that were taken over; None: all, also those added later.
    """

    pipeline: str
    epoch: int
    run: str = ""
    partitions: frozenset[TopicPartition] | None = None

    def covers(self, tp: TopicPartition) -> bool:
        """True if the run has taken the partition over."""
        return self.partitions is None or tp in self.partitions

    def is_held(self, entry: Entry) -> bool:
        """True if the position still has the run's epoch and name."""
        return (entry.epoch, entry.run) == (self.epoch, self.run)

    def held(self, entries: Mapping[TopicPartition, Entry]) -> frozenset[TopicPartition]:
        """The partitions that the run still holds."""
        return frozenset(tp for tp, one in entries.items() if self.covers(tp) and self.is_held(one))

    def refuse_taken(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Check that no other run has taken one of this run's partitions since.

        Raises:
            Fenced: with the lost partitions, if the run has taken some partitions only.
        """
        lost = {
            tp: one.epoch
            for tp, one in entries.items()
            if self.covers(tp) and one.epoch >= self.epoch and not self.is_held(one)
        }
        if lost:
            named = () if self.partitions is None else lost
            raise Fenced(self.pipeline, self.epoch, max(lost.values()), named)


class QueryBatch(NamedTuple):
    """A micro-batch of a streaming query that brings its own checkpoint.

    Attributes:
        query_id: the id of the checkpoint.
        batch_id: Spark's number of the micro-batch.
        plan: a digest of Spark's plan, from the checkpoint's offset log.
    """

    query_id: str
    batch_id: int
    plan: str


@dataclass(frozen=True)
class Claim:
    """The ranges that one transaction commits, and the ledger state on which that was decided.

    Attributes:
        fence: the run that commits.
        ranges: the offsets over which positions are moved, each beginning at the current position.
        expected: the entry of each of these partitions. A position is moved by compare-and-set on
            its (position, epoch).
        kind: the kind of the ranges in the history.
        query: the micro-batch of a query that brings its checkpoint; it takes effect once.
        parts: of a thread that has some of the keys: the ranges of its records. They may begin
            beyond the position, and other threads commit at the same time. ``ranges`` is then from
            the first to the last of them.
    """

    fence: Fence
    ranges: Mapping[TopicPartition, OffsetRange]
    expected: Mapping[TopicPartition, Entry]
    kind: RangeKind = "data"
    query: QueryBatch | None = None
    parts: Mapping[TopicPartition, tuple[OffsetRange, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tp in self.ranges:
            ours = self.fence.covers(tp) and self.fence.is_held(self.expected[tp])
            check(ours, f"{tp}: decided on another epoch's entry, or another run's")

    def only(self, partitions: Iterable[TopicPartition]) -> Claim:
        """This claim, restricted to some of its partitions."""
        return replace(self, ranges={tp: self.ranges[tp] for tp in partitions})

    def end(self, tp: TopicPartition) -> Position:
        """The partition's position after the claim has taken effect."""
        return advance(self.expected[tp], [self.ranges[tp]])

    @property
    def data(self) -> Claim:
        """The claim of a batch without its empty ranges, which move no position.

        Raises:
            InvariantViolation: the batch does not begin where the positions stand.
        """
        claimed = self.only(tp for tp, range_ in self.ranges.items() if not range_.is_empty)
        for tp, range_ in claimed.ranges.items():
            check(
                self.expected[tp].position == range_.start,
                f"{tp}: the batch does not begin at the position",
            )
        return claimed


@dataclass(frozen=True)
class Takeover:
    """The parameters with which a run takes over the positions of a ledger.

    Attributes:
        source: current cluster and topic ids; compared with the ledger's.
        start: returns the positions at which a new pipeline begins; called once in the pipeline's
            life.
        earliest: the first offset of each partition, for partitions that are added later.
        expected: the epoch that this run has held. A run that opens again after a failed batch must
            not take the ledger back from a newer run.
        reset: moves the positions.
        partitions: the partitions that are taken over. They alone get the new epoch, and only
            their holders are fenced. None: all, also those that are added later. With an empty
            set the source is compared and ``start`` is settled, and no run is fenced.
        since: for a takeover of some partitions, ``Opened.whole`` of the first takeover of its
            process. It is refused when all partitions have been taken over since
            (docs/decisions/0036). None: not compared.
    """

    source: SourceIdentity
    start: Callable[[], Positions]
    earliest: Positions
    expected: int | None = None
    reset: Reset | None = None
    partitions: frozenset[TopicPartition] | None = None
    since: Fence | None = None

    def __post_init__(self) -> None:
        whole = self.partitions is None
        check(whole or self.reset is None, "a reset takes all partitions over")
        check(not whole or self.since is None, "a takeover of all partitions has no `since`")

    @property
    def begins(self) -> Positions:
        """The start of partitions that are taken over and have no position yet."""
        if self.partitions is None:
            return self.earliest
        return {tp: at for tp, at in self.earliest.items() if tp in self.partitions}

    def require_positions(self, found: Positions) -> None:
        """Check that each partition named by the takeover has a position.

        Raises:
            InvariantViolation: naming those without one.
        """
        lacking = (self.partitions or frozenset()) - found.keys()
        check(not lacking, f"{sorted(lacking)} have no position, and no first offset to begin at")


@dataclass(frozen=True)
class Opened:
    """The answer to ``open``: this run's fence, and a position for every partition taken over.

    Attributes:
        fence: the fence of the run.
        positions: the position of every partition.
        first_start: the pipeline has never run before.
        counted: the last noted count of rejects; empty if the ledger keeps none.
        leader_epochs: the noted leader epochs of the source; a reset forgets those of the positions
            that it moves.
        whole: the last takeover of all partitions; None if the ledger does not keep it.
        beyond: the ranges beyond the position that have taken effect, of partitions that have some.
        begun: the partitions that begin at these positions: no run has moved them.
    """

    fence: Fence
    positions: Positions
    first_start: bool
    counted: RejectCount = NOTHING_COUNTED
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    whole: Fence | None = None
    beyond: Mapping[TopicPartition, tuple[OffsetRange, ...]] = field(default_factory=dict)
    begun: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True)
class Notes:
    """State that a run keeps in the ledger beside positions.

    Attributes:
        leader_epochs: leader epochs of the source's partitions, each no older than the record
            before the partition's position. The epochs of other partitions are kept.
        counted: the count of rejects for the next run's ``open``; None: unchanged.
        noted: the count that the run has found or noted last. A run of some partitions adds what
            it has counted since to the count in the ledger.
    """

    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    counted: RejectCount | None = None
    noted: RejectCount = NOTHING_COUNTED


@dataclass(frozen=True)
class Counts:
    """Counts of a topic-partition's records, by outcome, and the digest of their rows.

    Attributes:
        digest: the digest of the rows (:mod:`oncely.core.digest`), from 0 to 2^64 - 1; None if it
            is not known. Not compared.
        recipe: the columns that the digest covers; empty if it is not known.
    """

    records: int
    rows: int
    rejects: int
    filtered: int
    digest: int | None = field(default=None, compare=False)
    recipe: str = field(default="", compare=False)

    def __add__(self, other: Counts) -> Counts:
        """The sums. The digest is known if one side has no rows, or both have the same recipe.

        A change of rows that leaves their number has a recipe, too; if its digest is not known,
        :data:`UNKNOWN`.
        """
        both = (self, other)
        with_rows = [one for one in both if one.rows or (one.recipe and one.digest != 0)] or [self]
        known = with_rows[0].recipe == with_rows[-1].recipe
        digests = [one.digest if known else None for one in with_rows]
        digest = None if None in digests else sum(filter(None, digests)) % (1 << 64)
        recipes, rows = {one.recipe for one in with_rows}, self.rows + other.rows
        unknown = UNKNOWN if UNKNOWN in recipes or (any(recipes) and not rows) else ""
        return Counts(
            self.records + other.records,
            rows,
            self.rejects + other.rejects,
            self.filtered + other.filtered,
            digest,
            unknown if digest is None else with_rows[0].recipe,
        )


class Finished(NamedTuple):
    """A range of a topic-partition that a transaction has committed."""

    range: OffsetRange
    counts: Counts
    kind: RangeKind


UNKNOWN = "unknown"
"""The recipe of a change whose digest is not known: it differs from that of every digest."""

NO_RECORDS = Counts(0, 0, 0, 0, 0)
NOT_COUNTED = Counts(0, 0, 0, 0)
"""Of records that are written after their position has moved: their rows are not known."""


@dataclass(frozen=True)
class Amendment:
    """A change to the content of a committed range, after its commit.

    It moves no position, and no decision on positions reads it: the audit adds it to the history.

    Attributes:
        range: the offsets whose content has changed; within one committed range.
        counts: the change of each count, with the digest of the added rows.
    """

    partition: TopicPartition
    range: OffsetRange
    kind: AmendmentKind
    counts: Counts


class PositionMoved(Exception):
    """The compare-and-set changed no row: another commit took effect. Read the ledger and decide
    again."""


# -- the decision ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """The ledger's state of one topic-partition.

    Attributes:
        position: next offset to read; everything before it has taken effect.
        epoch: the only epoch that may commit.
        done: ranges at or beyond the position that have taken effect already.
        run: the name of the run that has the epoch, if the ledger keeps it: after a failover that
            lost an epoch, the same epoch is given out again.
    """

    position: Position
    epoch: int
    done: tuple[OffsetRange, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class Append:
    """Nothing of the range has taken effect: commit all of it."""

    range: OffsetRange


@dataclass(frozen=True)
class Trim:
    """Part of the range has taken effect: commit only what ``keep`` covers."""

    keep: tuple[OffsetRange, ...]


@dataclass(frozen=True)
class Skip:
    """All of the range has taken effect: a replay. Commit nothing, report success."""


@dataclass(frozen=True)
class Ahead:
    """The range begins beyond the position: ``missing`` was not committed before."""

    missing: OffsetRange


@dataclass(frozen=True)
class FencedOff:
    """The ledger belongs to a newer epoch: commit nothing and stop."""

    epoch: int


Decision = Append | Trim | Skip | Ahead | FencedOff


def decide(entry: Entry, wanted: OffsetRange, epoch: int) -> Decision:
    """Decide what the owner of ``epoch`` may commit of ``wanted``.

    Args:
        entry: the ledger, freshly read.
        wanted: the range that was read from the topic.
        epoch: the epoch of the calling run.

    Raises:
        InvariantViolation: the ledger is at an older epoch than the caller; epochs are given out by
            the ledger, so this cannot happen.
    """
    check(entry.epoch >= epoch, f"the ledger's epoch {entry.epoch} is older than ours, {epoch}")
    if entry.epoch > epoch:
        return FencedOff(entry.epoch)
    taken = _taken(entry)
    if wanted.start > taken[0].end:
        return Ahead(OffsetRange(taken[0].end, wanted.start))
    keep = wanted.minus(taken)
    if not keep:
        return Skip()
    return Append(wanted) if keep == (wanted,) else Trim(keep)


def decide_parts(
    entry: Entry, wanted: Iterable[OffsetRange], epoch: int
) -> Trim | Skip | FencedOff:
    """Decide what the owner of ``epoch`` may commit of ranges that may begin beyond the position.

    Raises:
        InvariantViolation: as :func:`decide`.
    """
    check(entry.epoch >= epoch, f"the ledger's epoch {entry.epoch} is older than ours, {epoch}")
    if entry.epoch > epoch:
        return FencedOff(entry.epoch)
    taken = _taken(entry)
    keep = normalize(part for one in wanted for part in one.minus(taken))
    return Trim(keep) if keep else Skip()


def advance(entry: Entry, committed: Iterable[OffsetRange]) -> Position:
    """The position after ``committed`` has taken effect too: the end of the contiguous offsets."""
    return _taken(entry, committed)[0].end


def _taken(entry: Entry, committed: Iterable[OffsetRange] = ()) -> tuple[OffsetRange, ...]:
    """All offsets that have taken effect; the first range begins at 0, with the position."""
    below = OffsetRange(0, entry.position)
    joined = normalize((below, *entry.done, *committed))
    return joined if joined and joined[0].start == 0 else (OffsetRange(0, 0), *joined)
