"""``sink.keep_source``: tables that Oncely creates keep the origin of each row by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.core.batch import Batch
from oncely.core.claim import Takeover
from oncely.core.ranges import OffsetRange
from oncely.errors import ConfigError
from oncely.kinds.delta.destination import DeltaDestination
from oncely.kinds.destination import PROBED, Inspection
from oncely.kinds.sql.destination import SqlDestination
from oncely.kinds.tables import SOURCE_COLUMNS
from oncely.pipeline import Pipeline
from tests.contracts.looking import create
from tests.deltatools import DeltaPlace
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    Place,
    at_t0,
    commit_all,
    gone,
    numbered,
    open_sink,
    publish_on,
    rec,
)

ORIGIN = "kafka_topic text, kafka_partition bigint, kafka_offset bigint"


def destination_of(**sink: Any) -> Any:
    described = {
        "name": "p",
        "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {
            "format": "json",
            "schema": "id BIGINT, name STRING",
            "key": {"format": "json", "schema": "id BIGINT"},
        },
        "sink": sink,
    }
    return Pipeline(parse(described)).destination


def destination(place: Place, **sink: Any) -> SqlDestination:
    found = destination_of(kind="sql", **{"url": place.url, "table": str(place.table()), **sink})
    assert isinstance(found, SqlDestination)
    return found


def kept(place: Place, schema: pa.Schema = SCHEMA, **sink: Any) -> list[str]:
    """Run a new pipeline object for two records, and return the columns of the table."""
    to = destination(place, **sink)
    bound = to.sink(to.row_schema(schema))
    fence = open_sink(bound, {T0: 4}).fence
    at = bound.ledger.positions(fence)[T0].position
    commit_all(bound.bind(), at_t0(at, numbered(at, at + 2), schema), fence)
    return [one.name for one in bound.wanted.schema]


def notes(place: Place, schema: pa.Schema = SCHEMA, **sink: Any) -> list[str]:
    to, inspection = destination(place, **sink), Inspection()
    to.plan(to.row_schema(schema), inspection)
    assert inspection.problems == []
    return inspection.notes


def test_a_table_that_oncely_creates_keeps_the_origin(place: Place) -> None:
    assert kept(place) == [*SCHEMA.names, *SOURCE_COLUMNS.names]
    assert kept(place) == [*SCHEMA.names, *SOURCE_COLUMNS.names]  # the next start
    assert place.sql("SELECT kafka_topic, kafka_partition, kafka_offset FROM rows ORDER BY 3") == [
        ("t", 0, at) for at in range(4, 8)
    ]
    assert notes(place) == []


def test_a_table_that_has_the_columns_keeps_the_origin(place: Place) -> None:
    create(place, f"id bigint, {ORIGIN}, name text")
    assert kept(place) == [*SCHEMA.names, *SOURCE_COLUMNS.names]


def test_a_table_without_the_columns_stays_as_it_is(place: Place) -> None:
    create(place, "id bigint, name text, kafka_topic text")
    assert kept(place) == SCHEMA.names
    (note,) = notes(place)
    assert "rows has no columns kafka_topic, kafka_partition, kafka_offset" in note


def test_a_setting_overrides_the_table(place: Place) -> None:
    assert kept(place, keep_source=False) == SCHEMA.names
    assert notes(place, keep_source=False) == []
    for column in ORIGIN.split(", "):
        own = column if place.is_postgres else column.replace("bigint", "INT")
        place.sql(f"ALTER TABLE rows ADD COLUMN {own}")
    assert kept(place, keep_source=False) == SCHEMA.names
    assert place.sql("SELECT DISTINCT kafka_topic FROM rows") == [(None,)]
    assert kept(place, keep_source=True) == [*SCHEMA.names, *SOURCE_COLUMNS.names]


@pytest.mark.parametrize("more", [{}, {"keep_source": True}], ids=["unset", "true"])
def test_rows_with_columns_of_these_names_are_refused(place: Place, more: dict[str, Any]) -> None:
    """Their values would be taken for the origin of the rows."""
    own = pa.schema([*SCHEMA, ("kafka_offset", pa.int64())])
    with pytest.raises(ConfigError, match=r"sink\.keep_source.*kafka_offset") as refused:
        destination(place, **more).row_schema(own)
    assert "keep_source = false" in refused.value.way_out
    to = destination(place, keep_source=False)
    assert to.row_schema(own).names == own.names
    assert not to.sink(to.row_schema(own)).keep_source


def test_names_that_differ_in_capitals_only(place: Place) -> None:
    """PostgreSQL fills both columns; SQLite has one name for them."""
    both = pa.schema([("job", pa.string()), ("JOB", pa.string())])
    to = destination(place, keep_source=False)
    if not place.is_postgres:
        with pytest.raises(ConfigError, match="'job' and 'JOB' differ in capitals only"):
            to.row_schema(both)
        return
    sink = to.sink(to.row_schema(both))
    fence = open_sink(sink).fence
    commit_all(sink.bind(), at_t0(0, [rec(0, job="a", JOB="b"), rec(1, JOB="c")], both), fence)
    assert place.sql("SELECT * FROM rows ORDER BY 2") == [("a", "b"), (None, "c")]


def test_a_delta_table_has_one_name_for_them(tmp_path: Path) -> None:
    both = pa.schema([("job", pa.string()), ("JOB", pa.string())])
    with pytest.raises(ConfigError, match="a Delta table takes them for one"):
        delta(tmp_path).row_schema(both)


def test_the_origin_of_a_spark_transform_s_rows_is_not_kept(place: Place) -> None:
    """The columns of such rows reach the sink as they are."""
    assert not destination(place).sink(SCHEMA).keep_source


def test_an_upsert_keeps_the_origin_of_the_newest(place: Place) -> None:
    to = destination(place, mode="upsert", keys=["id"])
    sink = to.sink(to.row_schema(SCHEMA))
    fence = open_sink(sink).fence
    records = [rec(0, id=1, name="a"), rec(1, id=2, name="b"), rec(2, id=1, name="c")]
    commit_all(sink.bind(), at_t0(0, [*records, gone(3, id=2)], keys=["id"]), fence)
    assert place.sql("SELECT id, name, kafka_offset FROM rows") == [(1, "c", 2)]


def test_plan_names_the_columns_that_an_audit_does_not_compare(place: Place) -> None:
    schema = pa.schema([*SCHEMA, ("tags", pa.list_(pa.string())), ("at", pa.timestamp("us"))])
    if not place.is_postgres:
        assert notes(place, schema) == []  # before there is a file, nothing is known of it
        destination(place).sink(SCHEMA).prepare()
        place.sql("DROP TABLE rows")
    (note,) = notes(place, schema)
    assert "no digest covers the values of tags:" in note
    if place.is_postgres:
        place.sql(f"CREATE TABLE rows (id numeric, name uuid, tags text[], at timestamp, {ORIGIN})")
        (note,) = notes(place, schema)
        assert "no digest covers the values of id, name, tags:" in note


# -- Delta ---------------------------------------------------------------------------------


def delta(root: Path, **sink: Any) -> DeltaDestination:
    found = destination_of(kind="delta", **{"url": root.as_uri(), **sink})
    assert isinstance(found, DeltaDestination)
    return found


def delta_notes(root: Path, schema: pa.Schema = SCHEMA, **sink: Any) -> list[str]:
    """The notes of a plan, without the one that every plan of a folder has."""
    to, inspection = delta(root, **sink), Inspection()
    to.plan(to.row_schema(schema), inspection)
    assert inspection.problems == []
    assert PROBED in inspection.notes
    return [note for note in inspection.notes if note != PROBED]


def staged(to: DeltaDestination, start: int) -> None:
    """Publish two records as one batch."""
    sink = to.sink(to.row_schema(SCHEMA))
    fence = sink.open(Takeover(SOURCE, lambda: {T0: start}, {T0: start})).fence
    what = at_t0(start, numbered(start, start + 2))
    task = sink.staging(fence, 0, start)
    assert task.add(what) == []
    rows = np.arange(2)
    batch = Batch({T0: OffsetRange(start, start + 2)}, what.counts(rows, ()), (), [task.finish()])
    publish_on(sink, batch, sink.ledger.positions(fence), fence)


def test_a_delta_table_that_oncely_creates_keeps_the_origin(tmp_path: Path) -> None:
    for start in (0, 2):
        staged(delta(tmp_path), start)
    rows = DeltaPlace(tmp_path).rows()
    assert [(one["id"], one["kafka_topic"], one["kafka_partition"]) for one in rows] == [
        (at, "t", 0) for at in range(4)
    ]
    assert [one["kafka_offset"] for one in rows] == [0, 1, 2, 3]


def test_a_delta_table_without_the_columns_stays_as_it_is(tmp_path: Path) -> None:
    staged(delta(tmp_path, keep_source=False), 0)
    staged(delta(tmp_path), 2)
    assert set(DeltaPlace(tmp_path).rows()[0]) == set(SCHEMA.names)
    (note,) = delta_notes(tmp_path)
    assert "has no columns kafka_topic" in note
    assert delta_notes(tmp_path, keep_source=False) == []
    upsert = {"mode": "upsert", "keys": ["id"], "version": "name"}
    assert delta_notes(tmp_path, keep_source=False, **upsert) == []


def test_plan_tells_what_an_audit_of_a_delta_table_proves(tmp_path: Path) -> None:
    upsert = {"mode": "upsert", "keys": ["id"]}
    assert delta_notes(tmp_path, **upsert, version="name") == []
    tags = pa.schema([*SCHEMA, ("tags", pa.list_(pa.string()))])
    (values,) = delta_notes(tmp_path, tags, **upsert)
    assert "no digest covers the values of tags:" in values


# -- rows without an origin ----------------------------------------------------------------


@pytest.mark.parametrize(
    "sink",
    [
        {"kind": "sql", "url": "sqlite:///x.db", "table": "t"},
        {"kind": "delta", "url": "file:///tmp/x"},
        {"kind": "kafka", "topic": "out"},
    ],
    ids=lambda sink: sink["kind"],
)
def test_a_row_of_a_spark_transform_has_no_origin_to_keep(sink: dict[str, Any]) -> None:
    described = {
        "name": "p",
        "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "transform": {"spark": "tests.scenarios.transforms:counted"},
        "sink": sink,
    }
    Pipeline(parse(described)).refuse_keep_source()
    described["sink"] = {**sink, "keep_source": True}
    with pytest.raises(ConfigError, match=r"sink\.keep_source.*no single record"):
        Pipeline(parse(described)).refuse_keep_source()
