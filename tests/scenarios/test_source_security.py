"""One set of Kafka keys reaches both clients: SASL_SSL, SCRAM, and certificates on both sides.

The password holds what every quoting gets wrong, and is looked for in all that Spark writes.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError
from oncely.runtimes.spark.options import parse_initial_offsets, parse_offset_log
from oncely.sources.kafka import KafkaSource
from oncely.testing.servers.kafka import Broker, Scram

TOPIC = "behind-a-lock"
P0, P1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
PASSWORD = "quill\"umbrella\\thicket; xylo='fjord'"
PARTS = ("umbrella", "thicket", "fjord")

READER = """
    import json, sys
    from pathlib import Path
    from pyspark.sql import SparkSession
    from oncely.core.topics import TopicPartition
    from oncely.runtimes.spark.options import REDACTION_REGEX, reader_options

    job = json.loads(Path(sys.argv[1]).read_text())
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", job["jars"])
        .config("spark.redaction.regex", REDACTION_REGEX)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-Dlog4j2.configurationFile=" + job["log4j"])
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", job["events"])
        .getOrCreate()
    )
    start = {TopicPartition(*tp): offset for tp, offset in job["start"]}
    options = reader_options(
        job["brokers"], [job["topic"]], start, kafka=job["kafka"], max_records=1000, headers=True
    )
    values = []

    def keep(frame, _):
        values.extend([bytes(row.value).decode() for row in frame.select("value").collect()])

    reader = session.readStream.format("kafka").options(**options).load()
    query = (
        reader.writeStream.foreachBatch(keep)
        .option("checkpointLocation", job["checkpoint"])
        .trigger(processingTime="0 seconds")
        .start()
    )
    query.processAllAvailable()
    query.explain(True)
    query.stop()
    session.stop()
    Path(job["result"]).write_text(json.dumps(sorted(values)))
"""

LOG4J = """
rootLogger.level = info
rootLogger.appenderRef.err.ref = err
appender.err.type = Console
appender.err.name = err
appender.err.target = SYSTEM_ERR
appender.err.layout.type = PatternLayout
appender.err.layout.pattern = %p %c %m%n%ex
logger.kafka.name = org.apache.spark.sql.kafka010
logger.kafka.level = debug
logger.tokens.name = org.apache.spark.kafka010
logger.tokens.level = debug
"""


@pytest.fixture(scope="module")
def locked() -> Iterator[Broker]:
    """A broker that wants a password and a certificate."""
    with Broker(security=Scram({"pat": PASSWORD}, client_certificates=True)) as broker:
        broker.create_topic(TOPIC, 2)
        producer = Producer(broker.client_config())
        for n in range(10):
            producer.produce(TOPIC, f"v{n}", partition=n % 2)
        assert producer.flush(30) == 0
        yield broker


def keys(broker: Broker, **changed: str) -> dict[str, str]:
    """``[source.kafka]`` for the broker."""
    config = broker.client_config()
    del config["bootstrap.servers"]
    return config | {name.replace("_", "."): value for name, value in changed.items()}


def test_librdkafka_gets_in(locked: Broker) -> None:
    with KafkaSource(locked.bootstrap, [TOPIC], keys(locked)) as source:
        assert source.stable_end() == {P0: 5, P1: 5}
        assert source.fetch(P1, [2])[2].value == b"v5"
        assert source.timestamps_at({P0: 4})[P0]
        source.mirror("behind-a-lock", {P0: 3})
        assert source.mirrored("behind-a-lock") == {P0: 3}


@pytest.mark.long
def test_sparks_client_gets_in_and_nothing_is_told(
    locked: Broker, spark_jars: str, tmp_path: Path
) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "reader.py").write_text(textwrap.dedent(READER))
    (tmp_path / "log4j2.properties").write_text(LOG4J)
    job = {
        "brokers": locked.bootstrap,
        "topic": TOPIC,
        "kafka": keys(locked),
        "start": [[list(P0), 1], [list(P1), 2]],
        "jars": spark_jars,
        "log4j": (tmp_path / "log4j2.properties").as_uri(),
        "events": (tmp_path / "events").as_uri(),
        "checkpoint": str(tmp_path / "checkpoint"),
        "result": str(tmp_path / "result.json"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "reader.py"), str(tmp_path / "job.json")],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values = json.loads((tmp_path / "result.json").read_text())
    assert values == sorted(f"v{n}" for n in range(10) if n not in (0, 1, 3))

    checkpoint = tmp_path / "checkpoint"
    assert parse_initial_offsets((checkpoint / "sources/0/0").read_text()) == {P0: 1, P1: 2}
    assert parse_offset_log((checkpoint / "offsets/0").read_text()) == [{P0: 5, P1: 5}]

    written = [done.stdout, done.stderr]
    for folder in (tmp_path / "events", checkpoint):
        written += [p.read_text("utf-8", "replace") for p in folder.rglob("*") if p.is_file()]
    assert "Admin params" in done.stderr, "the log that shows all options was on"
    private_key = Path(keys(locked)["ssl.key.location"]).read_text().splitlines()[1]
    for secret in (*PARTS, private_key):
        assert not [text for text in written if secret in text]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sasl_password": "wrong-password"}, ("refuses the login", "sasl.password")),
        ({"sasl_username": "nobody"}, ("refuses the login", "sasl.username")),
        ({"ssl_ca_location": "its own"}, ("no TLS trust", "ssl.ca.location")),
    ],
)
def test_a_closed_door_is_a_mistake_in_the_file_and_told_at_once(
    locked: Broker, changed: dict[str, str], words: tuple[str, ...], capfd: Any
) -> None:
    kafka = keys(locked, **changed)
    if "ssl_ca_location" in changed:  # a certificate that did not sign the broker's
        kafka["ssl.ca.location"] = kafka["ssl.certificate.location"]
    with KafkaSource(locked.bootstrap, [TOPIC], kafka) as source:
        for call in (source.identity, lambda: source.fetch(P0, [1])):
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.key == "source.kafka"
            for word in words:
                assert word in str(caught.value)
            for secret in (*PARTS, "wrong-password"):
                assert secret not in str(caught.value)
    del call, caught  # a client that ends with a question open has something to say
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_client_without_certificate_is_told_so(locked: Broker) -> None:
    kafka = {k: v for k, v in keys(locked).items() if k not in _CLIENT}
    with (
        KafkaSource(locked.bootstrap, [TOPIC], kafka) as source,
        pytest.raises(ConfigError, match=r"ssl\.certificate\.location"),
    ):
        source.identity()


_CLIENT = ("ssl.certificate.location", "ssl.key.location")
