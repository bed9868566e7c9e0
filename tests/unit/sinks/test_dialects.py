"""Which database a URL means."""

from __future__ import annotations

import pickle
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from oncely.errors import ConfigError, Unavailable
from oncely.stores.sql.dialects import dialect_for
from oncely.stores.sql.postgres import PostgresDialect
from oncely.stores.sql.sqlite import Sqlite
from oncely.testing.servers.process import free_port


def test_postgresql() -> None:
    dialect = dialect_for("postgresql://ann:canary-1@db.example:5433/flights", 7.5)
    assert isinstance(dialect, PostgresDialect)
    assert dialect.connect_timeout_seconds == 8
    assert dialect.endpoint == "db.example:5433/flights"
    assert "canary-1" not in repr(dialect)


@pytest.mark.parametrize("scheme", ["postgres", "POSTGRESQL", "Postgres"])
def test_spellings_of_postgresql(scheme: str) -> None:
    dialect = dialect_for(f"{scheme}://localhost/x")
    assert isinstance(dialect, PostgresDialect)
    assert dialect.endpoint == "localhost:5432/x"


def test_libpq_counts_in_whole_seconds_two_at_least() -> None:
    assert dialect_for("postgresql://localhost/x", 0.1) == PostgresDialect(
        "postgresql://localhost/x", 2
    )


def test_sqlite_absolute_and_relative() -> None:
    assert dialect_for("sqlite:////data/100%25 of it.db") == Sqlite("/data/100%25 of it.db", 10.0)
    assert dialect_for("sqlite:///x.db") == Sqlite(str(Path.cwd() / "x.db"), 10.0)
    assert dialect_for("SQLite:////data/x.db?cache=private", 0.5) == Sqlite("/data/x.db", 0.5)
    assert dialect_for("sqlite:////data/x.db").endpoint == "/data/x.db"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://x.db"])
def test_sqlite_needs_a_file(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sink.url: SQLite needs a file") as caught:
        dialect_for(url)
    assert "sqlite:////" in caught.value.way_out


@pytest.mark.parametrize("url", ["mysql://ann:canary-2@h/d", "ann:canary-2@h", "", "/data/x.db"])
def test_other_databases_are_refused_without_showing_the_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sink.url: .* not a supported database") as caught:
        dialect_for(url)
    assert "canary-2" not in str(caught.value)


def test_a_url_that_libpq_can_t_read_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        dialect_for("postgresql://ann:canary-3%zz@h/d")
    assert "canary-3" not in str(caught.value)
    assert "percent-encode" in caught.value.way_out


@pytest.mark.parametrize("password", ["canary-4@rest", "canary-4/rest", "ca@nary-4/rest"])
def test_a_password_that_libpq_takes_apart_is_refused(password: str) -> None:
    """It would come back in pieces, as a host or a port that can't be."""
    with pytest.raises(ConfigError) as caught:
        dialect_for(f"postgresql://ann:{password}@h/d")
    assert "nary-4" not in str(caught.value)
    assert "rest" not in str(caught.value)


def test_several_hosts_and_a_socket_are_what_they_are() -> None:
    assert dialect_for("postgresql://h1:5432,h2:5433/d").endpoint == "h1,h2:5432,5433/d"
    assert dialect_for("postgresql:///d?host=/tmp").endpoint == "/tmp:5432/d"


@pytest.mark.parametrize("url", ["postgresql://h/d", "sqlite:////data/x.db"])
def test_they_are_shipped_to_executors(url: str) -> None:
    dialect = dialect_for(url)
    assert pickle.loads(pickle.dumps(dialect)) == dialect
    assert hash(dialect) == hash(pickle.loads(pickle.dumps(dialect)))


def test_an_executor_hides_the_password_though_it_has_read_no_configuration() -> None:
    """The URL alone says what to hide from the texts of libpq."""
    code = (
        "from oncely.stores.sql.postgres import PostgresDialect\n"
        "from oncely.errors import OncelyError\n"
        "try:\n"
        "    PostgresDialect('postgresql://ann:canary-5@canary-5.invalid:1/d').connect('x')\n"
        "except OncelyError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Unavailable")
    assert "***.invalid" in done.stdout
    assert "canary-5" not in done.stdout + done.stderr


@pytest.mark.parametrize("hosts", ["127.0.0.1:{0}", "127.0.0.1:{0},localhost:{0}"])
def test_a_server_that_is_not_there_is_named(hosts: str) -> None:
    port = free_port()
    dialect = PostgresDialect(f"postgresql://ann:canary@{hosts.format(port)}/shop", 5)
    with pytest.raises(Unavailable) as away:
        dialect.connect("x")
    for part in ("127.0.0.1", str(port), "/shop", "Connection refused"):
        assert part in away.value.message
    assert "start the server" in away.value.way_out
    assert "Is the server running" not in str(away.value)
    assert "canary" not in str(away.value)
    assert "\n" not in away.value.message


def test_two_processes_create_a_database_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has not seen the file yet, and meets the lock of the first one."""
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as first:
        first.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(Path, "exists", lambda _: False)
        Sqlite(str(path), 0.01).create_database()
    assert path.stat().st_size == 0
