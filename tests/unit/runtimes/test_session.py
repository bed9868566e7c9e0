"""The settings with which Spark is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from oncely import artifacts
from oncely.runtimes.spark import session


class _Started(Exception):
    pass


def test_a_session_of_ours_fetches_no_jars(monkeypatch: pytest.MonkeyPatch) -> None:
    """`oncely run` reads Kafka in Python: no connector is downloaded, or on the class path."""
    given: list[Mapping[str, str]] = []

    def submitted(settings: Mapping[str, str]) -> Any:
        given.append(settings)
        raise _Started

    def no_download(coordinate: str) -> Any:
        raise AssertionError(coordinate)

    monkeypatch.setenv("PYSPARK_PYTHON", "python")  # is set again: not to be kept
    monkeypatch.setattr(artifacts, "resolve", no_download)
    monkeypatch.setattr(session, "existing", lambda: None)
    monkeypatch.setattr(session, "_submitted", submitted)
    for conf in ({}, {"spark.jars": "/own.jar"}):
        with pytest.raises(_Started):
            session.start("orders", "local[2]", conf)
    assert [one.get("spark.jars") for one in given] == [None, "/own.jar"]
    assert not any("packages" in key for key in given[0])
