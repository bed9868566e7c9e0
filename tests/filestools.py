"""What tests of the files sink share: sinks on a folder, and the outcome seen by plain readers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from oncely.commit.path import Delivery, publish
from oncely.core.batch import Batch, Chunk, Reject, Staged
from oncely.core.claim import Counts, Entry, Fence, Opened, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Fenced
from oncely.kafka.client import make
from oncely.kinds.data_file import FileFormat
from oncely.kinds.files.sink import FilesSink, FilesTopics
from oncely.kinds.files.table import Table
from oncely.kinds.partitions import parse_partition_by
from oncely.stores.objects.store import Connect, Store, connect
from oncely.stores.topic.cluster import PipelineTopics
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import ensure_once
from tests.scenarios.files_world import FilesWorld
from tests.sinktools import SCHEMA, SOURCE, T0, T1, Rec, chunk, rec, together

GROUPS = 3
BAD = 13
TIMES = ("timeout", "transaction_timeout")
PER_TASK = 30
ENDS = {T0: PER_TASK, T1: PER_TASK}
START = {T0: 0, T1: 0}


@dataclass(frozen=True)
class FilesPlace:
    """The topics and the folder of one test. Picklable."""

    bootstrap: str
    name: str
    root: Path
    brokers: str = ""  # what the sink is told, when it goes through a proxy
    ledger: str = ""  # one of its own by default

    def sink(
        self,
        schema: pa.Schema | None = SCHEMA,
        *,
        kafka: Any = make,
        files: Connect = connect,
        run: str | None = None,
        **more: Any,
    ) -> FilesSink:
        """A sink as the driver makes it: a directory for each ``name``."""
        place = PipelineTopics(
            self.brokers or self.bootstrap, self.name, f"oncely-{self.name}",
            self.ledger or f"ledger-{self.name}", connect=kafka,
            **{"timeout": 20.0, **{k: more.pop(k) for k in TIMES if k in more}},
        )  # fmt: skip
        sink = FilesSink(
            place,
            Store(self.root.as_uri(), connect=files),
            FileFormat("avro", parse_partition_by(("name",)), schema),
            FilesTopics(f"{self.name}.manifest", f"{self.name}.schema"),
            f"{self.name}.rejects",
            **more,
        )
        return replace(sink, run=run) if run else sink

    def table(self, **more: Any) -> Table:
        """The same as the commands for tables see it."""
        sink = self.sink(**{k: more.pop(k) for k in TIMES if k in more})
        names = sink.topics.manifest, sink.topics.schema
        return Table(sink.pipeline_topics, sink.store, *names, partition_by=("name",), **more)

    @property
    def world(self) -> FilesWorld:
        """Plain readers."""
        return FilesWorld(self.bootstrap, "", T0.topic, self.root, self.name, root=self.root)

    def ids(self) -> list[int]:
        """What the manifest names, sorted; every named file is compared with its entry."""
        return sorted(row["id"] for row in self.world.rows())


def make_place(broker: Broker, folder: Path, ledger: str = "") -> FilesPlace:
    """New topics, made by the sink, and an empty folder; the ledger topic may be given."""
    for source in SOURCE.topic_ids:  # the broker takes offsets of topics that exist only
        ensure_once(broker, source, 4)
    name = uuid.uuid4().hex[:12]
    return FilesPlace(broker.bootstrap, name, folder / name, ledger=ledger)


def open_sink(sink: FilesSink, start: Mapping[TopicPartition, int] = START) -> Opened:
    """Opened as a run does it."""
    return sink.open(Takeover(SOURCE, lambda: start, start))


def rows_of(tp: TopicPartition, start: int = 0) -> Chunk:
    """What a topic-partition holds: ids of its own, in a few groups; one record is bad."""
    records = [
        rec(n, id=1000 * tp.partition + n, name=f"g{n % GROUPS}")
        for n in range(start, start + PER_TASK)
    ]
    if tp == T0:
        records[BAD] = Rec(start + BAD, bad="no JSON")
    return chunk({tp: (start, records)})


IDS = sorted([n for n in range(PER_TASK) if n != BAD] + [1000 + n for n in range(PER_TASK)])


def stage(sink: FilesSink, fence: Fence, batch: int = 0, start: int = 0) -> list[Staged]:
    """What two tasks stage, each its topic-partition."""
    staged = []
    for attempt, tp in enumerate(ENDS):
        task = sink.staging(fence, batch, attempt)
        assert task.add(rows_of(tp, start)) == []
        staged.append(task.finish())
    return staged


def what(staged: Sequence[Staged], start: int = 0) -> Batch:
    """What :func:`stage` has staged, with a reject."""
    bad = Reject(T0, start + BAD, 1_700_000_000_000, b"k", b"{", [("h", b"v")], "decode", "no JSON")
    ranges = {tp: OffsetRange(start, start + PER_TASK) for tp in ENDS}
    written = {tp: Counts(PER_TASK, 0, 0, 0) for tp in ENDS}
    return Batch(ranges, written, [bad], staged)


def publish_all(to: Any, what: Batch, fence: Fence) -> bool:
    """As the driver does it, to a sink or a delivery; whether it had taken effect before."""
    delivery = to if isinstance(to, Delivery) else together(to)

    def entries() -> dict[TopicPartition, Entry]:
        found = delivery.ledger.positions(fence, settled=True)
        newest = max(entry.epoch for entry in found.values())
        if newest > fence.epoch:  # as OpenLedger does
            raise Fenced(fence.pipeline, fence.epoch, newest)
        return found

    return publish(delivery, what, fence, entries)
