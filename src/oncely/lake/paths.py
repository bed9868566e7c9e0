"""The encoding of partition values as directories, and the names of files.

``user=…/date=2026-11-21/hour=07/NAME``. Hive's style, for compatibility with other tools:

- letters, digits, ``_``, ``.`` and ``-`` of ASCII are kept; each other byte of UTF-8 is ``%XX``;
- no value is ``__HIVE_DEFAULT_PARTITION__``; a text equal to it is encoded at its start;
- ``.`` and ``..`` are encoded; the empty text is ``~empty``;
- a value that is too long is cut: its beginning, ``~``, 32 hex digits of the SHA-256 of the whole.

``~`` has no other use, so two values never share a directory. On a case-insensitive file system,
values that differ only in case share a directory: nothing is lost, since the manifest lists the
files, but the directories no longer separate the values.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from oncely.lake.partitions import PartitionColumn
from oncely.lake.records import ManifestFile

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

_EMPTY = "~empty"
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")
_OTHER = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_LEVEL = 200  # bytes, name and value of one directory
_ALL_LEVELS = 680  # bytes: with the longest name, 220, and a slash it is below LONGEST_PATH
_LONGEST_NAME = 64  # bytes, of a topic or of an attempt inside a file's name
_DIGEST = 32


def directory(columns: Sequence[PartitionColumn], values: Sequence[str | None]) -> str:
    """``user=…/date=…``, without a slash at the end; nothing without partition columns."""
    longest = _longest_level(len(columns))
    levels = []
    for column, value in zip(columns, values, strict=True):
        name = encoded(column.name, longest // 2 - 1)
        levels.append(f"{name}={encoded(value, longest - len(name) - 1)}")
    return "/".join(levels)


def _longest_level(columns: int) -> int:
    return min(_LONGEST_LEVEL, _ALL_LEVELS // max(1, columns) - 1)


def is_cut(columns: Sequence[str], name: str, value: str | None = None) -> bool:
    """True if the directories of partition columns cut a name, or a value of its column."""
    longest = _longest_level(len(columns))
    level = encoded(name, longest // 2 - 1)
    found = level if value is None else encoded(value, longest - len(level) - 1)
    return "~" in found.removeprefix(_EMPTY)


@lru_cache(maxsize=4096)
def encoded(value: str | None, longest: int = _LONGEST_LEVEL) -> str:
    """A value as a part of a directory's name, at most ``longest`` bytes of ASCII."""
    if value is None:
        return NO_VALUE
    if not value:
        return _EMPTY
    if value in (".", "..", NO_VALUE):
        return value.replace(".", "%2E").replace("__H", "%5F_H")
    whole, utf8 = value, value.encode("utf-8", "surrogatepass")
    if not _PLAIN.fullmatch(value):
        whole = _OTHER.sub(lambda other: f"%{other[0][0]:02X}".encode(), utf8).decode()
    if len(whole) <= longest:
        return whole
    digest = hashlib.sha256(utf8).hexdigest()[:_DIGEST]
    kept = re.sub("%.?$", "", whole[: longest - _DIGEST - 1])  # no incomplete escape
    return f"{kept}~{digest}"


@dataclass
class FileNames:
    """Unique names of files, in the order of the offsets.

    ``<topic>-<partition>-<first offset>-e<epoch>-b<batch>-<attempt>-<random>-<number>.avro``;
    ``rows-…`` replaces the first three if a transform has mixed the records. Files of a single
    topic-partition sort by offset; a file of several is named after the first.

    Attributes:
        epoch, batch: of the run.
        attempt: identifies the task, for people.
        random: 16 hex digits, which make the names unique.
    """

    epoch: int
    batch: int
    attempt: str
    random: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    _given: int = 0

    def name(self, first: tuple[str, int, int] | None, extension: str) -> str:
        """A new name.

        Args:
            first: topic, partition and offset of the file's first record.
            extension: without a point.
        """
        self._given += 1
        attempt = encoded(self.attempt, _LONGEST_NAME)
        origin = "rows"
        if first is not None:
            origin = f"{encoded(first[0], _LONGEST_NAME)}-{first[1]}-{first[2]:020d}"
        return (
            f"{origin}-e{self.epoch}-b{self.batch}-{attempt}-{self.random}-{self._given:06d}"
            f".{extension}"
        )


# -- information in file names -------------------------------------------------------------


_BY_WHOM = r"-e\d+-b-?\d+-[^/]+-[0-9a-f]{16}-\d{6,}\.(?:avro|parquet)"
_FILE = re.compile(r"(?:.*/)?[^/]+" + _BY_WHOM)
_MIXED = re.compile(r"(?:.*/)?rows" + _BY_WHOM)


def is_file(path: str) -> bool:
    """True if a path below the root ends in a name that Oncely gives to files of a table."""
    return _FILE.fullmatch(path) is not None


def is_mixed(file: ManifestFile) -> bool:
    """True if a transform has mixed the records: the file's ranges are those of the whole batch."""
    return _MIXED.fullmatch(file.path) is not None


def is_replayed(file: ManifestFile) -> bool:
    """True if its rows were dead letters: they are in ranges that other files have."""
    return file.batch < 0
