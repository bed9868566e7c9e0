"""Snapshots of the manifest in the user's cache, from which the next command continues.

Kafka's compaction bounds the history of removed files, but the entries of live files are read by
each command: 300,000 of them take many seconds. A snapshot is only a copy. It is used if all of the
following hold; otherwise the topics are read from their first offset:

- Its topics have the same ids as before (a recreated topic has another id), and end at the
  snapshot's end or later.
- The last message that it contains is still at its offset, or was compacted away.
- It is younger than half of the topics' ``delete.retention.ms``. A tombstone is kept at least that
  long, so every removal since then is still in the log.
- The file belongs to this user, is complete, and was written by a version with the same fields.

Commands that delete or rewrite files (``vacuum``, ``compact``) and that check them (``verify``)
read the topics from the beginning.

In memory, too, the hundreds of thousands of entries of a table are packed into bytes. A decoded
:class:`ManifestFile` takes 1.8 kB, mostly for its Python objects. As MessagePack, with its path as
the key, it takes less than a third of that, and is decoded in two microseconds at each access.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from oncely.kinds.files.records import ManifestFile, ManifestOwner, ScopeSchema

# The path is the first field, and the key. The last one, other files of the message, is not kept.
_KEPT = msgspec.structs.fields(ManifestFile)[1:-1]
_VALUES: Any = tuple[tuple(one.type for one in _KEPT)]  # type: ignore[misc]
FIELDS = [one.name for one in _KEPT]
"""The fields of a packed entry, in order."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_VALUES)


class LiveFiles(Mapping[str, ManifestFile]):
    """Files by path, in the order of insertion. Each access decodes a file again."""

    def __init__(self, packed: dict[str, bytes] | None = None) -> None:
        self._packed: dict[str, bytes] = {} if packed is None else packed

    def __getitem__(self, path: str) -> ManifestFile:
        return ManifestFile(path, *_decoder.decode(self._packed[path]))

    def __contains__(self, path: object) -> bool:
        return path in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, file: ManifestFile) -> None:
        """Add a file, or replace the one with its path."""
        self._packed[file.path] = _encoder.encode(msgspec.structs.astuple(file)[1:-1])

    def remove(self, path: str) -> bool:
        """Remove a file; True if it was present."""
        return self._packed.pop(path, None) is not None

    def copy(self) -> LiveFiles:
        """A copy that later changes do not affect; the packed entries are shared."""
        return LiveFiles(self._packed.copy())

    @property
    def packed(self) -> dict[str, bytes]:
        """The packed entries; see :data:`FIELDS`."""
        return self._packed


_logger = logging.getLogger("oncely.kinds.files")
_CHECKSUM = 32  # bytes


class ReadSoFar(msgspec.Struct, frozen=True):
    """The progress of reading one of the topics.

    Attributes:
        topic_id: Kafka's topic id.
        last: offset and digest of the last message; None if there was none.
    """

    topic_id: str
    last: tuple[int, bytes] | None


class TopicsSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of both topics.

    Attributes:
        taken: seconds since 1970 when the reading began.
        manifest, schema: the progress of reading.
        files: packed, by path.
        removed, schemas, seen: state of the manifest's reader.
        fields: the fields of a packed file.
        owners: the owner records, in the order of the log.
    """

    taken: float
    manifest: ReadSoFar
    schema: ReadSoFar
    files: dict[str, bytes]
    removed: dict[str, int]
    schemas: list[ScopeSchema]
    seen: list[str]
    fields: list[str]
    owners: list[ManifestOwner]


def load(folder: Path, ids: tuple[str, str], retention: float) -> TopicsSnapshot | None:
    """The snapshot of two topics; None if there is no valid one.

    Args:
        folder: the folder of snapshots.
        ids: the present ids of manifest and schema topic.
        retention: seconds for which the topics keep tombstones.
    """
    path = _path(folder, ids)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            checksum, data = file.read(_CHECKSUM), file.read()
        if hashlib.sha256(data).digest() != checksum:
            return None
        found = msgspec.msgpack.decode(data, type=TopicsSnapshot)
    except (OSError, msgspec.DecodeError):
        return None
    age = time.time() - found.taken
    fits = (found.manifest.topic_id, found.schema.topic_id) == ids and found.fields == FIELDS
    return found if fits and 0 <= age < retention / 2 else None


def save(folder: Path, snapshot: TopicsSnapshot) -> None:
    """Replace the snapshot of these topics. An unwritable cache is no error."""
    path = _path(folder, (snapshot.manifest.topic_id, snapshot.schema.topic_id))
    data = msgspec.msgpack.encode(snapshot)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=folder)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(made, path)
        except OSError:
            os.unlink(made)
            raise
    except OSError as error:
        _logger.debug("no snapshot of the manifest is kept: %s", error)


def _path(folder: Path, ids: tuple[str, str]) -> Path:
    return folder / f"{hashlib.sha256('/'.join(ids).encode()).hexdigest()[:32]}.msgpack"
