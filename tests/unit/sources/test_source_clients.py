"""Quiet, picklable, and sorted by consequence, without a broker."""

from __future__ import annotations

import itertools
import logging
import pickle
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Unavailable
from oncely.kafka import client as clients
from oncely.kafka.client import KafkaAdmin, stay_connected
from oncely.kafka.source import KafkaSource
from oncely.testing.servers.process import free_port

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
    with source, pytest.raises(Unavailable, match="Connection refused") as caught:
        calls[call]()
    assert caught.value.retryable
    assert source.brokers in str(caught.value)
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "librdkafka's lines belong to the logger"


def test_librdkafkas_lines_go_to_the_logger_once(caplog: pytest.LogCaptureFixture) -> None:
    source = KafkaSource(f"127.0.0.1:{free_port()}", ["t"], timeout=1.0)
    with caplog.at_level(logging.DEBUG, "oncely.kafka.source"), pytest.raises(Unavailable):
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


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        ("fetch.max.bytes", 0, 1_000_000),
        ("receive.message.max.bytes", 1000, (16 << 20) + 512),
        ("receive.message.max.bytes", 2_000_000, (16 << 20) + 512),
    ],
)
def test_a_value_that_only_a_consumer_refuses(key: str, value: int, least: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}. must be >= ") as caught:
        KafkaSource("127.0.0.1:1", ["t"], {key: value}).check_properties()
    assert caught.value.key == f"source.kafka.{key}"
    assert str(least) in caught.value.way_out
    KafkaSource("127.0.0.1:1", ["t"], {key: least}).check_properties()


@dataclass
class Metadata:
    orig_broker_id: int


class Connecting:
    """A client that is answered by its first connection, which is closed, before it stays."""

    def __init__(self, *answered_by: int) -> None:
        self._answered_by = list(answered_by)
        self.waits: list[float] = []

    def list_topics(self, _topic: str, timeout: float) -> Metadata:
        self.waits.append(timeout)
        return Metadata(self._answered_by.pop(0))


def test_an_answer_by_the_first_connection_is_no_connection_yet() -> None:
    client = Connecting(-1, -1, 7, 7)
    stay_connected(client, "t", 5.0)
    assert len(client.waits) == 3
    assert 5.0 == client.waits[0] > client.waits[2] > 4.0


class Admin:
    """An admin client that writes down what it is asked; some answers fail."""

    def __init__(self, *failures: Exception) -> None:
        self.asked: list[str] = []
        self.made = 0
        self._failures = list(failures)

    def __call__(self, _config: object, **_more: object) -> Admin:
        self.made += 1
        return self

    def __len__(self) -> int:
        return 0  # as a real one without messages

    def poll(self, _seconds: float) -> None:
        """Nothing to serve."""

    def describe_cluster(self, request_timeout: float) -> Future[str]:
        return self._answer(f"cluster in {request_timeout:g} s")

    def list_topics(self, timeout: float) -> None:
        self.asked.append(f"metadata in {timeout:g} s")

    def ask(self) -> dict[str, Future[str]]:
        return {"it": self._answer("it")}

    def fail(self, error: Exception) -> None:
        """Answer the next request with it."""
        self._failures.append(error)

    def _answer(self, what: str) -> Future[str]:
        self.asked.append(what)
        done: Future[str] = Future()
        if self._failures:
            done.set_exception(self._failures.pop(0))
        else:
            done.set_result(what)
        return done


def test_an_admin_client_connects_before_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = Admin(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
    monkeypatch.setattr(clients, "AdminClient", admin)
    client = KafkaAdmin("h:1", {}, 3.0)
    with pytest.raises(Unavailable, match="look: no answer from h:1"):
        client.ask("look", lambda *_: admin.ask())
    assert admin.asked == ["cluster in 3 s"]  # what was wanted was not requested
    for _ in range(2):
        assert client.ask("look", lambda *_: admin.ask()) == {"it": "it"}
    assert admin.asked[1:] == ["cluster in 3 s", "it", "it"]
    assert admin.made == 2  # one from the beginning, and one after what failed


def test_an_admin_client_refreshes_stale_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that was restarted has a new epoch, and the client would go by the old one.

    The client is kept: librdkafka may abort the process when one is closed right after it has
    found no leader.
    """
    admin = Admin()
    monkeypatch.setattr(clients, "AdminClient", admin)
    client = KafkaAdmin("h:1", {}, 3.0)
    client.one("look", lambda *_: admin.ask())
    admin.fail(KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH)))
    assert client.one("look", lambda *_: admin.ask()) == {"it": "it"}
    assert admin.asked == ["cluster in 3 s", "it", "it", "metadata in 3 s", "it"]
    assert admin.made == 1


def test_a_source_is_pickled_without_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "AdminClient", Admin())
    source = KafkaSource("h:1", ("t",))
    assert source._asking is source._admin
    assert pickle.loads(pickle.dumps(source))._admin is None
