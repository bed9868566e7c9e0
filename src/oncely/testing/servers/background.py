"""A broker and a PostgreSQL in the background: ``oncely local up``, ``down``, ``status``.

``up`` starts one detached process, the keeper, which starts both servers as its children and waits.
So the guarantees of :mod:`oncely.testing.servers.process` hold here, too: when the keeper is gone,
its servers are gone. Data, ports and password are kept in the directory for the next ``up``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from oncely import artifacts
from oncely.errors import OncelyError, Unavailable, WrongInput
from oncely.testing.servers import postgres
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from oncely.testing.servers.process import free_port, is_free
from oncely.threads import tries

_MODULE = "oncely.testing.servers.background"
_START = 180.0
_STOP = 90.0
_POLL = 0.05
_CLOCK_MOVED = 2.0


@dataclass(frozen=True)
class LocalServers:
    """The addresses of the servers.

    Attributes:
        brokers: ``host:port``.
        postgres: a libpq URL with the password.
    """

    brokers: str
    postgres: str = field(repr=False)


def up(folder: Path | None = None) -> LocalServers:
    """Start the servers in the background and return when both respond; running servers are kept.

    Args:
        folder: their data, as in :func:`home_directory`.

    Raises:
        Unavailable: they did not start.
        WrongInput: Java or PostgreSQL's programs are missing, or the state file is damaged.
    """
    artifacts.java()
    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    with _locked(folder) as home:
        running = _running(home)
        if running:
            return running[1]
        return _launch(home)


def down(folder: Path | None = None, *, erase: bool = False) -> bool:
    """Stop the servers; return True if there were any.

    Args:
        folder: as in :func:`home_directory`.
        erase: also delete their data, ports and password.

    Raises:
        Unavailable: they did not end.
    """
    with _locked(folder) as home:
        running = _running(home)
        if running:
            _end(running[0])
            (home / "state.json").unlink(missing_ok=True)
        if erase:
            _erase(home)
        return running is not None


def status(folder: Path | None = None) -> LocalServers | None:
    """Return the addresses of the servers, or None if they are not running."""
    running = _running(home_directory(folder))
    return running[1] if running else None


def home_directory(folder: Path | None = None) -> Path:
    """Return the folder, or ``$ONCELY_LOCAL_DIR``, or ``local`` in the cache directory."""
    given = folder or os.environ.get("ONCELY_LOCAL_DIR")
    return Path(given).expanduser().absolute() if given else artifacts.cache_directory() / "local"


@contextlib.contextmanager
def _locked(folder: Path | None) -> Iterator[Path]:
    """Serialise ``up`` and ``down``. The lock is released if its holder is killed.

    Raises:
        WrongInput: the directory belongs to another user.
    """
    home = home_directory(folder)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise WrongInput(f"{home} belongs to another user", way_out="--folder, or ONCELY_LOCAL_DIR")
    # PostgreSQL can't run as root: the user of its server passes into a directory of its own.
    within = postgres.server_user() is not None and (home / "postgres").exists()
    home.chmod(0o711 if within else 0o700)
    (home / "lock").touch(mode=0o600)
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield home


def _running(home: Path) -> tuple[psutil.Process, LocalServers] | None:
    """Return the keeper and its servers, if the process of the state file is still the same.

    Raises:
        WrongInput: the file is damaged: they may be running.
    """
    file = home / "state.json"
    try:
        state = json.loads(file.read_bytes())
        pid, started, found = int(state["pid"]), state["started"], LocalServers(**state["servers"])
        with contextlib.suppress(psutil.Error):
            keeper = psutil.Process(pid)
            same = abs(keeper.create_time() - started) < _CLOCK_MOVED
            if same and _is_keeper(keeper, home):
                return keeper, found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        left = [str(one.pid) for one in psutil.process_iter() if _is_keeper(one, home)]
        stop = f"end process {left[0]}, with which the servers end, and " if left else ""
        told = f"{file} is damaged: nobody can tell whether the local servers are running"
        raise WrongInput(told, way_out=f"{stop}delete the file") from error
    return None


def _is_keeper(process: psutil.Process, home: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()  # empty of a zombie
        return _MODULE in line and str(home) in line
    return False


def _launch(home: Path) -> LocalServers:
    (home / "state.json").unlink(missing_ok=True)
    log = home / "keeper.log"
    log.touch(mode=0o600)
    with log.open("wb") as out:
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(home)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=home,
            start_new_session=True,
            umask=0o077,  # Kafka's files and the logs, too
        )
    try:
        for _ in tries(_START, _POLL):
            running = _running(home)
            if running:
                return running[1]
            if keeper.poll() is not None:
                break
        tail = log.read_text(errors="replace").strip()
        raise Unavailable(f"the local servers did not start: {tail}", way_out=f"see {log}")
    except BaseException:
        keeper.kill()  # its servers end with it
        keeper.wait()
        raise


def _end(keeper: psutil.Process) -> None:
    # psutil compares the start time once more before it sends a signal.
    for end, patience in ((keeper.terminate, _STOP), (keeper.kill, 10.0)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            end()
            keeper.wait(patience)
        if not keeper.is_running():
            return
    raise Unavailable(f"process {keeper.pid} of the local servers does not end")


def _erase(home: Path) -> None:
    settings = _settings(home)
    shutil.rmtree(settings["postgres_directory"], ignore_errors=True)
    shutil.rmtree(home / "kafka", ignore_errors=True)
    (home / "settings.json").unlink(missing_ok=True)


def _settings(home: Path) -> dict[str, str]:
    """Return the settings that ``up`` keeps, creating them at the first time.

    A port that another process has taken since is chosen again.
    """
    settings: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        settings = json.loads((home / "settings.json").read_text())
    if "postgres_directory" not in settings:
        own = home / "postgres"
        if postgres.server_user() is not None and not postgres.reachable(home):
            own = postgres.reachable_directory("oncely-postgres-")
        settings["postgres_directory"] = str(own)
    for name in ("kafka_port", "postgres_port"):
        if name not in settings or not is_free(int(settings[name])):
            settings[name] = str(free_port())
    _write(home / "settings.json", settings)
    return settings


def _write(file: Path, content: object) -> None:
    """Write JSON that only this user can read, completely or not at all."""
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)
    part.write_text(json.dumps(content, indent=1))
    part.replace(file)


def keep(home: Path) -> None:
    """Run both servers until SIGTERM; the state file shows that they respond."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    settings = _settings(home)
    broker = Broker(home / "kafka", port=int(settings["kafka_port"]))
    postgres = Postgres(Path(settings["postgres_directory"]), port=int(settings["postgres_port"]))
    with broker, postgres:
        servers = LocalServers(broker.bootstrap, postgres.url())
        started = psutil.Process().create_time()
        state = {"pid": os.getpid(), "started": started, "servers": asdict(servers)}
        _write(home / "state.json", state)
        try:
            while not stopped.wait(0.5):
                for server in (broker, postgres):
                    if not server.running:
                        raise Unavailable(f"{type(server).__name__} ended by itself")
        finally:
            (home / "state.json").unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        keep(Path(sys.argv[1]))
    except (OncelyError, OSError) as error:
        sys.exit(str(error))
