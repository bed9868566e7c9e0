"""``oncely local produce | consume``: lines become records, and records become lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner, Result

from oncely.cli import local
from oncely.cli.verbs import app
from oncely.errors import Unavailable, WrongInput
from oncely.testing import readers
from oncely.testing.processes import await_that
from oncely.testing.servers.background import LocalServers
from oncely.testing.servers.kafka import Broker


@pytest.fixture
def topic(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name; the broker of the tests is the local one."""
    monkeypatch.setattr(local, "brokers", lambda _: broker.bootstrap)
    return f"lines-{uuid.uuid4().hex[:12]}"


def oncely(*words: str, given: str | bytes = b"") -> Result:
    return CliRunner().invoke(app, ["local", *words], input=given)


def written(topic: str, given: str | bytes, *options: str) -> str:
    done = oncely("produce", topic, *options, given=given)
    assert done.exit_code == 0, done.exception
    return done.stderr


def printed(topic: str, *options: str) -> list[dict[str, Any]]:
    done = oncely("consume", topic, *options)
    assert done.exit_code == 0, done.exception
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_line_is_a_value(broker: Broker, topic: str) -> None:
    assert f"3 records written to {topic}" in written(topic, b"a\r\n\n  \nno \xff text\n{}")
    found = readers.messages(broker.bootstrap, topic)
    assert [one.value() for one in found] == [b"a", b"no \xff text", b"{}"]
    first, bytes_, last = printed(topic)
    assert first.pop("timestamp").endswith("Z")
    assert first == {"topic": topic, "partition": 0, "offset": 0, "key": None, "value": "a"}
    assert bytes_["value"] == {"base64": "bm8g/yB0ZXh0"}
    assert last["value"] == "{}"


def test_a_field_is_the_key(broker: Broker, topic: str) -> None:
    lines = ['{"id": 12345678901234567.89, "v": "ü"}', '{"id":"a b"}', '{"id": null}']
    written(topic, "\n".join(lines), "--key", "id", "--partitions", "3")
    found = readers.messages(broker.bootstrap, topic)
    assert sorted((one.key() or b"", one.value().decode()) for one in found) == sorted(
        zip([b"12345678901234567.89", b"a b", b""], lines, strict=True)
    )
    assert len(readers.ends(broker.bootstrap, topic)) == 3
    assert len(printed(topic, "--limit", "2")) == 2


def test_records_come_back_as_they_are(broker: Broker, topic: str) -> None:
    lines = [
        {"key": "k", "value": {"id": 1}, "headers": {"a": "x", "b": None}},
        {"key": {"base64": "/w=="}, "headers": [["a", "1"], ["a", {"base64": "/w=="}]]},
        {"value": "text"},
    ]  # fmt: skip
    written(topic, "\n".join(map(json.dumps, lines)), "--records")
    copy = f"{topic}-copy"
    written(copy, oncely("consume", topic).stdout, "--records")
    for name in (topic, copy):
        found = readers.messages(broker.bootstrap, name)
        assert [(one.key(), one.value(), one.headers()) for one in found] == [
            (b"k", b'{"id": 1}', [("a", b"x"), ("b", None)]),
            (b"\xff", None, [("a", b"1"), ("a", b"\xff")]),
            (None, b"text", None),
        ]


