"""Columns of type JSON, from a topic through a run into PostgreSQL, and audited."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import parse
from oncely.pipeline import Pipeline
from tests.scenarios.commands import oncely
from tests.scenarios.world import World, produce

VALUES = ['{"id": 1, "p": {"a": [1, 1.50]}}', '{"id": 2, "p": "x"}', '{"id": "3"}', '{"id": 4}']
SCHEMA = {"decode": {"schema": "id STRING, p JSON"}}
SQL = {"transform": {"sql": "SELECT *, p->>'$.a' AS a FROM (SELECT id, p FROM input) t"}}
SPARK: dict[str, Any] = {
    "transform": {"spark": "tests.scenarios.test_json_columns:unchanged"},
    "sink": {"keep_source": False},
}


@pytest.mark.parametrize(
    "transform", [{}, pytest.param(SQL, marks=pytest.mark.both)], ids=["none", "sql"]
)
def test_json_is_jsonb(make_world: Any, runtime: Any, transform: Any) -> None:
    assert_jsonb(make_world, runtime, transform)


def test_json_of_a_spark_transform_is_text(make_world: Any, spark: Any) -> None:
    assert_jsonb(make_world, spark, SPARK)


def assert_jsonb(make_world: Any, runtime: Any, transform: Any) -> None:
    world: World = make_world(1)
    produce(world.brokers, world.topic, [(0, None, one.encode()) for one in VALUES])
    sections = SCHEMA | transform
    Pipeline(parse(world.settings(**sections))).run("latest", spark=runtime)
    kind = "text" if "spark" in transform.get("transform", {}) else "jsonb"
    assert world.sql("SELECT id, p::text, pg_typeof(p)::text FROM rows ORDER BY id") == [
        ("1", '{"a": [1, 1.50]}' if kind == "jsonb" else '{"a":[1,1.50]}', kind),
        ("2", '"x"', kind), ("3", None, kind), ("4", None, kind),
    ]  # fmt: skip
    if kind == "jsonb":
        oncely("audit", world.file(**sections))


def unchanged(frame: Any) -> Any:
    """A transform by Spark, which has no type JSON."""
    return frame.select("*")
