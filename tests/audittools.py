"""What tests of the audit share: a real topic, a table that its records were committed to, damage.

Records are committed through the sink, as a task does, but without Spark; the topic is read by a
plain consumer.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from confluent_kafka import Producer

from oncely.audit import Report, audit
from oncely.commit.path import pass_over
from oncely.config import parse
from oncely.core.batch import Chunk, Rejection
from oncely.core.claim import Fence, Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.kafka.source import KafkaSource
from oncely.kinds.sql.sink import SqlSink
from oncely.pipeline import Pipeline
from oncely.stores.sql.connection import close_all
from oncely.testing.processes import await_that
from oncely.testing.readers import held_back, messages
from tests.scenarios.world import produce, toml
from tests.sinktools import Place, Rec, chunk, commit_all, open_sink, sink_to, together

BAD = b"not json"


def value(number: int) -> bytes:
    """A record that becomes one row."""
    return json.dumps({"id": number, "name": f"name {number}"}).encode()


def parts_of(message: Any) -> dict[str, Any]:
    """What a dead letter keeps of a record."""
    return {
        "key": message.key(),
        "value": message.value(),
        "headers": message.headers() or (),
        "timestamp": message.timestamp()[1],
    }


@dataclass
class AuditWorld:
    """A topic, a place with a table and its ledger, and the pipeline between them."""

    brokers: str
    place: Place
    topic: str
    folder: Path
    keep_source: bool = True
    expand: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda row: [row]
    pipeline: str = field(default_factory=lambda: f"p-{uuid.uuid4().hex[:8]}")
    table: str = "rows"

    def tp(self, number: int = 0) -> TopicPartition:
        return TopicPartition(self.topic, number)

    # -- the topic -------------------------------------------------------------------------

    def publish(self, numbers: Iterable[int], partition: int = 0) -> None:
        self.produce([(partition, str(n).encode(), value(n)) for n in numbers])

    def produce(self, records: Sequence[tuple[int, bytes | None, bytes | None]]) -> None:
        produce(self.brokers, self.topic, records)

    def in_transaction(self, numbers: Iterable[int], partition: int = 0, *, commit: bool) -> None:
        """Records of one transaction, and its marker."""
        producer = Producer(
            {"bootstrap.servers": self.brokers, "transactional.id": uuid.uuid4().hex}
        )
        producer.init_transactions(120)
        producer.begin_transaction()
        for n in numbers:
            producer.produce(self.topic, value(n), b"k", partition=partition)
        assert producer.flush(120) == 0
        producer.commit_transaction(120) if commit else producer.abort_transaction(120)
        await_that(lambda: not held_back(self.brokers, self.topic), "the marker")

    @cached_property
    def source(self) -> KafkaSource:
        return KafkaSource(self.brokers, [self.topic])

    @property
    def identity(self) -> SourceIdentity:
        return self.source.identity()

    def ends(self) -> dict[TopicPartition, int]:
        return dict(self.source.stable_end())

    # -- commits ---------------------------------------------------------------------------

    @property
    def sink(self) -> SqlSink:
        return sink_to(
            self.place, table=self.table, pipeline=self.pipeline, keep_source=self.keep_source
        )

    def open(self, start: Mapping[TopicPartition, int] | None = None) -> Fence:
        at = start or dict.fromkeys(self.ends(), 0)
        return open_sink(self.sink, at, self.identity).fence

    def reset(self, to: Mapping[TopicPartition, int]) -> None:
        self.sink.open(Takeover(self.identity, dict, {}, reset=lambda _: to))

    def run(self, size: int = 7, fence: Fence | None = None) -> Fence:
        """Commit all that is there in chunks of some records, and close the holes."""
        fence = fence or self.open()
        sink = self.sink.bind()
        for tp in sorted(self.ends()):
            records = [m for m in messages(self.brokers, self.topic) if m.partition() == tp[1]]
            at = sink.ledger.positions(fence)[tp].position
            records = [m for m in records if m.offset() >= at]
            for first in range(0, len(records), size):
                some = [self.record(m) for m in records[first : first + size]]
                commit_all(sink, self.chunk(tp, at, some), fence)
                at = some[-1].offset + 1
            if at < self.ends()[tp]:
                hole = {tp: OffsetRange(at, self.ends()[tp])}
                pass_over(together(sink), hole, fence, "hole")
        return fence

    def chunk(self, tp: TopicPartition, at: int, records: Sequence[Rec]) -> Chunk:
        return chunk({tp: (at, records)})

    def record(self, message: Any) -> Rec:
        """What decode and transform make of a record: rows, or a reject."""
        kept = parts_of(message)
        if message.value() == BAD:
            return Rec(message.offset(), bad="no JSON", **kept)
        return Rec(message.offset(), tuple(self.expand(json.loads(message.value()))), **kept)

    # -- the audit -------------------------------------------------------------------------

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        schema = self.place.schema
        table = f"{schema}.{self.table}" if schema else self.table
        base: dict[str, Any] = {
            "name": self.pipeline,
            "delivery": "exactly_once",
            "source": {"brokers": self.brokers, "topics": [self.topic]},
            "decode": {"format": "json", "schema": "id BIGINT, name STRING"},
            "sink": {
                "kind": "sql",
                "url": self.place.url,
                "table": table,
                "keep_source": self.keep_source,
            },
        }
        for section, more in sections.items():
            base[section] = {**base.get(section, {}), **more}
        return base

    def file(self, **sections: Mapping[str, Any]) -> Path:
        path = self.folder / f"{self.pipeline}-{uuid.uuid4().hex[:4]}.toml"
        path.write_text(toml(self.settings(**sections)))
        return path

    def audit(self, **options: Any) -> Report:
        sections = options.pop("sections", {})
        return audit(Pipeline(parse(self.settings(**sections))), **options)

    @property
    def bytes(self) -> str:
        """The type of bytes."""
        return "bytea" if self.place.is_postgres else "BLOB"

    def refusals(self) -> list[Rejection]:
        """The bad records of the first partition, as decode refuses them today."""
        expected = Pipeline(parse(self.settings())).expected
        assert expected is not None
        bad = [m for m in messages(self.brokers, self.topic) if m.value() == BAD]
        with closing(expected):
            return [*expected.refused(self.tp(), bad).values()]

    def sql(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        return self.place.sql(text, *params)


Parts = tuple[str, Place, str, Path]
"""Brokers, an empty place, an empty topic and a folder: what a world is made of."""

AnyWorld = TypeVar("AnyWorld", bound=AuditWorld)


class Kept(Generic[AnyWorld]):
    """An audited world that the tests of a module damage in turn.

    Each ``with`` gives the world as it was built: at its end all tables get back the rows that they
    had. Tests that change a topic, or a table's columns, build worlds of their own.
    """

    def __init__(self, world: AnyWorld) -> None:
        self._world, self._place = world, world.place
        if self._place.is_postgres:
            schema = self._place.schema
            tables = "SELECT tablename FROM pg_tables WHERE schemaname = ?"
            self._tables = [name for (name,) in self._place.sql(tables, schema)]
            self._place.sql(f"CREATE SCHEMA kept_{schema}")
            for one in self._tables:
                self._place.sql(f"CREATE TABLE kept_{schema}.{one} AS TABLE {one}")
        else:
            close_all()  # which moves the log into the file
            self._file = self._place.file.read_bytes()

    def __enter__(self) -> AnyWorld:
        return self._world

    def __exit__(self, *_: object) -> None:
        close_all()
        if self._place.is_postgres:
            kept = f"kept_{self._place.schema}"
            both = [f"DELETE FROM {t}; INSERT INTO {t} TABLE {kept}.{t}" for t in self._tables]
            self._place.sql("; ".join(both))
        else:
            self._place.file.write_bytes(self._file)


def found(report: Report) -> dict[str, list[tuple[int, int | None]]]:
    """The findings as (partition, offset), by kind."""
    kinds: dict[str, list[tuple[int, int | None]]] = {}
    for one in report.findings:
        partition = -1 if one.partition is None else one.partition.partition
        kinds.setdefault(one.kind, []).append((partition, one.offset))
    return kinds
