"""`oncely audit` of topics, files and Delta tables, from real topics, by the pipeline's own file.

Records are committed by the pipeline's sink, as its tasks do, without Spark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.audit import Report, audit
from oncely.audit.files import NOT_READ
from oncely.commit.path import pass_over
from oncely.config import parse
from oncely.core.batch import Batch, Chunk
from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.delta.settings import DeltaSinkSettings
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.kinds.kafka.settings import KafkaSinkSettings
from oncely.pipeline import Pipeline
from oncely.stores.objects.store import Store
from oncely.testing.processes import await_that
from oncely.testing.readers import held_back, messages
from oncely.testing.servers.kafka import Broker
from tests import s3tools
from tests.audittools import BAD, found, parts_of, value
from tests.filestools import publish_all
from tests.kafkatools import set_config
from tests.scenarios.commands import oncely_json
from tests.scenarios.world import produce, toml
from tests.sinktools import Rec, chunk, commit_all, open_sink, together

KINDS = ("kafka", "kafka with sources", "files", "s3", "delta", "delta with sources")


@dataclass
class SinkWorld:
    """A topic of two partitions, and a pipeline into a destination of some kind."""

    brokers: str
    topic: str
    given: dict[str, Any]
    folder: Path
    name: str = field(default_factory=lambda: f"p-{uuid.uuid4().hex[:8]}")
    batch: int = 0

    def tp(self, number: int) -> TopicPartition:
        return TopicPartition(self.topic, number)

    def publish(self, numbers: range, partition: int = 0) -> None:
        records = [(partition, str(n).encode(), value(n)) for n in numbers]
        produce(self.brokers, self.topic, records)

    def in_transaction(self, numbers: range, *, commit: bool) -> None:
        """Records of one transaction, and its marker."""
        own = {"transactional.id": uuid.uuid4().hex}
        producer = Producer({"bootstrap.servers": self.brokers, **own})
        producer.init_transactions(120)
        producer.begin_transaction()
        for n in numbers:
            producer.produce(self.topic, value(n), b"k", partition=0)
        assert producer.flush(120) == 0
        producer.commit_transaction(120) if commit else producer.abort_transaction(120)
        await_that(lambda: not held_back(self.brokers, self.topic), "the marker")

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": {"brokers": self.brokers, "topics": [self.topic]},
            "decode": {"format": "json", "schema": "id BIGINT, name STRING"},
            "sink": {one: str(of).format(name=self.name) if isinstance(of, str) else of
                     for one, of in self.given.items()},
        }  # fmt: skip

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(parse(self.settings))

    def file(self) -> Path:
        path = self.folder / f"{self.name}.toml"
        path.write_text(toml(self.settings))
        return path

    def audit(self, **more: Any) -> Report:
        return audit(self.pipeline, **more)

    # -- commits ---------------------------------------------------------------------------

    def ends(self) -> dict[TopicPartition, int]:
        return dict(self.pipeline.source.stable_end())

    @cached_property
    def sink(self) -> Any:
        return self.pipeline.sink(self.pipeline.row_schema())

    @cached_property
    def fence(self) -> Fence:
        start = dict.fromkeys(self.ends(), 0)
        return open_sink(self.sink, start, self.pipeline.source.identity()).fence

    def run(self) -> None:
        """Commit all that is there, each partition for itself, in two commits."""
        for tp in sorted(self.ends()):
            entry = self.sink.ledger.positions(self.fence)[tp]
            every = [m for m in messages(self.brokers, self.topic) if m.partition() == tp[1]]
            left = [m for m in every if m.offset() >= entry.position]
            at, half = entry.position, len(left) // 2
            for some in filter(None, (left[:half], left[half:])):
                self.commit(tp, at, [self.record(m) for m in some])
                at = some[-1].offset() + 1

    def record(self, message: Any) -> Rec:
        """What decode and transform make of a record."""
        kept = parts_of(message)
        if message.value() == BAD:
            return Rec(message.offset(), bad="no JSON", **kept)
        return Rec(message.offset(), (json.loads(message.value()),), **kept)

    def chunk(self, tp: TopicPartition, at: int, records: list[Rec]) -> Chunk:
        return chunk({tp: (at, records)})

    def commit(self, tp: TopicPartition, at: int, records: list[Rec]) -> None:
        what = self.chunk(tp, at, records)
        if isinstance(self.pipeline.settings.sink, KafkaSinkSettings):
            commit_all(self.sink, what, self.fence)
            return
        self.batch += 1
        self.sink.begin_batch()
        task = self.sink.staging(self.fence, self.batch, 0)
        assert task.add(what) == []
        letters = what.dead_letters(what.rejections) if what.rejections else []
        staged = task.finish()
        counts = what.counts(what.row_record, what.rejections)
        counts = {of: staged.of_range(of, one) for of, one in counts.items()}
        publish_all(self.sink, Batch(what.ranges, counts, letters, [staged]), self.fence)

    def skip(self, tp: TopicPartition) -> None:
        """Move the position past what is there, as if there were no records."""
        at = self.sink.ledger.positions(self.fence)[tp].position
        over = {tp: OffsetRange(at, self.ends()[tp])}
        pass_over(together(self.sink), over, self.fence, "hole")


def _sink(kind: str, request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """The section of the pipeline file."""
    if kind.startswith("kafka"):
        return {"kind": "kafka", "topic": "{name}.out", "ledger_topic": "{name}.ledger",
                "keep_source": "sources" in kind}  # fmt: skip
    if kind.startswith("delta"):
        return {"kind": "delta", "url": (folder / "table").as_uri(),
                "keep_source": "sources" in kind}  # fmt: skip
    given = {"kind": "files", "url": (folder / "root").as_uri(), "ledger_topic": "{name}.ledger",
             "manifest_topic": "{name}.manifest"}  # fmt: skip
    if kind == "s3":
        server = request.getfixturevalue("s3_server")
        keys = {"access_key": s3tools.ACCESS, "secret_key": s3tools.SECRET}
        given |= {
            "url": f"s3://{server.bucket()}/root",
            "s3": {"endpoint": server.endpoint, **keys},
        }
    return given


@pytest.fixture
def world_of(
    request: pytest.FixtureRequest, broker: Broker, make_topic: Callable[..., str], tmp_path: Path
) -> Iterator[Callable[[str], SinkWorld]]:
    """Worlds with aborted records, markers and rejects, committed as a whole."""
    made = []

    def make(kind: str) -> SinkWorld:
        given = _sink(kind, request, tmp_path)
        world = SinkWorld(broker.bootstrap, make_topic(partitions=2), given, tmp_path)
        made.append(world)
        world.publish(range(10))
        world.in_transaction(range(10, 15), commit=True)
        world.in_transaction(range(90, 95), commit=False)
        produce(world.brokers, world.topic, [(0, b"bad", BAD)])
        world.publish(range(15, 20))
        world.publish(range(100, 110), partition=1)
        world.run()
        return world

    yield make
    for world in made:
        world.sink.close()


def damage(world: SinkWorld) -> dict[str, list[tuple[int, int | None]]]:
    """Damage of the kind that the destination can have, and what an audit should name."""
    sink = world.pipeline.settings.sink
    if isinstance(sink, KafkaSinkSettings):
        at = world.ends()[world.tp(1)]
        world.publish(range(200, 202), partition=1)
        world.skip(world.tp(1))
        return {"lost": [(1, at), (1, at + 1)]}
    if isinstance(sink, DeltaSinkSettings):
        world.sink.tables.load().delete("id IN (3, 104)")
        return {"lost": [(0, 3), (1, 4)]}
    assert isinstance(sink, FilesSinkSettings)
    store: Store = sink.store
    files = sorted(one.path for one in store.list() if one.path.startswith(f"{world.topic}-1-"))
    store.delete(files[:1])
    return {"lost": [(1, at) for at in range(5)]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_destination_is_clean_until_it_is_damaged(
    kind: str, world_of: Callable[[str], SinkWorld]
) -> None:
    world = world_of(kind)
    for download in (False, True):
        report = world.audit(download=download)
        assert report.verdict == "clean", report.as_json()
        assert (report.records, report.accounted, report.found) == (31, 31, {})
        assert report.holes == 1 + 5 + 1  # a marker, aborted records, their marker
        assert report.complete_until.wall_time == report.at
    wanted = damage(world)
    report = world.audit()
    assert (report.verdict, found(report)) == ("damaged", wanted)
    assert report.accounted == report.records - len(wanted["lost"])


def test_the_clock_of_an_audit_is_not_that_of_the_write(
    world_of: Callable[[str], SinkWorld], broker: Broker
) -> None:
    """Timestamps that their topic accepted are too old for it by now."""
    world = world_of("kafka")
    wanted = damage(world)
    settings = world.settings
    settings["decode"]["metadata"] = {"timestamp": "at"}
    settings["transform"] = {"sql": "SELECT id, name FROM input"}
    settings["sink"]["timestamp"] = "source"
    set_config(broker, settings["sink"]["topic"], {"message.timestamp.before.max.ms": "1"})
    report = audit(Pipeline(parse(settings)))
    assert (report.verdict, found(report)) == ("damaged", wanted)


def test_the_command(world_of: Callable[[str], SinkWorld]) -> None:
    world = world_of("files")
    whole = oncely_json("audit", world.file(), "--download")
    assert (whole["verdict"], whole["proof"], whole["records"]) == ("clean", "content", 31)
    damage(world)
    assert whole["limits"] == []
    shown = oncely_json("audit", world.file(), expect=1)
    assert shown["limits"] == [NOT_READ]
    assert [one["offset"] for one in shown["lost"]] == list(range(5))
    assert "it is missing" in shown["lost"][0]["detail"]
