"""Dead letters in Kafka: read back as they were, and replayed once each, whatever comes between."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.commit.change import try_portion
from oncely.core.batch import Reject
from oncely.core.claim import Fence, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Stopped, TableMismatch
from oncely.kafka.sender import batch_size
from oncely.kafka.transaction import Message
from oncely.kinds.kafka.change import replay_into_topics
from oncely.kinds.kafka.format import RecordFormat
from oncely.kinds.kafka.sink import KafkaSink
from oncely.kinds.topic_publishing import dead_letter
from oncely.stores.topic.cluster import Cluster
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, producing_by, ready
from tests.replaytools import bad, judging, left, mixing, replayed, waiting
from tests.sinktools import SCHEMA, SOURCE, T0, T1, Rec, at_t0, chunk, commit_all, numbered


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


@pytest.fixture
def six(topics: Topics) -> Topics:
    """Ten records, of which six were rejected, and twice three of another pipeline's."""
    other = dataclasses.replace(topics, pipeline=f"{topics.pipeline}-other")
    for number in range(2):
        sink, fence = ready(other.sink())
        commit_all(sink, at_t0(number * 3, bad(*range(number * 3, number * 3 + 3))), fence)
        if number == 0:
            sink, fence = ready(topics.sink())
            commit_all(sink, at_t0(0, [*numbered(0, 4), *bad(*range(4, 10))]), fence)
    return topics


# -- letters ---------------------------------------------------------------------------------


def test_letters_are_the_records_as_they_were(topics: Topics) -> None:
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    before = [("oncely.pipeline", topics.pipeline.encode()), ("oncely.offset", b"77"), ("a", None)]
    records = [
        Rec(3, bad="no JSON", key=None, value=b"\xff", headers=before),
        Rec(5, bad="é" * 3000, key=b"k", value=None),
    ]
    commit_all(sink, chunk({T1: (0, bad(2)), T0: (0, records)}), fence)
    when = 1_700_000_000_000
    assert waiting(topics) == (
        [
            Reject(T0, 3, when, None, b"\xff", before, "decode", "no JSON"),
            Reject(T0, 5, when, b"k", None, [], "decode", "é" * 2000),
            Reject(T1, 2, when, b"2", b"v2", [], "decode", "no JSON"),
        ],
        3,
    )
    assert waiting(topics, limit=1)[0][0].offset == 3
    tombstones = [dict(m.headers()).get("oncely.tombstone") for m in topics.records(topics.rejects)]
    assert sorted(map(str, tombstones)) == ["None", "None", "b'true'"]


def test_a_pipeline_that_never_ran_has_none(topics: Topics) -> None:
    assert waiting(topics) == ([], 0)
    assert waiting(dataclasses.replace(topics, rejects="nowhere")) == ([], 0)


def test_of_one_topic_for_several_pipelines_each_sees_its_own(six: Topics) -> None:
    other = dataclasses.replace(six, pipeline=f"{six.pipeline}-other")
    assert left(six) == [4, 5, 6, 7, 8, 9]
    assert left(other) == [0, 1, 2, 3, 4, 5]
    assert replayed(six.sink()) == (6, 0)
    assert (left(six), left(other)) == ([], [0, 1, 2, 3, 4, 5])


def test_messages_that_are_no_letters_are_passed_over(six: Topics, broker: Broker) -> None:
    producer = Producer(broker.client_config())
    ours = [("oncely.pipeline", six.pipeline.encode())]
    for headers in ([], ours, [*ours, ("oncely.topic", b"t"), ("oncely.partition", b"x")]):
        producer.produce(six.rejects, b"{}", headers=headers)
    assert producer.flush(120) == 0
    assert left(six) == [4, 5, 6, 7, 8, 9]
    assert replayed(six.sink()) == (6, 0)


