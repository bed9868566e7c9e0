"""An example of each key of the pipeline file that has neither choices nor a useful default."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from oncely.config import urls
from oncely.config.sink import sink_kinds

EXAMPLES: Mapping[str, str] = {
    "name": 'name = "flights"',
    "delivery": 'delivery = "at_least_once"',
    "commit_interval": 'commit_interval = "5 seconds"',
    "processes": "processes = 2",
    "source": "[source]",
    "source.brokers": 'brokers = "127.0.0.1:9092"',
    "source.topics": 'topics = ["flights"]',
    "source.start": 'start = "2026-01-01T00:00:00Z"',
    "source.group": 'group = "flights-lag"',
    "source.kafka": 'kafka = { "security.protocol" = "SSL", "ssl.ca.location" = "ca.pem" }',
    "decode": '[decode], format = "json"',
    "decode.format": 'format = "json"',
    "decode.schema": 'schema = "id BIGINT, name STRING"',
    "decode.schema_file": 'schema_file = "order.avsc"',
    "decode.schema_registry": 'schema_registry = "https://registry:8081"',
    "decode.schema_registry_user_info": 'schema_registry_user_info = "user:${PASSWORD}"',
    "decode.schema_registry_ca": 'schema_registry_ca = "ca.pem"',
    "decode.columns": 'columns = ["key", "value", "timestamp", "headers"]',
    "decode.unwrap": 'unwrap = "payload"',
    "decode.key.unwrap": 'unwrap = "payload"',
    "decode.key.json": "json = true",
    "decode.metadata.topic": 'topic = "source"',
    "decode.metadata.partition": 'partition = "source_partition"',
    "decode.metadata.offset": 'offset = "source_offset"',
    "decode.metadata.timestamp": 'timestamp = "sent_at"',
    "decode.metadata.key": 'key = "customer"',
    "decode.metadata.headers": 'headers = { trace = "trace_id", "ce.type" = "event_type" }',
    "decode.key.format": 'format = "string"',
    "decode.key.schema": 'schema = "id BIGINT"',
    "decode.key.column": 'column = "id"',
    "decode.key.type": 'type = "BIGINT"',
    "decode.key.schema_file": 'schema_file = "order.avsc"',
    "decode.key.schema_registry": 'schema_registry = "https://registry:8081"',
    "decode.key.schema_registry_user_info": 'schema_registry_user_info = "user:${PASSWORD}"',
    "decode.key.schema_registry_ca": 'schema_registry_ca = "ca.pem"',
    "filter.drop": "drop = \"key = 'test'\"",
    "filter.expire": 'expire = "1 hour"',
    "filter.delay": 'delay = "10 seconds"',
    "filter.throttle": 'throttle = "1000 in 1 second"',
    "transform.sql": 'sql = "SELECT *, dep_delay > 15 AS late FROM input"',
    "transform.python": 'python = "flights_rules:late"',
    "transform.spark": 'spark = "flights_rules:by_carrier"',
    "sink": "[sink]",
    "sink.keys": 'keys = ["id"]',
    "sink.version": 'version = "changed_at"',
    "sink.keep_source": "keep_source = true",
    "sink.rejects_topic": 'rejects_topic = "flights.rejects"',
    "sink.kafka": 'kafka = { "compression.type" = "zstd" }',
    "sink.s3.endpoint": 'endpoint = "https://minio:9000"',
    "sink.s3.region": 'region = "eu-central-1"',
    "sink.s3.access_key": 'access_key = "${S3_KEY}"',
    "sink.s3.secret_key": 'secret_key = "${S3_SECRET}"',
    "sink.s3.session_token": 'session_token = "${S3_TOKEN}"',
    "offsets.store": 'store = "kafka"',
    "offsets.group": 'group = "flights-positions"',
    "offsets.path": 'path = "offsets"',
    "offsets.path of zookeeper": 'path = "/oncely"',
    "offsets.url": 'url = "redis://:${PASSWORD}@host:6379/0"',
    "offsets.url of sql": urls.EXAMPLE,
    "offsets.hosts": 'hosts = "zk-1:2181,zk-2:2181,zk-3:2181"',
    "spark.conf": 'conf = { "spark.executor.memory" = "4g" }',
    "worker.group": 'group = "flights-workers"',
    "worker.protocol": 'protocol = "consumer"',
    "worker.instance": 'instance = "worker-${HOSTNAME}"',
    "worker.buffer": 'buffer = "256 MiB"',
    "worker.session_timeout": 'session_timeout = "10 seconds"',
}
"""By dotted name; with "of" and the value of the selector if it is for one form of the table."""


def example(key: str, form: str = "") -> str:
    """An example of a key as a line of TOML; empty if there is none.

    Args:
        key: its dotted name.
        form: the value of its table's selector, if it is known.
    """
    return _all().get(f"{key} of {form}", _all().get(key, ""))


@cache
def _all() -> Mapping[str, str]:
    """The examples, with those of the kinds; of a key that several have, the first one's."""
    found = {"sink.kind": f'kind = "{next(iter(sink_kinds()))}"', **EXAMPLES}
    for kind, section in sink_kinds().items():
        for key, line in section.examples.items():
            found.setdefault(f"sink.{key}", line)
            found[f"sink.{key} of {kind}"] = line
    return found
