"""A small HTTP server for probes and scrapes, which answers GET only, and the page of metrics."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EADDRINUSE
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from oncely.errors import OncelyError, Unavailable, WrongInput

MOST, LONGEST = 100, 10.0
"""Connections of a server, and seconds in which a request must have come."""
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


def cannot_listen(option: str, address: str, error: OSError) -> OncelyError:
    """A port that is taken may be free when a supervisor starts the process again."""
    kind = Unavailable if error.errno == EADDRINUSE else WrongInput
    said = os.strerror(error.errno or 0)
    return kind(f"{option} {address}: can't listen: {said}", way_out="use another port")


def is_own_host(header: str, names: Collection[str]) -> bool:
    """True if a ``Host`` header contains an IP address, ``localhost``, or one of the names.

    A page of another site whose name is made to resolve to this server (DNS rebinding) is requested
    by that name, never by an address.
    """
    try:
        host = urlsplit(f"//{header}").hostname or ""
        return host == "localhost" or host in names or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


class Server:
    """Answers ``GET`` within a ``with`` block.

    Args:
        option: the option that contains the address, for errors.
        address: ``HOST:PORT``; without a host only this machine can connect.
        pages: the answers.
        names: host names under which it may be reached, in addition to IP addresses, ``localhost``,
            the name of the machine and that of the address.

    Raises:
        WrongInput: the address is malformed, or none of this machine.
        Unavailable: it is taken.
    """

    def __init__(
        self, option: str, address: str, pages: Pages, names: Collection[str] = ()
    ) -> None:
        host, port = parse_address(option, address)
        known = {one.lower() for one in (*names, host, socket.gethostname())}
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), _handler(pages, known))
        except OSError as error:
            raise cannot_listen(option, address, error) from None
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
    """Closes connections that take too long, and the oldest of too many."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # with the end of its time; the oldest first
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = time.monotonic() + LONGEST
        self.service_actions()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called ten times a second."""
        found, now = list(self._open.items()), time.monotonic()
        for at, (one, until) in enumerate(found):
            if until < now or at < len(found) - MOST:
                with suppress(OSError):  # its thread reads the end, and closes it
                    one.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(pages: Pages, names: Collection[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            make = pages.get(self.path.partition("?")[0])
            if not is_own_host(self.headers.get("Host", "localhost"), names):  # none: no browser
                page = Page("unknown host; --allow-host names others\n", status=421)
            else:
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


# -- the page that Prometheus scrapes: metrics of registries of our own, none of the process ------

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def gauge(
    name: str, told: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Values of the moment, with the values of their labels."""
    made = GaugeMetricFamily(name, told, labels=labels)
    for values, value in samples:
        made.add_metric(values, value)
    return made


@dataclass
class _Page:
    """Metrics by name, as ``generate_latest`` asks for them."""

    by_name: dict[str, Metric] = field(default_factory=dict)

    def collect(self) -> Iterable[Metric]:
        return self.by_name.values()


def exposition(metrics: Iterable[Metric]) -> str:
    """The page in text format 0.0.4, with the version; samples of a name are put together."""
    page, version = _Page(), importlib.metadata.version("oncely")
    built = gauge("oncely_build_info", "The version of Oncely.", ["version"], [([version], 1)])
    for one in (built, *metrics):
        samples = [each for each in one.samples if each.name != f"{one.name}_created"]
        known = page.by_name.setdefault(one.name, one)
        known.samples = samples if known is one else [*known.samples, *samples]
    return generate_latest(page).decode()
