"""The table of each proposal of `oncely init` is one that the database creates."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncely.kinds.sql.table import create_statement
from tests.sinktools import Place
from tests.unit.pipeline.test_proposal import SHAPES, proposed


@pytest.mark.parametrize("compacted", [False, True])
def test_a_database_creates_each_proposed_table(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for keys, values in SHAPES.values():
        _, pipeline, _ = proposed(keys, values, place.url, compacted)
        schema = pipeline.row_schema()
        pipeline.destination.check(schema)
        sink = pipeline.destination.sink(schema)
        place.sql(create_statement(sink.dialect, sink.wanted))  # type: ignore[attr-defined]
        place.sql(f"DROP TABLE {sink.wanted.table}")  # type: ignore[attr-defined]
