"""A Delta table's log, and the ledger documents that its application transactions name.

The log is read as it is stored: ``_delta_log/<version>.json``, a JSON object a line. Versions
before a checkpoint may have been removed; the rest of the history says nothing about them.

A document is ``_oncely/ledger-<pipeline>/<number>.json`` (docs/decisions/0039); the newest one is
named by the application transaction ``oncely/<pipeline>`` of the table's version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.audit.stored.topic_ledger import Letter, StoredTotals, content_of
from oncely.core.ranges import TopicPartition, from_tree
from oncely.errors import OlderFormat
from oncely.stores.objects.store import NoSuchFile, Store

_FOLDER = "_oncely"
_FORMAT = 1
_ADDED = ("totals", "started", "format")
_Tree = dict[str, dict[int, int]]


class DeltaDocument(msgspec.Struct, frozen=True):
    """The state of a pipeline's ledger in a Delta table."""

    pipeline: str
    epoch: int
    run: str
    cluster_id: str
    topic_ids: dict[str, str]
    positions: _Tree
    leader_epochs: _Tree
    counted: tuple[str, int, int]
    rejects: list[tuple[str, int]]
    replay: str
    format: int
    totals: dict[str, dict[int, StoredTotals]]
    started: _Tree


@dataclass(frozen=True)
class FileAction:
    """A file that a version adds or removes.

    Attributes:
        path: below the root, not percent-encoded; an absolute URL if the file is elsewhere.
        stored_rows: its number of rows; None if the log does not contain it.
        bytes: its size; None if the log does not contain it.
        changes_data: False if only the layout of the rows has changed, as by OPTIMIZE.
        vector: the deletion vector, which marks some of its rows as deleted; None without one.
    """

    path: str
    stored_rows: int | None
    bytes: int | None
    changes_data: bool
    vector: Any = None

    @property
    def rows(self) -> int | None:
        """The number of rows that are not deleted; None if the log does not contain it."""
        deleted = self.vector.get("cardinality") if isinstance(self.vector, dict) else 0
        known = self.stored_rows is not None and deleted is not None
        return self.stored_rows - deleted if known else None  # type: ignore[operator]


@dataclass(frozen=True)
class DeltaCommit:
    """A version of the table.

    Attributes:
        version: its number.
        at_ms: its time, milliseconds since 1970; None if it is not stored.
        operation: as its writer has named it.
        info: the whole ``commitInfo``.
        added, removed: its files.
        transactions: application transactions, by id.
    """

    version: int
    at_ms: int | None
    operation: str
    info: Mapping[str, Any]
    added: Sequence[FileAction]
    removed: Sequence[FileAction]
    transactions: Mapping[str, int]

    def tree(self, pipeline: str, name: str) -> dict[TopicPartition, Any]:
        """Values of this pipeline's metadata by topic-partition; none for another writer."""
        told = self.told_by(pipeline) or {}
        tree = told.get(name) or {}
        return from_tree(
            {topic: {int(n): at for n, at in own.items()} for topic, own in tree.items()}
        )

    def told_by(self, pipeline: str) -> Mapping[str, Any] | None:
        """The metadata of a commit of this pipeline; None for a commit of another writer."""
        told = self.info.get("oncely")
        ours = f"oncely/{pipeline}" in self.transactions
        return told if ours and isinstance(told, dict) else None


def read_commits(store: Store, until: int | None = None) -> list[DeltaCommit]:
    """The versions that are still in the log, ascending, up to ``until``.

    Args:
        store: the table's root.
        until: the last version; by default the newest.

    Raises:
        Unavailable, ConfigError: see :class:`Store`.
    """
    log = Store(f"{store.url}/_delta_log", store.s3, store.connect)
    names = (one.path.removesuffix(".json") for one in log.list() if one.path.endswith(".json"))
    commits = []
    for name in sorted(name for name in names if name.isdigit()):
        if until is None or int(name) <= until:
            with suppress(NoSuchFile):  # cleaned up meanwhile
                commits.append(parsed_commit(int(name), log.read(f"{name}.json")))
    return commits


def parsed_commit(version: int, data: bytes) -> DeltaCommit:
    """A version from the content of its file."""
    info: dict[str, Any] = {}
    added, removed, transactions = [], [], {}
    for line in data.splitlines():
        match json.loads(line or "{}"):
            case {"commitInfo": dict(given)}:
                info = given
            case {"add": dict(action)}:
                added.append(_file(action))
            case {"remove": dict(action)}:
                removed.append(_file(action))
            case {"txn": {"appId": str(name), "version": int(number)}}:
                transactions[name] = number
    at, operation = info.get("timestamp"), str(info.get("operation", ""))
    return DeltaCommit(version, at, operation, info, added, removed, transactions)


def _file(action: Mapping[str, Any]) -> FileAction:
    stats = action.get("stats")
    rows = json.loads(stats).get("numRecords") if stats else None
    path = unquote(action["path"])
    changes = action.get("dataChange", True)
    return FileAction(path, rows, action.get("size"), changes, action.get("deletionVector"))


def read_document(store: Store, pipeline: str, number: int) -> DeltaDocument:
    """The document that an application transaction names.

    Args:
        store: the table's root.
        number: the version of the application transaction.

    Raises:
        NoSuchFile: it is gone.
        OlderFormat: it lacks a field that versions before the first release did not write.
        ValueError: it is invalid, or of a newer version.
    """
    path = f"{_FOLDER}/ledger-{pipeline}/{number}.json"
    try:
        found = msgspec.json.decode(store.read(path), type=DeltaDocument)
    except msgspec.ValidationError as error:
        if any(f"missing required field `{name}`" in str(error) for name in _ADDED):
            raise OlderFormat(f"{path} in {store!r}") from None
        raise
    if found.format > _FORMAT or found.pipeline != pipeline:
        raise ValueError(f"{path}: format {found.format} of pipeline {found.pipeline!r}")
    return found


def document_numbers(store: Store, pipeline: str) -> list[int]:
    """The numbers of all documents that are stored, also of attempts that took no effect."""
    folder = Store(f"{store.url}/{_FOLDER}/ledger-{pipeline}", store.s3, store.connect)
    names = (one.path.removesuffix(".json") for one in folder.list())
    return sorted(int(name) for name in names if name.isdigit())


def positions_of(document: DeltaDocument) -> dict[TopicPartition, int]:
    """The positions by topic-partition."""
    return from_tree(document.positions)


def read_letters(store: Store, document: DeltaDocument) -> Iterator[Letter]:
    """The dead letters that wait, and those that were discarded.

    Raises:
        NoSuchFile: a file of dead letters is gone.
    """
    for path, _ in document.rejects:
        for row in pq.read_table(pa.BufferReader(store.read(f"{_FOLDER}/{path}"))).to_pylist():
            of = TopicPartition(row["topic"], row["partition"])
            headers = [one.values() for one in row["headers"]]
            content = content_of(row["timestamp_ms"], row["key"], row["value"], headers)
            yield Letter(of, row["offset"], row["stage"], row["reason"], content)
