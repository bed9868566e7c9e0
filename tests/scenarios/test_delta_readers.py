"""What others read in a table that the sink has written, and what they may do beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.deltatools import Committing, make_place
from tests.replaytools import bad, judging
from tests.scenarios.delta_jobs import replayed
from tests.scenarios.delta_spark import worked_on
from tests.sinktools import T0, at_t0, commit_all, ready, rec

NAMES: list[Any] = ["a b", "ä/ö", "%41", "x=y", "..", None]


def delta_rs_works_on(root: Path) -> dict[str, Any]:
    """Delta's library in Rust does what :func:`worked_on` has Spark do."""
    table = DeltaTable(root)

    def rows() -> list[list[Any]]:
        read = table.to_pyarrow_table(columns=["id", "name"]).sort_by("id")
        return [[row["id"], row["name"]] for row in read.to_pylist()]

    found: dict[str, Any] = {"before": rows()}
    found["pruned"] = table.to_pyarrow_table(filters=[("name", "=", "a b")]).num_rows
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    write_deltalake(
        table,
        pl.DataFrame({"id": [1000], "name": ["foreign"]}),
        mode="append",
        schema_mode="merge",
    )
    found["after"] = rows()
    return found


@pytest.mark.parametrize(
    "works_on",
    [delta_rs_works_on, pytest.param(worked_on, marks=pytest.mark.long)],
    ids=["delta-rs", "Spark"],
)
def test_others_read_rewrite_vacuum_and_append(
    tmp_path: Path, works_on: Callable[[Path], dict[str, Any]]
) -> None:
    """Each record stays what it was, and the pipeline goes on where it was."""
    place = make_place(tmp_path)
    sink, fence = ready(Committing(place.sink(partition_by=["name"])))
    expected = [[i, name] for i, name in enumerate(NAMES)]
    for i, name in expected:
        commit_all(sink, at_t0(i, [rec(i, id=i, name=name)]), fence)
    end = len(NAMES)
    commit_all(sink, at_t0(end, bad(end, end + 1)), fence)
    assert pl.read_delta(str(place.root)).sort("id").rows() == [(i, n) for i, n in expected]

    found = works_on(place.root)
    assert found["before"] == expected
    assert found["pruned"] == 1
    assert found["after"] == [*expected, [1000, "foreign"]]
    assert place.letters() == [("t", 0, end), ("t", 0, end + 1)]

    commit_all(sink, at_t0(end + 2, [rec(end + 2, id=end + 2, name="a b")]), fence)
    assert sink.ledger.positions(fence)[T0].position == end + 3
    replayed(place.sink(partition_by=["name"]), judging())
    assert place.ids() == [*range(end + 3), 1000]
