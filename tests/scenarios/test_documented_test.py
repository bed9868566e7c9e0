"""The test that docs/testing.md shows to users: it passes, and the document shows it as it is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from examples.test_orders import test_no_order_is_lost_or_doubled as example
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests.conftest import repository


@pytest.mark.long  # a driver killed inside a commit is in every run: test_kills_and_restarts.py
def test_it_passes(broker: Broker, postgres: Postgres, tmp_path: Path, spark: Any) -> None:
    """On servers and a Spark that run already."""
    try:
        example(broker, postgres, tmp_path)
    finally:
        postgres.drop_database("shop")
        broker.delete_topic("orders")


def test_the_document_shows_it() -> None:
    assert inspect.getsource(example) in (repository() / "docs" / "testing.md").read_text()
