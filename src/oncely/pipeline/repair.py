"""Repair of what an audit has found, and backfill of a range, with the pipeline's present settings.

Records are read again from the topic, decoded and transformed as by a run, and written through the
commit path. The pipeline may run meanwhile.

Where rows do not contain the offsets of their records, what contains a damaged record is replaced
as a whole, with all records of its ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oncely.audit.report import Finding
from oncely.commit import change as commit
from oncely.commit.backoff import Backoff
from oncely.commit.change import NOTHING, RecordsToRepair, entry_of, spans
from oncely.core.batch import Chunk, Reject
from oncely.core.change import FileGroup, Produce, RewriteKind, Rewritten, add_up
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange, TopicPartition, grouped, normalize
from oncely.errors import WrongInput
from oncely.kinds.base import RewritesRecords, RewritesTogether
from oncely.pipeline.reread import RepairContext, records_gone, rewriting

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts


NO_OFFSET = "the audit does not know the offset: the rows do not contain it (sink.keep_source)"
NO_RECORD = "no record has this place: delete the row by hand, or correct its columns"
NOT_OURS = "the ledger's history does not contain this offset: it was never read, or was changed"
REFUSED = (
    "not written now, and what is there was left as it is: {}; correct the table or the transform,"
    " and repair again"
)
LOST_FOR_GOOD = "lost for good: the topic no longer has the record"


class Impossible(NamedTuple):
    """A finding that can't be repaired, and the reason."""

    found: Finding
    reason: str


@dataclass(frozen=True)
class Repaired:
    """The effect of a repair or backfill; of a dry run, what it would process.

    Attributes:
        executed: False for a dry run.
        offsets: the number of offsets, by kind of damage.
        ranges: the offsets of a backfill.
        impossible: findings that were left as they are.
        done: the sums of the transactions.
        files: files that are replaced or removed, if rows do not contain their offsets.
        removes: the rows and rejects that are removed, and not replaced.
    """

    executed: bool
    offsets: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[TopicPartition, OffsetRange] = field(default_factory=dict)
    impossible: Sequence[Impossible] = ()
    done: Rewritten = NOTHING
    files: int = 0
    removes: Mapping[str, int] = field(default_factory=dict)

    def exceeds(self, most: int) -> str:
        """What would be removed, if that is more than the allowed number of a kind."""
        if max(self.removes.values(), default=0) <= most:
            return ""
        told = " and ".join(f"{number:,} {kind}" for kind, number in self.removes.items())
        return f"it removes {told}, and --max-removed is {most:,}"

    def refuse_more(self, most: int) -> None:
        """Refuse to remove more rows, or more rejects.

        Raises:
            WrongInput: nothing was written.
        """
        if self.executed and (told := self.exceeds(most)):
            raise WrongInput(
                f"the repair was refused, and nothing was written: {told}",
                way_out="look at what `oncely audit` names: are the rows wrong, or is the ledger?"
                f" `--max-removed {max(self.removes.values())}` allows the removal",
            )

    def as_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {
            "executed": self.executed,
            "offsets": dict(self.offsets),
            "ranges": [
                {"topic": tp.topic, "partition": tp.partition, "start": one.start, "end": one.end}
                for tp, one in sorted(self.ranges.items())
            ],
            "impossible": [
                {
                    "topic": one.found.partition and one.found.partition.topic,
                    "partition": one.found.partition and one.found.partition.partition,
                    "offset": one.found.offset,
                    "kind": one.found.kind,
                    "reason": one.reason,
                }
                for one in self.impossible
            ],
            "removed_rows": self.done.removed_rows,
            "removed_rejects": self.done.removed_rejects,
            "rows": self.done.counts.rows,
            "rejects": self.done.counts.rejects,
            "filtered": self.done.counts.filtered,
            "files": self.files,
            "removes": dict(self.removes),
        }


Progress = Callable[[int], None]

OFFSETS_A_TRANSACTION = 500
"""Damaged records that are repaired together: each is a condition of a DELETE."""
BACKFILL_A_TRANSACTION = 20_000