def test_a_longer_reason_does_not_push_the_value_out() -> None:
    fence = Fence("p", 1)
    reject = Reject(T0, 5, 0, b"k", b"v" * 500, [("h", b"1")], "decode", "short")
    told = dead_letter(reject, 10_000, fence)
    own = [one for one in told.headers if one[0] == "h" or one[0].startswith("oncely.")]
    limit = batch_size(told._replace(headers=own))
    longer = dead_letter(dataclasses.replace(reject, reason="ü" * 900), limit, fence)
    assert (longer.value, longer.key) == (reject.value, reject.key)
    assert batch_size(longer) <= limit
    assert dict(longer.headers)["oncely.reason"].decode() in ("üü", "ü")  # type: ignore[union-attr]
    too_large = dead_letter(dataclasses.replace(reject, value=b"v" * 600), limit, fence)
    assert too_large.value is None


def test_a_letter_without_its_value_stays_one(broker: Broker) -> None:
    topics = make_topics(broker)
    small = broker.create_topic(f"small-{topics.rejects}", 1, {"max.message.bytes": "1000"})
    topics = dataclasses.replace(topics, rejects=small)
    sink, fence = ready(topics.sink())
    huge = Rec(0, bad="no JSON", key=b"k", value=b"v" * 2000)
    commit_all(sink, at_t0(0, [huge, *bad(1)]), fence)
    for expected in ((1, 1), (0, 1)):
        assert replayed(topics.sink()) == expected
        ((kept,), _) = waiting(topics)
        assert kept.reason == (
            "no JSON (too large for this topic: key 1 bytes, value 2000 bytes, 0 headers)"
        )
    assert topics.ids() == [1]


# -- replay ----------------------------------------------------------------------------------


def test_what_passes_is_written_and_the_rest_stays_with_the_newer_reason(six: Topics) -> None:
    odd = judging(lambda one: one.offset % 2 == 1)
    for at_once, expected in ((2, (3, 3)), (500, (0, 3))):
        assert replayed(six.sink(), odd, at_once) == expected
        assert six.ids() == [0, 1, 2, 3, 5, 7, 9]
        listed, total = waiting(six)
        assert total == 3
        assert [(one.offset, one.value, one.reason) for one in listed] == [
            (n, b"v%d" % n, "still bad") for n in (4, 6, 8)
        ]
    assert replayed(six.sink()) == (3, 0)
    assert six.ids() == list(range(10))
    assert replayed(six.sink()) == (0, 0)
    assert six.committed() == {T0: 10}  # the pipeline's own position is not touched


def test_a_record_that_is_filtered_now_is_done(six: Topics) -> None:
    def judge(found: Any) -> Any:
        made = judging()(found)
        none = dataclasses.replace(
            made.chunk, rows=made.chunk.rows.slice(0, 0), row_record=made.chunk.row_record[:0]
        )
        return dataclasses.replace(made, chunk=none)

    assert replayed(six.sink(), judge) == (6, 0)
    assert (left(six), six.ids()) == ([], [0, 1, 2, 3])


def test_letters_in_several_partitions(broker: Broker) -> None:
    topics = make_topics(broker)
    wide = broker.create_topic(f"wide-{topics.rejects}", 3)
    topics = dataclasses.replace(topics, rejects=wide)
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    commit_all(sink, chunk({T0: (0, bad(*range(20))), T1: (0, bad(*range(20, 40)))}), fence)
    assert len({m.partition() for m in topics.records(wide)}) == 3
    assert replayed(topics.sink(), judging(lambda one: one.offset != 7), 7) == (39, 1)
    assert topics.ids() == [n for n in range(40) if n != 7]
    assert left(topics) == [7]


def test_what_was_rejected_meanwhile_waits_for_the_next_replay(six: Topics) -> None:
    """A run beside it goes on; a replay has an end."""
    live, fence = ready(six.sink())
    at = 10

    def judge(found: Any) -> Any:
        nonlocal at
        commit_all(live, at_t0(at, bad(at)), fence)
        at += 1
        return judging()(found)

    assert replayed(six.sink(), judge, 2) == (6, 0)
    assert left(six) == [10, 11, 12]
    assert replayed(six.sink()) == (3, 0)
    assert six.ids() == list(range(13))


