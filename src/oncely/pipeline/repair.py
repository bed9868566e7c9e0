"""Repair of what an audit has found, and backfill of a range, with the pipeline's present settings.

Records are read again from the topic, decoded and transformed as by a run, and written through the
commit path. The pipeline may run meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oncely.commit import rewrite as commit
from oncely.commit.backoff import Backoff
from oncely.commit.rewrite import Damage, entry_of, spans
from oncely.core.batch import Reject
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange, TopicPartition, grouped, normalize
from oncely.core.rewrite import Rewritten, add_up
from oncely.errors import ConfigError, WrongInput
from oncely.pipeline.repair_together import backfill_together, repair_together
from oncely.pipeline.repaired import (
    LOST_FOR_GOOD,
    NO_OFFSET,
    NO_RECORD,
    NOT_OURS,
    REFUSED,
    Found,
    Impossible,
    Repaired,
)
from oncely.pipeline.reread import Work, records_gone, rewriting
from oncely.sinks.base import RewritesRecords
from oncely.sinks.files.rewrite import FilesRewrites

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline

Progress = Callable[[int], None]

OFFSETS_A_TRANSACTION = 500
"""Damaged records that are repaired together: each is a condition of a DELETE."""
BACKFILL_A_TRANSACTION = 20_000


# -- repair -------------------------------------------------------------------------------------


def repair(
    pipeline: Pipeline,
    found: Sequence[Found],
    *,
    execute: bool,
    max_removed: int,
    progress: Progress,
    events: str | Path | None,
) -> Repaired:
    """See :meth:`oncely.pipeline.Pipeline.repair`."""
    with rewriting(pipeline, events, execute=execute, progress=progress) as work:
        if isinstance(work.sink, FilesRewrites):
            return repair_together(work, found, max_removed)
        return _repair_records(work, found, max_removed)


def _repair_records(
    work: Work[RewritesRecords], found: Sequence[Found], max_removed: int
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


def _no_place(one: Found) -> str:
    """The reason why a finding names no record; empty if it does."""
    if one.partition is None or one.offset is None:
        return NO_OFFSET if one.within else NO_RECORD
    return NO_RECORD if one.offset < 0 else ""


def _removes(work: Work[RewritesRecords], damage: Damage) -> Mapping[str, int]:
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


def _portions(found: Sequence[Found]) -> Iterator[list[Found]]:
    """Findings for one transaction each: of one partition, by offset."""
    by_partition = grouped((one.partition, one) for one in found if one.partition is not None)
    for _, own in sorted(by_partition.items()):
        own.sort(key=lambda one: one.offset or 0)
        for at in range(0, len(own), OFFSETS_A_TRANSACTION):
            yield own[at : at + OFFSETS_A_TRANSACTION]


def _damage(
    work: Work[RewritesRecords], portion: Sequence[Found]
) -> tuple[Damage | None, list[Impossible]]:
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
    return Damage(tp, offsets, surplus & set(offsets), chunk, lost - surplus), left


def _impossible(
    work: Work[RewritesRecords],
    one: Found,
    records: Mapping[int, Reject],
    ours: Sequence[OffsetRange],
) -> str:
    """The reason why a finding can't be repaired; empty if it can."""
    tp, offset = one.partition, one.offset
    assert tp is not None  # noqa: S101 - for mypy
    assert offset is not None  # noqa: S101
    if reason := work.sink.lacks(one.kind):
        return reason
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
    pipeline: Pipeline,
    ranges: Mapping[TopicPartition, OffsetRange],
    *,
    execute: bool,
    progress: Progress,
    events: str | Path | None,
) -> Repaired:
    """See :meth:`oncely.pipeline.Pipeline.backfill`."""
    with rewriting(pipeline, events, execute=execute, progress=progress) as work:
        if isinstance(work.sink, FilesRewrites):
            return backfill_together(work, ranges)
        return _backfill_records(work, ranges)


def _backfill_records(
    work: Work[RewritesRecords], ranges: Mapping[TopicPartition, OffsetRange]
) -> Repaired:
    if reason := work.sink.lacks("backfill"):
        raise ConfigError("sink.kind", reason, way_out="write into a new topic")
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
    work: Work[RewritesRecords], tp: TopicPartition, wanted: OffsetRange
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


def _backfill_part(work: Work[RewritesRecords], tp: TopicPartition, part: OffsetRange) -> Rewritten:
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