# -- repair -------------------------------------------------------------------------------------


def repair(
    pipeline: Parts,
    found: Sequence[Finding],
    *,
    execute: bool,
    max_removed: int,
    progress: Progress,
    events: str | Path | None,
) -> Repaired:
    """See :meth:`oncely.pipeline.Pipeline.repair`."""
    found = [replace(one, detail="") for one in found]  # of a place, not of a text
    with rewriting(pipeline, "repair", events, execute=execute, progress=progress) as work:
        if isinstance(work.sink, RewritesTogether):
            return repair_together(work, found, max_removed)
        return _repair_records(work, found, max_removed)


def _repair_records(
    work: RepairContext[RewritesRecords], found: Sequence[Finding], max_removed: int
) -> Repaired:
    """Process all portions twice: nothing is written before it is known what would be removed."""
    impossible = [Impossible(one, reason) for one in found if (reason := _no_place(one))]
    portions = list(_portions([one for one in found if not _no_place(one)]))
    counted, removes = Counter[str](), Counter[str]()
    for portion in portions:
        damage, left = _damage(work, portion)
        impossible += left
        gone = {one.found for one in left}
        counted.update(one.kind for one in portion if one not in gone)
        removes.update({} if damage is None else _removes(work, damage))
    plan = Repaired(work.execute, dict(counted), impossible=tuple(impossible), removes=removes)
    plan.refuse_more(max_removed)
    total = commit.NOTHING
    for portion in portions if work.execute else ():
        damage, _ = _damage(work, portion)
        if damage is not None:
            total = add_up(total, commit.repair(work.sink, damage, Backoff(), work.tell))
            work.progress(len(damage.offsets))
    refused = [
        Impossible(one, REFUSED.format(" ".join(total.refused[one.partition, one.offset].split())))
        for one in found
        if one.partition and one.offset is not None
        and (one.partition, one.offset) in total.refused
    ]  # fmt: skip
    counted.subtract(one.found.kind for one in refused)
    return replace(plan, offsets=dict(+counted), impossible=(*impossible, *refused), done=total)


def _no_place(one: Finding) -> str:
    """The reason why a finding names no record; empty if it does."""
    if one.partition is None or one.offset is None:
        return NO_OFFSET if one.within else NO_RECORD
    return NO_RECORD if one.offset < 0 else ""


def _removes(work: RepairContext[RewritesRecords], damage: RecordsToRepair) -> Mapping[str, int]:
    """Rows and rejects in whose place their records produce nothing."""
    offsets = commit.spans(one for one in damage.offsets if one not in damage.lost)
    if not offsets:
        return {}
    rows, rejects = work.sink.present(damage.partition, offsets)
    ours = work.sink.committed(damage.partition, OffsetRange(offsets[0].start, offsets[-1].end))
    chunk = damage.chunk.keep({damage.partition: offsets})
    chunk = chunk.keep({damage.partition: normalize(ours)})
    made = chunk.counts(chunk.row_record, chunk.rejections).get(damage.partition, NO_RECORDS)
    return {"rows": max(0, rows - made.rows), "rejects": max(0, rejects - made.rejects)}


def _portions(found: Sequence[Finding]) -> Iterator[list[Finding]]:
    """Findings for one transaction each: of one partition, by offset."""
    by_partition = grouped((one.partition, one) for one in found if one.partition is not None)
    for _, own in sorted(by_partition.items()):
        own.sort(key=lambda one: one.offset or 0)
        for at in range(0, len(own), OFFSETS_A_TRANSACTION):
            yield own[at : at + OFFSETS_A_TRANSACTION]


