"""``oncely web``: its options, and its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncely.cli import screen
from oncely.cli.web import serve
from oncely.errors import ConfigError, WrongInput
from oncely.secrets import Secrets
from oncely.web.access import TOKEN
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
        serve([pipeline_file(tmp_path)], address, names, None, 5.0, make_token=False)
    assert TOKEN in refused.value.way_out


def test_wrong_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pipeline_file(tmp_path)
    with pytest.raises(WrongInput, match="no address"):
        serve([file], "here", [], None, 5.0, make_token=False)
    with pytest.raises(WrongInput, match="there is no such folder"):
        serve([file], "127.0.0.1:0", [], tmp_path / "none", 5.0, make_token=False)
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ConfigError, match="can be guessed"):
        serve([file], "127.0.0.1:0", [], None, 5.0, make_token=False)


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
