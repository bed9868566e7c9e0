"""What the commit scenarios write: a pipeline with a table of its own, and its topic's records.

The topic is a function of the task's kind, so writer, restart and reader agree on it without
speaking to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from oncely.core.batch import Chunk
from oncely.core.ranges import TopicPartition
from oncely.kinds.sql.sink import SqlSink
from tests.sinktools import T0, T1, Place, Rec, chunk, rec, sink_to

APPEND = pa.schema([("id", pa.int64()), ("name", pa.string())])
UPSERT = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("name", pa.string())])
KINDS = ("append", "append with rejects", "staged append", "upsert", "batch", "batch upsert")
PER_PARTITION = 16
REFUSED = "refused"
"""A name that the table's CHECK refuses: the database finds the row, not Oncely."""


@dataclass(frozen=True)
class Task:
    """A pipeline with a table of its own."""

    kind: str
    place: Place
    name: str

    @property
    def is_upsert(self) -> bool:
        return "upsert" in self.kind

    @property
    def is_batch(self) -> bool:
        return "batch" in self.kind

    @property
    def schema(self) -> pa.Schema:
        return UPSERT if self.is_upsert else APPEND

    def ddl(self) -> list[str]:
        """Tables that the kind needs and ``create`` would not make."""
        source = "kafka_topic text, kafka_partition int, kafka_offset bigint"
        if not self.place.is_postgres:
            source = "kafka_topic TEXT, kafka_partition INT, kafka_offset INT"
        number, end = ("bigint", "") if self.place.is_postgres else ("INT", " STRICT")
        name = f"name text CHECK (name <> '{REFUSED}')"
        if self.kind == "append with rejects":
            return [f"CREATE TABLE {self.name} (id {number} UNIQUE, {name}, {source}){end}"]
        if self.kind == "upsert":
            columns = f"id {number} PRIMARY KEY, v {number}, {name}, {source}"
            return [f"CREATE TABLE {self.name} ({columns}){end}"]
        if self.kind == "staged append" and self.place.is_postgres:
            return [f"CREATE TABLE {self.name} (id bigint, name inet, {source})"]
        return []

    def sink(self) -> SqlSink:
        keys, version = (["id"], "v") if self.is_upsert else ([], None)
        return sink_to(
            self.place,
            self.schema,
            table=self.name,
            pipeline=self.name,
            keys=keys,
            version=version,
            keep_source=not self.is_batch,
        )


# -- the topic -----------------------------------------------------------------------------


def topic(kind: str) -> Mapping[TopicPartition, Sequence[Rec]]:
    """Two partitions with a hole each; what else, by kind."""
    make = _upsert if "upsert" in kind else _append
    return {
        tp: [make(kind, tp, at) for at in range(1, PER_PARTITION + 2) if at != 5] for tp in (T0, T1)
    }


def _append(kind: str, tp: TopicPartition, at: int) -> Rec:
    number = tp.partition * 1000 + at
    if kind == "append with rejects" and tp == T0:
        if at == 3:
            return Rec(at, bad="no JSON")
        if at == 8:  # found by COPY, in the middle of it
            return rec(at, id=number, name=REFUSED)
        if at == 12:  # and by the unique constraint
            return rec(at, id=number - 1, name="twice")
        if at == 14:
            return Rec(at)
    if kind == "batch" and at == 3:
        return Rec(at, bad="no JSON")
    return rec(at, id=number, name=f"10.0.{tp.partition}.{at}")


def _upsert(kind: str, tp: TopicPartition, at: int) -> Rec:
    key = tp.partition * 1000 + at % 4
    if "batch" in kind:
        return rec(at, id=key, v=at, name=f"at {at}")
    if at % 7 == 6:
        return Rec(at, deletes={"id": key}, value=None)
    if at == 3:
        return rec(at, id=None, v=1, name="no key")
    if at == 16 and tp == T1:  # the last of its key: an upsert writes, and so tries, no other
        return rec(at, id=key, v=99, name=REFUSED)
    return rec(at, id=key, v=at if at % 5 else 0, name=f"at {at}")


def left(kind: str, positions: Mapping[TopicPartition, int], last: int) -> Chunk | None:
    """What a task reads from ``positions`` up to offset ``last``; nothing of other partitions."""
    parts = {}
    for tp, records in topic(kind).items():
        at = positions.get(tp, last)
        read = [one for one in records if at <= one.offset <= last]
        if read:
            parts[tp] = (positions[tp], read)
    keys = ["id"] if kind == "upsert" else []
    return chunk(parts, UPSERT if "upsert" in kind else APPEND, keys) if parts else None
