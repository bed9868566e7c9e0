"""The audit of output topics: by the header of the source, and by content.

Output, ledger and dead letters are those of the sink; the source's records are written down.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from oncely.audit import kafka
from oncely.audit.engine import ByOffset
from oncely.audit.kafka import KafkaGroup, KafkaOffsets
from oncely.audit.of_pipeline import evidence_of
from oncely.audit.report import Report
from oncely.commit.path import pass_over
from oncely.config import parse
from oncely.core.claim import Fence, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import ConfigError, SourceMismatch
from oncely.kinds.kafka.format import RecordFormat
from oncely.kinds.kafka.settings import KafkaSinkSettings
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests import kafkatools
from tests.groupedtools import Compared, Topic, compare
from tests.kafkatools import Topics
from tests.replaytools import judging, replayed, waiting
from tests.sinktools import SCHEMA, SOURCE, T0, T1, Rec, chunk, commit_all, rec, together

COMMITS, EACH, BAD, HOLE = 2, 6, 2, 4
RECORDS, HOLES = COMMITS * (2 * EACH - 1), COMMITS


class Bytes(Topic):
    """Topics whose rows are compared as the bytes of their messages."""

    def _digest(self, one: Rec, recipe: Any) -> int:
        rows = [{"key": None, "value": _json(row)} for row in one.rows]
        return self.digest_of(rows, one.offset, recipe)


def _json(row: Any) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode()


@dataclass
class World:
    """An output with two commits, each of two partitions."""

    topics: Topics
    sink: Any
    fence: Fence
    topic: Bytes
    keep_source: bool

    @staticmethod
    def records(tp: TopicPartition, commit: int) -> list[Rec]:
        start = commit * EACH
        every = [
            rec(n, id=100 * tp.partition + n, name=f"n{n}") for n in range(start, start + EACH)
        ]
        if tp == T0:
            every[BAD] = Rec(start + BAD, bad="no JSON", key=str(start + BAD).encode())
            return every
        return [one for one in every if one.offset % EACH != HOLE]

    def commit(self, number: int) -> None:
        what = {tp: (number * EACH, self.records(tp, number)) for tp in (T0, T1)}
        commit_all(self.sink, chunk(what), self.fence)

    def skip(self, tp: TopicPartition, start: int, end: int) -> None:
        """Move the position past readable records, as if there were none."""
        pass_over(together(self.sink), {tp: OffsetRange(start, end)}, self.fence, "hole")
        own = [rec(n, id=900 + n, name="skipped") for n in range(start, end)]
        self.topic.records = {**self.topic.records, tp: [*self.topic.records[tp], *own]}

    def evidence(self, **more: Any) -> KafkaGroup | KafkaOffsets:
        settings = parse(
            {
                "name": self.topics.pipeline,
                "source": {"brokers": self.topics.bootstrap, "topics": ["t", "u"]},
                "decode": {"format": "json", "schema": "id BIGINT, name STRING"},
                "sink": {
                    "kind": "kafka",
                    "topic": self.topics.output,
                    "rejects_topic": self.topics.rejects,
                    "ledger_topic": self.topics.ledger,
                    "keep_source": self.keep_source,
                    **more,
                },
            }
        )
        assert isinstance(settings.sink, KafkaSinkSettings)
        found = evidence_of(settings)
        assert isinstance(found, KafkaOffsets | KafkaGroup)
        return found

    def audit(self, **more: Any) -> Compared:
        found = self.evidence()
        assert isinstance(found, KafkaGroup)
        return compare(found, self.topic, **more)

    def by_offset(self) -> Report:
        found = self.evidence()
        assert isinstance(found, KafkaOffsets)
        try:
            return ByOffset("p", found, self.topic, self.topic, 50).run(None)
        finally:
            found.close()

    def say(self, value: bytes, *headers: tuple[str, bytes]) -> None:
        """Write to the output, as another program, or once more."""
        producer = Producer({"bootstrap.servers": self.topics.bootstrap, "log_level": 0})
        producer.produce(self.topics.output, value, headers=list(headers))
        assert producer.flush(120) == 0

    def source(self, tp: TopicPartition, offset: int) -> tuple[str, bytes]:
        return "oncely.source", msgspec.json.encode([*tp, offset])


def _world(broker: Broker, *, keep_source: bool) -> World:
    topics = kafkatools.make_topics(broker, ledger=kafkatools.SHARED_LEDGER)
    form = RecordFormat(SCHEMA, topic=topics.output, key=None, keep_source=keep_source)
    sink, fence = kafkatools.ready(topics.sink(form), {T0: 0, T1: 0})
    world = World(topics, sink, fence, Bytes({}), keep_source)
    world.topic.records = {
        tp: list(itertools.chain(*(world.records(tp, n) for n in range(COMMITS))))
        for tp in (T0, T1)
    }
    if keep_source:
        world.topic.recipe = str(form.recipe)
    for number in range(COMMITS):
        world.commit(number)
    return world


@pytest.fixture
def world(broker: Broker) -> Iterator[World]:
    found = _world(broker, keep_source=False)
    yield found
    found.sink.close()


@pytest.fixture
def sourced(broker: Broker) -> Iterator[World]:
    found = _world(broker, keep_source=True)
    yield found
    found.sink.close()


# -- by content --------------------------------------------------------------------------------


def test_an_output_without_damage_is_clean_and_nothing_is_recomputed(world: World) -> None:
    found = world.audit()
    assert found.is_clean, (found.findings, found.reasons)
    assert (found.records, found.holes) == (RECORDS, HOLES)
    assert world.topic.asked == []


def test_a_record_that_is_there_twice_is_named(world: World) -> None:
    world.say(_json({"id": 101, "name": "n1"}))
    found = world.audit()
    assert found.findings == [("duplicated", T1, 1)]
    assert "2 rows of 1 records in" in found.details


def test_records_that_were_passed_over_are_lost(world: World) -> None:
    world.skip(T0, COMMITS * EACH, COMMITS * EACH + 2)
    assert world.audit().findings == [("lost", T0, COMMITS * EACH + n) for n in (0, 1)]


def test_a_record_of_another_writer_is_undecided(world: World) -> None:
    world.say(b'{"id":5000}')
    found = world.audit()
    assert found.findings == []
    assert "1 rows of no record, by another writer?" in found.reasons


def test_lost_dead_letters_are_lost_records(world: World, broker: Broker) -> None:
    broker.delete_records(world.topics.rejects, {0: -1})
    letters = {one.offset for one in world.evidence().snapshot.letters}
    gone = {BAD, EACH + BAD} - letters
    assert gone
    assert world.audit().findings == [("lost", T0, at) for at in sorted(gone)]


def test_a_replayed_dead_letter_has_its_record(world: World) -> None:
    # A commit returns before its marker is in the rejects topic.
    await_that(lambda: waiting(world.topics)[1] == COMMITS, "the dead letters")
    assert replayed(world.sink, judging())[0] == COMMITS
    own = [
        rec(r.offset, id=r.offset, name="again") if r.bad else r for r in world.topic.records[T0]
    ]
    world.topic.records = {**world.topic.records, T0: own}
    found = world.audit()
    assert found.is_clean, (found.findings, found.reasons)
    assert world.topic.asked == []  # the ledger's totals contain the change


def test_an_output_that_has_lost_records_to_retention_is_undecided(
    world: World, broker: Broker
) -> None:
    broker.delete_records(world.topics.output, {0: 3})
    found = world.audit()
    assert (found.findings, "has deleted the first records" in found.reasons) == ([], True)


def test_a_compacted_output_is_undecided(world: World, broker: Broker) -> None:
    kafkatools.set_config(broker, world.topics.output, {"cleanup.policy": "compact"})
    found = world.audit()
    assert (found.findings, "is compacted" in found.reasons) == ([], True)


def test_a_commit_meanwhile_changes_nothing(world: World) -> None:
    evidence = world.evidence()
    assert isinstance(evidence, KafkaGroup)
    world.commit(COMMITS)
    found = compare(evidence, world.topic)
    assert (found.is_clean, found.records) == (True, RECORDS)


def test_a_commit_between_ledger_and_output_begins_the_reading_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, commits = kafka.read_ledger, [COMMITS]

    def meanwhile(*args: Any) -> Any:
        if commits:
            world.commit(commits.pop())
        return real(*args)

    monkeypatch.setattr(kafka, "read_ledger", meanwhile)
    own = {tp: [*rs, *world.records(tp, COMMITS)] for tp, rs in world.topic.records.items()}
    world.topic.records = own
    found = world.audit()
    assert found.is_clean, (found.findings, found.reasons)
    assert found.records == (COMMITS + 1) * (2 * EACH - 1)


# -- by the header of the source ---------------------------------------------------------------


def test_with_sources_an_output_without_damage_is_clean(sourced: World) -> None:
    report = sourced.by_offset()
    assert report.verdict == "clean", report.as_json()
    assert (report.proof, report.records, report.holes) == ("offsets", RECORDS, HOLES)
    assert sourced.topic.asked == []


def test_with_sources_each_damage_is_named_by_offset(sourced: World) -> None:
    end = COMMITS * EACH
    sourced.say(_json({"id": 101, "name": "n1"}), sourced.source(T1, 1))
    sourced.say(b"{}", sourced.source(T1, HOLE))
    sourced.say(b"{}", sourced.source(T0, BAD))
    sourced.say(b"{}", sourced.source(T1, end + 7))
    sourced.skip(T0, end, end + 1)
    found = [(one.kind, one.partition, one.offset) for one in sourced.by_offset().findings]
    assert sorted(found) == [
        ("duplicated", T0, BAD), ("duplicated", T1, 1), ("lost", T0, end),
        ("unexpected", T1, HOLE), ("unexpected", T1, end + 7)]  # fmt: skip


def test_with_sources_a_record_of_the_only_hole_of_a_range_is_found(sourced: World) -> None:
    end = COMMITS * EACH
    pass_over(together(sourced.sink), {T0: OffsetRange(end, end + 1)}, sourced.fence, "hole")
    sourced.topic.last = {T0: end + 1}
    sourced.say(b"{}", sourced.source(T1, HOLE))
    sourced.say(b"{}", sourced.source(T0, end))
    found = [(one.kind, one.partition, one.offset) for one in sourced.by_offset().findings]
    assert found == [("unexpected", T0, end), ("unexpected", T1, HOLE)]


def test_with_sources_records_of_other_writers_are_no_damage(sourced: World) -> None:
    sourced.say(b"by hand")
    sourced.say(b"of another pipeline", sourced.source(TopicPartition("elsewhere", 0), 3))
    sourced.say(b"odd", ("oncely.source", b"no JSON"))
    evidence = sourced.evidence()
    (limit,) = evidence.limits
    assert limit.startswith(f"3 records of {sourced.topics.output} name no source")
    evidence.close()
    assert sourced.by_offset().verdict == "clean"


def test_with_sources_a_changed_transform_is_no_damage(sourced: World) -> None:
    own = sourced.topic.records[T1]
    now = [rec(1, id=101, name="other") if r.offset == 1 else r for r in own]
    sourced.topic.records = {**sourced.topic.records, T1: now}
    assert sourced.by_offset().verdict == "clean"  # the ledger's digest tells what was committed


def test_with_sources_a_commit_meanwhile_changes_nothing(sourced: World) -> None:
    evidence = sourced.evidence()
    assert isinstance(evidence, KafkaOffsets)
    sourced.commit(COMMITS)
    assert ByOffset("p", evidence, sourced.topic, None, 50).run(None).verdict == "clean"
    evidence.close()


# -- what can't be audited ---------------------------------------------------------------------


def test_topics_from_a_column_are_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="are not known"):
        world.evidence(topic=None, topic_column="name")


def test_a_pipeline_that_never_ran_is_refused(world: World, broker: Broker) -> None:
    other = World(kafkatools.make_topics(broker), None, world.fence, world.topic, keep_source=False)
    with pytest.raises(SourceMismatch, match="contains nothing of pipeline"):
        other.evidence()


def test_a_dead_letter_that_differs_from_its_record_is_named(sourced: World) -> None:
    assert sourced.by_offset().verdict == "clean"
    sourced.topic.change(T0, BAD, value=b"other", headers=[("h", b"1")])
    (found,) = sourced.by_offset().findings
    assert (found.kind, found.partition, found.offset) == ("altered", T0, BAD)
    assert found.detail == "its dead letter has another value and headers"


@pytest.mark.parametrize("keep_source", [False, True])
def test_records_that_a_reset_passed_over_are_not_lost(broker: Broker, keep_source: bool) -> None:
    world = _world(broker, keep_source=keep_source)
    world.sink.open(Takeover(SOURCE, dict, {}, reset=lambda _: {T0: (COMMITS + 1) * EACH}))
    world.fence = world.sink.open(Takeover(SOURCE, dict, {})).fence
    for number in (COMMITS, COMMITS + 1):
        own = {tp: [*old, *world.records(tp, number)] for tp, old in world.topic.records.items()}
        world.topic.records = own
    last = {T0: (COMMITS + 1) * EACH, T1: COMMITS * EACH}
    of_t0 = world.records(T0, COMMITS + 1)
    commit_all(world.sink, chunk({T0: (last[T0], of_t0)}), world.fence)
    if keep_source:
        report = world.by_offset()
        assert (report.verdict, report.found) == ("clean", {}), report.as_json()
        assert any("[12, 18) was passed over by a reset" in one for one in report.limits)
    else:
        assert world.audit().is_clean
    world.sink.close()
