"""`sink.timestamp = "source"`: records of the output topic keep their time, replayed ones too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import toml

LONG_AGO = 1_577_836_800_000  # 2020-01-01


def test_records_keep_the_time_of_their_source(
    broker: Broker, make_topic: Any, tmp_path: Path
) -> None:
    topic = make_topic()
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for at, value in enumerate(['{"id": 1}', '{"id": 9999999999}', '{"id": 3}']):
        producer.produce(topic, value, "k", timestamp=LONG_AGO + at)
    producer.flush()
    file, output = tmp_path / "p.toml", f"{topic}.out"
    settings = {
        "name": topic,
        "source": {"brokers": broker.bootstrap, "topics": topic},
        "decode": {"format": "json", "schema": "id INT"},
        "sink": {"kind": "kafka", "topic": output, "ledger_topic": f"{topic}.ledger",
                 "timestamp": "source", "max_rejects": 1},
    }  # fmt: skip
    file.write_text(toml(settings))
    oncely("work", file, "--until", "latest")
    assert times(broker, output) == {1: LONG_AGO, 3: LONG_AGO + 2}
    file.write_text(toml(settings | {"decode": {"format": "json", "schema": "id BIGINT"}}))
    assert oncely_json("rejects", "replay", file) == {"moved": 1, "kept": 0}
    assert times(broker, output)[9999999999] == LONG_AGO + 1


def times(broker: Broker, topic: str) -> dict[int, int]:
    found = messages(broker.bootstrap, topic)
    return {int(one.value()[6:-1]): one.timestamp()[1] for one in found}
