"""The embedded PostgreSQL: what is committed survives, the process does not; TLS is verified."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from oncely.errors import Unavailable, WrongInput
from oncely.testing.servers import postgres
from oncely.testing.servers.certificates import make_certificates
from oncely.testing.servers.postgres import Mode, Postgres
from oncely.testing.servers.process import Process

pytestmark = [pytest.mark.long, pytest.mark.embedded]

_PASSWORD = "p@ss: /w%20'ö\""


@pytest.fixture(scope="module")
def own() -> Iterator[Postgres]:
    """A server that these tests may stop and crash."""
    with Postgres() as running:
        yield running


def _one(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return row[0]


@pytest.mark.parametrize("mode", ["smart", "fast", "immediate"])
def test_committed_rows_and_the_port_survive(own: Postgres, mode: Mode) -> None:
    url, pid = own.create_database(f"d_{mode}"), own.pid
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS n")
    own.restart(mode)
    assert own.pid != pid
    assert _one(url, "SELECT sum(n) FROM t") == 500_500


def test_a_crash_ends_sessions_and_keeps_what_was_committed(own: Postgres) -> None:
    url = own.create_database("crash")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (n int)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (2)")
        own.kill()
        assert not own.running
        with pytest.raises(psycopg.OperationalError):
            connection.execute("COMMIT")
    own.start()
    assert _one(url, "SELECT array_agg(n) FROM t") == [1]


def test_a_postmaster_ended_by_sigkill_can_be_started_again(own: Postgres) -> None:
    """It leaves its pid file, and for a moment its sessions."""
    url = own.create_database("sigkill")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS n")
        os.kill(own.pid, signal.SIGKILL)
        assert own._process is not None
        assert own._process.wait(180) == -signal.SIGKILL
        assert (own.directory / "data" / "postmaster.pid").exists()
        own.start()
    assert _one(url, "SELECT n FROM t") == 1


def test_a_pid_file_that_names_a_stranger_is_no_obstacle(own: Postgres, tmp_path: Path) -> None:
    """A pid is given to somebody else in the end; PostgreSQL alone would refuse to start."""
    own.kill()
    user = postgres.server_user()  # PostgreSQL overlooks processes that it may not signal
    sleep = ["/bin/sleep", "1000"]
    stranger = Process("x", sleep, directory=Path("/"), log=tmp_path / "log", user=user)
    pid_file = own.directory / "data" / "postmaster.pid"
    pid_file.write_text(f"{stranger.pid}\n{pid_file.parent}\n")
    try:
        own.start()
        assert stranger.running
    finally:
        stranger.kill()


def test_it_is_durable_unless_asked_otherwise(own: Postgres) -> None:
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        assert _one(own.url(), f"SHOW {setting}") == "on"


def test_settings_win_and_survive(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"max_connections": "17", "fsync": "off", "cluster_name": "it's"}
    with Postgres(settings=settings) as server:
        for name, value in settings.items():
            assert _one(server.url(), f"SHOW {name}") == value


def test_a_wrong_setting_is_told_with_the_servers_own_words() -> None:
    broken = Postgres(settings={"max_connections": "many"})
    with pytest.raises(Unavailable, match="max_connections"), broken:
        pass
    assert not broken.directory.exists()


def test_only_the_password_lets_in() -> None:
    with Postgres(password=_PASSWORD, user="the owner") as server:
        assert _one(server.url(), "SELECT current_user") == "the owner"
        assert _one(server.create_database('we/ird "%20'), "SELECT current_database()")
        for wrong in ("guessed", _PASSWORD.strip('"')):
            with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
                psycopg.connect(server.url(password=wrong))
        assert _PASSWORD not in (server.directory / "postgres.log").read_text()


def test_a_database_can_be_dropped_under_a_session(postgres: Postgres) -> None:
    url = postgres.create_database("to_drop")
    with psycopg.connect(url):
        postgres.drop_database("to_drop")
    postgres.drop_database("to_drop")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)


def test_it_listens_on_the_loopback_only(postgres: Postgres) -> None:
    addresses = {
        connection.laddr.ip
        for connection in psutil.Process(postgres.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_a_directory_is_opened_again_by_another_object() -> None:
    place = postgres.reachable_directory("oncely-test-")
    try:
        with Postgres(place) as first:
            url = first.create_database("kept")
        with Postgres(place, port=first.port) as second:
            assert second.url("kept") == url
            assert _one(url, "SELECT 1") == 1
        assert place.exists()
    finally:
        shutil.rmtree(place)


_CHILD = """
import time
from oncely.testing.servers.postgres import Postgres
server = Postgres().start()
print(server.pid, server.url(), server.directory, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_server_outlives_its_parent(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        postmaster, url, directory = parent.stdout.readline().split()
        server = psutil.Process(int(postmaster))
        with psycopg.connect(url) as session:  # somebody else's, who does not go by himself
            backend = psutil.Process(session.info.backend_pid)
            family = [server, backend, *server.children(), server.parent()]
            os.killpg(parent.pid, number)
            _, left = psutil.wait_procs([p for p in family if p is not None], timeout=60)
    assert not left
    assert not Path(directory).exists()


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Postgres]:
    """A server that takes encrypted connections only."""
    with Postgres(tls=True) as running:
        yield running


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tls_is_verified_in_full(encrypted: Postgres, host: str) -> None:
    url = encrypted.url().replace("@127.0.0.1:", f"@{host}:")
    assert "sslmode=verify-full" in url
    query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
    assert _one(url, query) is True


def test_plaintext_and_a_wrong_authority_are_refused(encrypted: Postgres, tmp_path: Path) -> None:
    with pytest.raises(psycopg.OperationalError, match="no encryption"):
        psycopg.connect(encrypted.url().replace("verify-full", "disable"))
    other = make_certificates(tmp_path).ca
    with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
        psycopg.connect(encrypted.url(), sslrootcert=str(other))


def test_plaintext_servers_have_no_authority(postgres: Postgres) -> None:
    with pytest.raises(WrongInput, match="plaintext"):
        _ = postgres.ca_file


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root must give up its rights")


@needs_root
def test_programs_below_a_closed_home_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below /root (mode 0700) is out of reach for the server's user."""
    installed = postgres._installed()
    closed = tmp_path / "home"
    home = closed / "venv" / installed.parent.name / installed.name
    shutil.copytree(installed, home, symlinks=True)
    libraries = f"{installed.parent.name}.libs"
    shutil.copytree(installed.parent.parent / libraries, closed / "venv" / libraries)
    closed.chmod(0o700)
    temporary = postgres.reachable_directory("oncely-test-")
    monkeypatch.setattr(postgres, "_installed", lambda: home)
    monkeypatch.setattr(postgres.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed / "cache"))
    try:
        programs = postgres.programs()
        assert temporary in programs.parents
        assert programs == postgres.programs()  # one copy
        assert len(list(temporary.iterdir())) == 1
        with Postgres() as server:
            assert psutil.Process(server.pid).exe() == str(programs / "postgres")
            assert _one(server.url(), "SELECT 1") == 1
        (programs / "initdb").unlink()  # something clears old temporary files
        assert postgres.programs() == programs
        assert (programs / "initdb").exists()
    finally:
        shutil.rmtree(temporary)


@needs_root
def test_somebody_elses_programs_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = postgres.reachable_directory("oncely-test-")
    monkeypatch.setattr(postgres.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "closed" / "cache"))
    (tmp_path / "closed").mkdir(mode=0o700)
    trap = temporary / f"x-{os.getuid()}"
    try:
        for mode, owner in ((0o777, 0), (0o755, 65534)):
            trap.mkdir()
            (trap / "files.txt").touch()
            trap.chmod(mode)
            os.chown(trap, owner, owner)
            made = postgres._made_once("x", lambda place: (place / "good").touch())
            assert (made / "good").exists()
            assert made != trap
            shutil.rmtree(trap)
    finally:
        shutil.rmtree(temporary)


@needs_root
def test_a_directory_out_of_reach_is_refused_with_the_way_out(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(WrongInput, match="no other user can reach"):
        Postgres(closed / "data")


@needs_root
def test_the_server_is_not_root(postgres: Postgres) -> None:
    assert psutil.Process(postgres.pid).uids().effective != 0
