"""Messages of the files sink about its files: manifest messages and schema messages.

The manifest topic has one partition and is compacted by path. It is an interface: any
``read_committed`` consumer can follow it (docs/MANIFEST.md).

| topic    | key                              | value                                     |
|----------|----------------------------------|-------------------------------------------|
| manifest | the file's path below the root   | :class:`ManifestFile`; null: removed      |
| manifest | ``["owner", pipeline]``          | :class:`ManifestOwner`; null: withdrawn   |
| schema   | ``["schema", *scope]``           | :class:`ScopeSchema`                      |

A scope is the values of those partition columns that are plain columns: records of one user share a
schema for all dates. Without such columns, and with a fixed schema, there is one scope, ``()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

from oncely.core.ranges import Position, TopicPartition
from oncely.decode.infer import is_untyped
from oncely.errors import InvariantViolation, NewerFormat, OlderFormat
from oncely.kinds.data_file import Format, Scope, SourceRange
from oncely.kinds.partitions import MIXED

VERSION = 1


class ManifestFile(msgspec.Struct, frozen=True, tag="file", tag_field="kind"):
    """A file that is part of the table.

    Attributes:
        path, rows, bytes, sha256, partition, ranges, scope: as in
            :class:`oncely.kinds.data_file.WrittenFile`.
        format: the format of the file.
        event_time: the event time as ISO 8601 in UTC.
        schema: the id of the scope's published schema, to which the file's own schema resolves.
        pipeline, epoch, batch: the publisher.
        version: the version of this format.
        replaces: files whose rows it contains now: a reader of this message ignores those files,
            even if their tombstones are not visible yet.
        along: files that this message adds, too: together they contain what ``replaces`` did. A
            message of its own for each of them follows, and one of this file without them.
    """

    path: str
    format: Format
    rows: int
    bytes: int
    sha256: str
    partition: dict[str, str | None]
    event_time: tuple[str, str] | None
    ranges: list[SourceRange]
    scope: Scope
    schema: str
    pipeline: str
    epoch: int
    batch: int
    version: int = VERSION
    replaces: list[str] = []
    along: list[ManifestFile] | msgspec.UnsetType = msgspec.UNSET


class ManifestOwner(msgspec.Struct, frozen=True, tag="owner", tag_field="kind"):
    """The pipeline to which a manifest topic belongs; the first record in the log is valid.

    Attributes:
        pipeline: its name.
        root: the URL that paths are relative to.
        version: the version of this format.
    """

    pipeline: str
    root: str
    version: int = VERSION


class ScopeSchema(msgspec.Struct, frozen=True, tag="schema", tag_field="kind"):
    """The schema that every file of a scope resolves to.

    Attributes:
        id: the first 16 hex digits of the SHA-256 of ``avro``.
        scope: its scope.
        avro: the Avro schema, as JSON text.
        version: the version of this format.
    """

    id: str
    scope: Scope
    avro: str
    version: int = VERSION


def path_key(path: str) -> bytes:
    """The key of a file's manifest message."""
    return path.encode()


def owner_key(pipeline: str) -> bytes:
    """The key of a pipeline's owner record; no path begins with a bracket."""
    return msgspec.json.encode(["owner", pipeline])


def schema_key(scope: Scope) -> bytes:
    """The key of a scope's schema message."""
    return msgspec.json.encode(["schema", *scope])


def read_manifest(key: bytes | None, value: bytes | None) -> tuple[str, ManifestFile | None]:
    """Parse a manifest message: the path, and the file; None if it is no longer part of the table.

    Raises:
        InvariantViolation: a foreign message.
        NewerFormat: a newer version of Oncely has written it.
    """
    path = _text(key)
    if value is None:
        return path, None
    found = _value(value, ManifestFile)
    if found.path != path:
        raise InvariantViolation(f"the manifest's message {path!r} names the file {found.path!r}")
    return path, found


def read_owner(key: bytes | None, value: bytes | None) -> tuple[str, ManifestOwner | None] | None:
    """Parse an owner record: the pipeline, and the record, None if it was withdrawn.

    Returns:
        None for another message of the manifest topic.

    Raises:
        NewerFormat: a newer version of Oncely has written it.
    """
    if not (key or b"").startswith(b"["):
        return None
    try:
        _, pipeline = msgspec.json.decode(key or b"", type=tuple[Literal["owner"], str])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return pipeline, _value(value, ManifestOwner) if value is not None else None


def read_schema(key: bytes | None, value: bytes | None) -> ScopeSchema | None:
    """Parse a message of the schema topic; None for a tombstone.

    Raises:
        InvariantViolation: a foreign message.
        NewerFormat, OlderFormat: another version of Oncely has written it.
    """
    if value is None:
        return None
    found = _value(value, ScopeSchema)
    if schema_key(found.scope) != key:
        raise InvariantViolation(f"the schema topic's message {key!r} has the scope {found.scope}")
    if is_untyped(found.scope):
        raise OlderFormat(f"the schema topic's message {key!r}")
    return found


def _text(key: bytes | None) -> str:
    try:
        return (key or b"").decode()
    except UnicodeDecodeError:
        raise InvariantViolation(f"the manifest topic holds a foreign key: {key!r}") from None


T = TypeVar("T", ManifestFile, ManifestOwner, ScopeSchema)


def _value(value: bytes, kind: type[T]) -> T:
    try:
        version = msgspec.json.decode(value, type=dict).get("version")
        if isinstance(version, int) and version > VERSION:
            raise NewerFormat(f"the {kind.__struct_config__.tag} message", version, VERSION)
        if version != VERSION:
            raise InvariantViolation(
                f"a message of version {version!r}; this Oncely reads {VERSION}"
            )
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvariantViolation(f"a message that is none of Oncely's: {error}") from None


def is_mixed(file: ManifestFile) -> bool:
    """True if a transform has mixed the records: the file's ranges are those of the whole batch."""
    return MIXED.fullmatch(file.path) is not None


def is_replayed(file: ManifestFile) -> bool:
    """True if its rows were dead letters: they are in ranges that other files have."""
    return file.batch < 0


Resets = Mapping[TopicPartition, Mapping[int, Position]]
"""Per source partition, the epoch of each reset and its new position."""


def era(epoch: int, resets: Resets) -> int:
    """The newest reset before an epoch; files of different eras may overlap."""
    return max((e for own in resets.values() for e in own if e <= epoch), default=0)
