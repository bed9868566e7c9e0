"""Information in file names; see :class:`oncely.lake.paths.FileNames`."""

from __future__ import annotations

import re

from oncely.lake.records import ManifestFile

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
