"""What tests of the files sink share: stores, what a receipt promises, checked by other means."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.kinds.data_file import AvroFiles, Receipt, WrittenFile
from oncely.stores.objects.root import S3Options
from oncely.stores.objects.store import Bytes, Store, StoredFile


def avro_of(rows: pa.Table) -> bytes:
    """One Avro file of all rows, in their own schema."""
    return AvroFiles(rows.schema).prepare(rows)(0, rows.num_rows)


@dataclass
class Shelf:
    """A place in memory; ``fail`` is raised by the next calls of that name."""

    stored: dict[str, bytes] = field(default_factory=dict)
    fail: dict[str, list[Exception]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    def prepare(self) -> None:
        self._call("prepare")

    def write(self, path: str, data: Bytes) -> None:
        self._call("write")
        self.stored[path] = bytes(data)

    def read(self, path: str) -> bytes:
        self._call("read")
        if path not in self.stored:
            raise FileNotFoundError(path)
        return self.stored[path]

    def open(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self.read(path))

    def files(self) -> Iterator[StoredFile]:
        self._call("files")
        now = datetime.now(UTC)
        return iter([StoredFile(path, len(data), now) for path, data in self.stored.items()])

    def modified(self, path: str) -> datetime:
        self._call("modified")
        return datetime.now(UTC)

    def delete(self, path: str) -> None:
        self._call("delete")
        if self.stored.pop(path, None) is None:
            raise FileNotFoundError(path)

    def sync(self) -> None:
        self._call("sync")

    def store(self, url: str = "file:///shelf", s3: S3Options | None = None) -> Store:
        return Store(url, s3, connect=lambda _url, _s3: self)


def rows_of(data: bytes) -> list[dict[str, Any]]:
    """The rows of a file, by fastavro or pyarrow."""
    if data[:4] == b"PAR1":
        return pq.read_table(pa.BufferReader(data)).to_pylist()
    return list(fastavro.reader(io.BytesIO(data)))  # type: ignore[arg-type]


def check_files(store: Store, receipt: Receipt) -> dict[str, list[dict[str, Any]]]:
    """Every file of a receipt is what it says; the rows of each, by path."""
    found = {}
    for file in receipt.files:
        data = store.read(file.path)
        assert len(data) == file.bytes
        assert hashlib.sha256(data).hexdigest() == file.sha256
        assert file.schema in receipt.schemas
        found[file.path] = rows_of(data)
        assert len(found[file.path]) == file.rows > 0
    assert len(found) == len(receipt.files)
    assert {stored.path for stored in store.list()} == set(found)
    assert set(receipt.schemas) == {file.schema for file in receipt.files}
    return found


def covers(file: WrittenFile, topic: str, partition: int, offset: int) -> bool:
    return any(
        (r.topic, r.partition) == (topic, partition) and r.start <= offset < r.end
        for r in file.ranges
    )
