"""How a pipeline of your own is tested: real servers, a kill inside a commit, a count from outside.

Run it with ``pytest examples/test_orders.py``; docs/testing.md walks through it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Producer

from oncely import Pipeline
from oncely.testing import Broker, Postgres, inside_a_commit, kill_tree, messages, running

PIPELINE = """
name = "orders"
delivery = "exactly_once"

[source]
brokers = "{brokers}"
topics = ["orders"]

[decode]
format = "json"
schema = "id BIGINT NOT NULL, cents BIGINT NOT NULL"

[transform]
sql = "SELECT id, cents / 100.0 AS euros FROM input"

[sink]
kind = "sql"
url = "{url}"
table = "orders"

[spark]
master = "local[2,4]"
trigger = "0 seconds"
"""


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """A Kafka broker for all tests: three seconds to start."""
    with Broker() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL for all tests: one second to start."""
    with Postgres() as server:
        yield server


def test_no_order_is_lost_or_doubled(broker: Broker, postgres: Postgres, tmp_path: Path) -> None:
    """The driver, its JVM and its workers are killed while a transaction of theirs is open."""
    broker.create_topic("orders", partitions=2)
    url = postgres.create_database("shop")
    file = tmp_path / "orders.toml"
    file.write_text(PIPELINE.format(brokers=broker.bootstrap, url=url))

    publish(broker, range(1_000))
    with (
        running(file) as driver,
        inside_a_commit(url, "orders", driver.pid, lambda: publish(broker, range(1_000, 2_000))),
    ):
        kill_tree(driver.pid)
    assert Pipeline.from_file(file).run("latest"), "it goes on from what the database says"

    ordered = Counter(json.loads(one.value())["id"] for one in messages(broker.bootstrap, "orders"))
    with psycopg.connect(url) as database:
        written = Counter(id_ for (id_,) in database.execute("SELECT id FROM orders"))
    assert written == ordered


def publish(broker: Broker, ids: range) -> None:
    """Orders, into both partitions."""
    producer = Producer(broker.client_config())
    for number in ids:
        order = {"id": number, "cents": 100 * number}
        producer.produce("orders", json.dumps(order).encode(), partition=number % 2)
    assert producer.flush(30) == 0
