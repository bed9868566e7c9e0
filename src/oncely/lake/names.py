"""What the name of a file tells; see :class:`oncely.lake.paths.FileNames`."""

from __future__ import annotations

import re

from oncely.lake.records import ManifestFile

_BY_WHOM = r"-e\d+-b-?\d+-[^/]+-[0-9a-f]{16}-\d{6,}\.(?:avro|parquet)"
_FILE = re.compile(r"(?:.*/)?[^/]+" + _BY_WHOM)
_MIXED = re.compile(r"(?:.*/)?rows" + _BY_WHOM)


def is_file(path: str) -> bool:
    """Whether a path below the root ends in a name that Oncely gives to files of a table."""
    return _FILE.fullmatch(path) is not None


def is_mixed(file: ManifestFile) -> bool:
    """Whether a transform has mixed the records: its ranges are those of the whole batch."""
    return _MIXED.fullmatch(file.path) is not None


def is_replayed(file: ManifestFile) -> bool:
    """Whether its rows were dead letters once: they lie in ranges that other files have."""
    return file.batch < 0
