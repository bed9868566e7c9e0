"""``[sink]`` with ``kind = "kafka"``, and deliveries weaker than exactly once: what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import PipelineSettings, parse
from oncely.config.pipeline import Delivery
from oncely.errors import ConfigError
from oncely.kinds.kafka.settings import KafkaSinkSettings
from oncely.pipeline import Pipeline
from tests.configtools import SQL, edited_file

RIGHT: dict[str, Any] = {
    "name": "late",
    "source": {"brokers": "h:9092", "topics": ["flights"]},
    "decode": {"format": "json", "schema": "id BIGINT, grp STRING"},
    "sink": {"kind": "kafka", "topic": "late"},
}


def edited(**sections: Any) -> dict[str, Any]:
    return edited_file(RIGHT, sections)


def settings(**sections: Any) -> PipelineSettings:
    return parse(edited(**sections))


def refused(**sections: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settings(**sections)
    assert caught.value.exit_code == 2
    assert "way out" in str(caught.value) or "allowed: " in str(caught.value)
    return caught.value


def sink(**more: Any) -> KafkaSinkSettings:
    found = settings(sink=more).sink
    assert isinstance(found, KafkaSinkSettings)
    return found


def test_what_it_is_by_default() -> None:
    one = sink()
    assert (one.value, one.key, one.headers, one.create) == ("json", None, False, True)
    assert one.rejects == "late.rejects"
    assert one.topics == ("late", "late.rejects", "oncely.ledger")
    assert one.transaction_timeout == 60.0
    assert str(one.max_rejects) == "1%"


def test_keys_that_change_speed_are_passed_through() -> None:
    given = {"linger.ms": 50, "compression.type": "zstd", "acks": "all", "max.in.flight": 5}
    assert sink(kafka=given).kafka == {"linger.ms": "50", "compression.type": "zstd"}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"topic": None}, "sink.topic", "one of the two is needed"),
    ({"topic_column": "grp", "rejects_topic": "r"}, "sink.topic", "both are given"),
    ({"topic": None, "topic_column": "grp"}, "sink.rejects_topic", "no default"),
    ({"topic": "a b"}, "sink.topic", "found 'a b'"),
    ({"topic": "flights"}, "sink.topic", "which source.topics reads: it would never end"),
    ({"rejects_topic": "flights"}, "sink.topic", "which source.topics reads"),
    ({"topic": "t" * 245}, "sink.topic", "has more than 249 characters"),
    ({"ledger_topic": "late"}, "sink.topic", "late is used for two purposes"),
    ({"rejects_topic": "late"}, "sink.topic", "late is used for two purposes"),
    ({"rejects_topic": "oncely.ledger"}, "sink.topic", "oncely.ledger is used for two"),
    ({"topic": None, "topic_column": "grp", "key": "grp", "rejects_topic": "r"},
     "sink.topic_column", "column of key or value"),
    ({"topic": None, "topic_column": "grp", "value": "grp", "rejects_topic": "r"},
     "sink.topic_column", "column of key or value"),
    ({"value": "avro"}, "sink.schema_file", 'value = "avro" needs the schema'),
    ({"value": "id", "decimals": "number"}, "sink.decimals", 'no meaning unless value = "json"'),
    ({"schema_id": 3}, "sink.schema_id", 'no meaning unless value = "avro"'),
    ({"key": ""}, "sink.key", "not empty"),
    ({"create": 1}, "sink.create", "allowed: true or false"),
    ({"max_rejects": "101%"}, "sink.max_rejects", "0% to 100%"),
    ({"transaction_timeout": "9 seconds"}, "sink.transaction_timeout", "10 seconds to 15 minutes"),
    ({"transaction_timeout": "16 minutes"}, "sink.transaction_timeout", "10 seconds to 15"),
    ({"transaction_timeout": "soon"}, "sink.transaction_timeout", "found 'soon'"),
    ({"brokers": "SSL://h:1"}, "sink.brokers", "security.protocol"),
    ({"table": "t"}, "sink.table", 'it belongs to kind = "sql"'),
    ({"topics": ["late"]}, "sink.topics", "did you mean topic?"),
    # what would weaken the producer
    ({"kafka": {"enable.idempotence": False}}, "sink.kafka.enable.idempotence", "doubles records"),
    ({"kafka": {"enable.idempotence": "false"}}, "sink.kafka.enable.idempotence", "doubles"),
    ({"kafka": {"acks": 1}}, "sink.kafka.acks", "lost with its broker"),
    ({"kafka": {"request.required.acks": "0"}}, "sink.kafka.request.required.acks", "lost"),
    ({"kafka": {"max.in.flight": 6}}, "sink.kafka.max.in.flight", "changes the order"),
    ({"kafka": {"max.in.flight.requests.per.connection": 10}},
     "sink.kafka.max.in.flight.requests.per.connection", "changes the order"),
    ({"kafka": {"acks": "0"}}, "sink.kafka.acks", "lost with its broker"),
    ({"kafka": {"linger": 5}}, "sink.kafka.linger", "unknown, or not a setting"),
    ({"kafka": {"transactional.id": "x"}}, "sink.kafka.transactional.id", "for fencing"),
    ({"kafka": {"transaction.timeout.ms": 1}}, "sink.kafka.transaction.timeout.ms", "refused"),
    ({"kafka": {"retries": 0}}, "sink.kafka.retries", "refused"),
    ({"kafka": {"message.timeout.ms": 1}}, "sink.kafka.message.timeout.ms", "refused"),
    ({"kafka": {"bootstrap.servers": "x:1"}}, "sink.kafka.bootstrap.servers", "one cluster"),
    ({"kafka": {"linger.mss": 1}}, "sink.kafka.linger.mss", "did you mean linger.ms?"),
    ({"kafka": {"sasl.password": "x"}}, "sink.kafka.sasl.password", "not a setting"),
    ({"kafka": {"linger.ms": [1]}}, "sink.kafka.linger.ms", "a text or a number"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "key", "word"), WRONG, ids=[f"{w[1]}:{w[0]}" for w in WRONG])
def test_one_mistake(more: dict[str, Any], key: str, word: str) -> None:
    error = refused(sink=more)
    assert error.key == key, str(error)
    assert word in str(error)


def test_several_mistakes_are_told_together() -> None:
    error = str(refused(sink={"topic": None, "value": "avro", "kafka": {"acks": 0, "retries": 1}}))
    assert "sink.kafka.acks" in error
    assert "sink.kafka.retries" in error


@pytest.mark.parametrize(("key", "value"), [("headers", True), ("timestamp", "source")])
def test_some_keys_need_a_record_that_a_row_comes_from(key: str, value: object) -> None:
    error = refused(sink={key: value}, transform={"spark": "m:f"})
    assert error.key == f"sink.{key}"
    settings(sink={key: value}, transform={"python": "m:f"})


def test_the_group_can_not_be_switched_off() -> None:
    assert refused(source={"group": False}).key == "source.group"
    assert settings(source={"group": "mine"}).mirror_group == "mine"


def test_nothing_secret_is_shown() -> None:
    login = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "canary-18",
    }
    done = settings(source={"kafka": login})
    assert "canary-18" not in repr(done) + str(done.describe())


# -- deliveries and stores -----------------------------------------------------------------

STORES: list[dict[str, Any]] = [
    {"store": "kafka"},
    {"store": "file", "path": "positions"},
    {"store": "sql", "url": "postgresql://h/other"},
    {"store": "sql", "url": "sqlite:///p.db"},
    {"store": "redis", "url": "redis://h/0"},
    {"store": "redis", "url": "unix:///run/redis.sock"},
    {"store": "zookeeper", "hosts": "h:2181"},
]
ON_ONE_MACHINE = [STORES[1], STORES[3], STORES[5]]
WEAKER: tuple[Delivery, ...] = ("none", "at_most_once", "at_least_once")


@pytest.mark.parametrize("store", STORES, ids=str)
@pytest.mark.parametrize("kind", ["sql", "kafka"])
def test_exactly_once_takes_the_ledger_and_nothing_else(store: dict[str, Any], kind: str) -> None:
    own = SQL if kind == "sql" else {}
    error = refused(sink=own, offsets=store)
    assert error.key == "offsets.store"
    assert f"found '{store['store']}'" in str(error)
    assert "no transaction covers both" in str(error)
    assert "at_least_once" in error.way_out
    assert settings(sink=own, offsets={"store": "ledger"}).delivery == "exactly_once"
    for delivery in WEAKER:
        assert settings(sink=own, offsets=store, delivery=delivery).offsets.store == store["store"]


@pytest.mark.parametrize("store", STORES, ids=str)
def test_a_cluster_needs_a_store_that_all_machines_reach(store: dict[str, Any]) -> None:
    more = {"delivery": "at_least_once", "spark": {"master": "spark://h:7077"}}
    if store not in ON_ONE_MACHINE:
        settings(offsets=store, **more)
        return
    error = refused(offsets=store, **more)
    assert error.key == "offsets.store"
    assert "on one machine, and spark.master is spark://h:7077" in str(error)
    assert "kafka, redis, zookeeper or PostgreSQL" in error.way_out


def test_both_reasons_are_told() -> None:
    error = str(refused(offsets=STORES[1], spark={"master": "yarn"}))
    assert "no transaction covers both" in error
    assert "on one machine" in error


@pytest.mark.parametrize("wrong", [0, -5, 1.5, True, "0 seconds", "soon", [5]], ids=str)
def test_intervals_that_are_none(wrong: object) -> None:
    assert refused(delivery="none", commit_interval=wrong).key == "commit_interval"


def test_intervals() -> None:
    by_time = settings(commit_interval="5 seconds").commit_interval
    by_number = settings(commit_interval=500).commit_interval
    assert by_time
    assert by_number
    assert (by_time.seconds, by_time.records) == (5.0, None)
    assert (by_number.seconds, by_number.records) == (None, 500)


@pytest.mark.parametrize(
    ("sink", "offsets", "group"),
    [
        (SQL, {"store": "ledger"}, "oncely-late"),
        (SQL, {"store": "redis", "url": "redis://h/0"}, "oncely-late"),
        (SQL, {"store": "kafka"}, None),
        (SQL, {"store": "kafka", "group": "mine"}, None),
        ({}, {"store": "kafka"}, None),
        ({}, {"store": "ledger"}, None),
        ({}, {"store": "redis", "url": "redis://h/0"}, "oncely-late"),
    ],
)
def test_positions_are_mirrored_only_where_they_are_not_in_a_group(
    sink: dict[str, Any], offsets: dict[str, Any], group: str | None
) -> None:
    """A mirror of bare offsets would erase the stamps that the store reads."""
    one = Pipeline(settings(sink=sink, offsets=offsets, delivery="at_least_once"))
    assert one.mirror_group == group
