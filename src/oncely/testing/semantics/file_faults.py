"""Faults at the ports of the files sink: its store, and the producer of the manifest.

They are given to ``Parts.files_connect`` and ``Parts.kafka_connect``, like those of
:mod:`oncely.testing.semantics.faults`. Files are written by tasks, so the store kills from a
worker; they are published by the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncely.stores.delta import Change, DeltaTables
from oncely.stores.delta import connect as connect_delta
from oncely.stores.objects.s3 import S3Options
from oncely.stores.objects.store import Bytes, FileSystem, connect
from oncely.testing.semantics.cells import BEFORE, NAMING, RECORDS, STAGED, WRITING, WRITTEN
from oncely.testing.semantics.faults import ARRIVING, Killer, KillingClients, KillingProducer


@dataclass
class KillingStores:
    """``Parts.files_connect``."""

    killer: Killer

    def __call__(self, url: str, s3: S3Options | None) -> FileSystem:
        """Open the store; its writes have the fault."""
        return _Place(connect(url, s3), self.killer)


class _Place:
    """A store that tracks the progress of a task's files."""

    def __init__(self, inner: FileSystem, killer: Killer) -> None:
        self._inner, self._first = inner, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, path: str, data: Bytes) -> None:
        self._first.now.at(WRITING)
        self._inner.write(path, data)
        self._first.now.at(WRITTEN)

    def sync(self) -> None:
        self._inner.sync()
        self._first.now.at(STAGED)


@dataclass
class KillingTables:
    """``Parts.delta_connect``."""

    killer: Killer

    def __call__(self, url: str, s3: S3Options | None) -> Any:
        """Open the table; its commits have the fault."""
        return _Table(connect_delta(url, s3), self.killer)


class _Table:
    """A table that tracks the step of its commits."""

    def __init__(self, inner: DeltaTables, killer: Killer) -> None:
        self._inner, self._killer = inner, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self, table: Any, change: Change) -> None:
        records, position = bool(change.files), "ranges" in change.metadata
        if position if self._killer.position_first else records:
            self._killer.at(BEFORE)
        self._inner.commit(table, change)
        self._killer.committed(records=records, position=position)


@dataclass
class KillingNames(KillingClients):
    """``Parts.kafka_connect`` for a files sink; its topic is the manifest.

    Attributes:
        files: the number of files of one batch.
    """

    files: int

    def producer(self, made: Any) -> KillingProducer:
        """The producer with the fault."""
        return _Namer(made, self.killer, self.topic, self.files)


class _Namer(KillingProducer):
    """A producer that tracks the published files of a batch."""

    def __init__(self, inner: Any, killer: Killer, topic: str, files: int) -> None:
        super().__init__(inner, killer, topic)
        self._files, self._named = files, 0

    def begin_transaction(self) -> Any:
        if self._killer.together:
            self._killer.at(BEFORE)
        return self._inner.begin_transaction()

    def produce(self, topic: str, value: Any, key: Any, **more: Any) -> None:
        names = topic == self._topic and not key.startswith(
            b"["
        )  # not an owner record of the topic
        if names and not self._named and not self._killer.position_first:
            self._killer.at(BEFORE)
        self._inner.produce(topic, value, key, **more)
        if names:
            self._named += 1
            self._records = True
            half, all_ = self._named == self._files // 2, self._named == self._files
            if (half and self._killer.wants(NAMING)) or (
                all_ and self._killer.together and self._killer.wants(RECORDS)
            ):
                self._inner.flush(ARRIVING)
                self._killer.end()

    def flush(self, *timeout: float) -> Any:
        self._named = 0  # without transactions it serves the next batch as well
        return super().flush(*timeout)