def test_an_open_transaction_hides_letters_until_it_ends(six: Topics) -> None:
    sink = six.sink()
    with sink.cluster.transaction("somebody/else") as writer:
        writer.init()
        writer.begin()
        writer.send(six.rejects, [Message(b"1")])
        late, fence = ready(six.sink())
        commit_all(late, at_t0(10, bad(10)), fence)
        assert replayed(six.sink()) == (6, 0)
        writer.commit()
    assert left(six) == [10]
    assert replayed(six.sink()) == (1, 0)
    assert six.ids() == list(range(11))


@pytest.mark.parametrize("lost", ["group", "ledger"])
def test_one_copy_of_the_position_is_enough(six: Topics, broker: Broker, lost: str) -> None:
    """Group offsets expire after a week; a ledger topic may be made anew."""
    assert replayed(six.sink(), judging(lambda one: one.offset < 9)) == (5, 1)
    if lost == "group":
        group, admin = f"{six.pipeline}.replay", broker.admin()
        admin.delete_consumer_groups([group])[group].result(120)
    else:
        broker.delete_topic(six.ledger)
        ready(six.sink())
    assert replayed(six.sink()) == (1, 0)
    assert six.ids() == list(range(10))
    assert left(six) == []


def test_in_a_topic_that_was_made_anew_the_old_position_means_nothing(
    six: Topics, broker: Broker
) -> None:
    assert replayed(six.sink()) == (6, 0)
    broker.delete_topic(six.rejects)
    broker.create_topic(six.rejects)
    sink, fence = ready(six.sink())
    commit_all(sink, at_t0(10, bad(10, 11)), fence)
    assert left(six) == [10, 11]
    assert replayed(six.sink()) == (2, 0)
    assert six.ids() == list(range(12))


def test_what_a_reset_has_read_again_is_no_letter_any_more(six: Topics) -> None:
    """Else the record would be written by the run that reads it again, and by a replay."""
    assert replayed(six.sink(), judging(lambda one: one.offset < 6)) == (2, 4)
    sink = six.sink()
    fence = sink.open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda _: {T0: 8})).fence
    assert left(six) == [6, 7]
    commit_all(sink, at_t0(8, [*numbered(8, 9), *bad(9)]), fence)
    assert left(six) == [6, 7, 9]
    assert replayed(six.sink()) == (3, 0)
    assert six.ids() == list(range(10))


def test_rows_that_no_record_answers_for(six: Topics) -> None:
    """After a Spark transform: a row is not left out because some record is rejected."""
    sink, fence = ready(dataclasses.replace(six, output=six.output).sink(), {T0: 0, T1: 0})
    commit_all(sink, chunk({T1: (0, bad(0))}), fence)
    large = mixing(lambda _: {"id": 1, "name": "x" * 2_000_000})
    with pytest.raises(Stopped, match="a row of the Spark transform can't be written"):
        replayed(six.sink(), large)
    assert len(left(six)) == 7
    assert replayed(six.sink(), mixing(lambda n: {"id": n * 100, "name": "sum"})) == (6, 1)
    assert six.ids() == [0, 1, 2, 3, 600]
    assert left(six) == [0]


# -- refused ---------------------------------------------------------------------------------


def test_a_compacted_topic_is_refused(six: Topics, broker: Broker) -> None:
    """Named by a column, it is known when the row is."""
    compacted = broker.create_topic(
        f"compacted-{six.output}", 1, {"cleanup.policy": "compact,delete"}
    )
    own = dataclasses.replace(six, pipeline=f"{six.pipeline}-by-column")
    sink, fence = ready(own.sink(form := RecordFormat(SCHEMA, topic_column="name")))
    commit_all(sink, at_t0(0, bad(0)), fence)

    def judge(found: Any) -> Any:
        made = judging()(found)
        rows = made.chunk.rows.set_column(1, "name", [[compacted]])
        return dataclasses.replace(made, chunk=dataclasses.replace(made.chunk, rows=rows))

    with pytest.raises(ConfigError, match=r"sink.topic_column: topic .* is compacted") as caught:
        replayed(own.sink(form), judge)
    assert caught.value.way_out
    assert topics_are_empty(six, compacted)


