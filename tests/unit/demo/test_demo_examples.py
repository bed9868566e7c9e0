"""The pipeline files in ``examples/`` are what Oncely takes, and the demo waits as they demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import lake
from demo.job import ROOT
from oncely.config import load
from oncely.kinds.files.maintenance import SLACK
from oncely.kinds.files.settings import FilesSinkSettings

GIVEN = {
    **{"FLIGHTS_BROKERS": "broker:9092", "EVENTS_BROKERS": "broker:9092"},
    **{"FLIGHTS_POSTGRES_URL": "postgresql://loader@db/warehouse"},
    **{"LAKE_URL": "file:///lake", "LAKE_START": "2026-01-01T00:00:00+00:00"},
    **{
        "EVENTS_S3": "http://s3:9000",
        "EVENTS_S3_KEY": "c4nary-events-id",
        "EVENTS_S3_SECRET": "c4nary-events-word",
    },
}


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda f: f.name)
def test_an_example_is_a_pipeline(file: Path, monkeypatch):
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    assert load(file).name == file.stem


def test_orphans_are_waited_for_as_long_as_vacuum_demands(monkeypatch):
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    sink = load(ROOT / lake.PIPELINE_FILE).sink
    assert isinstance(sink, FilesSinkSettings)
    demanded = sink.max_staging_age + sink.transaction_timeout + SLACK.total_seconds()
    assert demanded == lake.YOUNG
