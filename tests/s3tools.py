"""A real S3 server for tests, and an HTTP proxy before it that refuses, delays and cuts.

The server is Versity's gateway over a folder. It is built by Go once and kept where artifacts
are; without Go there is nothing to test with, and tests skip aloud.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

import pytest

from oncely import artifacts
from oncely.stores.objects.root import S3Options
from oncely.testing.servers.process import HOST, ChildServer, Process, free_port, wait_until

VERSION = "v1.8.0"
ACCESS, SECRET = "tester", "secret-of-the-tester"

_MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
_BUILD_SECONDS = 600


class NoServer(Exception):
    """There is no S3 server for this machine."""


def program() -> Path:
    """The server's program, built by Go once.

    Raises:
        NoServer: no Go, or it could not build.
    """
    place = artifacts.cache_directory() / "programs" / f"versitygw-{VERSION}"
    if place.exists():
        return place
    go = shutil.which("go")
    if go is None:
        raise NoServer("Go is not installed, which builds versitygw")
    print("Building versitygw, the S3 server of the tests (once, a minute)", flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".versitygw-") as made:
        built = subprocess.run(
            [go, "install", _MODULE],
            env={**os.environ, "GOBIN": made, "CGO_ENABLED": "0", "GOGC": "800"},
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
        )
        if built.returncode:
            raise NoServer(f"go install {_MODULE}: {built.stderr[-500:]}")
        (Path(made) / "versitygw").rename(place)
    return place


class S3Server(ChildServer):
    """One server in a temporary directory, on a port of its own."""

    name = "versitygw"

    def __init__(self) -> None:
        self._program = program()
        super().__init__(Path(tempfile.mkdtemp(prefix="oncely-s3-")), temporary=True)
        self.port = free_port()
        self.data = self.directory / "data"
        self.data.mkdir()
        (self.directory / "sidecar").mkdir()

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def options(self, **changed: Any) -> S3Options:
        """How to reach it; ``changed`` are fields of :class:`S3Options`."""
        known: dict[str, Any] = {"access_key": ACCESS, "secret_key": SECRET, "retries": 3}
        return S3Options(**{**known, "endpoint": self.endpoint, **changed})

    def bucket(self) -> str:
        """A new bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        (self.data / name).mkdir()
        return name

    def parts(self, bucket: str) -> list[Path]:
        """The parts of multipart uploads that are not completed."""
        below = (self.data / bucket / ".sgwtmp" / "multipart").rglob("*")
        return [one for one in below if one.is_file()]

    def remove(self, path: str) -> None:
        """Remove an object and its metadata from the disk; ``path`` is ``bucket/key``."""
        (self.data / path).unlink(missing_ok=True)
        shutil.rmtree(self.directory / "sidecar" / path, ignore_errors=True)

    def _await_ready(self, process: Process) -> None:
        wait_until(self._listens, process=process, timeout=30, what="it listened")

    def _listens(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), 1).close()
        except OSError:
            return False
        return True

    def _launch(self) -> Process:
        # With metadata beside the files it also runs where a folder has no extended attributes.
        posix = ["posix", "--sidecar", str(self.directory / "sidecar"), str(self.data)]
        return Process(
            self.name,
            [str(self._program), "--port", f"{HOST}:{self.port}", "--quiet", *posix],
            directory=self.directory,
            log=self.directory / "server.log",
            environment={**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET},
            remove=self._delete_after,
        )


def server_or_skip() -> S3Server:
    """A server that is not started yet."""
    try:
        return S3Server()
    except NoServer as error:
        pytest.skip(f"no S3 server to test with: {error}")


Kind = Literal["refuse", "hold", "cut request", "lose response", "no condition"]


@dataclass
class Fault:
    """What happens to requests that match.

    refuse: 503 SlowDown. hold: no answer until released. cut request: the connection ends in
    the middle of the body. lose response: the server does it, the client is not told. no
    condition: the object is removed before, as if the server did not know If-None-Match.

    Attributes:
        method: of the request.
        part: what its target contains.
        times: how many requests are hurt.
        skip: how many pass before.
        met: at least one has been hurt.
    """

    kind: Kind
    method: str = "PUT"
    part: str = ""
    times: int = 1
    skip: int = 0
    met: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class S3Proxy:
    """Listens on a port of its own and passes requests on to the server."""

    def __init__(self, server: S3Server) -> None:
        self.server, self.upstream = server, server.port
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.conditional: list[str] = []
        """Targets of requests that came with If-None-Match."""
        self.open: list[socket.socket] = []
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._http = ThreadingHTTPServer((HOST, 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://{HOST}:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self._faults:
            fault.released.set()
        self._http.shutdown()
        self._http.server_close()
        with self._lock:
            for connection in self.open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def fault(self, kind: Kind, **how: Any) -> Iterator[Fault]:
        """Hurt requests while the block runs; see :class:`Fault`."""
        fault = Fault(kind, **how)
        with self._lock:
            self._faults.append(fault)
        try:
            yield fault
        finally:
            fault.released.set()
            with self._lock:
                self._faults.remove(fault)

    def meet(self, method: str, target: str) -> Fault | None:
        """The fault that falls on a request, if there is one."""
        with self._lock:
            self.requests.append((method, target))
            for fault in self._faults:
                if fault.method == method and fault.part in target and fault.times:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    fault.met.set()
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: S3Proxy

    def setup(self) -> None:
        super().setup()
        self.owner.open.append(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        fault = self.owner.meet(self.command, self.path)
        if "If-None-Match" in self.headers:
            self.owner.conditional.append(self.path)
        if fault is not None and fault.kind == "cut request":
            length = int(self.headers.get("Content-Length") or 2)
            self.rfile.read(length // 2)
            self._cut()
            return
        body = self._body()
        if fault is not None and fault.kind == "refuse":
            self._refuse()
            return
        if fault is not None and fault.kind == "hold":
            fault.released.wait(60)
            self._cut()
            return
        if fault is not None and fault.kind == "no condition":
            fault = None  # the header is signed, so it can't be left out
            self.owner.server.remove(unquote(urlsplit(self.path).path).lstrip("/"))
        answer, data = self._ask(body)
        if fault is not None:
            self._cut()
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        known = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", known or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _body(self) -> bytes:
        """As it was sent, with the marks of its chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        raw = []
        size = -1
        while size:
            raw.append(self.rfile.readline())
            size = int(raw[-1].split(b";")[0], 16)
            if size:
                raw.append(self.rfile.read(size + 2))
        while raw[-1] != b"\r\n":  # headers that follow
            raw.append(self.rfile.readline())
        return b"".join(raw)

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        onward = http.client.HTTPConnection(HOST, self.owner.upstream, timeout=60)
        with contextlib.closing(onward):
            onward.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    onward.putheader(name, value)
            onward.endheaders(body)
            answer = onward.getresponse()
            return answer, answer.read()

    def _refuse(self) -> None:
        body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
        self.send_response_only(503)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    try:
        program()
    except NoServer as error:
        print(f"Tests of S3 will be skipped: {error}")
