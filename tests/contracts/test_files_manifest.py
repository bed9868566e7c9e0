"""The manifest and schema topics: made, refused, read to their end, settled."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import TopicPartition

from oncely.errors import (
    ConfigError,
    DataLost,
    InvariantViolation,
    NewerFormat,
    SourceMismatch,
    Unavailable,
)
from oncely.kafka.client import KafkaAdmin
from oncely.kafka.topics import TopicLog, configured, identified
from oncely.kinds.files.manifest import Contents, Manifest
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce
from tests.manifesttools import Topics, a_file, a_schema, topics

COMPACT = {"cleanup.policy": "compact"}


@pytest.fixture
def own(broker: Broker) -> Topics:
    return topics(broker)


def shown(reader: Manifest, path: str) -> Contents:
    """What is there once a file can be seen: the marker follows the commit's answer."""
    found: Contents = await_that(
        lambda: found if path in (found := reader.look()).files else None, f"file {path}"
    )
    return found


def test_topics_are_made_with_one_partition_and_compacted(own: Topics) -> None:
    ids = own.make()
    admin = KafkaAdmin(own.bootstrap, {}, 10.0)
    found = configured(admin, [own.manifest, own.schema])
    assert [found[name]["cleanup.policy"] for name in (own.manifest, own.schema)] == ["compact"] * 2
    assert found[own.manifest]["delete.retention.ms"] == "604800000"
    assert own.make(create=False) == ids


@pytest.mark.parametrize(
    ("partitions", "config", "said"),
    [
        (2, COMPACT, "has 2 partitions"),
        (1, {"cleanup.policy": "delete"}, "'delete'"),
        (1, {"cleanup.policy": "compact,delete"}, "delete"),
    ],
)
@pytest.mark.parametrize("which", ["manifest", "schema"])
def test_a_topic_of_another_form_is_refused(
    broker: Broker, own: Topics, which: str, partitions: int, config: dict[str, str], said: str
) -> None:
    broker.create_topic(getattr(own, which), partitions, config)
    with pytest.raises(ConfigError, match=f"sink.{which}_topic.*{said}") as refused:
        own.make()
    assert refused.value.way_out


def test_a_missing_topic_is_refused_where_it_may_not_be_made(own: Topics) -> None:
    with pytest.raises(ConfigError, match=r"sink.manifest_topic.*missing"):
        own.make(create=False)
    with own.reader() as reader, pytest.raises(ConfigError, match="nothing was published yet"):
        reader.require()


def test_one_topic_for_both_is_refused(own: Topics) -> None:
    from oncely.kinds.files.topics import require_topics

    with pytest.raises(ConfigError, match=r"sink\.schema_topic"):
        require_topics(KafkaAdmin(own.bootstrap, {}, 10.0), "one", "one", create=True)


def test_files_come_and_go(own: Topics) -> None:
    own.make()
    with own.reader() as reader:
        assert not reader.look().files
        own.publish([a_file("a"), a_file("b")], [a_schema()])
        first = reader.settled()
        assert list(first.files) == ["a", "b"]
        assert list(first.schemas) == [()]
        before = time.time() * 1000 - 60_000
        own.publish([a_file("c", replaces=["a"])], removed=["a", "b"])
        then = reader.settled()
        assert list(then.files) == ["c"]
        assert then.removed.keys() == {"a", "b"}
        assert all(before < at < before + 120_000 for at in then.removed.values())
        assert list(first.files) == ["a", "b"]  # what was told does not change


def test_a_file_that_replaces_others_takes_them_out_before_their_tombstones(own: Topics) -> None:
    """A prefix of the topic may hold half of a transaction; see the module."""
    own.make()
    own.publish([a_file("a"), a_file("b")], [a_schema()])
    with own.transaction() as first, own.transaction() as second, own.reader() as reader:
        own.send(first, [a_file("c", replaces=["a", "b"])])
        own.send(second, [a_file("d")])
        own.send(first, removed=["a", "b"])
        first.commit_transaction(120)
        # The second one's record hides the tombstones, and not the new file.
        assert list(shown(reader, "c").files) == ["c"]
        second.commit_transaction(120)
        assert list(reader.settled().files) == ["c", "d"]


def test_aborted_messages_are_not_seen(own: Topics) -> None:
    own.make()
    own.publish([a_file("a")], [a_schema()])
    with own.transaction() as producer:
        own.send(producer, [a_file("b")], removed=["a"])
        producer.abort_transaction(120)
    with own.reader() as reader:
        assert list(reader.settled().files) == ["a"]


