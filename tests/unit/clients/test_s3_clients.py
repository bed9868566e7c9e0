"""``[sink.s3]`` reaches the server in the same form from each of the three clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from oncely.config import S3Settings
from oncely.errors import OncelyError
from oncely.stores.delta import DeltaTables
from oncely.stores.objects.root import S3Options, require_conditional_writes
from oncely.stores.objects.store import connect

URL = "s3://lake/events"


class Recording(ThreadingHTTPServer):
    """Notes each request, and answers none as S3 would."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Recording

    def _note(self) -> None:
        token = self.headers["X-Amz-Security-Token"]
        self.server.asked.append((self.path, self.headers["Authorization"], token))
        self.send_error(403)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _note

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recording() -> Iterator[Recording]:
    with Recording() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


CLIENTS: dict[str, Callable[[S3Options], object]] = {
    "files": lambda options: connect(URL, options).write("file", b"x"),
    "conditional writes": lambda options: require_conditional_writes(URL, options),
    "delta": lambda options: DeltaTables(URL, options).load(),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_asks_for_the_same_place_in_the_same_name(
    client: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("VIRTUAL_HOSTED_STYLE_REQUEST", "true"), ("REGION", "us-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    settings = S3Settings(
        endpoint=f"http://127.0.0.1:{recording.server_port}", region="eu-central-1",
        access_key=SecretStr("a-key"), secret_key=SecretStr("a-secret"),
        session_token=SecretStr("a-token"), retries=0,
    )  # fmt: skip
    with contextlib.suppress(OncelyError, OSError):  # it is no real S3
        CLIENTS[client](settings.options())
    assert recording.asked
    for path, signed, token in recording.asked:
        assert path.partition("?")[0].split("/")[1] == "lake", path
        assert "Credential=a-key/" in signed
        assert "/eu-central-1/s3/aws4_request" in signed
        assert token == "a-token"
