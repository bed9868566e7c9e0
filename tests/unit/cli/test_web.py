"""``oncely web``: its options, and its process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from oncely import http_server
from oncely.cli import screen
from oncely.cli.verbs import Web
from oncely.cli.web import serve
from oncely.errors import ConfigError, WrongInput
from oncely.secrets import Secrets
from oncely.testing.processes import await_that
from oncely.web.access import TOKEN, Access
from oncely.web.server import Site, server_of
from tests.webtools import pipeline_file


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(TOKEN, raising=False)
    yield
    screen.hide(Secrets())


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "127.0.0.1:0"])
def test_others_need_a_token_to_read(tmp_path: Path, address: str) -> None:
    """On loopback, through the proxy whose name is allowed."""
    names = ["ops.example"] if address.startswith("127.") else []
    with pytest.raises(WrongInput, match="other machines would read") as refused:
        serve(Web(paths=[pipeline_file(tmp_path)], listen=address, allow_host=names))
    assert TOKEN in refused.value.way_out


def test_wrong_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pipeline_file(tmp_path)
    with pytest.raises(WrongInput, match="no address"):
        serve(Web(paths=[file], listen="here"))
    with pytest.raises(WrongInput, match="there is no such folder"):
        serve(Web(paths=[file], listen="127.0.0.1:0", audits=tmp_path / "none"))
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ConfigError, match="can be guessed"):
        serve(Web(paths=[file], listen="127.0.0.1:0"))


def test_a_signal_ends_it_also_while_a_page_is_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oncely.cli", "web", str(pipeline_file(tmp_path))]
    child = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--token"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert child.stderr is not None
        token = child.stderr.readline().removeprefix("token: ").strip()
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        visitor.addheaders = [("Origin", url.rstrip("/"))]
        with visitor.open(f"{url}login", f"token={token}".encode(), timeout=60) as page:
            assert page.url == url
        with visitor.open(f"{url}events", timeout=60) as stream:
            assert stream.readline() == b"retry: 3000\n"
            with visitor.open(url, timeout=60) as page:
                text = page.read().decode()
            assert "1 pipeline" in text
            assert "/p/shop" in text
            child.send_signal(signal.SIGTERM)
            assert child.wait(180) == 0
        assert len(token) > 16
        assert "Traceback" not in child.stderr.read()
        assert token not in text
    finally:
        child.kill()
        child.wait()


@contextmanager
def pages() -> Iterator[tuple[int, Callable[[], int]]]:
    """The pages: their port, and the number of connections."""
    server = server_of(Site([], Access.of("127.0.0.1", 0, "a-token-of-this-test")).app())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], lambda: len(server.server_state.connections)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def probes() -> Iterator[tuple[int, Callable[[], int]]]:
    """The server of probes and metrics: the same."""
    made = {"/login": lambda: http_server.Page("alive")}
    threads = [one.ident for one in threading.enumerate()]
    with http_server.Server("--http", "127.0.0.1:0", made) as server:
        yield (
            server.port,
            lambda: len([one for one in threading.enumerate() if one.ident not in threads]) - 1,
        )


def refused(address: tuple[str, int], sent: bytes) -> bool:
    """True if the server closes the connection within 10 s, though a byte comes every 0.1 s."""
    with socket.create_connection(address, 10) as slow, suppress(ConnectionError):
        slow.sendall(sent)
        slow.settimeout(0.1)
        for _ in range(100):
            with suppress(TimeoutError):
                if not slow.recv(1000):
                    break
            slow.sendall(b"x")
        else:
            return False
    return True


@pytest.mark.parametrize("serving", [pages, probes])
def test_slow_connections_keep_nobody_out(
    serving: Callable[[], AbstractContextManager[tuple[int, Callable[[], int]]]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More than may be open, of which each would send its headers, or its form, for ever."""
    monkeypatch.setattr(http_server, "MOST", 20)
    headers = b"GET /login HTTP/1.1\r\nHost: localhost\r\nX: "
    form = b"POST /login HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
    form += b"Content-Length: 999\r\n\r\n"
    with serving() as (port, number):
        address = ("127.0.0.1", port)
        slow = [socket.create_connection(address, 10) for _ in range(60)]
        for one in slow:
            with suppress(ConnectionError):
                one.sendall(headers)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/login", timeout=10) as answer:
            assert answer.status == 200
        await_that(lambda: number() <= 20, "as many connections as may be open")
        for one in slow:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            one.close()  # a reset
        monkeypatch.setattr(http_server, "LONGEST", 1.0)
        assert refused(address, headers)
        assert refused(address, form)
        await_that(lambda: number() == 0, "all connections are closed")
    assert "Traceback" not in capfd.readouterr().err
    assert not [one for one in caplog.records if one.levelno > logging.WARNING]