def test_settled_waits_for_an_open_transaction_and_look_does_not(own: Topics) -> None:
    own.make()
    own.publish([a_file("a")], [a_schema()])
    with own.transaction() as producer, own.reader() as reader:
        own.send(producer, [a_file("b")])
        assert list(shown(reader, "a").files) == ["a"]
        found: list[list[str]] = []
        waiting = threading.Thread(target=lambda: found.append(list(reader.settled().files)))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        producer.commit_transaction(120)
        waiting.join(180)
        assert found == [["a", "b"]]


def test_settled_gives_up_in_time(own: Topics) -> None:
    from dataclasses import replace

    own.make()
    with own.transaction() as producer:
        own.send(producer, [a_file("b")])
        brief = replace(own.pipeline_topics, timeout=1.0)
        with (
            Manifest(brief, own.manifest, own.schema) as reader,
            pytest.raises(Unavailable, match="open transaction"),
        ):
            reader.settled()


def test_a_file_is_not_shown_without_the_schema_that_it_names(own: Topics) -> None:
    """The marker reaches the manifest first; the schema is read again until it is there.

    Two transactions stand for the two markers: the schema's is still open when the manifest's
    is committed.
    """
    own.make()
    with own.transaction() as schema, own.reader() as reader:
        own.send(schema, schemas=[a_schema("s2")])
        own.publish([a_file("a", schema="s2")])
        found: list[list[str]] = []
        waiting = threading.Thread(
            target=lambda: found.append([x.id for x in shown(reader, "a").schemas.values()])
        )
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        schema.commit_transaction(120)
        waiting.join(180)
        assert found == [["s2"]]


def test_the_newest_schema_of_each_scope(own: Topics) -> None:
    own.make()
    own.publish(schemas=[a_schema("s1", ("ann",)), a_schema("s1", (None,))])
    own.publish(schemas=[a_schema("s2", ("ann",))])
    with own.reader() as reader:
        schemas = reader.settled().schemas
    assert {scope: one.id for scope, one in schemas.items()} == {("ann",): "s2", (None,): "s1"}


def test_another_topic_by_the_same_name(broker: Broker, own: Topics) -> None:
    ids = own.make()
    own.publish([a_file("a"), a_file("b")], [a_schema()])
    with own.reader() as reader:
        reader.require_whole(ids.manifest)
        assert len(reader.settled().files) == 2
        broker.delete_topic(own.manifest)
        with pytest.raises(SourceMismatch, match="now it is gone"):
            reader.require_whole(ids.manifest)
        broker.create_topic(own.manifest, 1, COMPACT)
        with pytest.raises(SourceMismatch, match="had id"):
            reader.require_whole(ids.manifest)
        assert not reader.settled().files  # what the old one said is void


def test_a_log_that_lost_its_beginning(broker: Broker, own: Topics) -> None:
    own.make()
    broker.create_topic(f"cut-{own.name}", 1, {"cleanup.policy": "delete"})
    cut = Manifest(own.pipeline_topics, f"cut-{own.name}", own.schema)
    produce(broker, f"cut-{own.name}", [(0, b"k", None)] * 3)
    here = TopicPartition(f"cut-{own.name}", 0, 2)
    admin = broker.admin()  # lives until it has its answer
    admin.delete_records([here])[here].result(120)
    found = identified(KafkaAdmin(own.bootstrap, {}, 10.0), f"cut-{own.name}")
    assert found is not None
    with cut, pytest.raises(DataLost, match="begins at offset 2"):
        cut.require_whole(found[0])


def test_foreign_messages_are_told(broker: Broker, own: Topics) -> None:
    own.make()
    produce(broker, own.manifest, [(0, b"a", b'{"version":0,"kind":"file"}')])
    with own.reader() as reader, pytest.raises(InvariantViolation, match="version 0"):
        reader.look()


@pytest.mark.parametrize("key", [b"a", b'["owner","p"]'])
def test_a_message_of_a_newer_version_is_refused(broker: Broker, own: Topics, key: bytes) -> None:
    own.make()
    produce(broker, own.manifest, [(0, key, b'{"version":2,"path":7}')])
    with own.reader() as reader, pytest.raises(NewerFormat, match=r"format 2, .* up to 1") as told:
        reader.look()
    assert "upgrade Oncely" in told.value.way_out


def test_what_was_read_of_tens_of_thousands_of_files_is_not_read_again(
    own: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.make()
    for batch in range(5):
        own.publish([a_file(f"user=x/date=d/{batch}-{i}") for i in range(10_000)], [a_schema()])
    with own.reader() as reader:
        assert len(reader.settled().files) == 50_000
        reader.look()  # passes over the marker of the last transaction, which may come late
        monkeypatch.setattr(TopicLog, "_read_to", None)  # nothing can be read from here on
        assert len(reader.look().files) == 50_000
