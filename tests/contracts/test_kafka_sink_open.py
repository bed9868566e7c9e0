"""Opening: epochs fence, positions are found or refused, sources are told apart."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from oncely.core.claim import Positions, Takeover
from oncely.errors import ConfigError, Fenced, OlderFormat, Stopped, TableMismatch, Unavailable
from oncely.kinds.kafka.format import RecordFormat
from oncely.kinds.topic_destination import LedgerTopic
from oncely.stores.topic.compare_and_set import PositionTakeover
from oncely.stores.topic.records import OffsetMetadata, stamp
from oncely.stores.topic.takeover import TopicTakeover
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, empty_ledger, forget_group, make_topics, open_sink, put, ready
from tests.sinktools import SCHEMA, SOURCE, T0, T1, Died, at_t0, commit_all, numbered


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


def test_a_run_goes_on_and_opens_again_after_a_rival_died_with_an_epoch_alone(
    topics: Topics,
) -> None:
    old, fence = ready(topics.sink())
    commit_all(old, at_t0(0, numbered(0, 3)), fence)

    takes_an_epoch_and_dies(topics)
    commit_all(old, at_t0(3, numbered(3, 6)), fence)
    old.ledger.add_partitions(fence, {T1: 0}, SOURCE)
    again = open_sink(old, expected=fence.epoch)
    assert (again.fence.epoch, again.positions) == (3, {T0: 6, T1: 0})
    commit_all(old, at_t0(6, numbered(6, 9)), again.fence)
    assert topics.ids() == list(range(9))


def takes_an_epoch_and_dies(topics: Topics) -> None:
    """Another run opens, and ends before it has taken a position."""
    with pytest.MonkeyPatch.context() as rival:

        def dies(*_: object) -> None:
            raise Died

        rival.setattr(PositionTakeover, "take", dies)
        with pytest.raises(Died):
            open_sink(topics.sink())


def test_a_reset_goes_on_after_a_rival_died_with_an_epoch_alone(topics: Topics) -> None:
    """In the middle of it, when it is asked where to; asked once, because that may depend."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    asked = []

    def elsewhere(positions: Positions) -> Positions:
        asked.append(positions)
        takes_an_epoch_and_dies(topics)
        return {T0: 1}

    opened = topics.sink().open(Takeover(SOURCE, dict, {T0: 0}, reset=elsewhere))
    assert (opened.positions, asked) == ({T0: 1}, [{T0: 3}])
    with pytest.raises(Fenced):
        commit_all(sink, at_t0(3, numbered(3, 6)), fence)
    assert open_sink(topics.sink()).positions == {T0: 1}


def test_a_reset_is_fenced_by_a_rival_that_has_taken_the_positions(topics: Topics) -> None:
    """In the middle of it; the rival may have moved them, and nothing was reset."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)

    def elsewhere(_: Positions) -> Positions:
        commit_all(topics.sink(), at_t0(3, numbered(3, 6)), open_sink(topics.sink()).fence)
        return {T0: 1}

    with pytest.raises(Fenced):
        topics.sink().open(Takeover(SOURCE, dict, {T0: 0}, reset=elsewhere))
    assert open_sink(topics.sink()).positions == {T0: 6}


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_an_opener_whose_rival_died_with_an_epoch_alone_is_not_fenced(
    topics: Topics, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    if not again:
        sink = topics.sink()
    take = PositionTakeover.take

    def overtaken(self: PositionTakeover, *args: Any) -> Any:
        done = take(self, *args)
        monkeypatch.undo()
        takes_an_epoch_and_dies(topics)
        return done

    monkeypatch.setattr(PositionTakeover, "take", overtaken)
    opened = open_sink(sink, expected=fence.epoch if again else None)
    assert (opened.fence.epoch, opened.positions) == (4, {T0: 3})
    commit_all(sink, at_t0(3, numbered(3, 6)), opened.fence)
    assert topics.ids() == list(range(6))


def test_a_run_whose_opening_was_cut_short_opens_again_though_a_rival_died(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest epoch of a position is the one that the run was given itself."""
    sink, fence = ready(topics.sink())

    def unavailable(*_: object) -> None:
        raise Unavailable("no answer")

    with monkeypatch.context() as cut:
        cut.setattr(TopicTakeover, "_note_settled", unavailable)
        with pytest.raises(Unavailable):
            open_sink(sink, expected=fence.epoch)
    takes_an_epoch_and_dies(topics)
    opened = open_sink(sink, expected=fence.epoch)
    assert (opened.fence.epoch, opened.positions) == (4, {T0: 0})


