"""`oncely local`: a broker and PostgreSQL in the background, and a pipeline between them."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from oncely.errors import WrongInput
from oncely.testing.servers import background
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
    home = Path(env["ONCELY_LOCAL_DIR"])
    database_directory = Path(
        json.loads((home / "settings.json").read_text())["postgres_directory"]
    )
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    for place in (home, database_directory):  # root's server has a user of its own
        found = [place, *place.rglob("*")]
        assert {"data", "password", "postgres.log"} <= {one.name for one in found} or place == home
        assert not [one for one in found if one.lstat().st_mode & 0o066]
    assert "stopped" in oncely("local", "down", env=env).stdout
    assert "nothing was running" in oncely("local", "down", env=env).stdout


def test_a_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCELY_LOCAL_DIR", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(WrongInput, match="belongs to another user"):
        background.down()


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
