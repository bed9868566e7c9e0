"""`oncely init`: from a topic to a pipeline file that `plan` accepts and `run` can use."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable

from oncely.testing.servers.kafka import Broker
from tests.scenarios.commands import oncely, oncely_json, run


@pytest.fixture(autouse=True)
def brokers(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKERS", broker.bootstrap)


@pytest.fixture
def topic(broker: Broker, make_topic: Any) -> str:
    """30 orders in 3 partitions, one broken value, and an aborted transaction."""
    orders = [
        {"id": f"o{i}", "at": "2026-01-02T10:00:00Z", "amount": i * 1.25, "lines": [{"sku": "a"}]}
        for i in range(30)
    ]
    records = [(i % 3, one["id"], json.dumps(one)) for i, one in enumerate(orders)]
    name: str = make_topic(partitions=3, records=[*records, (0, "x", "{")])
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(name, b'{"aborted": 1}', b"o1", partition=1)
    producer.flush()
    producer.abort_transaction()
    return name


def test_the_proposal_is_planned_and_run(broker: Broker, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "orders.toml"
    arguments = ("init", "--brokers", broker.bootstrap, "--topic", topic, "-o", file)
    groups = AdminClient({"bootstrap.servers": broker.bootstrap}).list_consumer_groups
    before = {one.group_id for one in groups(request_timeout=60).result(120).valid}
    said = oncely(*arguments, "--to", f"sqlite:///{tmp_path}/orders.db").stdout
    assert f"\n  export BROKERS={broker.bootstrap}\n  oncely plan {file} --sample 1000\n" in said
    plan = oncely_json("plan", file, "--sample", 100)
    assert plan["can_run"]
    sample = plan["sample"]
    assert (sample["records"], sample["rows"], sample["rejected"]) == (31, 30, 1)
    assert "not JSON" in sample["reasons"][0][0]
    assert sample["unnamed"] == []
    after = {one.group_id for one in groups(request_timeout=60).result(120).valid}
    assert not {one for one in after - before if topic in one or "reads" in one}
    assert not (tmp_path / "orders.db").exists()

    refused = run(*arguments)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    text = file.read_text()
    assert "aborted" not in text
    assert 'brokers = "${BROKERS}" ' in text
    assert f"# export BROKERS={broker.bootstrap} before" in text
    assert "amount DECIMAL(18, 2)" in text
    assert 'column = "id"' in text
    printed = oncely("init", "--brokers", broker.bootstrap, "--topic", topic, "-o", "-").stdout
    assert f'topics = ["{topic}"]' in printed

    file.write_text(text.replace("[sink]", '[sink]\nmax_rejects = "10%"'))
    oncely("work", file, "--until", "latest")
    with sqlite3.connect(tmp_path / "orders.db") as database:
        table = next(line for line in text.splitlines() if line.startswith("table"))
        name = table.partition('"')[2].rstrip('"')
        (found,) = database.execute(f"SELECT count(DISTINCT id) FROM {name}").fetchone()
    assert found == 30


def test_a_delta_table_is_proposed_and_written(broker: Broker, topic: str, tmp_path: Path) -> None:
    file, table = tmp_path / "orders.toml", tmp_path / "table"
    to = ("--to", f"delta:{table}")
    oncely("init", "--brokers", broker.bootstrap, "--topic", topic, "-o", file, *to)
    plan = oncely_json("plan", file)
    assert plan["can_run"]
    assert any("a probe was written" in one for one in plan["notes"])
    file.write_text(file.read_text().replace("[sink]", '[sink]\nmax_rejects = "10%"'))
    oncely("run", file, "--until", "latest")
    assert DeltaTable(table).to_pyarrow_table().num_rows == 30


def test_topics_without_records_and_missing_ones_are_clear_errors(
    broker: Broker, make_topic: Any, tmp_path: Path
) -> None:
    empty = make_topic()
    file = tmp_path / "x.toml"
    for name, said in ((empty, "no committed records"), ("nowhere", "'nowhere'")):
        done = run("init", "--brokers", broker.bootstrap, "--topic", name, "-o", file)
        assert done.returncode == 2
        assert said in done.stderr
    assert not file.exists()


def test_json_with_schemas_of_kafka_connect_is_upserted(
    broker: Broker, make_topic: Any, tmp_path: Path
) -> None:
    def wrapped(kind: str, payload: Any) -> str:
        return json.dumps({"schema": {"type": kind, "optional": False}, "payload": payload})

    orders = [(7, {"id": 7, "user": "a"}), (8, {"id": 8, "user": "b"}), (7, {"id": 7, "user": "c"})]
    records: list[Any] = [(0, wrapped("int32", k), wrapped("struct", v)) for k, v in orders]
    topic = make_topic(partitions=1, records=[*records, (0, wrapped("int32", 8), None)])
    file, database = tmp_path / "orders.toml", tmp_path / "orders.db"
    to = ("--to", f"sqlite:///{database}")
    oncely("init", "--brokers", broker.bootstrap, "--topic", topic, "-o", file, *to)
    assert oncely_json("plan", file, "--sample", 10)["can_run"]
    oncely("work", file, "--until", "latest")
    table = next(line for line in file.read_text().splitlines() if line.startswith("table"))
    with sqlite3.connect(database) as opened:
        name = table.partition('"')[2].rstrip('"')
        assert opened.execute(f'SELECT id, "user" FROM {name}').fetchall() == [(7, "c")]
