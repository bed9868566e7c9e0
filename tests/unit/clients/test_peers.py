"""What speaks at an address, and what a client of Kafka says about it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.kafka import client as clients
from oncely.kafka.client import KafkaAdmin, at_start, refuse_strangers
from oncely.kafka.source import KafkaSource
from oncely.peers import protocol_at
from oncely.pipeline import Pipeline
from oncely.pipeline.init import ProposalRequest, pipeline_file
from oncely.pipeline.running import preflight
from oncely.stores.sql.postgres import _refuse_broker
from oncely.testing.servers.process import free_port

ANSWERS = {
    "TLS": b"\x15\x03\x03\x00\x02\x02P",
    "Kafka without TLS": b"\x00\x00\x00\x10once\x00\x00",
    "PostgreSQL": b"E\x00\x00\x00\x8cSFATAL\x00",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "": b"",
}


@contextmanager
def speaking(answer: bytes) -> Iterator[str]:
    """A server that says this to whoever says something; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(5)
                    try:
                        client.recv(100)
                        client.sendall(answer)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(180)


@pytest.mark.parametrize("spoken", ANSWERS)
def test_each_protocol_is_told_by_its_answer(spoken: str) -> None:
    with speaking(ANSWERS[spoken]) as address:
        host, _, port = address.partition(":")
        assert protocol_at(host, port) == spoken
    assert protocol_at(host, port) == "", "nothing listens any more"


@pytest.mark.parametrize("address", ["a..b:9092", f"{64 * 'a'}.test:9092", "localhost:99999"])
def test_nothing_speaks_at_an_address_that_is_none(address: str) -> None:
    refuse_strangers(address, {})


def test_a_host_of_a_url_may_have_no_port_of_its_own() -> None:
    with (
        speaking(ANSWERS["Kafka without TLS"]) as address,
        pytest.raises(ConfigError, match=f"{address} is a broker"),
    ):
        _refuse_broker(f"postgresql://u@127.0.0.1,{address}/d")


@pytest.mark.parametrize(
    ("spoken", "protocol"),
    [
        ("TLS", ""),
        ("TLS", "SASL_PLAINTEXT"),
        ("Kafka without TLS", "ssl"),
        ("Kafka without TLS", "SASL_SSL"),
        ("PostgreSQL", ""),
        ("HTTP", "SSL"),
    ],
)
def test_a_client_names_what_is_there_instead(spoken: str, protocol: str) -> None:
    kafka = {"security.protocol": protocol} if protocol else {}
    with speaking(ANSWERS[spoken]) as address:
        said = f"{address} speaks {spoken}, and security.protocol is {protocol.upper()}"
        with pytest.raises(ConfigError, match=said) as refused:
            refuse_strangers(address, kafka)
        assert "SSL or SASL_SSL for a port with TLS" in refused.value.way_out


def test_one_broker_of_several_is_enough() -> None:
    with speaking(ANSWERS["HTTP"]) as other, speaking(ANSWERS["Kafka without TLS"]) as broker:
        refuse_strangers(f"{other},{broker}", {})
        with pytest.raises(ConfigError):
            refuse_strangers(f"{other},{broker}", {"security.protocol": "ssl"})


def test_a_server_that_says_nothing_may_be_a_broker() -> None:
    with speaking(b"") as address:
        refuse_strangers(address, {})


def test_a_source_does_not_wait_for_its_timeout() -> None:
    with speaking(ANSWERS["PostgreSQL"]) as address:
        source = KafkaSource(address, ["t"], timeout=300)
        with pytest.raises(OncelyError, match="speaks PostgreSQL") as refused:
            source.identity()
    assert not isinstance(refused.value, Unavailable)
    source.close()


def test_a_command_that_starts_does_not_wait_for_a_broker_that_refuses() -> None:
    brokers = f"127.0.0.1:{free_port()},localhost:{free_port()}"
    source = KafkaSource(brokers, ["t"], timeout=300)
    with at_start(), pytest.raises(Unavailable, match=f"no answer from {brokers}"):
        source.identity()


def test_it_waits_for_one_that_says_nothing() -> None:
    with speaking(b"") as silent:
        KafkaAdmin(f"127.0.0.1:{free_port()},{silent}", {}, 1.0)._refuse_absent("ask")


@pytest.mark.parametrize(
    ("call", "starts"),
    [
        (Pipeline.status, True),
        (Pipeline.plan, True),
        (Pipeline.partition_offsets, True),
        (preflight, True),
        (Pipeline.work, True),
        (lambda one: pipeline_file(ProposalRequest(one.source.brokers, "t"), one, "f"), True),
        (Pipeline.preflight, False),  # also when a run that is under way begins again
        (lambda one: one.source.stable_end(), False),
    ],
)
def test_only_the_first_look_of_a_command_is_short(
    call: Callable[[Pipeline], Any], starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    for name in ("_PATIENCE", "_REFUSED"):
        monkeypatch.setattr(clients, name, 0.0)
    monkeypatch.setattr(clients, "refuses", lambda *address: not looked.append(address))
    pipeline = Pipeline(parse({
        "name": "p", "runtime": "processes",
        "source": {"brokers": f"127.0.0.1:{free_port()}", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": f"sqlite:///{tmp_path}/x.db", "table": "t"},
    }))  # fmt: skip
    pipeline.source.timeout = 1.0
    with suppress(Unavailable):
        call(pipeline)
    assert bool(looked) is starts
