"""`oncely plan --sample` tells what decode and transform make of records."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from oncely.cli import screen
from oncely.cli.plan import show_trial
from oncely.config import parse
from oncely.kafka.records import RECORDS
from oncely.pipeline import Pipeline
from oncely.pipeline import trial as trials
from oncely.pipeline.trial import Trial, trial

DECODE = {
    "format": "json",
    "schema": "id INT NOT NULL, by STRUCT<name: STRING>, l ARRAY<STRUCT<a: INT>>",
}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trial]:
    def try_(values: list[Any], **more: Any) -> Trial:
        texts = [v if v is None or isinstance(v, bytes) else json.dumps(v).encode() for v in values]
        rows = [
            {"topic": "t", "partition": 0, "offset": at, "key": b"k", "value": value, "headers": []}
            for at, value in enumerate(texts)
        ]
        sampled = pa.Table.from_pylist(rows, schema=RECORDS)
        monkeypatch.setattr(trials, "sample", lambda *_: sampled)
        sink = {"kind": "kafka", "topic": "out"}
        raw = {
            "name": "p",
            "source": {"brokers": "h:1", "topics": ["t"]},
            "decode": DECODE,
            "sink": sink,
        }
        return trial(Pipeline(parse(raw | more)), len(rows))

    return try_


def test_reasons_are_grouped_and_counted(tried: Callable[..., Trial]) -> None:
    found = tried([{"id": 1}, {"id": "x"}, {"id": "y"}, {"id": None}, b"{", {"id": 2}])
    assert (found.records, found.rows, found.rejected, found.filtered) == (6, 2, 4, 0)
    assert found.reasons[0] == ('id: expected INT, found the text "x"', 2)
    assert len(found.reasons) == len(found.examples) == 3
    assert [one.values for one in found.columns if one.name == "id"] == [["1", "2"]]


def test_members_outside_the_schema_are_named(tried: Callable[..., Trial]) -> None:
    by, items = {"name": "a", "age": 1}, [{"b": "x"}, {"b": "y"}]
    second = {"id": 2, "new": 2.5, "gone": None}
    found = tried([{"id": 1, "new": 1, "by": by, "l": items}, second])
    assert [(one.path, one.values, one.type) for one in found.unnamed] == [
        ("l[].b", 2, "STRING"), ("new", 2, "DOUBLE"), ("by.age", 1, "BIGINT"),
    ]  # fmt: skip


def test_a_transform_filters_and_rejects(tried: Callable[..., Trial]) -> None:
    sql = 'SELECT 10 // id AS part, CAST("by".name AS INT) AS n FROM input WHERE id > 0'
    found = tried([{"id": 0}, {"id": 5}, {"id": 1, "by": {"name": "x"}}], transform={"sql": sql})
    assert (found.rows, found.filtered, found.rejected) == (1, 1, 1)
    assert [one.name for one in found.columns] == ["part", "n"]


def test_tombstones_delete(tried: Callable[..., Trial]) -> None:
    key = {"format": "string", "column": "k"}
    found = tried([{"id": 1}, None], decode=DECODE | {"key": key})
    assert (found.rows, found.tombstones, found.filtered, found.rejected) == (1, 1, 0, 0)


def test_columns_are_inferred_as_a_files_sink_does(tried: Callable[..., Trial]) -> None:
    sink = {"kind": "files", "url": "file:///tmp/x", "manifest_topic": "m", "partition_by": ["u"]}
    decode = {"format": "json", "schema": "infer"}
    found = tried([{"u": "a", "n": 1}, {"u": "a", "n": "x"}, {"u": "b", "n": "x"}],
                  sink=sink, decode=decode)  # fmt: skip
    assert (found.rows, found.rejected, found.filtered) == (2, 1, 0)
    assert not found.unnamed


def test_a_sample_without_records_says_so(tried: Callable[..., Trial]) -> None:
    assert "no committed records" in tried([]).note


def test_the_screen_stays_within_80_columns(
    tried: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    console = Console(file=written, width=80, markup=False, highlight=False)
    monkeypatch.setattr(screen, "out", console)
    show_trial(tried([{"id": 1, "by": {"name": "x" * 99}, "a_long_member_of_records": 1},
                      {"id": "x" * 300}, {"id": 3}, {"id": 4}]))  # fmt: skip
    said = written.getvalue()
    assert "  3 rows, 1 reject\n" in said
    assert "a_long_member_of_records" in said
    assert max(map(len, said.splitlines())) <= 80
