"""Columns that nobody has named: they grow, survive restarts, and conflicts become dead letters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fastavro
import pytest

from oncely import files
from oncely.config import parse
from oncely.errors import WrongInput
from oncely.kinds.files.maintenance import reset_schema
from oncely.kinds.files.table import table_of
from oncely.kinds.files.verify import verify
from oncely.pipeline import Pipeline
from oncely.runtimes.batches.commit import RangeCommit
from tests.scenarios.files_world import FilesWorld, assert_exactly_once
from tests.scenarios.world import produce

Make = Callable[..., FilesWorld]
HOUR = "2026-03-01T07:00:00Z"


@pytest.fixture
def world(make_files_world: Make) -> FilesWorld:
    made = make_files_world(infer=True, **{"max.message.bytes": str(16 << 20)})
    made.overrides["sink"] = {"max_rejects": "100%"}
    return made


def events(ids: Iterator[int], user: str, *more: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"id": next(ids), "user": user, "ts": HOUR, **one} for one in more]


def run(world: FilesWorld, runtime: Any) -> Pipeline:
    pipeline = Pipeline(parse(world.settings()))
    pipeline.run("latest", spark=runtime)
    return pipeline


def fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {field["name"]: field["type"] for field in schema["fields"]}


def by_id(world: FilesWorld) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in world.rows()}


def test_a_schema_grows_and_is_taken_up_again(world: FilesWorld, spark: Any) -> None:
    ids = iter(range(100))
    world.publish_values(events(ids, "ann", {"n": 1}, {"n": 2, "tags": []}))
    world.publish_values(events(ids, "bob", {"n": "text"}))
    run(world, spark)
    first = world.schemas()
    assert fields(first[("ann",)])["n"] == ["null", "long"]
    assert "tags" not in fields(first[("ann",)])  # nobody knows yet what is in it
    assert fields(first[("bob",)])["n"] == ["null", "string"]  # bob's is bob's
    # A new run knows them: 1.5 widens, a text is a conflict with what an earlier run has seen.
    world.publish_values(events(ids, "ann", {"n": 1.5, "tags": ["a"]}, {"n": "late"}, {"n": 3}))
    pipeline = run(world, spark)
    grown = world.schemas()
    assert fields(grown[("ann",)])["n"] == ["null", "double"]
    assert fields(grown[("ann",)])["tags"] == [
        "null",
        {"type": "array", "items": ["null", "string"]},
    ]
    assert grown[("bob",)] == first[("bob",)]
    (letter,) = pipeline.rejects().listed
    assert "n: it is DOUBLE, found STRING" in letter.reason
    rows = by_id(world)
    assert [rows[i]["n"] for i in (0, 1, 3, 5)] == [1, 2, 1.5, 3]
    assert_exactly_once(world)
    assert_files_resolve(world)
    table = files.read(spark, pipeline, where={"user": "ann"}).collect()
    assert sorted((row["id"], row["n"], row["tags"]) for row in table) == [
        (0, 1.0, None), (1, 2.0, None), (3, 1.5, ["a"]), (5, 3.0, None),
    ]  # fmt: skip


def test_tasks_that_contradict_each_other_agree(
    world: FilesWorld, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in one partition, an object in the other, new in the same batch: the first counts."""
    monkeypatch.setattr("oncely.runtimes.batches.commit.OFFSETS_A_TASK", 1)  # a task for each
    ids = iter(range(100))
    world.publish_values(events(ids, "ann", *[{"x": "text"}] * 3), partition=1)
    world.publish_values(events(ids, "ann", *[{"x": {"deep": 1}}] * 2, {"y": 1}), partition=2)
    world.publish_values(events(ids, "ann", {"x": 7}, {"y": 2.5}), partition=3)
    pipeline = run(world, runtime)
    found = pipeline.rejects()
    assert found.total == 3  # two objects, one number
    assert {one.partition.partition for one in found.listed} == {2, 3}
    assert all("x: it is STRING" in one.reason for one in found.listed)
    assert fields(world.schemas()[("ann",)])["y"] == ["null", "double"]
    assert_exactly_once(world)
    assert_files_resolve(world)


TASKS = 4


