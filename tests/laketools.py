"""What tests of files share: a table with real files, published by a writer of the tests' own."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.core.claim import RejectCount
from oncely.decode.avro_schema import avro_schema_of, schema_id
from oncely.kafka.transaction import Message
from oncely.kinds.data_file import SourceRange
from oncely.kinds.data_file import encode as encode_entry
from oncely.kinds.files import topics as owner
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.records import ManifestFile, ScopeSchema, path_key, read_manifest
from oncely.kinds.files.table import Table
from oncely.kinds.partitions import FileNames, directory
from oncely.stores.objects.store import Store
from oncely.stores.topic.cluster import Cluster
from oncely.stores.topic.records import PipelineRecord, ResetRecord, View, encode
from oncely.testing.servers.kafka import Broker
from tests import manifesttools
from tests.manifesttools import Topics

COLUMNS = pa.schema([("id", pa.int64()), ("user", pa.string()), ("ts", pa.int64())])
T0 = 1_700_000_000_000  # 2023-11-14T22:13:20Z, in milliseconds


@dataclass
class Lake:
    """A table, and a publisher that knows nothing of the readers."""

    topics: Topics
    table: Table
    root: Path
    topic_id: str = ""
    next: dict[int, int] = field(default_factory=dict)
    batch: int = 0
    epoch: int = 1
    rows: list[dict[str, Any]] = field(default_factory=list)  # all that was published

    def file(
        self,
        rows: Sequence[Mapping[str, Any]],
        schema: pa.Schema = COLUMNS,
        *,
        partition: int = 0,
        start: int | None = None,
        scope: tuple[str | None, ...] = (),
        form: str = "avro",
        published: str | None = None,
        mixed: bool = False,
        ranges: Sequence[SourceRange] = (),
    ) -> ManifestFile:
        """Write rows of one directory; records are numbered from where the partition stands."""
        first = self.next.get(partition, 0) if start is None else start
        self.next[partition] = max(self.next.get(partition, 0), first + len(rows))
        names = [level.name for level in self.table.levels]
        values = tuple(value_of(rows[0], text) for text in self.table.partition_by)
        name = FileNames(self.epoch, self.batch, "t0").name(
            None if mixed else ("events", partition, first), form
        )
        folder = directory(self.table.levels, values)
        path = f"{folder}/{name}" if folder else name
        data = bytes_of(rows, schema, form)
        self.table.store.write(path, data)
        times = [row["ts"] for row in rows if isinstance(row.get("ts"), int)]
        timed = any("(" in text for text in self.table.partition_by)
        span = (instant(min(times)), instant(max(times))) if times and timed else None
        return ManifestFile(
            path=path,
            format=form,  # type: ignore[arg-type]
            rows=len(rows),
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            partition=dict(zip(names, values, strict=True)),
            event_time=span,
            ranges=list(ranges) or [SourceRange("events", partition, first, first + len(rows))],
            scope=scope,
            schema=published or schema_id(avro_schema_of(schema)),
            pipeline=self.topics.name,
            epoch=self.epoch,
            batch=self.batch,
        )

    def publish(
        self,
        files: Iterable[ManifestFile],
        schemas: Iterable[pa.Schema | tuple[tuple[str | None, ...], pa.Schema]] = (COLUMNS,),
    ) -> None:
        """One batch."""
        given = [one if isinstance(one, tuple) else ((), one) for one in schemas]
        self.topics.publish(files, [scope_schema(schema, scope) for scope, schema in given])
        self.batch += 1

    def batch_of(self, *groups: Sequence[Mapping[str, Any]], **more: Any) -> list[ManifestFile]:
        """Publish one file for each group of rows."""
        files = [self.file(rows, **more) for rows in groups]
        self.publish(files)
        self.rows += [dict(row) for rows in groups for row in rows]
        return files

    def age(self, path: str, seconds: float) -> None:
        """Make a file older than it is."""
        at = (self.root / path).stat().st_mtime - seconds
        os.utime(self.root / path, (at, at))

    def paths(self) -> set[str]:
        """All files of tables below the root."""
        found = (p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file())
        return {path for path in found if not path.startswith(("_oncely/", owner.NOTICE))}

    def register(self, resets: Mapping[int, int] | None = None) -> None:
        """What a sink writes at its start: ledger and owner. Resets of partition 0 by epoch."""
        words = self.table.pipeline_topics.keys
        registered = PipelineRecord(
            self.epoch,
            "run",
            "cluster",
            {},
            "files",
            {},
            {},
            {self.table.manifest_topic: self.topic_id},
            {},
            {},
            RejectCount(),
        )
        messages = [Message(encode(registered), words.pipeline_key())]
        from oncely.core.ranges import TopicPartition

        for epoch, at in (resets or {}).items():
            key = words.reset_key(TopicPartition("events", 0), epoch)
            messages.append(Message(encode(ResetRecord(at)), key))
        cluster = Cluster(self.table.pipeline_topics)
        with cluster.transaction(words.opener) as opener:
            opener.init()
            opener.begin()
            opener.send(self.table.pipeline_topics.ledger_topic, messages)
            opener.commit()
        cluster.close()
        known = owner.Owner(self.topics.name, self.topics.manifest, self.topic_id)
        owner.claim(self.table.store, known)

    def with_(self, **changes: Any) -> Lake:
        """The same with another table."""
        return replace(self, table=replace(self.table, **changes))


PARTITION_BY = ("user", "date(ts)")


def lake(broker: Broker, root: Path, **more: Any) -> Lake:
    """Empty topics, an empty root, partitioned by user and date; registered and claimed."""
    topics = manifesttools.topics(broker)
    ids = topics.make(root.as_uri())
    broker.create_topic(topics.pipeline_topics.ledger_topic, 16, {"cleanup.policy": "compact"})
    table = _table(Table, topics, root, **{"max_staging_age": 600.0, **more})
    made = Lake(topics, table, root, ids.manifest)
    made.register()
    return made


def lake_in_memory(root: Path, **more: Any) -> Lake:
    """The same without a broker, and with an empty ledger: for readers of files."""
    topics = InMemory("none:9092", "in-memory")
    return Lake(topics, _table(TableInMemory, topics, root, published=topics, **more), root)


def _table(kind: type[Table], topics: Topics, root: Path, **more: Any) -> Table:
    names = topics.manifest, topics.schema
    given = {"partition_by": PARTITION_BY, **more}
    return kind(topics.pipeline_topics, Store(f"file://{root}"), *names, **given)


@dataclass
class InMemory(Topics):
    """What is published is what readers find, at once; each entry is encoded, and read again."""

    contents: Contents = field(default_factory=lambda: Contents({}, {}, {}))

    def publish(
        self,
        files: Iterable[ManifestFile] = (),
        schemas: Iterable[ScopeSchema] = (),
        removed: Iterable[str] = (),
    ) -> None:
        there, newest = dict(self.contents.files), dict(self.contents.schemas)
        newest |= {one.scope: one for one in schemas}
        entries = (read_manifest(path_key(one.path), encode_entry(one)) for one in files)
        there |= {path: found for path, found in entries if found}
        for path in removed:
            del there[path]
        self.contents = Contents(there, {}, newest)

    def reader(self) -> Any:
        return self

    def settled(self) -> Contents:
        return self.contents

    look = settled

    def __enter__(self) -> InMemory:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class TableInMemory(Table):
    """A table whose manifest is :class:`InMemory`, and whose ledger is empty."""

    published: InMemory = field(kw_only=True)

    def manifest(self) -> Any:
        return self.published

    def look(self) -> Contents:
        return self.published.look()

    def ledger(self) -> View:
        return View()


def events(user: str | None, first: int, count: int, at: int = T0) -> list[dict[str, Any]]:
    """Rows of one user and day."""
    return [{"id": first + i, "user": user, "ts": at + i} for i in range(count)]


def scope_schema(schema: pa.Schema, scope: tuple[str | None, ...] = ()) -> ScopeSchema:
    """As a sink publishes it."""
    avro = avro_schema_of(schema)
    return ScopeSchema(schema_id(avro), scope, avro)


def bytes_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema, form: str = "avro") -> bytes:
    """A file that other writers than Oncely's have made."""
    out = io.BytesIO()
    avro = avro_schema_of(schema)
    if form == "parquet":
        known = schema.with_metadata({"oncely.schema": avro})
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], known), out)
    else:
        fastavro.writer(out, json.loads(avro), rows, codec="snappy")
    return out.getvalue()


def value_of(row: Mapping[str, Any], text: str) -> str | None:
    """A row's value of a partition column, by plain Python."""
    function, _, column = text.rpartition("(")
    value = row.get(column.rstrip(")"))
    if value is None or not function:
        return None if value is None else str(value)
    at = datetime.fromtimestamp(value / 1000, UTC)
    return at.date().isoformat() if function == "date" else f"{at.hour:02d}"


def instant(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat()
