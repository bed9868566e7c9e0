"""A real PostgreSQL server, as durable as one in production."""

from __future__ import annotations

import os
import secrets as random_secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from oncely.errors import Unavailable, WrongInput
from oncely.secrets import Secrets
from oncely.testing.servers import pginstall
from oncely.testing.servers.certificates import make_certificates
from oncely.testing.servers.child_server import ChildServer
from oncely.testing.servers.ports import HOST, free_port
from oncely.testing.servers.process import Process, wait_until

Mode = Literal["smart", "fast", "immediate"]

_START = 60.0
_ENDING = 15.0
_STOP: Mapping[Mode, signal.Signals] = {
    "smart": signal.SIGTERM,  # waits for the clients to disconnect
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class Postgres(ChildServer):
    """One PostgreSQL server on 127.0.0.1 with a directory of its own, passwords by SCRAM.

    Args:
        directory: kept after :meth:`stop`; by default a temporary directory that :meth:`close`
            deletes.
        settings: more lines of ``postgresql.conf``, which override the generated ones.
        tls: encrypted connections only, with a certificate for 127.0.0.1 and localhost.
        port: a free port by default.
        user: the superuser's name.
        password: the superuser's password; by default that of the directory, or a random one.

    Raises:
        WrongInput: the programs are missing, or root has no other user to run them as.
    """

    name = "PostgreSQL"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        tls: bool = False,
        port: int | None = None,
        user: str = "postgres",
        password: str | None = None,
    ) -> None:
        self._runs_as = pginstall.server_user()
        super().__init__(self._make_directory(directory), temporary=directory is None)
        self.port = port or free_port()
        self.user = user
        self._password = password or self._kept_password() or random_secrets.token_urlsafe(18)
        self._secrets = Secrets.of([self._password])
        self._settings = dict(settings or {})
        self._tls = tls

    @property
    def ca_file(self) -> Path:
        """The authority that signed the server's certificate.

        Raises:
            WrongInput: the server has no ``tls``.
        """
        if not self._tls:
            raise WrongInput("this PostgreSQL speaks plaintext", way_out="pass tls=True")
        return self.directory / "tls" / "ca.pem"

    def url(
        self, database: str = "postgres", user: str | None = None, password: str | None = None
    ) -> str:
        """Return a libpq URL with the password; with ``tls``, it verifies the server."""
        name = quote(user or self.user, safe="")
        word = quote(password or self._password, safe="")
        url = f"postgresql://{name}:{word}@{HOST}:{self.port}/{quote(database, safe='')}"
        if not self._tls:
            return url
        return f"{url}?{urlencode({'sslmode': 'verify-full', 'sslrootcert': self.ca_file})}"

    def stop(self, mode: Mode = "fast", timeout: float = 60.0) -> None:
        """Stop the server: ``smart`` waits for its clients, ``fast`` ends their sessions.

        ``immediate`` is a crash: the next start recovers from the write-ahead log.
        """
        if self._process is not None:
            self._process.stop(_STOP[mode], timeout)

    def kill(self) -> None:
        """Crash the server: all sessions end at once, nothing is flushed.

        By SIGQUIT (immediate shutdown). SIGKILL of the postmaster alone would leave sessions for a
        moment, which keep the shared memory that the next start needs.
        """
        self.stop("immediate")

    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start again, on the same port with the same data."""
        self.stop(mode)
        self.start()

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        self._run(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, ending its sessions; does nothing if there is none."""
        self._run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _pid_file(self) -> Path:
        return self._data / "postmaster.pid"

    def _make_directory(self, wanted: Path | None) -> Path:
        if wanted is None:
            return pginstall.reachable_directory("oncely-postgres-")
        wanted = wanted.absolute()
        wanted.mkdir(parents=True, exist_ok=True)
        if self._runs_as and not pginstall.reachable(wanted):
            raise WrongInput(
                f"PostgreSQL can't run as root, and no other user can reach {wanted}",
                way_out="choose a directory that every user can pass into (mode o+x all the way)",
            )
        return wanted

    @property
    def _password_file(self) -> Path:
        return self.directory / "password"

    def _kept_password(self) -> str:
        """Return the password of a directory from an earlier run."""
        try:
            return self._password_file.read_text().rstrip("\n")
        except FileNotFoundError:
            return ""

    def _environment(self) -> dict[str, str]:
        """Remove PG* variables, which are for clients; some of them would affect the server,
        too."""
        return {k: v for k, v in os.environ.items() if not k.startswith("PG")} | {"LC_ALL": "C"}

    def _launch(self) -> Process:
        self._make_cluster()
        self._configure()
        _clear(self._pid_file)
        return Process(
            self.name,
            [str(pginstall.programs(tls=self._tls) / "postgres"), "-D", str(self._data)],
            directory=self._data,
            log=self.directory / "postgres.log",
            environment=self._environment(),
            user=self._runs_as,
            end_signal=signal.SIGQUIT,  # it also ends its sessions
            remove=self._delete_after,
        )

    def _await_ready(self, process: Process) -> None:
        wait_until(
            lambda: _ready(self._pid_file, process.pid),
            process=process,
            timeout=_START,
            what="it was ready",
        )

    def _make_cluster(self) -> None:
        if (self._data / "PG_VERSION").exists():
            return
        self._data.mkdir(mode=0o700, exist_ok=True)
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(self._password + "\n")
        for path in (self._data, self._password_file):
            self._give(path)
        initdb = pginstall.programs(tls=self._tls) / "initdb"
        command = [str(initdb), "-D", str(self._data), "-U", self.user]
        command += ["--auth=scram-sha-256", f"--pwfile={self._password_file}"]
        command += ["--encoding=UTF8", "--locale-provider=builtin", "--locale=C.UTF-8"]
        command += ["--lc-messages=C", "--no-sync"]
        # A random password gains nothing from the 4,096 of the default, each connection loses 4 ms.
        command += ["--set=scram_iterations=1"]
        uid, gid = self._runs_as or (None, None)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.directory,
            env=self._environment(),
            user=uid,
            group=gid,
            extra_groups=[] if uid is not None else None,
        )
        if done.returncode:
            shutil.rmtree(self._data, ignore_errors=True)
            raise Unavailable(f"initdb failed: {done.stdout}{done.stderr}")

    def _configure(self) -> None:
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "log_line_prefix": "%m [%p] %a ",
            **(self._tls_settings() if self._tls else {}),
            **self._settings,
        }
        lines = (f"{name} = '{_quoted(value)}'\n" for name, value in settings.items())
        # Of several lines for one setting the last one counts, and auto.conf is read last.
        (self._data / "oncely.conf").write_text("".join(lines))
        main = self._data / "postgresql.conf"
        if "oncely.conf" not in main.read_text():
            with main.open("a") as file:
                file.write("\ninclude 'oncely.conf'\n")
        self._give(self._data / "oncely.conf")
        if self._tls:
            access = self._data / "pg_hba.conf"
            access.write_text(f"hostssl all,replication all {HOST}/32 scram-sha-256\n")

    def _tls_settings(self) -> dict[str, str]:
        directory = self.directory / "tls"
        if not (directory / "server.pem").exists():
            make_certificates(directory)
        self._give(directory / "server.key")  # PostgreSQL requires ownership
        return {
            "ssl": "on",
            "ssl_cert_file": str(directory / "server.pem"),
            "ssl_key_file": str(directory / "server.key"),
        }

    def _give(self, path: Path) -> None:
        if self._runs_as:
            os.chown(path, *self._runs_as)


def _clear(pid_file: Path) -> None:
    """Remove the pid file of a postmaster that is gone.

    A crash leaves the file, and PostgreSQL refuses to start while that pid exists, which may belong
    to another process by now. A postmaster that is still running keeps its file: it may be about to
    end.
    """
    import psutil

    try:
        pid = int(pid_file.read_text().split("\n", 1)[0])
        process = psutil.Process(pid)
        if process.name() == "postgres" and str(pid_file.parent) in process.cmdline():
            process.wait(_ENDING)
    except (OSError, ValueError, psutil.NoSuchProcess):
        pass
    except psutil.TimeoutExpired:
        return
    pid_file.unlink(missing_ok=True)


def _ready(pid_file: Path, pid: int) -> bool:
    """True if the postmaster reports it: the 8th line of its pid file, as pg_ctl waits for."""
    try:
        lines = pid_file.read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _quoted(value: str) -> str:
    return value.replace("'", "''")