@pytest.mark.parametrize("layout", ["per_partition", "clustered"])
def test_only_ranges_of_contradicting_tasks_are_staged_again(
    make_files_world: Make, runtime: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Each task contradicts all before it, in a column that only shows when they are settled."""
    monkeypatch.setattr("oncely.runtimes.batches.commit.OFFSETS_A_TASK", 1)  # a task for each
    staged: list[int] = []
    stage = RangeCommit._stage

    def counted(self: Any, *given: Any) -> Any:
        staged.append(len(given[1]))
        return stage(self, *given)

    monkeypatch.setattr(RangeCommit, "_stage", counted)
    world = make_files_world(TASKS, infer=True)
    world.overrides["sink"] = {"max_rejects": "100%", "layout": layout}
    ids = iter(range(1_000))
    for task in range(TASKS):
        texts = [{f"f{before}": "text"} for before in range(task)]
        world.publish_values(events(ids, "ann", *texts, {f"f{task}": 1}), partition=task)
    pipeline = run(world, runtime)
    assert staged == ([TASKS, TASKS - 1, TASKS - 2] if layout == "per_partition" else [TASKS] * 3)
    assert len(world.rows()) == TASKS
    found = pipeline.rejects()
    assert found.total == TASKS * (TASKS - 1) // 2
    # The last two tasks' ranges are read by one task, in the order that Spark hands them to it.
    either = r"f0: it is BIGINT|f1: it is BIGINT|f2: it is (BIGINT, found STRING|STRING, found BIG)"
    assert all(re.search(either, one.reason) for one in found.listed)
    schema = fields(world.schemas()[("ann",)])
    assert all(schema[name] == ["null", "long"] for name in ("f0", "f1", "f3"))
    assert_exactly_once(world)
    assert_files_resolve(world)


def test_a_schema_is_reset_to_what_its_files_hold(world: FilesWorld, runtime: Any) -> None:
    ids = iter(range(100))
    world.publish_values(events(ids, "ann", {"n": 1}))
    world.publish_values(events(ids, "bob", {"n": "text"}))
    pipeline = run(world, runtime)
    learned = world.schemas()
    # As a version published it that learned from records which it rejected.
    wrong = {"name": "amount", "type": ["null", "string"], "default": None}
    avro = json.dumps({**learned[("ann",)], "fields": [*learned[("ann",)]["fields"], wrong]})
    page = {"kind": "schema", "version": 1, "id": "0" * 16, "scope": ["ann"], "avro": avro}
    produce(
        world.brokers, f"{world.name}.schema", [(0, b'["schema","ann"]', json.dumps(page).encode())]
    )
    planned = reset_schema(pipeline, ["ann"], execute=False)
    assert planned.changes == [("amount", "STRING", "")]
    assert "amount" in fields(world.schemas()[("ann",)])
    done = reset_schema(pipeline, ["ann"], execute=True)
    assert (done.changes, done.files) == (planned.changes, 1)
    assert fields(world.schemas()[("ann",)]) == fields(learned[("ann",)])
    assert world.schemas()[("bob",)] == learned[("bob",)]
    world.publish_values(events(ids, "ann", {"amount": 5}))
    run(world, runtime)
    assert fields(world.schemas()[("ann",)])["amount"] == ["null", "long"]
    assert_exactly_once(world)
    assert_files_resolve(world)
    assert not verify(table_of(pipeline)).problems
    with pytest.raises(WrongInput, match="carl"):
        reset_schema(pipeline, ["carl"], execute=True)


def test_poison_is_a_dead_letter(world: FilesWorld, spark: Any) -> None:
    """A hundred thousand fields, ten thousand levels, an endless name: letters with reasons."""
    good = events(iter(range(3)), "ann", {"a": 1}, {"a": 2}, {"a": 3})
    many = {"user": "ann", "ts": HOUR, "id": 10} | {f"f{i}": i for i in range(100_000)}
    deep = b'{"user":"ann","ts":"' + HOUR.encode() + b'","id":11,"d":' + b"[" * 10_000
    deep += b"]" * 10_000 + b"}"
    named = {"user": "ann", "ts": HOUR, "id": 12, "n" * 900_000: 1}
    odd = {"user": "ann", "ts": HOUR, "id": 13, "": 1, "a.b": 2, "🦆": 3, "__proto__": 4}
    world.publish_values([good[0], many, good[1], deep, named, odd, good[2]])
    pipeline = run(world, spark)
    reasons = {one.offset: one.reason for one in pipeline.rejects().listed}
    assert sorted(reasons) == [1, 3, 4]
    assert "fields" in reasons[1]
    assert "900000 characters" in reasons[4]
    rows = by_id(world)
    assert sorted(rows) == [0, 1, 2, 13]
    assert set(rows[13].values()) >= {1, 2, 3, 4}
    assert_files_resolve(world)
    names = files.read(spark, pipeline).columns
    assert {"", "a.b", "🦆", "__proto__"} <= set(names)


def test_values_are_no_paths(world: FilesWorld, spark: Any) -> None:
    """Users such as ``../../etc``: nothing is written outside the root, and nothing is mixed up."""
    users = [
        "../../etc", "..", ".", "", "a/b", "a\\b", "x" * 300, "x" * 299 + "y", "🦆", "%2e%2e",
        "__HIVE_DEFAULT_PARTITION__", "user=ann", "a\u0000b", "A", "a", None, 7, True,
    ]  # fmt: skip
    before = sorted(world.root.parent.iterdir())
    world.publish_values(
        [{"id": i, "user": user, "ts": HOUR} for i, user in enumerate(users)]
        + [{"id": 90, "user": {"no": 1}, "ts": HOUR}, {"id": 91, "user": "ann", "ts": "tomorrow"},
           {"id": 92, "user": "ann"}]
    )  # fmt: skip
    pipeline = run(world, spark)
    assert {one.offset for one in pipeline.rejects().listed} == {len(users), len(users) + 1}
    assert set(world.root.parent.iterdir()) - set(before) == {world.root}
    seen: dict[str | None, set[str]] = {}
    for path, entry in world.entries().items():
        assert (world.root / path).resolve().is_relative_to(world.root.resolve())
        assert all(len(part.encode()) <= 255 for part in path.split("/"))
        seen.setdefault(entry["partition"]["user"], set()).add(path.split("/")[0])
    texts = {None if u is None else {True: "true", 7: "7"}.get(u, u) for u in users} | {"ann"}
    assert set(seen) == texts
    directories = [one for found in seen.values() for one in found]
    assert len(directories) == len(set(directories)) == len(texts)
    assert sorted(by_id(world)) == [*range(len(users)), 92]
    got = files.read(spark, pipeline, where={"user": "../../etc"}, columns=["id"]).collect()
    assert [row["id"] for row in got] == [0]


def assert_files_resolve(world: FilesWorld) -> None:
    """Each file's own schema resolves to the published one of its scope: Avro's own rules."""
    import io

    published = world.schemas()
    for path, entry in world.entries().items():
        schema = published[tuple(entry["scope"])]
        list(fastavro.reader(io.BytesIO(world.content(path)), reader_schema=schema))
