"""``oncely local up | down | status``; topics are in :mod:`oncely.cli.local_topics`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oncely import artifacts
from oncely.cli import screen, verbs
from oncely.config.base import without_password
from oncely.errors import WrongInput

if TYPE_CHECKING:
    from types import ModuleType

    from oncely.testing.servers.background import LocalServers


@contextmanager
def importing_servers() -> Iterator[None]:
    """Import the local servers in this block.

    Raises:
        WrongInput: one of their packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise WrongInput(
            f"the local servers need {error.name}", way_out="pip install 'oncely[local]'"
        ) from None


def _servers() -> ModuleType:
    with importing_servers():
        from oncely.testing.servers import background as servers
    return servers


def up(asked: verbs.LocalUp) -> None:
    """Start the servers and print their addresses, or shell commands that set them as variables.

    Raises:
        WrongInput: both formats are requested.
    """
    if asked.as_json and asked.export:
        raise WrongInput("--export and --json exclude each other")
    servers = _servers()
    running: LocalServers = servers.status(asked.folder) or _started(servers, asked.folder)
    if asked.export:
        for name, value in (("BROKERS", running.brokers), ("POSTGRES", running.postgres)):
            sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
        return
    _show(running, asked.as_json)


def _started(servers: ModuleType, folder: Path | None) -> LocalServers:
    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    said = f"starting a Kafka broker and PostgreSQL in {servers.home_directory(folder)}"
    if not (live := screen.err.is_terminal):
        screen.note(said)
    with screen.err.status(said) if live else nullcontext():
        made: LocalServers = servers.up(folder)
        return made


def brokers(folder: Path | None) -> str:
    """The address of the local broker in a folder, by default the usual one.

    Raises:
        WrongInput: it is not running.
    """
    running: LocalServers | None = _servers().status(folder)
    if running is None:
        raise WrongInput(
            "the local broker is not running",
            way_out="start it by `oncely local up`, or name another one by --brokers HOST:PORT",
        )
    return running.brokers


def down(asked: verbs.LocalDown) -> None:
    """Stop the servers."""
    ended = _servers().down(asked.folder, erase=asked.erase)
    screen.out.print("stopped" if ended else "nothing was running")


def status(asked: verbs.LocalStatus) -> int:
    """Print the addresses of the servers without the password; exit code 1 if they are not
    running."""
    as_json, running = asked.as_json, _servers().status(asked.folder)
    if running is not None:
        _show(replace(running, postgres=without_password(running.postgres)), as_json)
        if not as_json:
            screen.note("`oncely local up` prints the password, too")
    elif as_json:
        screen.show_json(None)
    else:
        screen.out.print("not running; `oncely local up` starts a broker and PostgreSQL")
    return 0 if running is not None else 1


def _show(running: LocalServers, as_json: bool) -> None:
    """Print the addresses, unredacted."""
    where = asdict(running)
    if as_json:
        sys.stdout.write(json.dumps(where) + "\n")
        return
    for name, value in where.items():
        sys.stdout.write(f"{name:9} {value}\n")
