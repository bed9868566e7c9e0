"""Topic to files: what a run leaves, whatever the layout, the format and the columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.files_world import FilesWorld, assert_exactly_once, event_of
from tests.scenarios.world import run

Make = Callable[..., FilesWorld]


@pytest.mark.parametrize(
    ("form", "layout", "infer"),
    [  # every pair of two choices
        pytest.param("avro", "per_partition", True, marks=pytest.mark.both),
        pytest.param("parquet", "clustered", False, marks=pytest.mark.both),
        pytest.param("parquet", "per_partition", False, marks=pytest.mark.long),
        pytest.param("avro", "clustered", True, marks=pytest.mark.long),
    ],
)
def test_each_record_is_a_row_of_a_named_file_or_a_dead_letter(
    make_files_world: Make, runtime: Any, form: str, layout: str, infer: bool
) -> None:
    world = make_files_world(infer=infer)
    world.overrides["sink"] = {"format": form, "layout": layout, "max_rejects": "100%"}
    world.publish(3_000, pad=10, bad_every=501)
    pipeline = run(world, runtime)
    assert assert_exactly_once(world) == 3_000 - 6
    world.publish(500, first=3_000)
    run(world, runtime)
    assert assert_exactly_once(world) == 3_494
    for row in world.rows():
        expected = event_of(row["id"])
        assert row["user"] == expected["user"]
    for entry in world.entries().values():
        values = entry["partition"]
        assert entry["path"].startswith(
            f"user={values['user']}/date={values['date']}/hour={values['hour']}/"
        )
    assert pipeline.status().rejects == 6
    assert world.stored() == set(world.entries())
    if layout == "clustered":  # one file a directory and batch
        directories = {path.rpartition("/")[0] for path in world.entries()}
        assert len(world.entries()) <= 2 * len(directories)
