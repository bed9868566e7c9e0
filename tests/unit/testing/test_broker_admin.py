"""A process has one admin client for each start of a broker."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from oncely.testing.servers.kafka import Broker


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """It is not running, and its clients are objects that can not be pickled."""
    monkeypatch.setattr(Broker, "_connect", lambda _: Lock())
    return Broker(tmp_path)


def test_it_is_kept_until_the_next_start(stopped: Any) -> None:
    first = stopped.admin()
    assert stopped.admin() is first
    stopped._process = object()
    assert stopped.admin() is not first


def test_another_process_gets_its_own(stopped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After fork() a client has no threads, and its destruction would wait for them."""
    first, pid = stopped.admin(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert stopped.admin() is not first
    monkeypatch.setattr(os, "getpid", lambda: pid)
    assert stopped.admin() is first


def test_a_view_is_pickled_without_clients(stopped: Any) -> None:
    first = stopped.admin()
    assert pickle.loads(pickle.dumps(stopped)).admin() is not first