def _damage(
    work: RepairContext[RewritesRecords], portion: Sequence[Finding]
) -> tuple[RecordsToRepair | None, list[Impossible]]:
    """The damage of a portion, and the findings that can't be repaired."""
    tp = portion[0].partition
    assert tp is not None  # noqa: S101 - for mypy
    known = tp in work.positions
    offsets = sorted({one.offset or 0 for one in portion})
    whole = OffsetRange(offsets[0], offsets[-1] + 1)
    ours = normalize(work.sink.committed(tp, whole)) if known else ()
    records = work.fetch(tp, offsets) if tp in work.lows else {}
    reasons = {one: _impossible(work, one, records, ours) for one in portion}
    left = [Impossible(one, reason) for one, reason in reasons.items() if reason]
    offsets = sorted({one.offset or 0 for one, reason in reasons.items() if not reason})
    if not offsets:
        return None, left
    wanted = [records[one] for one in offsets if one in records]
    standing = work.standing(tp, wanted, entry_of(work.sink, tp).position)
    chunk = work.chunk(tp, standing)
    surplus, lost = (
        {o.offset or 0 for o in portion if o.kind == k} for k in ("unexpected", "lost")
    )
    return RecordsToRepair(tp, offsets, surplus & set(offsets), chunk, lost - surplus), left


def _impossible(
    work: RepairContext[RewritesRecords],
    one: Finding,
    records: Mapping[int, Reject],
    ours: Sequence[OffsetRange],
) -> str:
    """The reason why a finding can't be repaired; empty if it can."""
    tp, offset = one.partition, one.offset
    assert tp is not None  # noqa: S101 - for mypy
    assert offset is not None  # noqa: S101
    if one.kind in work.lacks:
        return work.lacks[one.kind]
    if tp not in work.positions:
        return "the pipeline has no position in this partition: the rows may be of another pipeline"
    record = records.get(offset)
    if record is not None and record.value is None and work.late_delete:
        return work.late_delete
    if record is None and one.kind != "unexpected":
        return LOST_FOR_GOOD
    if one.kind != "unexpected" and not any(offset in own for own in ours):
        return NOT_OURS
    deleted = tp not in work.lows or offset < work.lows[tp]
    if record is None and (deleted or (tp.topic in work.compacted and offset < work.ends[tp])):
        return "the topic no longer tells whether there was a record"
    return ""


# -- backfill -----------------------------------------------------------------------------------


def backfill(
    pipeline: Parts,
    ranges: Mapping[TopicPartition, OffsetRange],
    *,
    execute: bool,
    progress: Progress,
    events: str | Path | None,
) -> Repaired:
    """See :meth:`oncely.pipeline.Pipeline.backfill`."""
    with rewriting(pipeline, "backfill", events, execute=execute, progress=progress) as work:
        if isinstance(work.sink, RewritesTogether):
            return backfill_together(work, ranges)
        return _backfill_records(work, ranges)


def _backfill_records(
    work: RepairContext[RewritesRecords], ranges: Mapping[TopicPartition, OffsetRange]
) -> Repaired:
    total = commit.NOTHING
    planned = {tp: _committed_part(work, tp, one) for tp, one in sorted(ranges.items())}
    planned = {tp: one for tp, one in planned.items() if not one.is_empty}
    for tp, whole in planned.items() if work.execute else ():
        for part in _parts(whole, work.sink.committed(tp, whole)):
            total = add_up(total, _backfill_part(work, tp, part))
            work.progress(part.end - part.start)
    return Repaired(work.execute, ranges=planned, done=total)


def _parts(whole: OffsetRange, committed: Sequence[OffsetRange]) -> Iterator[OffsetRange]:
    """Offsets of one transaction each: of one committed range, whose history it amends."""
    for one in committed:
        end = min(one.end, whole.end)
        for start in range(max(one.start, whole.start), end, BACKFILL_A_TRANSACTION):
            yield OffsetRange(start, min(end, start + BACKFILL_A_TRANSACTION))


