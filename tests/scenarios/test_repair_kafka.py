"""Records that an output topic has lost are sent again, each once, and the audit is clean."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oncely.audit.report import Finding
from oncely.commit.backoff import Backoff
from oncely.commit.change import RecordsToRepair, repair
from oncely.config import parse
from oncely.core.batch import Formed
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Stopped, WrongInput
from oncely.kinds.kafka import sink
from oncely.kinds.kafka.change import KafkaRewrites
from oncely.kinds.kafka.form import Messages
from oncely.pipeline import Pipeline
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests import kafkatools
from tests.audittools import BAD, AuditWorld
from tests.kafkatools import Topics
from tests.scenarios import repair_jobs
from tests.scenarios.zygote import Zygote
from tests.sinktools import rec

LOST = [(0, 2), (0, 9), (1, 4)]
LETTER = 5  # the offset of a record that is rejected


@dataclass
class World(AuditWorld):
    """A pipeline from a topic into another one, without Spark."""

    topics: Topics = field(kw_only=True)

    @property
    def sink(self) -> Any:
        pipeline = Pipeline(parse(self.settings()))
        return pipeline.sink(pipeline.row_schema())

    def settings(self, **sections: Any) -> dict[str, Any]:
        topics = self.topics
        sink = {
            "kind": "kafka",
            "topic": topics.output,
            "rejects_topic": topics.rejects,
            "ledger_topic": topics.ledger,
            "keep_source": True,
        }
        return {
            "name": self.pipeline,
            "delivery": "exactly_once",
            "source": {"brokers": self.brokers, "topics": [self.topic]},
            "decode": {"format": "json", "schema": "id BIGINT, name STRING"},
            "sink": {**sink, **sections.get("sink", {})},
        }

    def found(self) -> list[Finding]:
        return [Finding(one.partition, one.offset, one.kind) for one in self.audit().findings]

    def repaired(self, found: list[Finding]) -> int:
        done = Pipeline(parse(self.settings())).repair(found, execute=True)
        assert done.impossible == ()
        return done.done.counts.rows

    def sources(self) -> list[tuple[int, int]]:
        """The partition and offset that each committed record of the output names."""
        found = [
            dict(m.headers())["oncely.source"] for m in self.topics.records(self.topics.output)
        ]
        return sorted(tuple(json.loads(one)[1:]) for one in found)


@contextmanager
def losing(lost: list[tuple[int, int]]) -> Iterator[None]:
    """Commits of these records leave them out of the output; the ledger counts them."""
    whole = sink.of_partition

    def of(formed: Formed[Messages], chunk: Any, tp: TopicPartition) -> Any:
        offsets = chunk.offset[formed.row_record]
        return {
            topic: own[[(tp.partition, int(offsets[at])) not in lost for at in own]]
            for topic, own in whole(formed, chunk, tp).items()
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "of_partition", of)
        yield


@pytest.fixture
def world(broker: Broker, make_topic: Callable[..., str], tmp_path: Path) -> World:
    """Two partitions with aborted records and a reject; three records are lost."""
    topics = kafkatools.make_topics(broker)
    world = World(
        broker.bootstrap, None, make_topic(partitions=2), tmp_path, topics=topics,
        pipeline=topics.pipeline,
    )  # type: ignore[arg-type]  # fmt: skip
    for partition in range(2):
        world.publish(range(LETTER), partition)
        world.produce([(partition, b"bad", BAD)])
        world.in_transaction(range(90, 92), partition, commit=False)
        world.publish(range(10, 14), partition)
    with losing(LOST):
        world.run()
    return world


def all_sources(world: World) -> list[tuple[int, int]]:
    kept = messages(world.brokers, world.topic)
    return sorted((m.partition(), m.offset()) for m in kept if m.value() != BAD)


def test_lost_records_are_sent_again(world: World) -> None:
    before, found = world.topics.ledger_positions(), world.found()
    assert sorted((one.partition[1], one.offset) for one in found if one.partition) == LOST
    assert {one.kind for one in found} == {"lost"}
    dry = Pipeline(parse(world.settings())).repair(found)
    assert (dry.offsets, dry.executed) == ({"lost": len(LOST)}, False)
    assert len(world.sources()) == len(all_sources(world)) - len(LOST)
    assert world.repaired(found) == len(LOST)
    assert world.sources() == all_sources(world)
    # Repeated, with a report of before: nothing is lost now, and a dead letter is not.
    assert world.repaired([*found, Finding(world.tp(), LETTER, "lost")]) == 0
    assert world.sources() == all_sources(world)
    report = world.audit()
    assert (report.verdict, report.undecided) == ("clean", [])
    assert world.topics.ledger_positions() == before
    entries = [json.loads(m.key()) for m in world.topics.records(world.topics.ledger)]
    assert [one[3] for one in entries if one[0] == "rewritten"] == [0, 1]


def test_what_a_topic_can_not_do_is_told(world: World) -> None:
    kinds = ("duplicated", "altered", "unexpected")
    pipeline = Pipeline(parse(world.settings()))
    done = pipeline.repair([Finding(world.tp(), 1, kind) for kind in kinds], execute=True)
    assert [one.reason.partition(":")[0] for one in done.impossible] == [
        "a surplus copy can't be removed from a topic",
        "a record can't be replaced in a topic",
        "a record can't be removed from a topic",
    ]
    with pytest.raises(ConfigError, match="a record can't be replaced in a topic"):
        pipeline.backfill({})
    rewrites = KafkaRewrites(world.sink.bind())
    kept = world.chunk(world.tp(), 0, [rec(50, id=1, name="")])
    with pytest.raises(WrongInput, match="offset 50 is not committed"):
        repair(rewrites, RecordsToRepair(world.tp(), [50], set(), kept), Backoff())
    _reset_begins(world)
    with pytest.raises(Stopped, match="a reset is under way that puts the position back to 0"):
        pipeline.repair(world.found(), execute=True)
    rewrites.close()
    assert len(world.sources()) == len(all_sources(world)) - len(LOST)


def _reset_begins(world: World) -> None:
    """As a reset that has decided, and was killed before it put the position back."""
    key = json.dumps(["pipeline", world.pipeline], separators=(",", ":")).encode()
    ledger = world.topics.records(world.topics.ledger)
    (*_, record) = (json.loads(one.value()) for one in ledger if one.key() == key)
    record["resetting"] = {world.topic: {"0": 0, "1": 0}}
    kafkatools.put(world.topics, key, json.dumps(record).encode())


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_the_commit(zygote: Zygote, world: World, when: str) -> None:
    """Before it, no reader of committed records sees a part; another repair sends the rest."""
    there, found = world.sources(), world.found()
    given = [[list(one.partition or ()), one.offset, one.kind] for one in found]
    at = 1 if when == "after" else 2  # the transaction of a partition
    ended = zygote.run(repair_jobs.repair_topic, world.settings(), given, at, when)
    assert ended.signal == signal.SIGKILL, ended.error
    first = sorted([*there, *(one for one in LOST if one[0] == 0)])
    assert world.sources() == first
    assert world.repaired(found) == len(all_sources(world)) - len(first)
    assert world.sources() == all_sources(world)
    assert world.audit().verdict == "clean"
