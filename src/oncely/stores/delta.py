"""Delta tables by delta-rs. All calls to it are in this module, where tests inject faults.

A handle is the table as it was loaded. ``max_commit_retries=0`` makes a commit a compare-and-set of
the whole log: it is refused if any version is newer than the handle's, from any writer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from oncely.core.claim import PositionMoved
from oncely.errors import OncelyError, TableMismatch, Unavailable, check
from oncely.extras import require
from oncely.phases import phase
from oncely.stores.objects.root import S3Options


@dataclass(frozen=True)
class DataFile:
    """A Parquet file to be added: path below the root, partition values as text."""

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str | None]


@dataclass(frozen=True)
class Merge:
    """Rows to be merged by key; they have the additional columns ``deleted`` and ``cleared``.

    Attributes:
        rows: one for each key.
        keys, version: as in ``[sink]``.
        deleted: the boolean column that marks a key whose row is deleted.
        cleared: the boolean column that marks a key that was deleted before: then versions are not
            compared.
        gone: a condition on rows of the table, which are deleted first; empty: none are.
    """

    rows: pa.Table
    keys: Sequence[str]
    version: str | None
    deleted: str
    cleared: str
    gone: str = ""


@dataclass(frozen=True)
class Change:
    """One commit: a higher version of an application, its metadata, files or a merge.

    Attributes:
        gone: paths of files to be removed from the table.
    """

    app_id: str
    version: int
    metadata: Mapping[str, Any]
    files: Sequence[DataFile] = ()
    merge: Merge | None = None
    gone: Collection[str] = ()


class DeltaTables:
    """The table at a URL."""

    def __init__(self, url: str, s3: S3Options | None) -> None:
        self._url, self._s3 = url, s3

    def load(self) -> Any:
        """A handle on the newest version; None if there is no table."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        with self._sorted("load"):
            try:
                return DeltaTable(self._url, storage_options=self._options)
            except TableNotFoundError:
                return None

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Create the table, or keep an existing one."""
        from deltalake import DeltaTable

        with self._sorted("create"):
            DeltaTable.create(
                self._url, schema, "ignore", list(partition_by), storage_options=self._options
            )

    def add_columns(self, table: Any, schema: pa.Schema) -> None:
        """Add columns; they are null in older rows."""
        from deltalake import CommitProperties, Schema

        with self._sorted("add columns to", table):
            once = CommitProperties(max_commit_retries=0)
            table.alter.add_columns(Schema.from_arrow(schema).fields, commit_properties=once)

    @phase("commit")
    def commit(self, table: Any, change: Change) -> None:
        """Commit on the handle on which the change was decided.

        Raises:
            PositionMoved: another commit came first, from any writer; or this commit took effect,
                and its answer was lost.
            Unavailable: the outcome is unknown.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        once = CommitProperties(
            custom_metadata={"oncely": dict(change.metadata)},
            app_transactions=[Transaction(change.app_id, change.version)],
            max_commit_retries=0,
        )
        now, loaded = int(time.time() * 1000), table.version()
        with self._sorted("commit to", table):
            if change.merge is not None:
                _merge(table, change.merge, once)
                if table.transaction_version(change.app_id) == change.version:
                    return
                # A merge that changes no row commits nothing, but the positions must move.
                if table.version() != loaded:
                    raise PositionMoved(f"version {loaded} is not the newest one")
            adds = [
                AddAction(one.path, one.bytes, one.partition, now, True,
                          json.dumps({"numRecords": one.rows}))
                for one in change.files
            ]  # fmt: skip
            removes = list(_removes(table, change.gone, now)) if change.gone else []
            check(len(removes) == len(change.gone), "a file to be removed is not in the table")
            by = table.metadata().partition_columns
            table.create_write_transaction([*removes, *adds], "append", table.schema(), by,
                                           commit_properties=once)  # fmt: skip

    @property
    def _options(self) -> dict[str, str]:
        if not self._url.startswith("s3:"):
            return {}
        s3 = self._s3 or S3Options()
        given = {
            "AWS_ENDPOINT_URL": s3.endpoint,
            "AWS_REGION": s3.region or (s3.endpoint and "us-east-1"),
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "AWS_SESSION_TOKEN": s3.session_token,
            "AWS_ALLOW_HTTP": str(s3.scheme == "http").lower(),
            # These two override the environment.
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            "AWS_S3_ALLOW_UNSAFE_RENAME": "false",
            "aws_conditional_put": "etag",
            "connect_timeout": f"{s3.connect_timeout:g}s",
            "timeout": f"{s3.request_timeout:g}s",
            "max_retries": str(s3.retries),
        }
        return {name: value for name, value in given.items() if value is not None}

    @contextmanager
    def _sorted(self, doing: str, table: Any = None) -> Iterator[None]:
        """Convert errors of delta-rs by consequence."""
        from deltalake import exceptions as of

        try:
            yield
        except (OncelyError, PositionMoved):
            raise
        except Exception as error:  # delta-rs raises Exception, OSError and classes of its own
            if isinstance(error, of.CommitFailedError) and self._newer(table):
                raise PositionMoved(f"version {table.version()} is not the newest one") from None
            text = f"can't {doing} {self._url}: {' '.join(str(error).split())[:500]}"
            wrong = isinstance(error, of.DeltaProtocolError | of.TableNotFoundError)
            if wrong or "Unsupported table features" in text:
                classified: OncelyError = TableMismatch(text, way_out="use another table")
            else:
                classified = Unavailable(text)
            if self._s3 is not None:
                classified.hide(self._s3.secrets)
            raise classified from None

    def _newer(self, table: Any) -> bool:
        newest = self.load() if table is not None else None
        return newest is not None and newest.version() > table.version()


