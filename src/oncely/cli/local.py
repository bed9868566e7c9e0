"""``oncely local up | down | status``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from oncely import artifacts
from oncely.cli import screen
from oncely.errors import WrongInput

if TYPE_CHECKING:
    from types import ModuleType

    from oncely.testing.servers.background import LocalServers


def _servers() -> ModuleType:
    """The module, if its packages are installed.

    Raises:
        WrongInput: they are not.
    """
    try:
        from oncely.testing.servers import background as servers
    except ModuleNotFoundError as error:
        raise WrongInput(
            f"the local servers need {error.name}", way_out="pip install 'oncely[local]'"
        ) from None
    return servers


def up(as_json: bool) -> None:
    """Start the servers and print their addresses."""
    servers = _servers()
    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    if screen.err.is_terminal:
        with screen.err.status("starting a Kafka broker and PostgreSQL"):
            running = servers.up()
    else:
        running = servers.up()
    _show(running, as_json)


def down(erase: bool) -> None:
    """Stop the servers."""
    servers = _servers()
    ended = servers.down(erase=erase)
    screen.out.print("stopped" if ended else "nothing was running")


def status(as_json: bool) -> int:
    """Print the addresses of the servers; exit code 1 if they are not running."""
    servers = _servers()
    running = servers.status()
    if running is not None:
        _show(running, as_json)
    elif as_json:
        screen.show_json(None)
    else:
        screen.out.print("not running; `oncely local up` starts a broker and PostgreSQL")
    return 0 if running is not None else 1


def _show(running: LocalServers, as_json: bool) -> None:
    """Print the addresses, unredacted: they include the password."""
    where = {"brokers": running.brokers, "postgres": running.postgres}
    if as_json:
        sys.stdout.write(json.dumps(where) + "\n")
        return
    for name, value in where.items():
        sys.stdout.write(f"{name:9} {value}\n")
