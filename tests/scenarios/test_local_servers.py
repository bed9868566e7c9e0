"""``oncely local``: in the background until told to stop, never somebody else's process."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from oncely.errors import Unavailable, WrongInput
from oncely.testing.processes import name_of
from oncely.testing.servers import background as servers
from oncely.testing.servers import postgres

pytestmark = [pytest.mark.long, pytest.mark.embedded]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = postgres.reachable_directory("oncely-test-")
    monkeypatch.setenv("ONCELY_LOCAL_DIR", str(place))
    yield place
    servers.down(erase=True)
    shutil.rmtree(place)


def _keeper(home: Path) -> psutil.Process:
    return psutil.Process(json.loads((home / "state.json").read_text())["pid"])


def _answer(found: servers.LocalServers) -> None:
    assert AdminClient({"bootstrap.servers": found.brokers}).list_topics(timeout=60).brokers
    with psycopg.connect(found.postgres) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_up_status_down_and_up_again(home: Path) -> None:
    assert servers.status() is None
    assert servers.down() is False
    with ThreadPoolExecutor(2) as both:  # two at once: one starts, the other finds
        found, same = both.map(lambda _: servers.up(), range(2))
    assert found == same == servers.up() == servers.status()
    _answer(found)
    with psycopg.connect(found.postgres) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
    family = [_keeper(home), *_keeper(home).children(recursive=True)]
    assert {"java", "postgres"} <= {name_of(process) for process in family}

    assert servers.down() is True
    assert not any(process.is_running() for process in family)
    assert servers.status() is None
    assert servers.down() is False

    assert servers.up() == found  # ports, password and data have stayed
    with psycopg.connect(found.postgres) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (1,)
    servers.down(erase=True)
    assert not (home / "kafka").exists()
    assert not (home / "postgres").exists()


def test_they_stay_when_the_command_ends_and_go_with_their_keeper(home: Path) -> None:
    command = "from oncely.testing.servers import background; print(background.up())"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert "postgresql://" not in done.stdout  # the password is not in its repr
    found = servers.status()
    assert found is not None
    _answer(found)
    family = [_keeper(home), *_keeper(home).children(recursive=True)]
    _keeper(home).kill()
    _, left = psutil.wait_procs(family, timeout=180)
    assert not left
    assert servers.status() is None
    assert servers.down() is False
    _answer(servers.up())


def test_a_server_that_ends_takes_the_other_along(home: Path) -> None:
    servers.up()
    family = _keeper(home).children(recursive=True)
    keeper = _keeper(home)
    next(process for process in family if name_of(process) == "java").kill()
    _, left = psutil.wait_procs([keeper, *family], timeout=180)
    assert not left
    assert servers.status() is None
    assert "Broker ended by itself" in (home / "keeper.log").read_text()


def test_somebody_elses_process_is_left_alone(home: Path) -> None:
    """After a reboot the pid in the state file can be anybody's."""
    stranger = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        started = psutil.Process(stranger.pid).create_time()
        where = {"brokers": "127.0.0.1:1", "postgres": "postgresql://x"}
        for seen in (started - 100, started):
            state = {"pid": stranger.pid, "started": seen, "servers": where}
            (home / "state.json").write_text(json.dumps(state))
            assert servers.status() is None
            assert servers.down() is False
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_a_damaged_state_file_is_told(home: Path, content: str) -> None:
    (home / "state.json").write_text(content)
    for call in (servers.status, servers.down, servers.up):
        with pytest.raises(WrongInput, match=r"state\.json is damaged") as refused:
            call()
        assert refused.value.way_out == "delete the file"
    (home / "state.json").unlink()


def test_no_second_keeper_is_started_beside_one_with_a_damaged_state_file(home: Path) -> None:
    servers.up()
    keeper = _keeper(home)
    (home / "state.json").write_text("{")
    with pytest.raises(WrongInput, match=str(home / "state.json")) as refused:
        servers.up()
    assert refused.value.way_out.startswith(f"end process {keeper.pid}, with which")
    keeper.terminate()
    keeper.wait(60)
    (home / "state.json").unlink(missing_ok=True)
    assert servers.status() is None


def test_why_they_did_not_start(home: Path) -> None:
    (home / "kafka").touch()
    with pytest.raises(Unavailable, match=r"did not start: .*kafka") as refused:
        servers.up()
    assert "Traceback" not in str(refused.value)
    (home / "kafka").unlink()
    assert servers.status() is None


def test_files_with_the_password_are_ours_alone(home: Path) -> None:
    servers.up()
    for name in ("state.json", "settings.json"):
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's PostgreSQL is another user")
def test_root_below_a_closed_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "root"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("ONCELY_LOCAL_DIR", str(closed / "local"))
    found = servers.up()
    elsewhere = json.loads((closed / "local" / "settings.json").read_text())["postgres_directory"]
    try:
        _answer(found)
        assert servers.down()
        assert servers.up() == found
    finally:
        servers.down(erase=True)
    assert not Path(elsewhere).exists()
