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
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from pathlib import Path

import msgspec

from oncely.lake.live_files import FIELDS
from oncely.lake.records import ManifestOwner, ScopeSchema

_logger = logging.getLogger("oncely.sinks.files")
_CHECKSUM = 32  # bytes


class ReadSoFar(msgspec.Struct, frozen=True):
    """The progress of reading one of the topics.

    Attributes:
        topic_id: Kafka's topic id.
        last: offset and digest of the last message; None if there was none.
    """

    topic_id: str
    last: tuple[int, bytes] | None


class Snapshot(msgspec.Struct, frozen=True):
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


def load(folder: Path, ids: tuple[str, str], retention: float) -> Snapshot | None:
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
        found = msgspec.msgpack.decode(data, type=Snapshot)
    except (OSError, msgspec.DecodeError):
        return None
    age = time.time() - found.taken
    fits = (found.manifest.topic_id, found.schema.topic_id) == ids and found.fields == FIELDS
    return found if fits and 0 <= age < retention / 2 else None


def save(folder: Path, snapshot: Snapshot) -> None:
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
