"""SASL_SSL to the broker and TLS to PostgreSQL; a secret in every field shows up nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Producer

from oncely.local.kafka import Broker, Scram
from oncely.local.postgres import Postgres
from tests.scenarios.world import World, await_that, command_of, good, running, tree

KAFKA_SECRET = "c4nary+kafka/S\"ecr'et\\1"
SQL_SECRET = "c4nary@sql:Secr3t/2"
SPARK_SECRET = "c4nary-spark-Secr3t-3"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Postgres]]:
    folder = tmp_path_factory.mktemp("secure")
    security = Scram({"alice": KAFKA_SECRET})
    with (
        Broker(folder / "kafka", security=security) as broker,
        Postgres(tls=True, password=SQL_SECRET) as postgres,
    ):
        yield broker, postgres


def oncely(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oncely.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=180,
        check=False,
    )


@pytest.mark.timeout(300)
def test_encrypted_both_ways_and_no_secret_shows(
    servers: tuple[Broker, Postgres], tmp_path: Path
) -> None:
    broker, postgres = servers
    topic = broker.create_topic("secure", 2)
    producer = Producer(broker.client_config())
    for i in range(2_000):
        producer.produce(topic, good(i), partition=i % 2)
    assert producer.flush(30) == 0
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
            oncely("plan", str(file), env=env),
            oncely("plan", str(file), "--json", env=env),
        )
    ]
    commands: set[str] = set()
    with running(file, env=env) as driver:
        await_that(lambda: world.count() == 2_000, "all rows, over TLS", 120)
        commands.update(command_of(process) for process in tree(driver.pid))
        driver.terminate()
        assert driver.wait(60) == 0
    assert any("SparkSubmit" in command for command in commands)
    shown += [*commands, file.with_suffix(".log").read_text()]
    status = oncely("status", str(file), "--json", env=env)
    assert json.loads(status.stdout)["rejects"] == 0
    wrong = oncely(
        "status", str(file), env={**env, "CANARY_URL": world.url.replace("c4nary", "c4nary-wrong")}
    )
    assert wrong.returncode in (1, 2)
    shown += [status.stdout + status.stderr, wrong.stdout + wrong.stderr]
    shown += [repr(one) for one in everything_with_a_repr(file, env)]
    for text in shown:
        for secret in ("c4nary",):
            assert secret not in text, text[max(0, text.find(secret) - 200) :][:400]
    with psycopg.connect(world.url) as database:
        encrypted = database.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        assert encrypted.fetchone() == (True,)


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