def _committed_part(
    work: RepairContext[RewritesRecords], tp: TopicPartition, wanted: OffsetRange
) -> OffsetRange:
    """The part of a range that the pipeline has committed.

    Raises:
        DataLost: the topic no longer has the first of its records.
    """
    if tp not in work.lows:
        raise WrongInput(f"{tp}: the pipeline's topics have no such partition")
    entry = entry_of(work.sink, tp)
    ours = normalize(work.sink.committed(tp, wanted)) if not wanted.is_empty else ()
    end = min(wanted.end, entry.position)
    start = max(wanted.start, ours[0].start) if ours else end
    if start >= end:
        return OffsetRange(min(wanted.start, end), min(wanted.start, end))
    if start < work.lows[tp]:
        raise records_gone(tp, OffsetRange(start, min(end, work.lows[tp])))
    return OffsetRange(start, end)


def _backfill_part(
    work: RepairContext[RewritesRecords], tp: TopicPartition, part: OffsetRange
) -> Rewritten:
    records = work.fetch(tp, range(part.start, part.end))
    low = work.pipeline.source.watermarks()[tp].low
    if low > part.start:  # read after the records: nothing was deleted before they were read
        raise records_gone(tp, OffsetRange(part.start, min(part.end, low)))
    late = work.late_delete
    kept = [one for _, one in sorted(records.items()) if one.value is not None or not late]
    # Rows of records that compaction has deleted can't be made again.
    offsets = spans(one.offset for one in kept) if tp.topic in work.compacted else (part,)
    if not offsets:
        return commit.NOTHING
    standing = work.standing(tp, kept, entry_of(work.sink, tp).position)
    chunk = work.chunk(tp, standing)
    return commit.rewrite(work.sink, "backfill", tp, offsets, chunk, Backoff(), work.tell)


_A_TRANSACTION = 200_000  # offsets; a larger group is rewritten in one transaction, too
_AT_ONCE = 20_000  # offsets that are processed at a time

_LETTER = "a dead letter can't be removed from a topic"
_NOT_COMMITTED = "the pipeline has not committed this offset: audit it again"

Spans = Mapping[TopicPartition, Sequence[OffsetRange]]


def repair_together(
    work: RepairContext[RewritesTogether], found: Sequence[Finding], max_removed: int
) -> Repaired:
    """See :func:`oncely.pipeline.repair.repair`."""
    files = {one.file for one in found if one.file}
    foreign = work.sink.foreign(sorted(files))
    names = sorted(files - foreign.keys())
    impossible = [Impossible(one, why) for one in found if (why := _unplaced(one, foreign))]
    placed = {one: _place(one) for one in found if not one.file and not _unplaced(one, foreign)}
    groups = work.sink.groups(_joined(placed.values()))
    reasons = {id(group): _reason(work, group) for group in groups}
    counted = Counter[str](one.kind for one in found if one.file in names)
    for one, place in placed.items():
        group = next((group for group in groups if _contains(group, place)), None)
        reason = _NOT_COMMITTED if group is None else reasons[id(group)]
        if one.offset is not None and reason and one.partition is not None:
            reason = LOST_FOR_GOOD if _is_gone(work, one.partition, one.offset) else reason
        if reason:
            impossible.append(Impossible(one, reason))
        else:
            counted[one.kind] += 1
    left = [group for group in groups if not reasons[id(group)]]
    done = Repaired(
        work.execute, dict(counted), impossible=tuple(impossible), files=len(names),
        removes={"rows": work.sink.present(names)} if names else {},
    )  # fmt: skip
    done.refuse_more(max_removed)
    if work.execute and names:
        done = replace(done, done=commit.remove_unexpected(work.sink, names, Backoff(), work.tell))
    return _rewritten(work, "repair", left, done)


def backfill_together(
    work: RepairContext[RewritesTogether], ranges: Mapping[TopicPartition, OffsetRange]
) -> Repaired:
    """See :func:`oncely.pipeline.repair.backfill`; a range is widened to whole files."""
    for tp in ranges:
        if tp not in work.lows:
            raise WrongInput(f"{tp}: the pipeline's topics have no such partition")
    entries = work.sink.entries()
    wanted = {
        tp: [OffsetRange(one.start, min(one.end, entries[tp].position))]
        for tp, one in ranges.items()
        if tp in entries and one.start < entries[tp].position
    }
    groups = work.sink.groups(wanted)
    for group in groups:
        for tp, own in group.spans.items():
            if own[0].start < work.lows[tp]:
                raise records_gone(tp, OffsetRange(own[0].start, min(own[-1].end, work.lows[tp])))
        if reason := _reason(work, group):
            raise WrongInput(reason, way_out="choose another range, or write a new table")
    whole = commit.together(groups).spans
    planned = {tp: OffsetRange(own[0].start, own[-1].end) for tp, own in whole.items()}
    done = Repaired(work.execute, ranges=planned)
    return _rewritten(work, "backfill", groups, done)