def named_sizes(table: Any) -> dict[str, int]:
    """The files of a table, and their sizes in bytes as its log names them."""
    named = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return {unquote(row["path"]): row["size_bytes"] for row in named}


def of_content(fragment: Any, data: bytes) -> Any:
    """A file of the table's dataset, of its real content: delta-rs reads a file as if it had the
    size that the log names."""
    values = fragment.partition_expression
    return fragment.format.make_fragment(pa.BufferReader(data), partition_expression=values)


DeltaConnect = Callable[[str, S3Options | None], DeltaTables]


def connect(url: str, s3: S3Options | None) -> DeltaTables:
    """The table at a URL.

    Raises:
        ConfigError: a package of the extra is not installed.
    """
    require("delta", "sink.kind", "delta")
    return DeltaTables(url, s3)


def _removes(table: Any, gone: Collection[str], now: int) -> Iterator[Any]:
    """Actions that remove files. delta-rs lists paths in the log's encoding, and takes them without
    it."""
    from deltalake.transaction import RemoveAction

    by = table.metadata().partition_columns
    for row in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        if (path := unquote(row["path"])) in gone:
            values = {name: row[f"partition.{name}"] for name in by}
            texts = {name: None if one is None else str(one) for name, one in values.items()}
            yield RemoveAction(path, True, now, row["size_bytes"], texts)


def _merge(table: Any, merge: Merge, once: Any) -> None:
    """Merge in one statement: a key's row is deleted, replaced unless it is newer, or inserted; and
    rows that go are no rows of a key."""

    def of(side: str, name: str) -> str:
        return f'{side}."{name.replace(chr(34), chr(34) * 2)}"'

    names = [n for n in merge.rows.column_names if n not in (merge.deleted, merge.cleared)]
    same = " AND ".join(f"{of('t', key)} = {of('s', key)}" for key in merge.keys)
    if merge.gone:
        same += f" AND NOT COALESCE({merge.gone}, false)"
    gone, values = of("s", merge.deleted), {of("t", n)[2:]: of("s", n) for n in names}
    newer = None
    if merge.version is not None:
        new, old = of("s", merge.version), of("t", merge.version)
        newer = f"{of('s', merge.cleared)} OR {old} IS NULL OR {new} >= {old}"
    step = table.merge(merge.rows, same, source_alias="s", target_alias="t", commit_properties=once)
    step = step.when_matched_delete(gone).when_matched_update(values, newer)
    step = step.when_not_matched_insert(values, f"NOT {gone}")
    if merge.gone:
        step = step.when_not_matched_by_source_delete(merge.gone)
    step.execute()
