"""Audits of columns that digests do not cover: the server casts, pads or rounds their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from oncely.audit.report import Finding
from oncely.config import parse
from oncely.core.batch import Chunk
from oncely.core.ranges import TopicPartition
from oncely.kafka.records import table_of
from oncely.kinds.sql.sink import SqlSink
from oncely.pipeline import Pipeline
from oncely.runtimes.chunks import Processing
from oncely.testing.servers.kafka import Broker
from tests.audittools import AuditWorld, found
from tests.sinktools import Place

SCHEMA = (
    "id BIGINT, doc JSON, raw JSON, tags ARRAY<STRING>, counts ARRAY<BIGINT>, sizes ARRAY<DOUBLE>,"
    " code STRING, u STRING, cost DECIMAL(12, 4)"
)
TABLE = (
    "CREATE TABLE rows (id bigint {key}, doc jsonb, raw json, tags text[], counts bigint[],"
    " sizes real[], code char(8), u uuid, cost numeric(12, 2), kafka_topic text,"
    " kafka_partition int, kafka_offset bigint, noted timestamptz DEFAULT now())"
)
COLUMNS = ("doc", "raw", "tags", "counts", "sizes", "code", "u", "cost")
DOCS: list[Any] = [
    {"b": 1.50, "a": [1e2, -0.0, None, True], "aa": "\u00e9 \"\\/\u2028\t", "a ": {}},
    [], "text", 12345678901234567890, {"a": {"z": 1, "y": [{"b": 2, "a": 1}]}}, None, False,
]  # fmt: skip


def record(n: int) -> dict[str, Any]:
    doc = DOCS[n % len(DOCS)]
    return {
        "id": n, "doc": doc, "raw": doc, "tags": ['a "b"', "c,\\d", None, "NULL", ""][: n % 6],
        "counts": None if n % 5 == 0 else [n, None, -n], "sizes": [0.1, 1e-7, 3e8, n / 3],
        "code": f"c{n}", "u": str(UUID(int=n)).upper(), "cost": f"{n}.0050",
    }  # fmt: skip


class ColumnsWorld(AuditWorld):
    """Records go through the pipeline's own decode."""

    upsert, sql_of_rows = False, ""

    @cached_property
    def piped(self) -> Pipeline:
        return Pipeline(parse(self.settings()))

    @property
    def sink(self) -> SqlSink:
        return self.piped.sink(self.piped.row_schema())  # type: ignore[return-value]

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        sink: dict[str, Any] = {"rounding": "allow"}
        decode: dict[str, Any] = {"schema": SCHEMA}
        if self.upsert:
            sink |= {"mode": "upsert", "keys": ["id"]}
            decode["key"] = {"format": "json", "schema": "id BIGINT"}
        given: dict[str, Any] = {"decode": decode, "sink": sink, **sections}
        if self.sql_of_rows:
            given["transform"] = {"sql": self.sql_of_rows}
        return super().settings(**given)

    def record(self, message: Any) -> Any:
        return _Kept(message)

    def chunk(self, tp: TopicPartition, at: int, records: Any) -> Chunk:
        again = Processing(self.piped.decoder.decode, self.piped.row_transform)
        table = table_of([(tp, [one.message for one in records])], self.piped.decoder.needs)
        (made,) = again.chunks({tp: at}, [table])
        return made


class _Kept:
    def __init__(self, message: Any) -> None:
        self.message, self.offset = message, message.offset()


MakeWorld = Callable[..., ColumnsWorld]


@pytest.fixture
def make(
    broker: Broker, make_topic: Callable[..., str], on_postgres: Place, tmp_path: Path
) -> MakeWorld:
    def make(*, upsert: bool = False, keep_source: bool = True, rows: str = "") -> ColumnsWorld:
        world = ColumnsWorld(
            broker.bootstrap, on_postgres, make_topic(partitions=1), tmp_path, keep_source
        )
        world.upsert, world.sql_of_rows = upsert, rows
        world.sql(TABLE.format(key="PRIMARY KEY" if upsert else ""))
        world.produce([(0, b'{"id": %d}' % n, json.dumps(record(n)).encode()) for n in range(40)])
        world.run()
        return world

    return make


CHANGES = {
    "doc": """doc = '{"forged": 1}'""",
    "raw": "raw = (raw::text || ' ')::json",
    "tags": "tags = tags || 'x'::text",
    "counts": "counts = '{1}'",
    "sizes": "sizes = NULL",
    "code": "code = 'x'",
    "u": "u = gen_random_uuid()",
    "cost": "cost = cost + 0.01",
}


@pytest.mark.parametrize("upsert", [False, True], ids=["append", "upsert"])
def test_an_altered_value_of_each_column_is_named(make: MakeWorld, upsert: bool) -> None:
    world = make(upsert=upsert)
    clean = world.audit()
    assert (clean.verdict, clean.found, clean.undecided) == ("clean", {}, []), clean.as_json()
    for n, name in enumerate(COLUMNS):
        world.sql(f"UPDATE rows SET {CHANGES[name]} WHERE id = {2 * n + 1}")
    world.sql("UPDATE rows SET doc = NULL WHERE id = 21")
    report = world.audit()
    assert found(report) == {"altered": [(0, 2 * n + 1) for n in range(len(COLUMNS))] + [(0, 21)]}
    assert report.verdict == "damaged"
    if not upsert:  # which needs a version
        altered = [Finding(f.partition, f.offset, f.kind) for f in report.findings]
        world.piped.repair(altered, execute=True)
        assert world.audit().verdict == "clean"


TWO_ROWS = (
    "SELECT * EXCLUDE part REPLACE ({id} AS id, to_json(part) AS doc)"
    " FROM (SELECT *, UNNEST([0, 1]) AS part FROM input)"
)


