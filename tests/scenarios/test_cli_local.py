"""`oncely local`: a broker and PostgreSQL in the background, and a pipeline between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, produce


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    env = {"ONCELY_LOCAL_DIR": str(tmp_path / "local")}
    yield env
    oncely("local", "down", "--erase", env=env)


def test_up_status_down(env: dict[str, str]) -> None:
    assert oncely_json("local", "status", expect=1, env=env) is None
    where = oncely_json("local", "up", env=env)
    assert oncely_json("local", "up", env=env) == where == oncely_json("local", "status", env=env)
    assert AdminClient({"bootstrap.servers": where["brokers"]}).list_topics(timeout=60).brokers
    with psycopg.connect(where["postgres"]) as database:
        assert database.execute("SELECT 1").fetchone() == (1,)
    assert "stopped" in oncely("local", "down", env=env).stdout
    assert "nothing was running" in oncely("local", "down", env=env).stdout


@pytest.mark.long
@pytest.mark.embedded
def test_a_pipeline_between_servers_that_outlive_their_command(
    env: dict[str, str], tmp_path: Path
) -> None:
    where = oncely_json("local", "up", env=env, alone=True)
    assert set(where) == {"brokers", "postgres"}
    assert where["postgres"].startswith("postgresql://")
    assert oncely_json("local", "up", env=env, alone=True) == where
    assert oncely_json("local", "status", env=env, alone=True) == where
    assert where["brokers"] in oncely("local", "status", env=env, alone=True).stdout

    world = World(where["brokers"], where["postgres"], "first", tmp_path)
    admin = AdminClient({"bootstrap.servers": world.brokers})
    admin.create_topics([NewTopic("first", 1, 1)])["first"].result()
    produce(world.brokers, "first", [(0, b"k", json.dumps({"id": 1}).encode())])
    assert oncely_json("plan", world.file(), env=env, alone=True)["can_run"]

    assert "stopped" in oncely("local", "down", env=env, alone=True).stdout
    assert oncely_json("local", "up", env=env, alone=True) == where, "ports and password stay"
