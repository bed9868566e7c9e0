"""Messages of the files sink about its files: manifest messages, schema messages, receipts.

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

from typing import Literal, TypeVar

import msgspec

from oncely.decode.scopes import is_untyped
from oncely.errors import InvariantViolation, NewerFormat, OlderFormat

VERSION = 1
Format = Literal["avro", "parquet"]
Scope = tuple[str | None, ...]


class SourceRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets ``[start, end)`` of a topic-partition that contain all records of a file."""

    topic: str
    partition: int
    start: int
    end: int


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that a task has written, complete and closed.

    Attributes:
        path: the path below the root, ``/`` between the parts, values percent-encoded.
        rows: the number of rows, at least one.
        bytes: the size in bytes.
        sha256: the SHA-256 of its bytes, in hex.
        partition: the values of the directories: name to the value's text, None for no value.
        event_time: first and last instant of the column of ``date`` and ``hour``, in microseconds
            since 1970 UTC; None without such a column or without a value.
        ranges: the source ranges of its records; empty if a Spark transform mixed them.
        scope: the scope of its schema.
        schema: the id of the file's own schema, see ``schemas`` of :class:`Receipt`.
    """

    path: str
    rows: int
    bytes: int
    sha256: str
    partition: dict[str, str | None]
    event_time: tuple[int, int] | None
    ranges: list[SourceRange]
    scope: Scope
    schema: str


class Receipt(msgspec.Struct, frozen=True):
    """The message of a task to the driver about its files.

    Attributes:
        files: the files that it has written.
        schemas: the schemas of its files, and extended schemas, id to Avro schema in JSON.
        grown: the scopes whose schema the task has extended, and the id of the extended schema.
        batch: the number of the batch in its run.
    """

    files: list[WrittenFile]
    schemas: dict[str, str]
    grown: list[tuple[Scope, str]] = []
    batch: int = 0


class ManifestFile(msgspec.Struct, frozen=True, tag="file", tag_field="kind"):
    """A file that is part of the table.

    Attributes:
        path, rows, bytes, sha256, partition, ranges, scope: as in :class:`WrittenFile`.
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


def encode(what: ManifestFile | ManifestOwner | ScopeSchema | Receipt) -> bytes:
    """As JSON."""
    return msgspec.json.encode(what)


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


def read_receipt(text: str) -> Receipt:
    """Parse the receipt of a task."""
    return msgspec.json.decode(text, type=Receipt)


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