def test_an_opener_whose_rival_has_taken_a_position_is_fenced(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PositionTakeover.take

    def overtaken(self: PositionTakeover, *args: Any) -> Any:
        done = take(self, *args)
        monkeypatch.undo()
        open_sink(topics.sink())
        return done

    monkeypatch.setattr(PositionTakeover, "take", overtaken)
    with pytest.raises(Fenced):
        open_sink(topics.sink())


def test_another_output_topic_is_refused(topics: Topics, broker: Broker) -> None:
    ready(topics.sink())
    other = broker.create_topic(f"other-{topics.output}")
    with pytest.raises(TableMismatch, match="would begin where the old one ends"):
        open_sink(topics.sink(RecordFormat(SCHEMA, topic=other)))


def test_a_reset_takes_another_output_topic_over(topics: Topics, broker: Broker) -> None:
    """As the refusal says: nothing needs to move."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    other = dataclasses.replace(topics, output=broker.create_topic(f"other-{topics.pipeline}"))
    with pytest.raises(TableMismatch, match="--shift-by 0"):
        open_sink(other.sink())
    there = other.sink().open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda now: now))
    assert there.positions == {T0: 3}
    sink, fence = ready(other.sink())
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert (topics.ids(), other.ids()) == ([0, 1, 2], [3, 4])
    with pytest.raises(TableMismatch, match=topics.output):  # it is the old one now
        open_sink(topics.sink())


@pytest.mark.parametrize("made_again", [False, True], ids=["deleted", "made again"])
def test_an_output_topic_that_was_deleted_is_refused(
    topics: Topics, broker: Broker, made_again: bool
) -> None:
    """What was written there is gone; the new one would begin in the middle of the source."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    broker.delete_topic(topics.output)
    if made_again:
        broker.create_topic(topics.output)
    with pytest.raises(TableMismatch, match=f"'{topics.output}' was deleted") as refused:
        open_sink(topics.sink())
    assert "offsets reset" in refused.value.way_out
    known = LedgerTopic(topics.sink().pipeline_topics, topics.rejects).look([topics.output])
    assert known.refused == refused.value.message
    there = topics.output in broker.admin().list_topics(timeout=60).topics
    assert there == made_again
    # The way out that it names.
    opened = topics.sink().open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda _: {T0: 1}))
    assert opened.positions == {T0: 1}
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(1, numbered(1, 5)), fence)
    assert topics.ids() == [1, 2, 3, 4]


def test_messages_of_others_in_the_ledger_topic_are_passed_over_and_told_once(
    topics: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    foreign: list[tuple[bytes, bytes | None]] = [  # a compacted topic takes none without a key
        (b"", b"{}"), (b"no JSON", b"no JSON"), (b"[1,2]", b"{}"), (b"{}", b"x"),
        (b'["position"]', b"x"), (b'["position","someone-else","t",0]', b"no JSON"),
        (b'["pipeline",["p"]]', b"x"), (b"\xff\xfe", None),
    ]  # fmt: skip
    for key, value in foreign:
        put(topics, key, value)
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert topics.ids() == list(range(5))
    told = [one for one in caplog.records if "another program" in one.getMessage()]
    assert len(told) == 1
    assert topics.ledger in told[0].getMessage()


def test_a_record_of_ours_in_the_ledger_topic_that_cant_be_read_is_refused(topics: Topics) -> None:
    """Passed over, the position before it would be taken for the newest."""
    sink, _ = ready(topics.sink())
    put(topics, sink.pipeline_topics.keys.position_key(T0), b"no JSON")
    with pytest.raises(Stopped, match=r"'position'.*'t', 0") as refused:
        open_sink(topics.sink())
    assert refused.value.way_out


def test_a_group_offset_that_is_gone_is_restored(topics: Topics, broker: Broker) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    forget_group(broker, topics)
    assert topics.committed() == {}
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)  # a replay: skipped all the same
    assert open_sink(topics.sink()).positions == {T0: 3}
    assert topics.committed() == {T0: 3}
    forget_group(broker, topics)
    sink, fence = topics.sink(), open_sink(topics.sink()).fence
    forget_group(broker, topics)
    stranger = topics.sink()
    commit_all(stranger, at_t0(1, numbered(1, 5)), fence)  # trimmed, by the ledger topic alone
    assert topics.ids() == list(range(5))


def test_a_group_offset_that_a_tool_has_moved_is_not_believed(
    topics: Topics, broker: Broker
) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    tool = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topics.pipeline})
    tool.commit(offsets=[TopicPartition("t", 0, 0)], asynchronous=False)
    tool.close()
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert open_sink(topics.sink()).positions == {T0: 3}
    assert topics.ids() == [0, 1, 2]


def test_a_group_that_another_pipeline_commits_to_is_refused(topics: Topics) -> None:
    """Its positions would be believed, and records that this pipeline never read be left out."""
    shared = dataclasses.replace(topics, group=f"shared-{topics.pipeline}")
    sink, fence = ready(shared.sink())
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    other = dataclasses.replace(shared, pipeline=f"{topics.pipeline}-other")
    for ledger in (shared.ledger, f"other-{shared.ledger}"):
        with pytest.raises(
            ConfigError, match=rf"group '{shared.group}'.*'{topics.pipeline}'"
        ) as no:
            open_sink(dataclasses.replace(other, ledger=ledger).sink())
        assert no.value.key == "source.group"
        assert "source.group" in no.value.way_out
    commit_all(sink, at_t0(5, numbered(5, 6)), fence)  # nobody was disturbed
    sink, fence = ready(dataclasses.replace(other, group="").sink())
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    assert sorted(topics.ids()) == [0, 0, 1, 1, 2, 3, 4, 5]


