"""SASL_SSL to the broker and TLS to PostgreSQL; a secret in every field shows up nowhere."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from confluent_kafka import Producer

from oncely.testing.processes import await_that, command_of, running, tree
from oncely.testing.servers.kafka import Broker, Scram
from oncely.testing.servers.postgres import Postgres
from tests.scenarios.commands import run
from tests.scenarios.world import World, good

# Signs that one client or another takes apart; then a piece alone would be a leak, too.
KAFKA_SECRET = "c4nary+k4fk4one/k4fk4two\"k4fk4three'k4fk4four\\k4fk4five"
SQL_SECRET = "c4nary@sq1one:sq1two/sq1three"
SPARK_SECRET = "c4nary-sp4rk1-sp4rk2"
QUERY_SECRET = "c4nary q7ery"
OTHER_SECRET = "c4nary=oth3r"
ALL = (KAFKA_SECRET, SQL_SECRET, SPARK_SECRET, QUERY_SECRET, OTHER_SECRET)
PIECES = {piece for secret in ALL for piece in re.findall(r"[a-z0-9]+", secret)}


def assert_hidden(text: str) -> None:
    for piece in PIECES:
        assert piece not in text, text[max(0, text.find(piece) - 200) :][:400]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Postgres]]:
    folder = tmp_path_factory.mktemp("secure")
    security = Scram({"alice": KAFKA_SECRET})
    with (
        Broker(folder / "kafka", security=security) as broker,
        Postgres(tls=True, password=SQL_SECRET) as postgres,
    ):
        yield broker, postgres


@pytest.mark.long  # in every run: the errors below, and test_spark_hides_secrets.py
@pytest.mark.timeout(300)
def test_encrypted_both_ways_and_no_secret_shows(
    servers: tuple[Broker, Postgres], tmp_path: Path
) -> None:
    broker, postgres = servers
    topic = broker.create_topic("secure", 2)
    producer = Producer(broker.client_config())
    for i in range(2_000):
        producer.produce(topic, good(i), partition=i % 2)
    assert producer.flush(120) == 0
    client = broker.client_config()
    world = World(broker.bootstrap, postgres.create_database("secure"), topic, tmp_path, "secure")
    kafka = {k: v for k, v in client.items() if k not in ("bootstrap.servers", "sasl.password")}
    file = world.file(
        source={"kafka": {**kafka, "sasl.password": "${CANARY_KAFKA}"}},
        sink={"url": "${CANARY_URL}"},
        spark={"conf": {"spark.hadoop.fs.s3a.secret.key": "${CANARY_SPARK}"}},
    )
    env = {"CANARY_KAFKA": KAFKA_SECRET, "CANARY_URL": world.url, "CANARY_SPARK": SPARK_SECRET}
    shown = [file.read_text()]
    shown += [
        plan.stdout + plan.stderr
        for plan in (
            run("plan", file, env=env),
            run("plan", file, "--json", env=env),
        )
    ]
    commands: set[str] = set()
    with running(file, env=env) as driver:
        await_that(lambda: world.count() == 2_000, "all rows, over TLS", 180)
        commands.update(command_of(process) for process in tree(driver.pid))
        driver.terminate()
        assert driver.wait(180) == 0
    assert any("SparkSubmit" in command for command in commands)
    shown += [*commands, file.with_suffix(".log").read_text()]
    status = run("status", file, "--json", env=env)
    assert json.loads(status.stdout)["rejects"] == 0
    wrong = run("status", file, env={**env, "CANARY_URL": world.url.replace("sq1one", "sq1one-no")})
    assert wrong.returncode in (1, 2)
    shown += [status.stdout + status.stderr, wrong.stdout + wrong.stderr]
    shown += [repr(one) for one in everything_with_a_repr(file, env)]
    for text in shown:
        assert_hidden(text)
    with psycopg.connect(world.url) as database:
        encrypted = database.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        assert encrypted.fetchone() == (True,)


ERRORS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "wrong login to Kafka": ({"CANARY_KAFKA": f"{KAFKA_SECRET}x"}, {}, "refuses the login"),
    "wrong login to the database": ({"CANARY_SQL": "c4nary%40sq1one"}, {}, "authentication failed"),
    "a login that can't be read": ({"CANARY_SQL": SQL_SECRET}, {}, "are ambiguous"),
    "no database": ({"SQL_PORT": "1"}, {}, "Connection refused"),
    "no broker": ({"BROKERS": "127.0.0.1:1"}, {}, "no answer from 127.0.0.1:1"),
    "no such column": (
        {},
        {"transform": {"sql": "SELECT '${CANARY_QUERY}' AS a, nope FROM input"}},
        "transform.sql",
    ),
    "an unknown key": ({}, {"sink": {"tabel": "${CANARY_OTHER}"}}, "sink.tabel"),
}


@pytest.mark.parametrize("command", [("run", "--debug"), ("plan", "--json")], ids=" ".join)
@pytest.mark.parametrize("what", ERRORS)
def test_no_secret_shows_on_an_error_path(
    servers: tuple[Broker, Postgres], tmp_path: Path, what: str, command: tuple[str, ...]
) -> None:
    broker, postgres = servers
    wrong, sections, told = ERRORS[what]
    topic = broker.create_topic(f"errors-{uuid.uuid4().hex[:8]}", 1)
    world = World("${BROKERS}", "", topic, tmp_path)
    client = {k: v for k, v in broker.client_config().items() if k.startswith(("s", "S"))}
    login, _, address = postgres.url().rpartition("@")
    _, _, tls = address.partition("?")
    url = f"{login.rpartition(':')[0]}:${{CANARY_SQL}}@127.0.0.1:${{SQL_PORT}}/postgres?{tls}"
    file = world.file(
        source={"kafka": {**client, "sasl.password": "${CANARY_KAFKA}"}},
        spark={"conf": {"spark.hadoop.fs.s3a.secret.key": "${CANARY_SPARK}"}},
        **{**sections, "sink": {"url": url, **sections.get("sink", {})}},
    )
    env = {
        "CANARY_KAFKA": KAFKA_SECRET,
        "CANARY_SQL": quote(SQL_SECRET, safe=""),
        "CANARY_SPARK": SPARK_SECRET,
        "CANARY_QUERY": QUERY_SECRET,
        "CANARY_OTHER": OTHER_SECRET,
        "SQL_PORT": str(postgres.port),
        "BROKERS": broker.bootstrap,
    }
    done = run(*command, file, env=env | wrong)
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2), said
    assert told in said
    assert "starting Spark" not in said
    assert_hidden(said)


def everything_with_a_repr(file: Path, env: dict[str, str]) -> list[object]:
    """The values that could end up in somebody's log."""
    from oncely.pipeline import Pipeline

    before = dict(os.environ)
    os.environ.update(env)
    try:
        pipeline = Pipeline.from_file(file)
        sink = pipeline.sink(pipeline.row_schema())
        return [
            pipeline,
            pipeline.settings,
            pipeline.source,
            sink,
            sink.dialect,
            pipeline.settings.model_dump_json(),
            pipeline.settings.describe(),
        ]
    finally:
        os.environ.clear()
        os.environ.update(before)
