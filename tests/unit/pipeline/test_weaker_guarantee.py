"""What `oncely plan` says of each pair of sink and offset store, for each weaker delivery."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import parse
from oncely.pipeline.guarantee import Guarantee, guarantee_of

SINKS: dict[str, dict[str, Any]] = {
    "append": {"kind": "sql", "url": "postgresql://u@h/d", "table": "t"},
    "upsert": {"kind": "sql", "url": "postgresql://u@h/d", "table": "t", "mode": "upsert",
               "keys": ["id"]},
    "kafka": {"kind": "kafka", "topic": "out"},
}  # fmt: skip
STORES: dict[str, tuple[dict[str, Any], str]] = {
    "ledger": ({"store": "ledger"}, "the sink's ledger"),
    "kafka": ({"store": "kafka"}, "the consumer group oncely-p"),
    "a group of its own": ({"store": "kafka", "group": "mine"}, "the consumer group mine"),
    "file": ({"store": "file", "path": "positions"}, "a file on this machine"),
    "sql": ({"store": "sql", "url": "sqlite:///p.db"}, "a table of another database"),
    "redis": ({"store": "redis", "url": "redis://h/0"}, "Redis"),
    "zookeeper": ({"store": "zookeeper", "hosts": "h:1"}, "ZooKeeper"),
}


def guarantee(delivery: str, sink: str, store: str, **more: Any) -> Guarantee:
    raw: dict[str, Any] = {
        "name": "p",
        "delivery": delivery,
        "source": {"brokers": "b:1", "topics": ["t"]},
        "decode": {
            "format": "json",
            "schema": "id BIGINT",
            "key": {"format": "json", "schema": "id BIGINT"},
        },
        "sink": SINKS[sink],
        "offsets": STORES[store][0],
        **more,
    }
    return guarantee_of(parse(raw))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("sink", SINKS)
def test_each_pair(sink: str, store: str) -> None:
    raw, where = STORES[store]
    told = {}
    for delivery in ("none", "at_most_once", "at_least_once"):
        found = guarantee(delivery, sink, store)
        assert (found.delivery, found.store, found.commit) == (delivery, raw["store"], "partition")
        assert where in found.means
        assert "exactly once" not in " ".join((found.means, *found.ends))
        assert "same transaction" not in found.rejects, "there is none"
        ends = " ".join(found.ends)
        assert ("does not fence reliably" in ends) is (store != "ledger")
        assert ("stopped by the ledger" in ends) is (store == "ledger")
        assert ("offsets.retention.minutes" in ends) is (raw["store"] == "kafka")
        assert ("visible separately" in ends) is (sink == "kafka")
        told[delivery] = found
    assert "may lose some and write others again" in told["none"].means
    assert "every 5 seconds" in told["none"].means
    assert "loses up to 100,000 records of each task" in told["at_most_once"].means
    assert "nothing is written twice" in told["at_most_once"].means
    assert "writes up to 100,000 records of each task again" in told["at_least_once"].means
    assert "nothing is lost" in told["at_least_once"].means
    assert any("not retried" in end for end in told["at_most_once"].ends)


@pytest.mark.parametrize(
    ("sink", "word"),
    [
        ("append", 'mode = "upsert" would store them once'),
        ("upsert", "makes the second writing of a record harmless"),
        ("kafka", "a key and compaction hide them later"),
    ],
)
def test_what_makes_a_second_writing_harmless(sink: str, word: str) -> None:
    assert any(word in end for end in guarantee("at_least_once", sink, "ledger").ends)
    assert not any(word in end for end in guarantee("at_most_once", sink, "ledger").ends)


def test_the_interval_is_told() -> None:
    assert "up to 500" in guarantee("at_least_once", "append", "redis", commit_interval=500).means
    timed = guarantee("none", "append", "redis", commit_interval="2 minutes")
    assert "every" in timed.means
    assert "5 seconds" not in timed.means


@pytest.mark.parametrize("sink", ["append", "kafka"])
def test_a_spark_transform_has_a_batch_in_hand(sink: str) -> None:
    found = guarantee("at_least_once", sink, "redis", transform={"spark": "m:f"})
    assert found.commit == "batch"
    assert "writes a batch again" in found.means
    assert any("GROUP BY" in end for end in found.ends)


def test_gaps_are_told_as_well() -> None:
    source = {"brokers": "b:1", "topics": ["t"], "on_gap": "record"}
    found = guarantee("at_least_once", "append", "file", source=source)
    assert any("on_gap" in end for end in found.ends)
