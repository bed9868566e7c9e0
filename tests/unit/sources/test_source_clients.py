"""Quiet, picklable, and sorted by consequence, without a broker."""

from __future__ import annotations

import itertools
import logging
import pickle
import time

import pytest

from oncely.core.offsets import TopicPartition
from oncely.errors import ConfigError, Unavailable
from oncely.local.ports import free_port
from oncely.sources.kafka import KafkaSource
from oncely.sources.records import _runs

TP = TopicPartition("t", 0)


def test_a_source_travels_without_its_clients_and_shows_no_secret() -> None:
    source = KafkaSource("h:1", ("t",), {"sasl.password": "canary-in-repr"})
    assert "canary" not in repr(source)
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert copy.kafka == source.kafka


@pytest.mark.parametrize("call", ["identity", "fetch", "timestamps_at", "mirror"])
def test_a_broker_that_is_not_there(call: str, capfd: pytest.CaptureFixture[str]) -> None:
    source = KafkaSource(f"127.0.0.1:{free_port()}", ["t"], timeout=1.0)
    calls = {
        "identity": source.identity,
        "fetch": lambda: source.fetch(TP, [1], timeout=1.0),
        "timestamps_at": lambda: source.timestamps_at({TP: 1}, timeout=1.0),
        "mirror": lambda: source.mirror("g", {TP: 1}),
    }
    began = time.monotonic()
    with source, pytest.raises(Unavailable, match="Connection refused") as caught:
        calls[call]()
    assert time.monotonic() - began < 5
    assert caught.value.retryable
    assert source.brokers in str(caught.value)
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "librdkafka's lines belong to the logger"


def test_librdkafkas_lines_go_to_the_logger_once(caplog: pytest.LogCaptureFixture) -> None:
    source = KafkaSource(f"127.0.0.1:{free_port()}", ["t"], timeout=1.0)
    with caplog.at_level(logging.DEBUG, "oncely.sources.kafka"), pytest.raises(Unavailable):
        source.identity()
    lines = [r.message for r in caplog.records if "Connection refused" in r.message]
    assert lines
    assert all(a != b for a, b in itertools.pairwise(lines))


def test_a_value_that_librdkafka_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    kafka = {"security.protocol": "SSL", "ssl.ca.location": "/no/such/file"}
    with pytest.raises(ConfigError, match=r"source\.kafka: librdkafka refuses it: ssl\.ca"):
        KafkaSource("127.0.0.1:1", ["t"], kafka).identity()
    with pytest.raises(ConfigError, match=r"fetch\.min\.bytes"):
        KafkaSource("127.0.0.1:1", ["t"], {"fetch.min.bytes": "many"}).identity()
    assert capfd.readouterr().err == ""


def test_offsets_are_cut_where_the_way_is_long() -> None:
    assert list(_runs([])) == []
    assert list(_runs([5])) == [[5]]
    assert list(_runs([1, 2, 250, 10_000, 10_001])) == [[1, 2, 250], [10_000, 10_001]]
