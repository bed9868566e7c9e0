"""The embedded broker: data and port survive, the process does not; SASL_SSL keeps others out."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from oncely.errors import Unavailable, WrongInput
from oncely.testing.processes import await_that, command_of
from oncely.testing.servers.certificates import make_certificates
from oncely.testing.servers.kafka import Broker, Scram

pytestmark = [pytest.mark.long, pytest.mark.embedded]

_PASSWORD = "p@ss: \"w'ö/%20"


def _produce(config: dict[str, str], topic: str, values: list[bytes], timeout: int = 10) -> None:
    problems: list[object] = []
    producer = Producer({**config, "log_level": 0, "message.timeout.ms": timeout * 1000})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda e, _: problems.append(e) if e else None)
    assert producer.flush(120) == 0
    assert not problems, problems


def _consume(config: dict[str, str], topic: str, count: int) -> list[bytes]:
    settings = {**config, "group.id": "t", "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer(settings)
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: list[Any] = consumer.consume(count, 20)
        assert not [message.error() for message in found if message.error()]
        return [message.value() for message in found]
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def own() -> Iterator[Broker]:
    """A broker that these tests may stop and kill."""
    with Broker() as running:
        yield running


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_data_and_port_survive(own: Broker, topic_name: str, how: str) -> None:
    config, before = own.client_config(), (own.bootstrap, own.pid)
    own.create_topic(topic_name)
    _produce(config, topic_name, [b"1", b"2"])
    if how == "restart":
        own.restart()
    else:
        own.kill()
        assert not own.running
        own.start()
    assert own.bootstrap == before[0]
    assert own.pid != before[1]
    _produce(config, topic_name, [b"3"])
    assert _consume(config, topic_name, 3) == [b"1", b"2", b"3"]


def test_start_and_stop_are_idempotent(own: Broker) -> None:
    pid = own.pid
    own.start()
    assert own.pid == pid
    own.stop()
    own.stop()
    assert not own.running
    own.start()


def test_topics(broker: Broker, topic_name: str) -> None:
    broker.create_topic(topic_name, 2, {"cleanup.policy": "compact"})
    broker.add_partitions(topic_name, 5)
    client = AdminClient(broker.client_config())
    assert len(client.list_topics(timeout=60).topics[topic_name].partitions) == 5
    broker.delete_topic(topic_name)
    assert topic_name not in client.list_topics(timeout=60).topics
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC"):
        broker.delete_topic(topic_name)


def test_a_missing_topic_is_not_made_in_passing(broker: Broker, topic_name: str) -> None:
    with pytest.raises(AssertionError):
        _produce(broker.client_config(), topic_name, [b"1"], timeout=1)
    assert topic_name not in broker.admin().list_topics(timeout=60).topics


def test_records_can_be_dropped_from_the_beginning(broker: Broker, topic_name: str) -> None:
    broker.create_topic(topic_name)
    _produce(broker.client_config(), topic_name, [b"1", b"2", b"3"])
    broker.delete_records(topic_name, {0: 2})
    consumer = Consumer({**broker.client_config(), "group.id": "t"})
    try:
        assert consumer.get_watermark_offsets(TopicPartition(topic_name, 0)) == (2, 3)
    finally:
        consumer.close()
        broker.delete_topic(topic_name)


def test_a_wrong_property_is_told_with_the_brokers_own_words(tmp_path: Path) -> None:
    broken = Broker(tmp_path, properties={"num.io.threads": "many"})
    with pytest.raises(Unavailable, match="many"):
        broken.start()
    assert not broken.running


def test_what_needs_a_running_broker_says_so(tmp_path: Path) -> None:
    idle = Broker(tmp_path)
    with pytest.raises(WrongInput, match="not running"):
        _ = idle.pid
    with pytest.raises(WrongInput, match="plaintext"):
        _ = idle.ca_file


_CHILD = """
import time
from oncely.testing.servers.certificates import make_certificates
from oncely.testing.servers.kafka import Broker
broker = Broker().start()
print(broker.pid, broker.directory, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_broker_outlives_its_parent(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        server = psutil.Process(int(pid))
        parent.send_signal(number)
    _, left = psutil.wait_procs([server, *_guards(server)], timeout=60)
    assert not left
    await_that(lambda: not Path(directory).exists(), "the end of the guard's work")


def _guards(server: psutil.Process) -> list[psutil.Process]:
    try:
        return [p for p in [server.parent()] if p is not None and p.pid != 1]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def secured() -> Iterator[Broker]:
    """A broker that only two users can use."""
    users = {"alice in chains": _PASSWORD, "bob": "quite-secret"}
    with Broker(security=Scram(users=users)) as running:
        yield running


@pytest.mark.parametrize("user", ["alice in chains", "bob"])
def test_sasl_ssl_to_and_fro(secured: Broker, topic_name: str, user: str) -> None:
    config = secured.client_config(user)
    assert config["security.protocol"] == "SASL_SSL"
    assert config["ssl.ca.location"] == str(secured.ca_file)
    secured.create_topic(topic_name)
    _produce(config, topic_name, [b"1", b"2"])
    assert _consume(config, topic_name, 2) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sasl.password": "guessed"}, KafkaError._AUTHENTICATION),
        ({"sasl.username": "mallory"}, KafkaError._AUTHENTICATION),
        ({"security.protocol": "PLAINTEXT"}, KafkaError._ALL_BROKERS_DOWN),
        ({"security.protocol": "SSL"}, KafkaError._ALL_BROKERS_DOWN),
        ({"ssl.ca.location": "other"}, KafkaError._SSL),
    ],
)
def test_others_stay_outside(
    secured: Broker, tmp_path: Path, change: dict[str, str], problem: int
) -> None:
    if "ssl.ca.location" in change:
        change = {"ssl.ca.location": str(make_certificates(tmp_path).ca)}
    config = {**secured.client_config(), **change}
    if not config["security.protocol"].startswith("SASL"):
        config = {key: value for key, value in config.items() if not key.startswith("sasl")}
    assert problem in _refused(config)


