"""The manifest topic, in the order of the log (docs/MANIFEST.md), and the rows of a table's files.

Avro object container files and Parquet are read by the libraries' own readers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.audit.stored.log import Topics
from oncely.core.ranges import TopicPartition
from oncely.extras import polars as pl

_VERSION = 1


class FileRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets ``[start, end)`` of a topic-partition; they contain all records of a file."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def of(self) -> TopicPartition:
        """The topic-partition."""
        return TopicPartition(self.topic, self.partition)


class NamedFile(msgspec.Struct, frozen=True, tag="file", tag_field="kind"):
    """A file of the table, as published."""

    path: str
    format: Literal["avro", "parquet"]
    rows: int
    bytes: int
    sha256: str
    partition: dict[str, str | None]
    event_time: tuple[str, str] | None
    ranges: list[FileRange]
    scope: tuple[str | None, ...]
    schema: str
    pipeline: str
    epoch: int
    batch: int
    version: int
    replaces: list[str] = []
    along: list[NamedFile] = []
    """Files that the same message adds; a message of its own for each of them follows."""

    @property
    def is_replayed(self) -> bool:
        """True if its rows were dead letters, in ranges that other files have."""
        return self.batch < 0

    @property
    def is_mixed(self) -> bool:
        """True if a transform has mixed the records: the ranges are those of the whole batch."""
        return self.path.rpartition("/")[2].startswith("rows-e")


class ManifestOwner(msgspec.Struct, frozen=True, tag="owner", tag_field="kind"):
    """The pipeline and the root to which the topic belongs."""

    pipeline: str
    root: str
    version: int


T = TypeVar("T", NamedFile, ManifestOwner)


class ManifestMessage(NamedTuple):
    """A message about a file.

    Attributes:
        offset: its offset in the manifest topic.
        at_ms: its timestamp, milliseconds since 1970.
        path: the file's path below the root.
        file: the file; None: no longer part of the table.
    """

    offset: int
    at_ms: int
    path: str
    file: NamedFile | None


@dataclass(frozen=True)
class Manifest:
    """What the manifest topic says.

    Attributes:
        messages: the messages about files, ascending by offset.
        owners: the claims of the topic that are not withdrawn, in the order of the log.
        problems: offset and reason of messages that are invalid.
        again: paths that were named while they were named, or after they had been removed: a
            path is named once in its life.
        first, end: the offsets between which the topic was read. A manifest is compacted and never
            deleted by age: if ``first`` is not 0, entries are missing.
    """

    messages: Sequence[ManifestMessage] = ()
    owners: Sequence[ManifestOwner] = ()
    problems: Sequence[tuple[int, str]] = ()
    first: int = 0
    end: int = 0
    files: Mapping[str, NamedFile] = field(init=False, repr=False)
    removed: Mapping[str, int] = field(init=False, repr=False)
    """The offset of the message that removed a file, while the topic contains it."""
    again: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        files: dict[str, NamedFile] = {}
        removed: dict[str, int] = {}
        again: list[str] = []
        twice: set[str] = set()  # files that a second message of the same transaction names again
        for offset, _, path, file in self.messages:
            for gone in [path] if file is None else file.replaces:
                files.pop(gone, None)
                removed.setdefault(gone, offset)
            if file is None:
                continue
            if (path in files or path in removed) and path not in twice:
                again.append(path)
            twice.discard(path)
            for one in (msgspec.structs.replace(file, along=[]), *file.along):
                files[one.path] = one
            if file.along:
                twice |= {path, *(one.path for one in file.along)}
        for name, value in (("files", files), ("removed", removed), ("again", again)):
            object.__setattr__(self, name, value)


def read_manifest(topics: Topics, manifest_topic: str) -> Manifest:
    """Everything that was in the topic when it was called; waits for open transactions.

    Raises:
        Unavailable: a transaction stayed open, or no answer.
    """
    ends = topics.ends(manifest_topic)
    if not ends:
        return Manifest()
    here = TopicPartition(manifest_topic, 0)
    messages = topics.read({here: ends[here].high})
    return parsed(
        ((one.offset(), one.timestamp()[1], one.key(), one.value()) for one in messages),
        ends[here].first,
        ends[here].high,
    )


def parsed(
    messages: Iterable[tuple[int, int, bytes | None, bytes | None]], first: int = 0, end: int = 0
) -> Manifest:
    """The manifest from messages: offset, timestamp, key and value."""
    files: list[ManifestMessage] = []
    owners: dict[str, ManifestOwner] = {}
    problems: list[tuple[int, str]] = []
    for offset, at, key, value in messages:
        try:
            if (key or b"").startswith(b"["):
                _take_owner(owners, key, value)
            else:
                path = (key or b"").decode()
                files.append(ManifestMessage(offset, at, path, _file(path, value)))
        except (UnicodeDecodeError, msgspec.MsgspecError, ValueError) as error:
            problems.append((offset, f"{key!r}: {error}"))
    return Manifest(files, tuple(owners.values()), problems, first, end)


def _take_owner(owners: dict[str, ManifestOwner], key: bytes | None, value: bytes | None) -> None:
    """Other messages whose key begins with a bracket are no part of the table."""
    try:
        _, pipeline = msgspec.json.decode(key or b"", type=tuple[Literal["owner"], str])
    except msgspec.MsgspecError:
        return
    owners.pop(pipeline, None)  # a rewritten record moves to the end
    if value is not None:
        owners[pipeline] = _of_this_version(msgspec.json.decode(value, type=ManifestOwner))


def _file(path: str, value: bytes | None) -> NamedFile | None:
    if value is None:
        return None
    found = _of_this_version(msgspec.json.decode(value, type=NamedFile))
    if found.path != path:
        raise ValueError(f"it names the file {found.path!r}")
    return found


def _of_this_version(found: T) -> T:
    if found.version != _VERSION:
        raise ValueError(f"version {found.version}; this Oncely reads {_VERSION}")
    return found


# -- the rows of a file ---------------------------------------------------------------------

_ESCAPE = re.compile(r"_x([0-9A-F]{4,6})_")
_EMPTY = "_x_"


class Unreadable(Exception):
    """A file that is no file of its format: truncated, or overwritten."""


def rows_of(data: bytes, form: Literal["avro", "parquet"]) -> pa.Table:
    """All rows of a file, with the names of the columns as the pipeline has them.

    Raises:
        Unreadable: it can't be read.
    """
    try:
        if form == "parquet":
            return pq.read_table(pa.BufferReader(data))
        found = pl.read_avro(io.BytesIO(data)).to_arrow()
    except Exception as error:  # polars and pyarrow raise many classes, and panic
        raise Unreadable(f"can't be read: {type(error).__name__}: {error}"[:300]) from None
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":  # polars raises it past Exception
            raise
        raise Unreadable("can't be read") from None
    return found.rename_columns([_unescaped(name) for name in found.column_names])


def row_count(file: Any, form: Literal["avro", "parquet"]) -> int:
    """The number of rows that a file's metadata contain; reads the footer, or the blocks' heads.

    Args:
        file: a ``pyarrow.NativeFile`` that can seek.

    Raises:
        Unreadable: they can't be read.
    """
    try:
        if form == "parquet":
            return int(pq.ParquetFile(file).metadata.num_rows)
        return _avro_count(file)
    except (OSError, pa.ArrowException, IndexError, EOFError) as error:
        raise Unreadable(f"its metadata can't be read: {error}"[:300]) from None


def _avro_count(file: Any) -> int:
    """Avro 1.11, "Object Container Files": a map of metadata, a marker, and blocks."""
    size, found = file.size(), 0
    if file.read(4) != b"Obj\x01":
        raise EOFError("no Avro file")
    while count := _long(file):
        if count < 0:  # followed by the size in bytes
            _long(file)
        for _ in range(2 * abs(count)):  # key and value
            file.seek(_long(file), 1)
    file.seek(16, 1)
    while file.tell() < size:
        found += _long(file)
        file.seek(_long(file) + 16, 1)
    if file.tell() != size:
        raise EOFError("the last block is not complete")
    return found


def _long(file: Any) -> int:
    """A number in zigzag encoding."""
    value = shift = 0
    while True:
        byte = file.read(1)
        if not byte:
            raise EOFError("the file ends inside a number")
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return int((value >> 1) ^ -(value & 1))


def _unescaped(name: str) -> str:
    """The inverse of the escape of names in docs/MANIFEST.md."""

    def text(found: re.Match[str]) -> str:
        code = int(found[1], 16)
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else found[0]

    return "" if name == _EMPTY else _ESCAPE.sub(text, name)