@pytest.mark.parametrize(
    ("options", "line", "said"),
    [
        (["--key", "id"], "no JSON", "line 3: no JSON"),
        (["--key", "id"], "[1]", r"line 3: found \[1\]"),
        (["--key", "id"], '{"di": 1}', "line 3: no field 'id'\n.*it has di"),
        (["--records"], '{"vale": 1}', "line 3: found 'vale'\n.*an object of .*'value'"),
        (["--records"], '{"value": {"base64": "%"}}', "line 3: no base64"),
        (["--records"], '{"headers": [1]}', "line 3: headers are an object"),
        (["--records", "--key", "id"], "{}", "exclude each other"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_written(
    broker: Broker, topic: str, options: list[str], line: str, said: str
) -> None:
    good = '{"value": "x"}' if options == ["--records"] else '{"id": 1}'
    done = oncely("produce", topic, *options, given=f"{good}\n\n{line}\n{good}\n")
    assert isinstance(done.exception, WrongInput)
    with pytest.raises(WrongInput, match=said):
        raise done.exception
    assert isinstance(oncely("consume", topic).exception, WrongInput), "there is no such topic"


def test_a_line_that_is_too_long(broker: Broker, topic: str) -> None:
    done = oncely("produce", topic, given=b"a\n" + b"b" * 20_000_000)
    assert "line 2: produce" in str(done.exception)
    assert [one["value"] for one in printed(topic)] == ["a"]


def test_uncommitted_records_are_not_printed(broker: Broker, topic: str) -> None:
    written(topic, "a")
    producer = Producer({**broker.client_config(), "transactional.id": topic})
    producer.init_transactions(120)
    for commit, value in ((False, "aborted"), (True, "b"), (None, "open")):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(120)
        if commit is not None:
            (producer.commit_transaction if commit else producer.abort_transaction)(30)
    assert [one["value"] for one in printed(topic)] == ["a", "b"]
    producer.abort_transaction(120)


def test_another_broker(broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "brokers", lambda _: "127.0.0.1:1")
    there = ("--brokers", broker.bootstrap)
    missing = oncely("produce", topic, *there, given="a").exception
    assert isinstance(missing, WrongInput)
    assert "--partitions N creates it" in str(missing)
    written(topic, "a", *there, "--partitions", "1")
    assert len(printed(topic, *there)) == 1


def test_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TIMEOUT", 0.2)
    done = oncely("produce", "t", "--brokers", "127.0.0.1:1", given="a")
    assert isinstance(done.exception, Unavailable)
    assert "--brokers" in done.exception.way_out


@contextmanager
def started(command: list[str], **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """A child, which is killed if the test fails."""
    with subprocess.Popen(command, **streams) as child:  # type: ignore[call-overload]
        try:
            yield child
        finally:
            child.kill()


def test_follow_ends_by_ctrl_c(broker: Broker, topic: str) -> None:
    written(topic, "a", "--partitions", "2")
    there = ["--brokers", broker.bootstrap]
    command = [sys.executable, "-m", "oncely.cli", "local", "consume", topic, "--follow", *there]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert json.loads(reader.stdout.readline())["value"] == "a"
        written(topic, "b")
        assert json.loads(reader.stdout.readline())["value"] == "b"
        reader.send_signal(signal.SIGINT)
        out, err = reader.communicate(timeout=30)
    assert (reader.returncode, out, err) == (0, b"", b"")


def test_produce_ends_by_ctrl_c(broker: Broker, topic: str) -> None:
    command = [sys.executable, "-m", "oncely.cli", "local", "produce", topic, "--partitions", "1"]
    command += ["--brokers", broker.bootstrap]
    pipe = subprocess.PIPE
    with started(command, stdin=pipe, stdout=pipe, stderr=pipe) as writer:
        assert writer.stdin is not None
        writer.stdin.write(b"a\n")
        writer.stdin.flush()
        await_that(lambda: oncely("consume", topic).stdout, "a record while the input is open", 180)
        writer.send_signal(signal.SIGINT)
        _, err = writer.communicate(timeout=30)
    assert (writer.returncode, err.decode()) == (0, f"1 record written to {topic}\n")


def test_addresses_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    running = LocalServers("127.0.0.1:9", "postgresql://u:a'b$(c) d@127.0.0.1:1/p")
    servers = SimpleNamespace(
        up=lambda _: running, status=lambda _: None, home_directory=lambda _: "here"
    )
    monkeypatch.setattr(local, "_servers", lambda: servers)
    monkeypatch.setattr(local.artifacts, "resolve", lambda _: [])
    done = oncely("up", "--export")
    assert done.exit_code == 0
    script = f'{done.stdout}\nprintf "%s\\n" "$BROKERS" "$POSTGRES"'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout.splitlines() == [running.brokers, running.postgres]
    assert isinstance(oncely("up", "--export", "--json").exception, WrongInput)
    with pytest.raises(WrongInput, match="oncely local up"):
        local.brokers(None)
