"""A schema registry that speaks HTTP on this machine, and records in Confluent's wire format."""

from __future__ import annotations

import base64
import io
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro

from oncely.testing.servers.certificates import make_certificates

Schemas = dict[int, dict[str, Any]]


class FakeRegistry(ThreadingHTTPServer):
    """Answers what a schema registry answers to its readers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ids: Schemas = {}
        self.subjects: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.password = ""
        self.status = 200
        self.hang = threading.Event()
        self.hang.set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def use_tls(self, folder: Path) -> Path:
        """Speak TLS from now on; returns the PEM file of the authority that signed for it."""
        made = make_certificates(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.server, made.server_key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server_port}"
        return made.ca

    def add(self, schema: Any, *subjects: str, **more: Any) -> int:
        schema_id = 7 + 300 * len(self.ids)
        self.ids[schema_id] = {"schema": json.dumps(schema), **more}
        for subject in subjects:
            self.subjects.setdefault(subject, []).append(schema_id)
        return schema_id

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        parts = path.partition("?")[0].strip("/").split("/")
        if self.status != 200:
            return self.status, {"error_code": self.status, "message": "out of order"}
        if parts[:2] == ["schemas", "ids"]:
            found = self.ids.get(int(parts[2]))
            return (200, found) if found else (404, {"error_code": 40403, "message": "none"})
        versions = self.subjects.get(parts[1], [])
        number = len(versions) if parts[3] == "latest" else int(parts[3])
        if not 0 < number <= len(versions):
            return 404, {"error_code": 40401, "message": "none"}
        schema_id = versions[number - 1]
        head = {"subject": parts[1], "version": number, "id": schema_id}
        return 200, head | self.ids[schema_id]


class _Handler(BaseHTTPRequestHandler):
    server: FakeRegistry
    protocol_version = "HTTP/1.1"  # connections are kept, as a registry does

    def do_GET(self) -> None:
        self.server.hang.wait(20)
        self.server.asked.append(self.path)
        wanted = base64.b64encode(f"reader:{self.server.password}".encode()).decode()
        status, body = self.server.answer(self.path)
        if self.server.password and self.headers["Authorization"] != f"Basic {wanted}":
            status, body = 401, {"error_code": 401, "message": "who?"}
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running() -> Iterator[FakeRegistry]:
    """A registry in a thread of its own."""
    with FakeRegistry() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.hang.set()
            server.shutdown()
            thread.join()


def wire(schema_id: int, schema: Any, datum: Any) -> bytes:
    """The datum behind the id of its schema."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), datum)
    return b"\0" + schema_id.to_bytes(4, "big") + out.getvalue()
