"""What can't be repaired for certain is refused before anything is read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from oncely.audit.report import Finding
from oncely.config import parse
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError
from oncely.pipeline import Pipeline

_SQL = {"kind": "sql", "url": "sqlite:///none.db", "table": "rows"}
_LOST = [Finding(TopicPartition("t", 0), 3, "lost")]


def pipeline(sink: dict[str, Any], **sections: Any) -> Pipeline:
    base: dict[str, Any] = {
        "name": "p",
        "delivery": "exactly_once",
        "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": sink,
    }
    return Pipeline(parse({**base, **sections}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"delivery": "at_least_once"}, "delivery: is at_least_once"),
        ({"transform": {"spark": "math:sqrt"}}, "transform.spark: a row of a Spark transform"),
    ],
)
def test_pipelines_whose_rows_are_not_certain(sections: dict[str, Any], said: str) -> None:
    for work in (lambda p: p.repair(_LOST), lambda p: p.backfill({})):
        with pytest.raises(ConfigError, match=said) as refused:
            work(pipeline(_SQL, **sections))
        assert refused.value.way_out


SCHEMA = pa.schema([("id", pa.int64())])


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ({**_SQL, "keep_source": False}, "sink.keep_source: is false"),
        ({"kind": "kafka", "topic": "out"}, "sink.keep_source: is false"),
        (
            {"kind": "kafka", "topic_column": "t", "rejects_topic": "r"},
            "sink.topic_column: the topics",
        ),
        ({"kind": "delta", "url": "file:///none", "keep_source": False}, "sink.keep_source: is"),
    ],
)
def test_destinations_that_can_not_be_rewritten(sink: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        pipeline(sink).destination.check_rewrite(SCHEMA, "repair")
    assert refused.value.way_out


def test_an_upsert_without_a_version() -> None:
    upsert = pipeline(
        {**_SQL, "mode": "upsert", "keys": ["id"]},
        decode={
            "format": "json",
            "schema": "id BIGINT NOT NULL",
            "key": {"format": "json", "schema": "id BIGINT NOT NULL"},
        },
    )
    with pytest.raises(ConfigError, match=r"sink\.version: is missing"):
        upsert.destination.check_rewrite(SCHEMA, "repair")


def test_positions_in_a_store(tmp_path: Any) -> None:
    stored = pipeline(
        _SQL,
        delivery="at_least_once",
        offsets={"store": "file", "path": str(tmp_path / "positions")},
    )
    with pytest.raises(ConfigError, match=r"offsets\.store: the positions do not move"):
        stored.destination.check_rewrite(SCHEMA, "repair")
