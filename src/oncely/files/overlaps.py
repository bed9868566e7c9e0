"""Overlapping source ranges of files in one directory, which may contain the same records twice.

The range of a file is a hull: it covers all its records, and also records of other directories. So
only files of the same partition values and scope are compared. Among these:

- Files of one batch may share one offset: a record that became several rows, split between files.
- Files of different batches share none, unless a reset has moved the position back in between: then
  the records were read again on purpose.
- A compaction joins files of several batches, and so may share such an offset with any other file.
- Rows that a transform has mixed have the ranges of their whole batch: files of one batch share
  them, and those of a compaction have no meaning.
- Replayed dead letters have ranges that other files have, and are not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from oncely.core.ranges import Position, TopicPartition
from oncely.kinds.file_format import SourceRange
from oncely.kinds.files.records import ManifestFile, is_mixed, is_replayed

Resets = Mapping[TopicPartition, Mapping[int, Position]]
"""Per source partition, the epoch of each reset and its new position."""


class _Claim(NamedTuple):
    """A range of a file, and only the compared fields of the file, since there may be many."""

    start: int
    end: int
    path: str
    epoch: int
    batch: int
    mixed: bool
    rewritten: bool


def overlaps(files: Iterable[ManifestFile], resets: Resets) -> list[tuple[str, str]]:
    """Path and reason for each file that claims offsets of another file."""
    claims: dict[tuple[object, ...], list[_Claim]] = defaultdict(list)
    for file in files:
        if is_replayed(file) or (is_mixed(file) and file.replaces):
            continue
        where = (tuple(file.partition.items()), file.scope)
        for one in file.ranges:
            claims[*where, one.topic, one.partition].append(
                _Claim(
                    one.start,
                    one.end,
                    file.path,
                    file.epoch,
                    file.batch,
                    is_mixed(file),
                    bool(file.replaces),
                )
            )
    found: list[tuple[str, str]] = []
    for (*_, topic, number), own in claims.items():
        tp = TopicPartition(str(topic), int(str(number)))
        found += _of_partition(tp, own, resets.get(tp, {}))
    return found


def era(epoch: int, resets: Resets) -> int:
    """The newest reset before an epoch; files of different eras may overlap."""
    return max((e for own in resets.values() for e in own if e <= epoch), default=0)


def _of_partition(
    tp: TopicPartition, claims: list[_Claim], resets: Mapping[int, Position]
) -> Iterable[tuple[str, str]]:
    """Sweep: each claim is compared with those that have not ended before its start."""
    under_way: list[_Claim] = []
    for one in sorted(claims, key=lambda claim: claim[:2]):
        under_way = [other for other in under_way if other.end > one.start]
        for other in under_way:
            shared = SourceRange(*tp, one.start, min(one.end, other.end))
            if not _allowed(shared, one, other, resets):
                yield (
                    one.path,
                    f"offsets {shared.start} to {shared.end} of {tp} are in {other.path} too",
                )
        under_way.append(one)


def _allowed(
    shared: SourceRange, one: _Claim, other: _Claim, resets: Mapping[int, Position]
) -> bool:
    together = (one.epoch, one.batch) == (other.epoch, other.batch)
    if together and one.mixed and other.mixed:
        return True
    if (together or one.rewritten or other.rewritten) and shared.end - shared.start == 1:
        return True
    first, last = sorted((one.epoch, other.epoch))
    return any(first < epoch <= last and at <= shared.start for epoch, at in resets.items())