def test_another_pipelines_offset_in_the_group_is_not_believed_by_a_run(topics: Topics) -> None:
    """Two first starts at the same moment find an empty group, both."""
    ours, fence = ready(topics.sink())
    commit_all(ours, at_t0(0, numbered(0, 3)), fence)
    theirs, its = ready(dataclasses.replace(topics, pipeline=f"{topics.pipeline}-2").sink())
    commit_all(theirs, at_t0(0, numbered(10, 19)), its)
    with_group(
        topics,
        OffsetMetadata(9, 7, "cluster-1", "id-of-t", pipeline=theirs.pipeline_topics.pipeline),
    )
    commit_all(topics.sink(), at_t0(3, numbered(3, 6)), fence)
    assert topics.ids() == [0, 1, 2, 3, 4, 5, *range(10, 19)]


@pytest.mark.parametrize("more", [[], ["batch"]], ids=["partition", "batch"])
def test_offsets_without_a_pipelines_name_are_refused(topics: Topics, more: list[str]) -> None:
    """As versions before the first release wrote them."""
    stamp_ = ["oncely", 4, "cluster-1", SOURCE.topic_ids["t"], *more]
    with_group(topics, json.dumps(stamp_), 3)
    with pytest.raises(OlderFormat, match=r"offset 3 .* before 0\.1\.0"):
        open_sink(topics.sink())
    assert topics.ledger_positions() == {}


def test_a_ledger_topic_that_is_gone_is_restored_from_the_group(
    topics: Topics, broker: Broker
) -> None:
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    broker.delete_topic(topics.ledger)
    opened = open_sink(topics.sink(), {T0: 0, T1: 0})
    assert opened.positions == {T0: 3, T1: 0}
    assert opened.fence.epoch == 2


def test_neither_ledger_nor_group_is_refused(topics: Topics, broker: Broker) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    forget_group(broker, topics)
    empty_ledger(broker, topics)
    with pytest.raises(Stopped, match="has written before"):
        open_sink(topics.sink())


def test_one_position_that_is_gone_is_refused(topics: Topics, broker: Broker) -> None:
    """A tombstone in the ledger topic, and an idle partition whose offset has expired."""
    sink, _ = ready(topics.sink(), {T0: 0, T1: 0})
    put(topics, sink.pipeline_topics.keys.position_key(T1), None)
    forget_group(broker, topics)
    with pytest.raises(Stopped, match="t-1"):
        open_sink(topics.sink(), {T0: 0, T1: 0})


def test_an_unfit_ledger_topic_is_refused(topics: Topics, broker: Broker) -> None:
    broker.create_topic(topics.ledger, 2, {"cleanup.policy": "compact"})
    with pytest.raises(TableMismatch, match="2 of the 16 partitions"):
        open_sink(topics.sink())
    other = dataclasses.replace(topics, ledger=f"deleting-{topics.ledger}")
    broker.create_topic(other.ledger, 16, {"cleanup.policy": "compact,delete"})
    with pytest.raises(TableMismatch, match="compact,delete"):
        open_sink(other.sink())


def test_missing_topics_are_refused(topics: Topics) -> None:
    elsewhere = dataclasses.replace(topics, output=f"new-{topics.output}")
    with pytest.raises(TableMismatch, match="no such topic"):
        open_sink(dataclasses.replace(elsewhere.sink(), create=False))
    sink = dataclasses.replace(topics.sink(), create=False)
    with pytest.raises(TableMismatch, match="ledger topic"):
        open_sink(sink)


def test_missing_topics_are_created(topics: Topics) -> None:
    name = topics.output
    elsewhere = dataclasses.replace(topics, output=f"new-{name}", rejects=f"new-rejects-{name}")
    sink, fence = ready(elsewhere.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert elsewhere.ids() == [0, 1, 2]
    assert elsewhere.records(elsewhere.rejects) == []


def test_settings_that_would_weaken_it_are_refused(topics: Topics) -> None:
    """As in a file: ``test_config_kafka_sink.py`` has each."""
    with pytest.raises(ConfigError) as refused:
        open_sink(topics.sink(producer={"acks": 1}))
    assert refused.value.key == "sink.kafka.acks"


def test_settings_that_change_speed_only(topics: Topics) -> None:
    own = {"acks": "all", "enable.idempotence": True, "max.in.flight": 5, "linger.ms": 1,
           "compression.type": "zstd"}  # fmt: skip
    sink, fence = ready(topics.sink(producer=own))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    assert topics.ids() == [0, 1]


def with_group(topics: Topics, metadata: OffsetMetadata | str, at: int | None = None) -> None:
    """Put an offset of t-0 into the group, as another program would."""
    if isinstance(metadata, OffsetMetadata):
        at, metadata = metadata.position, stamp(metadata, metadata.pipeline)
    group = topics.group or topics.pipeline
    consumer = Consumer({"bootstrap.servers": topics.bootstrap, "group.id": group})
    offsets = [TopicPartition("t", 0, at, metadata)]
    consumer.commit(offsets=offsets, asynchronous=False)
    consumer.close()
