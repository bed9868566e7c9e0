"""What a command refuses for a pipeline, `plan` names before, with the same key and reason; and it
names nothing else."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from oncely.audit.report import KINDS, Finding
from oncely.config import parse
from oncely.core.ranges import TopicPartition
from oncely.errors import WrongInput
from oncely.pipeline import Pipeline
from oncely.pipeline.rejects import RejectFilter
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce

Settings = dict[str, Any]
Told = dict[str, tuple[str, str, str]]

WEAK = {"delivery": "at_least_once"}
STORED = WEAK | {"offsets": {"store": "file", "path": "FOLDER/positions"}}
SPARK = {"transform": {"spark": "math:sqrt"}, "runtime": "spark"}
UPSERT = {"mode": "upsert", "keys": ["id"]}
SQLITE = {"kind": "sql", "url": "sqlite:///FOLDER/rows.db", "table": "rows"}
POSTGRES = {"kind": "sql", "url": "DATABASE", "table": "rows"}
TOPIC = {"kind": "kafka", "topic": "NAME.out", "key": "id"}
FILES = {"kind": "files", "format": "parquet", "url": "file://FOLDER/files",
         "manifest_topic": "NAME.manifest"}  # fmt: skip
DELTA = {"kind": "delta", "url": "file://FOLDER/delta"}
HANDLERS = {"kind": "handlers", "url": "DATABASE"}

REPLAY, DISCARD, REPAIR = "oncely rejects replay", "oncely rejects discard", "oncely repair"
REWRITES = {REPAIR, "oncely backfill"}
SOME_DAMAGE = {f"oncely repair of {one} records" for one in KINDS if one != "lost"}


def refer_to_rows(folder: Path) -> None:
    with sqlite3.connect(folder / "rows.db") as database:
        database.execute("CREATE UNIQUE INDEX by_id ON rows (id)")
        database.execute("CREATE TABLE notes (id INTEGER REFERENCES rows (id) ON DELETE CASCADE)")


def append_only(folder: Path) -> None:
    table = DeltaTable(str(folder / "delta"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})


@dataclass(frozen=True)
class Case:
    """A pipeline that has run, but for those that ``oncely run`` refuses, or that need Spark.

    Attributes:
        sink: ``[sink]``.
        impossible: the operations that it does not permit.
        more: other parts of the pipeline file.
        after: what is done to the destination after the run, so that it permits less.
        compacted: the output topic exists and is compacted.
    """

    sink: Mapping[str, Any]
    impossible: set[str]
    more: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[Path], None] | None = None
    compacted: bool = False

    @property
    def runs(self) -> bool:
        return "oncely run" not in self.impossible and "transform" not in self.more


CASES = {
    "sqlite": Case(SQLITE, set()),
    "postgresql": Case(POSTGRES, set()),
    "append without offsets": Case(POSTGRES | {"keep_source": False}, REWRITES),
    "upsert": Case(POSTGRES | UPSERT, {REPLAY, *REWRITES}),
    "upsert with a version": Case(SQLITE | UPSERT | {"version": "name"}, set()),
    "upsert without offsets": Case(
        SQLITE | UPSERT | {"version": "name", "keep_source": False}, {"oncely audit", REPAIR}
    ),
    "rows that others refer to": Case(SQLITE, REWRITES, after=refer_to_rows),
    "a weaker delivery": Case(SQLITE, {"oncely work", *REWRITES}, WEAK),
    "positions elsewhere": Case(
        SQLITE, {"oncely work", "oncely audit", *REWRITES}, STORED
    ),
    "rows of Spark": Case(SQLITE, {"oncely work", *REWRITES}, SPARK),
    "topic": Case(TOPIC, {DISCARD, *REWRITES}),
    "topic with sources": Case(
        TOPIC | {"keep_source": True}, {DISCARD, "oncely backfill", *SOME_DAMAGE}
    ),
    "compacted topic": Case(
        TOPIC | {"keep_source": True}, {REPLAY, DISCARD, *REWRITES}, compacted=True
    ),
    "topic with headers": Case(
        TOPIC | {"headers": True}, {DISCARD, "transform.spark", *REWRITES}
    ),
    "topics of a column": Case(
        {"kind": "kafka", "topic_column": "name", "rejects_topic": "NAME.rejects"},
        {DISCARD, "oncely audit", *REWRITES},
    ),
    "topic, positions elsewhere": Case(
        TOPIC, {"oncely work", REPLAY, DISCARD, "oncely audit", *REWRITES}, STORED
    ),
    "files": Case(FILES, {"oncely work", DISCARD}),
    "delta": Case(DELTA, {"oncely work"}),
    "append-only delta": Case(DELTA, {"oncely work", *REWRITES}, after=append_only),
    "delta upsert": Case(
        DELTA | UPSERT | {"keep_source": False},
        {"oncely work", REPLAY, "oncely audit", "transform.spark", *REWRITES},
    ),
    "handlers": Case(
        HANDLERS,
        {"oncely run", "oncely work", REPLAY, "oncely audit", "transform.spark", *REWRITES},
    ),
}  # fmt: skip


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def settings(case: Case, broker: Broker, tmp_path: Path, request: Any) -> Settings:
    name = uuid.uuid4().hex[:12]
    broker.create_topic(name, 1)
    if case.compacted or "topic_column" in case.sink:
        policy = "compact" if case.compacted else "delete"
        broker.create_topic(f"{name}.out", 1, {"cleanup.policy": policy})
    produce(broker, name, [(0, f'{{"id": {one}}}', f'{{"id": {one}, "name": "{name}.out"}}')
                           for one in range(3)])  # fmt: skip
    names = {"NAME": name, "FOLDER": str(tmp_path)}
    if "DATABASE" in case.sink.values():
        names["DATABASE"] = request.getfixturevalue("database")

    def filled(given: Any) -> Any:
        if isinstance(given, Mapping):
            return {key: filled(one) for key, one in given.items()}
        for old, new in names.items():
            given = given.replace(old, new) if isinstance(given, str) else given
        return given

    key = {"key": {"format": "json", "schema": "id BIGINT NOT NULL"}}
    own = {"ledger_topic": f"{name}.ledger"} if case.sink["kind"] in ("kafka", "files") else {}
    made: Settings = {
        "name": name,
        "runtime": "processes",
        "source": {"brokers": broker.bootstrap, "topics": [name]},
        "decode": {"format": "json", "schema": "id BIGINT NOT NULL, name STRING"}
        | (key if "keys" in case.sink else {}),
        "sink": {**filled(case.sink), **own},
        **filled(case.more),
    }
    return made


def planned(settings: Settings) -> Told:
    """What `plan` names."""
    plan = Pipeline(parse(settings)).plan(use_spark=False)
    assert not [one for one in plan.problems if not one.key.startswith("transform")]
    assert ("impossible" in plan.as_json()) is bool(plan.impossible)
    return {one.operation: (one.key, one.reason, one.way_out) for one in plan.impossible}


def refused(settings: Settings, case: Case) -> Told:
    """What the commands refuse."""
    pipeline = Pipeline(parse(settings))
    spark = {**settings, "transform": {"spark": "math:sqrt"}, "runtime": "spark"}
    verbs: dict[str, Callable[[], object]] = {
        "oncely run": lambda: pipeline.run("latest"),
        "oncely work": lambda: pipeline.work("latest"),
        REPLAY: pipeline.replay,
        DISCARD: lambda: pipeline.discard(RejectFilter()),
        REPAIR: lambda: (pipeline.repair([]), pipeline.audit()),  # as the command does
        "oncely backfill": lambda: pipeline.backfill({}),
        "oncely audit": pipeline.audit,
        "transform.spark": lambda: parse(spark),
    }
    if "transform" in case.more:
        for one in ("oncely run", "oncely audit", "transform.spark"):
            del verbs[one]  # they would need a run on Spark
    found: Told = {}
    for operation, verb in verbs.items():
        try:
            verb()
        except WrongInput as error:
            found[operation] = error.key, error.problem, error.way_out
    if REPAIR not in found and case.sink["kind"] != "files":  # whose findings name files
        found |= unrepaired(pipeline)
    return found


def unrepaired(pipeline: Pipeline) -> Told:
    """The kinds of damage that a repair leaves."""
    place = TopicPartition(pipeline.settings.name, 0)
    done = pipeline.repair([Finding(place, 1, kind) for kind in KINDS])
    return {
        f"oncely repair of {one.found.kind} records": ("", one.reason, "")
        for one in done.impossible
    }


def test_plan_names_what_a_command_refuses(settings: Settings, case: Case, tmp_path: Path) -> None:
    first = planned(settings)
    if case.runs:
        Pipeline(parse(settings)).run("latest")
    if case.after is not None:
        assert not case.impossible & first.keys() - {"oncely work"}
        case.after(tmp_path)
    else:
        assert first.keys() == case.impossible
    found = planned(settings)
    assert found == refused(settings, case)
    assert found.keys() == case.impossible
