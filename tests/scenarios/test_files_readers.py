"""What a real pipeline has written, verified, read, compacted and vacuumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from oncely import files
from oncely.cli.verbs import app
from oncely.config import parse
from oncely.kinds.files.compact import compact
from oncely.kinds.files.maintenance import vacuum
from oncely.kinds.files.verify import verify
from oncely.pipeline import Pipeline
from tests.scenarios.files_world import FilesWorld, assert_exactly_once

Make = Callable[..., FilesWorld]


def pipeline_of(world: FilesWorld) -> Pipeline:
    return Pipeline(parse(world.settings()))


def same_rows(world: FilesWorld, spark: Any) -> None:
    """files.read gives what the independent reader finds."""
    frame = files.read(spark, pipeline_of(world))
    found = sorted((row.id, row.user, row.pad) for row in frame.collect())
    assert found == sorted((row["id"], row["user"], row["pad"]) for row in world.rows())


@pytest.mark.parametrize(
    ("layout", "form", "infer"),
    [
        ("per_partition", "avro", True),
        pytest.param("clustered", "parquet", False, marks=pytest.mark.long),
    ],
)
def test_a_pipeline_s_files(
    make_files_world: Make, spark: Any, layout: str, form: str, infer: bool
) -> None:
    world = make_files_world(infer=infer)
    world.overrides["sink"] = {"format": form, "layout": layout, "max_rejects": "100%"}
    for batch in range(2):
        world.publish(600, pad=10, first=batch * 600, bad_every=333)
        pipeline_of(world).run("latest", spark=spark)
    table = files.table_of(pipeline_of(world))
    found = verify(table)
    assert found.problems == ()
    assert (found.files, found.unnamed) == (len(world.entries()), 0)
    same_rows(world, spark)

    done = compact(table)
    assert done.outputs > 0
    assert done.inputs > done.outputs
    assert verify(table).problems == ()
    assert_exactly_once(world)
    same_rows(world, spark)
    kept = vacuum(table)
    assert (kept.for_readers, len(kept.orphans)) == (done.inputs, 0)

    # The pipeline goes on beside it, and both go on afterwards.
    world.publish(100, first=1_200)
    pipeline_of(world).run("latest", spark=spark)
    assert verify(table).problems == ()
    assert_exactly_once(world)


def test_files_of_a_spark_transform(make_files_world: Make, spark: Any) -> None:
    world = make_files_world()
    world.overrides["transform"] = {"spark": "tests.scenarios.test_files_readers:shuffled"}
    for batch in range(2):
        world.publish(400, first=batch * 400)
        pipeline_of(world).run("latest", spark=spark)
    table = files.table_of(pipeline_of(world))
    assert verify(table).problems == ()
    assert compact(table).outputs > 0
    assert verify(table).problems == ()
    same_rows(world, spark)


def shuffled(frame: Any) -> Any:
    """Rows of all partitions, mixed."""
    return frame.repartition(3, "id")


def test_the_commands_on_a_pipeline_file(make_files_world: Make, spark: Any) -> None:
    world = make_files_world()
    for first in (0, 100):
        world.publish(100, first=first)
        pipeline_of(world).run("latest", spark=spark)
    file = str(world.file())

    def oncely(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["files", words[0], file, *words[1:], "--json"])
        assert done.exit_code == 0, done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert oncely("list")["rows"] == 200
    assert oncely("list", "--where", "user=u3")["rows"] == len(range(3, 200, 7))
    rows = oncely("read", "--where", "user=u3")["rows"]
    assert sorted(row["id"] for row in rows) == list(range(3, 200, 7))
    assert oncely("verify")["ok"] is True
    assert oncely("compact")["outputs"] > 0
    assert oncely("vacuum", "--dry-run")["removed"] == 0
    assert oncely("verify")["ok"] is True