def test_values_that_rows_of_one_record_have_exchanged_are_seen(make: MakeWorld) -> None:
    world = make(rows=TWO_ROWS.format(id="2 * id + part"))
    world.sql("UPDATE rows SET doc = to_jsonb(1 - doc::int) WHERE kafka_offset IN (5, 9)")
    world.sql("UPDATE rows SET doc = '7' WHERE id = 40")
    assert found(world.audit()) == {"altered": [(0, 5), (0, 9), (0, 20)]}
    world.sql_of_rows = TWO_ROWS.format(id="2 * id + part + CASE id WHEN 9 THEN 100 ELSE 0 END")
    # The ledger's digest proves the id of record 9, which is another one by today's transform.
    assert found(world.audit()) == {"altered": [(0, 5), (0, 20)]}


class UuidWorld(ColumnsWorld):
    """An upsert by a key that the server casts."""

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        decode = {"schema": "v BIGINT", "key": {"format": "string", "column": "u"}}
        sink = {"mode": "upsert", "keys": ["u"], "version": "v"}
        return super().settings(**{"decode": decode, "sink": sink, **sections})


def test_one_key_in_several_forms_is_one_key(
    broker: Broker, make_topic: Callable[..., str], on_postgres: Place, tmp_path: Path
) -> None:
    world = UuidWorld(broker.bootstrap, on_postgres, make_topic(partitions=1), tmp_path)
    world.sql(
        "CREATE TABLE rows (u uuid PRIMARY KEY, v bigint, kafka_topic text, kafka_partition int,"
        " kafka_offset bigint)"
    )
    first, second, third = (str(UUID(int=(0xABC << 100) + n)).encode() for n in range(3))
    world.produce([(0, first.upper(), b'{"v": 1}'), (0, first, b'{"v": 2}')])
    world.produce([(0, second.upper(), b'{"v": 1}'), (0, second, None), (0, third, b'{"v": 1}')])
    world.run(size=2)
    rows = "SELECT u::text, kafka_offset FROM rows ORDER BY 2"
    whole = [(first.decode(), 1), (third.decode(), 4)]
    assert world.sql(rows) == whole
    report = world.audit()
    assert (report.verdict, report.found, report.undecided) == ("clean", {}, []), report.as_json()
    again = [Finding(world.tp(), at, "lost") for at in (0, 2)]
    world.piped.repair(again, execute=True)
    assert world.sql(rows) == whole  # what is deleted stays so


class VersionWorld(ColumnsWorld):
    """An upsert whose versions the server casts or rounds."""

    type = ""

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        key = {"format": "string", "column": "id"}
        sink = {"mode": "upsert", "keys": ["id"], "version": "v", "rounding": "allow"}
        decode = {"schema": f"v {self.type}", "key": key}
        return super().settings(**{"decode": decode, "sink": sink, **sections})


@pytest.mark.parametrize(
    ("given", "column", "versions", "newest"),
    [
        ("DECIMAL(12, 4)", "numeric(12, 2)", ("1.0040", "1.0010"), 1),
        ("TIMESTAMP", "timestamptz(0)", ("2026-01-01T00:00:00.4Z", "2026-01-01T00:00:00.1Z"), 1),
        ("STRING", "uuid", (str(UUID(int=0xABC)).upper(), str(UUID(int=0xABB))), 0),
        ("STRING", "uuid", (str(UUID(int=0xABC)), str(UUID(int=0xABD)).upper()), 1),
    ],
)
def test_versions_are_compared_as_they_are_stored(
    broker: Broker, make_topic: Callable[..., str], on_postgres: Place, tmp_path: Path,
    given: str, column: str, versions: tuple[str, str], newest: int,
) -> None:  # fmt: skip
    world = VersionWorld(broker.bootstrap, on_postgres, make_topic(partitions=1), tmp_path)
    world.type = given
    world.sql(
        f"CREATE TABLE rows (id text PRIMARY KEY, v {column}, kafka_topic text,"
        " kafka_partition int, kafka_offset bigint)"
    )
    world.produce([(0, b"a", json.dumps({"v": one}).encode()) for one in versions])
    world.run(size=1)
    assert world.sql("SELECT kafka_offset FROM rows") == [(newest,)]
    report = world.audit()
    assert (report.verdict, report.found) == ("clean", {}), report.as_json()


def test_values_of_records_that_are_gone_are_not_proved(make: MakeWorld, broker: Broker) -> None:
    world = make()
    broker.delete_records(world.topic, {0: 10})
    report = world.audit()
    assert report.verdict == "unknown"
    (left,) = report.undecided
    assert "doc, raw" in left.reason
    assert left.range is not None
    assert (left.range.start, left.range.end) == (0, 10)


def test_a_transform_that_gives_other_values_today_is_no_damage(make: MakeWorld) -> None:
    world = make()
    world.sql("UPDATE rows SET code = 'other'")
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {})
    assert "40 rows have other values" in report.undecided[0].reason


def test_a_transform_that_was_changed_after_the_first_ranges_is_no_damage(make: MakeWorld) -> None:
    world = make()
    world.sql("UPDATE rows SET code = 'other' WHERE id < 14 OR id = 20")
    report = world.audit()
    assert found(report) == {"altered": [(0, 20)]}
    (left,) = report.undecided
    assert left.range is not None
    assert (left.range.start, left.range.end) == (0, 14)


def test_rows_without_offsets_are_not_proved(make: MakeWorld) -> None:
    world = make(keep_source=False)
    report = world.audit()
    assert report.verdict == "unknown"
    assert "no digest covers the values of code, cost, counts, doc" in report.undecided[0].reason