# -- where damage is ----------------------------------------------------------------------------


def _unplaced(one: Finding, foreign: Mapping[str, str]) -> str:
    """The reason why a finding has no place that can be rewritten; empty if it has."""
    if one.file in foreign:
        return f"{one.file} is a file of pipeline {foreign[one.file]!r}: a repair leaves it"
    if one.file or one.within:
        return ""
    if one.partition is None or one.offset is None:
        return NO_OFFSET
    return _LETTER if one.kind == "unexpected" else ""


def _place(one: Finding) -> Spans:
    if one.partition is not None and one.offset is not None:
        return {one.partition: [OffsetRange(one.offset, one.offset + 1)]}
    return _joined({tp: [own]} for tp, own in one.within)


def _joined(places: Collection[Spans] | Iterator[Spans]) -> Spans:
    return commit.together([FileGroup(spans) for spans in places]).spans


def _contains(group: FileGroup, spans: Spans) -> bool:
    return any(
        one.overlaps(other)
        for tp, own in spans.items()
        for one in own
        for other in group.spans.get(tp, ())
    )


def _reason(work: RepairContext[RewritesTogether], group: FileGroup) -> str:
    """The reason why a group can't be rewritten; empty if it can."""
    for tp, own in group.spans.items():
        if tp.topic in work.compacted:
            return f"{tp.topic} is compacted: records of the same files may have been removed"
        if tp not in work.lows or own[0].start < work.lows[tp]:
            return f"{tp}: the topic no longer has all records whose rows are in the same files"
    return group.problem


def _is_gone(work: RepairContext[RewritesTogether], tp: TopicPartition, offset: int) -> bool:
    return tp not in work.lows or offset < work.lows[tp]


# -- rewriting ----------------------------------------------------------------------------------


def _rewritten(
    work: RepairContext[RewritesTogether],
    kind: RewriteKind,
    groups: Sequence[FileGroup],
    done: Repaired,
) -> Repaired:
    total: Rewritten = done.done
    for portion in _portions_together(groups) if done.executed else ():
        written = commit.rewrite_together(
            work.sink, kind, portion, _produce(work), Backoff(), work.tell
        )
        total = add_up(total, written)
        work.progress(portion.offsets)
    files = done.files + sum(len(group.names) for group in groups)
    return replace(done, done=total, files=files)


def _portions_together(groups: Sequence[FileGroup]) -> Iterator[FileGroup]:
    """Groups for one transaction each."""
    portion: list[FileGroup] = []
    for group in groups:
        if portion and sum(one.offsets for one in (*portion, group)) > _A_TRANSACTION:
            yield commit.together(portion)
            portion = []
        portion.append(group)
    if portion:
        yield commit.together(portion)


def _produce(work: RepairContext[RewritesTogether]) -> Produce:
    def produce(
        tp: TopicPartition, whole: OffsetRange, without: Collection[int]
    ) -> Iterator[Chunk]:
        for start in range(whole.start, whole.end, _AT_ONCE):
            end = min(whole.end, start + _AT_ONCE)
            records = work.fetch(tp, [one for one in range(start, end) if one not in without])
            low = work.pipeline.source.watermarks()[tp].low
            if low > start:  # read after the records: nothing was deleted before they were read
                raise records_gone(tp, OffsetRange(start, min(end, low)))
            if records:
                yield work.chunk(tp, [one for _, one in sorted(records.items())])

    return produce
