"""The guarantee in words follows the settings."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import ConfigError, Unavailable
from oncely.kinds.destination import Inspection
from oncely.kinds.sql.destination import _slots
from oncely.pipeline import Pipeline
from oncely.pipeline.guarantee import Guarantee, guarantee_of
from oncely.pipeline.planning import unchecked


def guarantee(**sections: dict[str, Any]) -> Guarantee:
    raw: dict[str, Any] = {
        "name": "p",
        "source": {"brokers": "b:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": "postgresql://u@h/d", "table": "t"},
    }
    for name, more in sections.items():
        raw[name] = more if "kind" in more else {**raw.get(name, {}), **more}
    return guarantee_of(parse(raw))


@pytest.mark.parametrize(
    ("transform", "commit"),
    [
        ({"sql": "SELECT * FROM input"}, "partition"),
        ({"python": "m:f"}, "partition"),
        ({"spark": "m:f"}, "batch"),
    ],
)
def test_the_transform_decides(transform: dict[str, str], commit: str) -> None:
    found = guarantee(transform=transform)
    assert found.commit == commit
    assert any("GROUP BY" in end for end in found.ends) is (commit == "batch")
    assert any("stops the pipeline" in end for end in found.ends) is (commit == "batch")
    (kind,) = transform
    assert f"transform.{kind}" in found.why


def test_without_a_transform() -> None:
    assert guarantee().commit == "partition"


@pytest.mark.parametrize(
    ("budget", "said"), [("1%", "beyond 1%"), (7, "beyond 7"), ("100%", "however many")]
)
def test_the_budget(budget: object, said: str) -> None:
    assert said in guarantee(sink={"max_rejects": budget}).rejects


def test_gaps_and_upserts() -> None:
    assert any("on_gap" in end for end in guarantee(source={"on_gap": "record"}).ends)
    upsert = {"mode": "upsert", "keys": ["id"]}
    key = {"key": {"format": "json", "schema": "id BIGINT"}}
    without = guarantee(sink=upsert, decode=key)
    assert any("sink.version" in end for end in without.ends)
    versioned = guarantee(
        sink=upsert | {"version": "v"}, decode={"schema": "id BIGINT, v BIGINT", **key}
    )
    assert not any("sink.version" in end for end in versioned.ends)
    for transform, ends in (({"sql": "SELECT id FROM input"}, 1), ({"python": "m:f"}, 2), ({}, 0)):
        more = {"transform": transform} if transform else {}
        found = guarantee(sink=upsert, decode=key, **more).ends
        said = ("leaves the row or message", "must pass the key columns", "tombstone is a dead")
        assert sum(one in end for end in found for one in said) == ends
        for column, count in (("id", ends), ("v", 1)):
            to = {"kind": "kafka", "topic": "o", "key": column}
            found = guarantee(sink=to, decode=key, **more).ends
            assert sum(one in end for end in found for one in said) == count


@pytest.mark.parametrize(
    ("master", "slots"),
    [("local", 1), ("local[3]", 3), ("local[2,4]", 2), ("spark://h:7077", 0), ("yarn", 0)],
)
def test_slots(master: str, slots: int) -> None:
    assert _slots(master) == slots
    assert _slots("local[*,4]") >= 1


def test_findings_go_on_after_a_problem() -> None:
    inspection = Inspection()
    with inspection.about("source.brokers"):
        raise Unavailable("gone")
    for _ in range(2):
        with inspection.about("decode"):
            raise ConfigError("decode.schema", "wrong", way_out="correct it")
    first, second = inspection.problems
    assert (first.key, first.wrong_input) == ("source.brokers", False)
    assert (second.key, second.message, second.way_out) == ("decode.schema", "wrong", "correct it")


CLUSTER = {"spark": {"master": "spark://m:7077"}}
HANDLERS = {"sink": {"kind": "handlers", "url": "postgresql://u@h/d"}}
DELTA = {"sink": {"kind": "delta", "url": "file:///shared"}}
FILES = {"sink": {"kind": "files", "url": "file:///shared", "manifest_topic": "m"}}
PYTHON = {"transform": {"python": "m:f"}}
CALLED = {"handlers": {"t": print}}


@pytest.mark.parametrize(
    ("sections", "functions", "asked", "named"),
    [
        ({}, {}, False, []),
        ({"transform": {"spark": "m:f"}}, {}, False, ["table unchecked"]),
        ({"transform": {"spark": "m:f"}}, {}, True, []),
        (CLUSTER, {}, False, ["executors were not checked", "PGPASSWORD"]),
        (CLUSTER, {}, True, ["none yet needs the same packages, in a Python at", "PGPASSWORD"]),
        (CLUSTER | {"runtime": "processes"}, {}, False, []),
        (CLUSTER | DELTA, {}, True, ["none yet", "one folder"]),
        (CLUSTER | FILES, {}, True, ["none yet", "one folder"]),
        (DELTA, {}, False, []),
        (FILES, {}, False, []),
        (PYTHON, {}, False, []),
        (HANDLERS, {}, False, ["safe for threads"]),
        (HANDLERS, CALLED, False, []),
        (HANDLERS, CALLED | {"threads": {"t": 2}}, False, ["safe for threads"]),
        (HANDLERS, CALLED | {"drops": {"t": print}}, False, ["safe for threads"]),
        (HANDLERS | PYTHON, CALLED, False, ["safe for threads"]),
    ],
)
def test_preconditions_that_nothing_checks_are_named_where_they_apply(
    sections: dict[str, Any], functions: dict[str, Any], asked: bool, named: list[str]
) -> None:
    raw = {
        "name": "p",
        "source": {"brokers": "b:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": "postgresql://u@h/d", "table": "t", "keep_source": False},
        **sections,
    }
    found = unchecked(Pipeline(parse(raw)).replaced(**functions), asked=asked)
    assert [text in one for text, one in zip(named, found, strict=True)] == [True] * len(named)
