"""The choice of small files to be merged: pure decisions, nothing is read or written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from oncely.core.ranges import OffsetRange, TopicPartition, normalize
from oncely.files.overlaps import Resets, era
from oncely.lake.manifest import ManifestFile, SourceRange, encode
from oncely.lake.paths import is_mixed, is_replayed

Bin: TypeAlias = "list[str]"
"""The paths of two or more files in the order of their rows, to be written as one."""

_FRAME = 1_000  # bytes of a batch and a record around key and value
_NUMBERS = 60  # bytes of a range in JSON, without its topic


def bins(
    files: Mapping[str, ManifestFile], resets: Resets, *, target: int, largest: int
) -> Iterator[Bin]:
    """Files of a directory that together have at most about ``target`` bytes.

    A file of half the target or more is not merged: otherwise every compaction would write it
    again. Files are merged if they have the same directory, scope and pipeline, and no reset is
    between them: records that were read twice on purpose are not merged into one file. Replayed
    dead letters, and rows that a transform has mixed, are merged only with each other, so that
    ranges keep their meaning.

    Args:
        files: the files of the table.
        resets: the resets in the ledger.
        target: the target size of a file, in bytes.
        largest: the limit of a manifest message, in bytes: it contains all paths of a bin.
    """
    # Entries of files take 1.8 kB each: only their sort keys are kept for all at a time.
    groups: dict[tuple[object, ...], list[tuple[int, int, str]]] = defaultdict(list)
    for file in files.values():
        if file.bytes * 2 < target:
            folder = file.path.rpartition("/")[0]
            kind = (is_mixed(file), is_replayed(file))
            key = (folder, file.scope, file.pipeline, era(file.epoch, resets), kind)
            groups[key].append(in_order(file))
    for group in groups.values():
        yield from _packed((files[path] for *_, path in sorted(group)), target, largest)


def in_order(file: ManifestFile) -> tuple[int, int, str]:
    """Batches in order, and within a batch names in the order of offsets."""
    return file.epoch, file.batch, file.path


def union(files: Iterable[ManifestFile]) -> list[SourceRange]:
    """The ranges of all files; touching or overlapping ranges are joined."""
    found: dict[TopicPartition, list[OffsetRange]] = defaultdict(list)
    for file in files:
        for one in file.ranges:
            found[TopicPartition(one.topic, one.partition)].append(OffsetRange(one.start, one.end))
    return [
        SourceRange(*tp, one.start, one.end)
        for tp, own in sorted(found.items())
        for one in normalize(own)
    ]


def _packed(files: Iterable[ManifestFile], target: int, largest: int) -> Iterator[Bin]:
    packed: Bin = []
    size = length = 0
    for file in files:
        entry = len(encode(file))
        if packed and (size + file.bytes > target or length + _more(file) > largest - _FRAME):
            if len(packed) > 1:
                yield packed
            packed = []
        if not packed:
            size, length = 0, entry
        packed.append(file.path)
        size, length = size + file.bytes, length + _more(file)
    if len(packed) > 1:
        yield packed


def _more(file: ManifestFile) -> int:
    """The bytes that a file adds to the message of the file that replaces it."""
    ranges = sum(len(one.topic) + _NUMBERS for one in file.ranges)
    return len(file.path) + len('"",') + ranges
