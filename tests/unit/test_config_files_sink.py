"""``[sink]`` of files, and columns that are inferred: defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import PipelineSettings, parse
from oncely.errors import ConfigError
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.pipeline import Pipeline
from tests.configtools import SQL, edited_file

RIGHT: dict[str, Any] = {
    "name": "events",
    "source": {"brokers": "h:9092", "topics": ["events"]},
    "decode": {"format": "json", "schema": "infer"},
    "sink": {
        "kind": "files",
        "url": "s3://lake/events",
        "partition_by": ["user", "date(ts)", "hour(ts)"],
        "manifest_topic": "events.manifest",
    },
}


def edited(**sections: Any) -> dict[str, Any]:
    return edited_file(RIGHT, sections)


def settings(**sections: Any) -> PipelineSettings:
    return parse(edited(**sections))


def sink(**more: Any) -> FilesSinkSettings:
    found = settings(sink=more).sink
    assert isinstance(found, FilesSinkSettings)
    return found


def test_what_it_is_by_default() -> None:
    one = sink()
    assert (one.format, one.layout, one.create) == ("avro", "per_partition", True)
    assert (one.schemas, one.rejects) == ("events.schema", "events.rejects")
    assert (one.flush_interval, one.target_file_size) == (30.0, 64 << 20)
    assert one.max_staging_age == 3600.0
    whole = settings()
    assert (whole.trigger_seconds, whole.max_records_per_batch) == (30.0, 5_000_000)
    assert settings(spark={"max_records_per_batch": 10}).max_records_per_batch == 10


def test_names_of_topics_follow_the_manifests() -> None:
    one = sink(manifest_topic="lake")
    assert (one.schemas, one.rejects) == ("lake.schema", "lake.rejects")
    assert sink(schema_topic="s", rejects_topic="r").topics == (
        "events.manifest", "s", "r", "oncely.ledger",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("64 MiB", 64 << 20), ("1.5 MB", 1_500_000), ("1GiB", 1 << 30), (65_536, 65_536)],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert sink(target_file_size=text).target_file_size == size


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"sink": {"url": None}}, "sink.url", "is missing"),
    ({"sink": {"manifest_topic": None}}, "sink.manifest_topic", "is missing"),
    ({"sink": {"url": "ftp://h/x"}}, "sink.url", "unknown scheme"),
    ({"sink": {"url": "s3://key:h1dden@b/x"}}, "sink.url", "contains a password"),
    ({"sink": {"url": "file:///"}}, "sink.url", "the root of the file system"),
    ({"sink": {"format": "orc"}}, "sink.format", "allowed: avro, parquet"),
    ({"sink": {"layout": "flat"}}, "sink.layout", "allowed: per_partition, clustered"),
    ({"sink": {"partition_by": ["week(ts)"]}}, "sink.partition_by", "week"),
    ({"sink": {"schema_topic": "events.manifest"}}, "sink.manifest_topic", "two purposes"),
    ({"sink": {"manifest_topic": "events"}}, "sink.manifest_topic", "which source.topics reads"),
    ({"sink": {"flush_interval": 30}}, "sink.flush_interval", "a number with ms"),
    ({"sink": {"flush_interval": "2 hours"}}, "sink.flush_interval", "up to an hour"),
    ({"sink": {"target_file_size": "64"}}, "sink.target_file_size", "a number with KiB"),
    ({"sink": {"target_file_size": "1 KiB"}}, "sink.target_file_size", "64 KiB to 1 GiB"),
    ({"sink": {"max_staging_age": "1 second"}}, "sink.max_staging_age", "a minute or more"),
    ({"sink": {"transaction_timeout": "1 hour"}}, "sink.transaction_timeout", "15 minutes"),
    ({"sink": {"kafka": {"acks": "1"}}}, "sink.kafka.acks", "acks"),
    ({"sink": {"table": "t"}}, "sink.table", "unknown key"),
    ({"sink": {"s3": {"endpoint": "h:9000/x"}}}, "sink.s3.endpoint", "address"),
    ({"sink": {"s3": {"access_key": "a"}}}, "sink.s3.access_key", "belong together"),
    ({"sink": {"s3": {"retrys": 3}}}, "sink.s3.retrys", "did you mean retries?"),
    ({"spark": {"trigger": "1 second"}}, "spark.trigger", "sink.flush_interval"),
    ({"sink": SQL}, "decode.schema", "infer is for files"),
    ({"transform": {"sql": "SELECT * FROM input"}}, "transform", "works on columns"),
    ({"decode": {"key": {"format": "string", "column": "k"}}}, "decode.key", "has no meaning"),
]


@pytest.mark.parametrize(("given", "key", "text"), WRONG, ids=lambda one: str(one)[:40])
def test_what_can_not_be_is_refused_by_name(given: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**given)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"{key}: "), str(caught.value)
    assert text in str(caught.value)


def test_keys_of_the_store_are_in_no_text() -> None:
    secret = "c4nary-store-key"
    one = settings(
        sink={"s3": {"access_key": "me", "secret_key": secret, "endpoint": "http://h:1"}}
    )
    shown = (repr(one), str(one), str(one.describe()), repr(Pipeline(one)))
    assert not any(secret in text for text in shown)
    assert isinstance(one.sink, FilesSinkSettings)
    store = one.sink.store
    assert secret not in repr(store) + repr(store.s3)
    assert store.s3 is not None
    assert store.s3.secret_key == secret
    assert one.secrets.redact(f"x {secret} y") == "x *** y"
