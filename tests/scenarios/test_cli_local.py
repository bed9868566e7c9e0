"""`oncely local`: a broker and PostgreSQL in the background, and a pipeline between them."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from oncely.errors import WrongInput
from oncely.testing.servers import background
from tests.scenarios.commands import oncely, oncely_json, run
from tests.scenarios.world import World, produce


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    env = {"ONCELY_LOCAL_DIR": str(tmp_path / "local")}
    yield env
    oncely("local", "down", "--erase", env=env)


def without_password(where: dict[str, str]) -> dict[str, str]:
    return where | {"postgres": re.sub(r":[^:@]+@", ":***@", where["postgres"])}


def test_a_folder_of_its_own(env: dict[str, str], tmp_path: Path) -> None:
    """Beside the servers of the usual folder, of which it knows nothing."""
    own = ("--folder", tmp_path / "own")
    try:
        started = run("local", "up", *own, "--json", env=env)
        assert f"starting a Kafka broker and PostgreSQL in {tmp_path / 'own'}" in started.stderr
        where = json.loads(started.stdout)
        again = run("local", "up", *own, "--json", env=env)
        assert (json.loads(again.stdout), again.stderr) == (where, "")
        assert oncely_json("local", "status", *own, env=env) == without_password(where)
        assert oncely_json("local", "status", expect=1, env=env) is None
        create_topic(where["brokers"], "mine")
        produce(where["brokers"], "mine", [(0, b"k", b"v")])
        assert '"value": "v"' in oncely("local", "consume", "mine", *own, env=env).stdout
        assert "the local broker is not running" in run("local", "consume", "x", env=env).stderr
    finally:
        assert "stopped" in oncely("local", "down", "--erase", *own, env=env).stdout


def create_topic(brokers: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result()


def test_up_status_down(env: dict[str, str]) -> None:
    assert oncely_json("local", "status", expect=1, env=env) is None
    where = oncely_json("local", "up", env=env)
    assert oncely_json("local", "up", env=env) == where
    assert oncely_json("local", "status", env=env) == without_password(where)
    said = oncely("local", "status", env=env)
    password = urlsplit(where["postgres"]).password
    assert where["brokers"] in said.stdout
    assert password
    assert password not in said.stdout + said.stderr
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
    assert oncely_json("local", "status", env=env, alone=True) == without_password(where)
    assert where["brokers"] in oncely("local", "status", env=env, alone=True).stdout

    world = World(where["brokers"], where["postgres"], "first", tmp_path)
    create_topic(world.brokers, "first")
    produce(world.brokers, "first", [(0, b"k", json.dumps({"id": 1}).encode())])
    assert oncely_json("plan", world.file(), env=env, alone=True)["can_run"]

    assert "stopped" in oncely("local", "down", env=env, alone=True).stdout
    assert oncely_json("local", "up", env=env, alone=True) == where, "ports and password stay"
