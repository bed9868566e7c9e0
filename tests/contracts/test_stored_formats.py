"""What sinks leave in their stores stays as it is, byte for byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncely.testing.servers.kafka import Broker
from tests.golden import writers
from tests.golden.compare import assert_golden
from tests.sinktools import Place


@pytest.fixture
def golden_broker(broker: Broker) -> Iterator[Broker]:
    """The broker; topics with the names that the golden files have are deleted afterwards."""
    yield broker
    for topic in broker.admin().list_topics(timeout=60).topics:
        if topic.startswith(("golden-", "ledger-golden-")):
            with contextlib.suppress(Exception):
                broker.delete_topic(topic)


def test_what_the_sql_sink_leaves_in_postgresql(database: str) -> None:
    assert_golden(writers.in_tables(Place(database)))


def test_what_the_sql_sink_leaves_in_sqlite(on_sqlite: Place) -> None:
    assert_golden(writers.in_tables(on_sqlite))


def test_what_the_kafka_sink_leaves(golden_broker: Broker) -> None:
    assert_golden(writers.in_topics(golden_broker))


def test_what_the_delta_sink_leaves(tmp_path: Path) -> None:
    assert_golden(writers.in_delta(tmp_path))


def test_what_the_files_sink_leaves(golden_broker: Broker, tmp_path: Path) -> None:
    assert_golden(writers.in_files(golden_broker, tmp_path))