def topics_are_empty(topics: Topics, *names: str) -> bool:
    return not any(topics.records(name) for name in names)


def test_another_output_topic_is_refused(six: Topics, broker: Broker) -> None:
    other = dataclasses.replace(six, output=broker.create_topic(f"other-{six.output}"))
    with pytest.raises(TableMismatch, match="has written to"):
        replayed(other.sink())
    assert topics_are_empty(other, other.output)


def test_a_group_that_another_pipeline_replays_by_is_refused(six: Topics) -> None:
    """Its position would be believed, and letters that were never replayed be passed over."""
    assert replayed(six.sink()) == (6, 0)
    other = dataclasses.replace(six, pipeline=f"{six.pipeline}-other", group=six.pipeline)
    with pytest.raises(ConfigError, match=f"holds positions of pipeline '{six.pipeline}'"):
        replayed(other.sink())
    own = dataclasses.replace(other, group="")
    assert replayed(own.sink()) == (6, 0)


# -- two at the same time --------------------------------------------------------------------


def with_a_rival(topics: Topics) -> tuple[int, int]:
    """A replay that is overtaken by another one between its reading and its ``init``."""
    done: list[tuple[int, int]] = []
    begun: list[bool] = []

    def init_late(producer: Any, timeout: float) -> None:
        begun.append(True)
        if len(begun) == 2:  # the first one ends what an earlier replay may have left open
            done.append(replayed(topics.sink()))
        producer.init_transactions(timeout)

    sink: KafkaSink = topics.sink(connect=producing_by(init_transactions=init_late))
    late = replayed(sink)
    assert done == [(6, 0)]
    return late


def test_init_comes_before_the_read_that_counts(six: Topics) -> None:
    assert with_a_rival(six) == (0, 0)
    assert six.ids() == list(range(10))
    assert left(six) == []


def test_without_the_second_reading_letters_are_doubled_and_it_is_seen(
    six: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake itself: what was read before ``init`` is taken for where replays stand."""
    monkeypatch.setattr(
        "oncely.kinds.topic_publishing.ReplayPosition.compared",
        property(lambda _: Anything()),
        raising=True,
    )
    with_a_rival(six)
    assert six.ids() == sorted([*range(4), *range(4, 10), *range(4, 10)])


class Anything:
    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def test_four_replays_at_the_same_time(six: Topics) -> None:
    counts: list[tuple[int, int]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            counts.append(replayed(six.sink(), at_once=2))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed, failed
    assert sum(moved for moved, _ in counts) == 6
    assert six.ids() == list(range(10))
    assert left(six) == []


def test_an_opening_ends_what_a_replay_has_left_open(six: Topics) -> None:
    """Its record in the ledger topic would hide what follows, until its time is up."""
    sink = six.sink(transaction_timeout=600.0)
    cluster = Cluster(sink.pipeline_topics)
    with cluster.transaction(sink.pipeline_topics.keys.replayer) as left_open:
        left_open.init()
        left_open.begin()
        left_open.send(six.ledger, [Message(b"{}", b'["replayed", "nobody", "t", 0]')])
        left_open._serve(0.2)
        left_open._open = False  # its process is gone
        new, fence = ready(six.sink())
        commit_all(new, at_t0(10, numbered(10, 12)), fence)
    assert replayed(six.sink()) == (6, 0)
    assert six.ids() == list(range(12))
    assert TopicPartition(six.rejects, 0) in Cluster(sink.pipeline_topics).look().replayed


def test_a_replay_may_be_begun_when_nothing_waits(topics: Topics) -> None:
    with closing(replay_into_topics(topics.sink().bind())) as letters:
        assert try_portion(letters, judging(), 10) is None