def _refused(config: dict[str, str]) -> set[int]:
    """Try until the client reports why it can't connect."""
    problems: set[int] = set()
    client = AdminClient(
        {**config, "log_level": 0, "error_cb": lambda error: problems.add(error.code())}
    )
    deadline = time.monotonic() + 180
    while not problems and time.monotonic() < deadline:
        with contextlib.suppress(KafkaException):
            assert not client.list_topics(timeout=0.2).brokers
        client.poll(0.1)
    return problems


def test_passwords_are_on_no_command_line_and_in_no_log(secured: Broker) -> None:
    below = psutil.Process().children(recursive=True)
    commands = " ".join(command_of(process) for process in below)
    assert "kafka.Kafka" in commands
    texts = [path for path in secured.directory.glob("*") if path.is_file()]
    assert {"kafka.log", "server.properties"} <= {path.name for path in texts}
    for text in (commands, repr(secured.security), *(path.read_text() for path in texts)):
        assert _PASSWORD not in text
        assert "quite-secret" not in text


def test_users_survive_a_restart(secured: Broker) -> None:
    secured.restart()
    assert AdminClient(secured.client_config("bob")).list_topics(timeout=60).brokers


def test_mutual_tls_wants_a_certificate_of_the_client(topic_name: str) -> None:
    with Broker(security=Scram(client_certificates=True)) as strict:
        config = strict.client_config()
        strict.create_topic(topic_name)
        _produce(config, topic_name, [b"1"])
        without = {k: v for k, v in config.items() if k.split(".")[1] not in ("certificate", "key")}
        assert len(without) == len(config) - 2
        assert _refused(without) & {KafkaError._SSL, KafkaError._ALL_BROKERS_DOWN}
