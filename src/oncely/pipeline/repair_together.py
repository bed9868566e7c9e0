"""Repair and backfill of destinations whose rows do not contain the offsets of their records.

What contains a damaged record is replaced as a whole, with all records of its ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from oncely.commit import rewrite as commit
from oncely.commit.backoff import Backoff
from oncely.core.batch import Chunk
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.core.rewrite import Produce, RewriteKind, Rewritten, Together, add_up
from oncely.errors import WrongInput
from oncely.pipeline.repaired import LOST_FOR_GOOD, NO_OFFSET, Found, Impossible, Repaired
from oncely.pipeline.reread import Work, records_gone
from oncely.sinks.files.rewrite import FilesRewrites

_A_TRANSACTION = 200_000  # offsets; a larger group is rewritten in one transaction, too
_AT_ONCE = 20_000  # offsets that are processed at a time

_LETTER = "a dead letter can't be removed from a topic"
_NOT_COMMITTED = "the pipeline has not committed this offset: audit it again"

Spans = Mapping[TopicPartition, Sequence[OffsetRange]]


def repair_together(
    work: Work[FilesRewrites], found: Sequence[Found], max_removed: int
) -> Repaired:
    """See :func:`oncely.pipeline.repair.repair`."""
    files = {one.file for one in found if one.file}
    foreign = work.sink.foreign(sorted(files))
    names = sorted(files - foreign.keys())
    impossible = [Impossible(one, why) for one in found if (why := _unplaced(one, foreign))]
    placed = {one: _place(one) for one in found if not one.file and not _unplaced(one, foreign)}
    groups = work.sink.groups(_joined(placed.values()))
    reasons = {id(group): _reason(work, group) for group in groups}
    counted = Counter(one.kind for one in found if one.file in names)
    for one, spans in placed.items():
        group = next((group for group in groups if _contains(group, spans)), None)
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
    work: Work[FilesRewrites], ranges: Mapping[TopicPartition, OffsetRange]
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


def _unplaced(one: Found, foreign: Mapping[str, str]) -> str:
    """The reason why a finding has no place that can be rewritten; empty if it has."""
    if one.file in foreign:
        return f"{one.file} is a file of pipeline {foreign[one.file]!r}: a repair leaves it"
    if one.file or one.within:
        return ""
    if one.partition is None or one.offset is None:
        return NO_OFFSET
    return _LETTER if one.kind == "unexpected" else ""


def _place(one: Found) -> Spans:
    if one.partition is not None and one.offset is not None:
        return {one.partition: [OffsetRange(one.offset, one.offset + 1)]}
    return _joined({tp: [own]} for tp, own in one.within)


def _joined(places: Collection[Spans] | Iterator[Spans]) -> Spans:
    return commit.together([Together(spans) for spans in places]).spans


def _contains(group: Together, spans: Spans) -> bool:
    return any(
        one.overlaps(other)
        for tp, own in spans.items()
        for one in own
        for other in group.spans.get(tp, ())
    )


def _reason(work: Work[FilesRewrites], group: Together) -> str:
    """The reason why a group can't be rewritten; empty if it can."""
    for tp, own in group.spans.items():
        if tp.topic in work.compacted:
            return f"{tp.topic} is compacted: records of the same files may have been removed"
        if tp not in work.lows or own[0].start < work.lows[tp]:
            return f"{tp}: the topic no longer has all records whose rows are in the same files"
    return group.problem


def _is_gone(work: Work[FilesRewrites], tp: TopicPartition, offset: int) -> bool:
    return tp not in work.lows or offset < work.lows[tp]


# -- rewriting ----------------------------------------------------------------------------------


def _rewritten(
    work: Work[FilesRewrites],
    kind: RewriteKind,
    groups: Sequence[Together],
    done: Repaired,
) -> Repaired:
    total: Rewritten = done.done
    for portion in _portions(groups) if done.executed else ():
        written = commit.rewrite_together(
            work.sink, kind, portion, _produce(work), Backoff(), work.tell
        )
        total = add_up(total, written)
        work.progress(portion.offsets)
    files = done.files + sum(len(group.names) for group in groups)
    return replace(done, done=total, files=files)


def _portions(groups: Sequence[Together]) -> Iterator[Together]:
    """Groups for one transaction each."""
    portion: list[Together] = []
    for group in groups:
        if portion and sum(one.offsets for one in (*portion, group)) > _A_TRANSACTION:
            yield commit.together(portion)
            portion = []
        portion.append(group)
    if portion:
        yield commit.together(portion)


def _produce(work: Work[FilesRewrites]) -> Produce:
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
