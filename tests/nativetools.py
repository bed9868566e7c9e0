"""Tests that run with the package oncely-native, and without it."""

from __future__ import annotations

import pytest

from oncely.extras import SWITCH
from oncely.kafka import client as clients


def need_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn oncely-native on, as `make proof` turns it off; skip the test where it is not there."""
    monkeypatch.delenv(SWITCH, raising=False)
    pytest.importorskip("oncely_native", reason="oncely-native is not installed: make native")
    assert clients.native(), "the library that is installed here was tried"
