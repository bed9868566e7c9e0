"""A small HTTP server for probes and scrapes: it answers GET only."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from oncely.errors import WrongInput

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]*):(\d{1,5})")


class Page(NamedTuple):
    """An answer."""

    body: str
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Pages = Mapping[str, Callable[[], Page]]
"""By path, what makes the answer. It is called in a thread of the request."""


def parse_address(option: str, address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; without a host that of this machine alone.

    Raises:
        WrongInput: it is malformed.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65_535:
        raise WrongInput(
            f"{option} {address!r}: no address", way_out="write HOST:PORT: 0.0.0.0:9187"
        )
    return match[1].strip("[]") or "127.0.0.1", int(match[2])


class Server:
    """Answers ``GET`` within a ``with`` block.

    Args:
        option: the option that contains the address, for errors.
        address: ``HOST:PORT``; without a host only this machine can connect.
        pages: the answers.

    Raises:
        WrongInput: the address is malformed, or can't be listened at.
    """

    def __init__(self, option: str, address: str, pages: Pages) -> None:
        host, port = parse_address(option, address)
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), _handler(pages))
        except OSError as error:
            raise WrongInput(
                f"{option} {address}: can't listen: {error.strerror}", way_out="use another port"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True,
            name="http",
        )  # fmt: skip

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(pages: Pages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            make = pages.get(self.path.partition("?")[0])
            page = Page("not found\n", status=404) if make is None else make()
            body = page.body.encode("utf-8", "replace")
            self.send_response(page.status)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return Handler
