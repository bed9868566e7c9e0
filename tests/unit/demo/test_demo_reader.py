"""The reader as a process, on a real broker and a real PostgreSQL; what it counts is made here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from demo import reader
from oncely.testing.servers.kafka import Broker

ROOT = reader.__file__.rsplit("/demo/", 1)[0]
ROWS, BROKEN = 200, b"not a flight"
DDL = """
CREATE TABLE flights (id bigint, carrier text, flight int, tailnum text, origin text, dest text,
  time_hour timestamptz, dep_delay float8, arr_delay float8, distance int, late bool);
CREATE TABLE rejects (topic text, "partition" int, "offset" bigint, "value" bytea);
"""


def flight(number: int) -> bytes:
    told = {"id": number, "carrier": "UA", "time_hour": "2013-01-01T10:00:00Z", "dep_delay": 16}
    return json.dumps(told).encode()


@pytest.fixture
def topic(broker: Broker, make_topic: Callable[..., str]) -> str:
    """200 flights and a broken record in two partitions; an aborted transaction ends both."""
    good = [(number % 2, b"k", flight(number)) for number in range(ROWS)]
    name = make_topic(partitions=2, records=[*good, (1, b"k", BROKEN)])
    producer = Producer({**broker.client_config(), "transactional.id": name, "log_level": 3})
    producer.init_transactions(120)
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(name, flight(-1 - partition), b"k", partition=partition)
    producer.flush(120)
    producer.abort_transaction(120)
    return name


@pytest.fixture
def filled(database: str, topic: str) -> str:
    """A database that holds what it must."""
    hour = datetime(2013, 1, 1, 10, tzinfo=UTC)
    with psycopg.connect(database) as connection:
        connection.execute(DDL)
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO flights (id, carrier, time_hour, dep_delay, late)"
                " VALUES (%s, 'UA', %s, 16, true)",
                [(number, hour) for number in range(ROWS)],
            )
        connection.execute("INSERT INTO rejects VALUES (%s, 1, 100, %s)", (topic, BROKEN))
    return database


def read(broker: Broker, topic: str, url: str, on_the_way: object = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "demo.reader", topic, "ours=flights,rejects"],
        cwd=ROOT,
        env=reader.environment(broker.bootstrap, {"ours": url}),
        input=json.dumps(on_the_way or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_right_tables_are_found_right_without_any_code_of_oncely(broker, topic, filled):
    answer = read(broker, topic, filled, {"ours": [{"0": 10, "1": 5}]})
    assert answer["pipeline_code_imported"] is False
    ours = answer["ours"]
    assert (ours["records"], ours["rows"], ours["rejects"]) == (ROWS + 1, ROWS, 1)
    assert ours["lost"] == ours["duplicated"] == ours["changed"] == ours["unexpected"] == 0
    assert ours["flights_before"] == [15]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("INSERT INTO flights SELECT * FROM flights WHERE id = 7", {"duplicated": 1}),
        ("UPDATE rejects SET value = 'x'", {"changed": 1}),
    ],
)
def test_damage_by_hand_is_counted(broker, topic, filled, damage, found):
    with psycopg.connect(filled) as connection:
        connection.execute(damage.encode())
    ours = read(broker, topic, filled)["ours"]
    names = ("lost", "duplicated", "changed", "unexpected")
    assert {name: ours[name] for name in names if ours[name]} == found
    assert ours["examples"]


def test_the_ends_do_not_include_an_open_transaction(broker, topic):
    before = reader.stable_ends(broker.bootstrap, topic)
    producer = Producer({**broker.client_config(), "transactional.id": f"{topic}-open"})
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(topic, flight(500), b"k", partition=0)
    producer.flush(120)
    try:
        assert reader.stable_ends(broker.bootstrap, topic) == before
        assert reader.read_topic(broker.bootstrap, topic).records == ROWS + 1
    finally:
        producer.abort_transaction(120)
