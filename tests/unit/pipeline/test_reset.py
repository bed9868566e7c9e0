"""A reset for another cluster or another topic of the same name is refused, as a dry run, too."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.core.claim import Takeover
from oncely.core.ranges import SourceIdentity, TopicPartition
from oncely.errors import SourceMismatch
from oncely.kafka.reset import Verb
from oncely.kafka.source import KafkaSource, Watermarks
from oncely.pipeline import Pipeline

TP = TopicPartition("orders", 0)
KNOWN = SourceIdentity("cluster-1", {"orders": "id-1"})


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "orders.db"


@pytest.fixture
def pipeline(database: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline at position 7 of the known topic."""
    raw = {
        "name": "orders",
        "source": {"brokers": "127.0.0.1:1", "topics": ["orders"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": f"sqlite:///{database}", "table": "orders"},
    }
    made = Pipeline(parse(raw))
    made.sink(pa.schema({"id": pa.int64()})).open(Takeover(KNOWN, lambda: {TP: 7}, {TP: 0}))
    monkeypatch.setattr(KafkaSource, "watermarks", lambda _: {TP: Watermarks(0, 9, 9)})
    return made


@pytest.mark.parametrize("execute", [False, True], ids=["dry run", "executed"])
@pytest.mark.parametrize(
    ("now", "said"),
    [
        (SourceIdentity("cluster-2", {"orders": "id-1"}), "leads to 'cluster-2'"),
        (SourceIdentity("cluster-1", {"orders": "id-2"}), "was deleted and recreated"),
    ],
    ids=["cluster", "topic"],
)
def test_another_source_is_refused_before_anything_is_written(
    pipeline: Pipeline,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    now: SourceIdentity,
    said: str,
    execute: bool,
) -> None:
    monkeypatch.setattr(KafkaSource, "identity", lambda _: now)
    before = database.read_bytes()
    with pytest.raises(SourceMismatch, match=said) as refused:
        pipeline.reset(Verb("to-earliest", 0), execute=execute)
    assert "a new name" in refused.value.way_out
    assert database.read_bytes() == before


def test_the_same_source_is_planned(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaSource, "identity", lambda _: KNOWN)
    planned = pipeline.reset(Verb("to-earliest", 0))
    assert (planned.before, planned.positions, planned.epoch) == ({TP: 7}, {TP: 0}, None)
