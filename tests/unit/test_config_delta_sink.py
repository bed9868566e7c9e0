"""``[sink]`` with ``kind = "delta"``: what is refused, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import ConfigError
from oncely.kinds.delta.settings import DeltaSinkSettings


def settings(**sink: Any) -> dict[str, Any]:
    return {
        "name": "p",
        "source": {"brokers": "b:9092", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id INT, name STRING"},
        "sink": {"kind": "delta", "url": "file:///table", **sink},
    }


def told(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return str(caught.value)


def test_defaults() -> None:
    sink = parse(settings()).sink
    assert isinstance(sink, DeltaSinkSettings)
    assert (sink.mode, sink.create, sink.flush_interval) == ("append", True, 30.0)
    assert parse(settings()).max_records_per_batch == 5_000_000
    assert parse(settings()).trigger_seconds == 30.0


@pytest.mark.parametrize(
    ("sink", "key", "said"),
    [
        ({"url": "gs://bucket/table"}, "sink.url", "file:// or s3://"),
        ({"url": "table"}, "sink.url", "unknown scheme"),
        ({"partition_by": ["date(ts)"]}, "sink.partition_by", "no partitions by date"),
        ({"max_staging_age": "48 hours"}, "sink.max_staging_age", "up to a day"),
        ({"mode": "upsert"}, "sink.keys", "is missing"),
        ({"keys": ["id"]}, "sink.keys", "no meaning with mode"),
        ({"s3": {"region": "eu"}}, "sink.s3", "is for s3:// only"),
        ({"layout": "clustered"}, "sink.layout", ""),
    ],
)
def test_what_is_refused(sink: dict[str, Any], key: str, said: str) -> None:
    text = told(settings(**sink))
    assert key in text
    assert said in text


def test_what_does_not_go_together() -> None:
    upsert = settings(mode="upsert", keys=["key"])
    assert "decode.key" in told(upsert)
    upsert["decode"]["key"] = {"format": "string", "column": "key"}
    assert parse(upsert).max_records_per_batch < 5_000_000, "the driver holds all of them"
    upsert["transform"] = {"spark": "m:f"}
    assert "transform.spark" in told(upsert)
    infer = settings()
    infer["decode"]["schema"] = "infer"
    assert "infer is for files" in told(infer)
    slow = settings() | {"spark": {"trigger": "1 second"}}
    assert "sink.flush_interval determines how often" in told(slow)
