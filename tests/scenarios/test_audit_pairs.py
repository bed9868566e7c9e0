"""``oncely audit --left --right``: each kind of damage is found, and none is invented."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import confluent_kafka as ck
import psycopg
import pytest

from oncely.audit import datasets
from oncely.audit.datasets import audit_pair
from oncely.audit.report import Report
from oncely.audit.spec import parse_pair
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Unavailable, WrongInput
from oncely.testing.processes import await_that
from oncely.testing.readers import held_back
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce

SCHEMA = "id BIGINT, ts TIMESTAMP, name STRING"
T0 = datetime(2026, 1, 2, tzinfo=UTC)


@dataclass
class Other:
    """A pipeline of somebody else: a topic, and a table that it should fill."""

    spark: Any
    broker: Broker
    topic: str
    url: str
    columns: str = "id BIGINT"
    given: dict[str, Any] = field(default_factory=lambda: {"id": "id"})

    def __post_init__(self) -> None:
        self.sql(f"CREATE TABLE delivered ({self.columns})")

    def sql(self, statement: str, rows: Sequence[Any] | None = None) -> None:
        with psycopg.connect(self.url, autocommit=True) as session, session.cursor() as cursor:
            if rows is None:
                cursor.execute(statement)
            else:
                cursor.executemany(statement, rows)

    def deliver(self, *ids: Any) -> None:
        self.sql("INSERT INTO delivered (id) VALUES (%s)", [(one,) for one in ids])

    def send(self, *values: dict[str, Any], partition: int | None = None) -> None:
        produce(
            self.broker,
            self.topic,
            [
                (n % 3 if partition is None else partition, None, json.dumps(one).encode())
                for n, one in enumerate(values)
            ],
        )

    def transaction(self, *values: dict[str, Any], commit: bool) -> None:
        producer = ck.Producer(
            {**self.broker.client_config(), "transactional.id": f"{self.topic}-{commit}"}
        )
        producer.init_transactions(120)
        producer.begin_transaction()
        for one in values:
            producer.produce(self.topic, json.dumps(one).encode(), partition=0)
        producer.flush(120)
        producer.commit_transaction(120) if commit else producer.abort_transaction(120)
        # The broker answers before its markers are in the log, where readers see the end.
        await_that(lambda: not held_back(self.broker.bootstrap, self.topic), "the markers")

    @property
    def left(self) -> str:
        return f"kafka:{self.topic}?brokers={self.broker.bootstrap}&schema={SCHEMA}"

    @property
    def right(self) -> str:
        to = urlsplit(self.url)
        user = f"&user={quote(to.username or '')}&password=${{PG_PASSWORD}}"
        return f"jdbc:postgresql://{to.hostname}:{to.port}{to.path}?dbtable=delivered{user}"

    def audit(self, **more: Any) -> Report:
        pair = parse_pair(self.left, self.right, self.given)
        return audit_pair(self.spark, pair, **more)


@pytest.fixture
def other(
    spark: Any,
    broker: Broker,
    database: str,
    make_topic: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Other]:
    monkeypatch.setenv("PG_PASSWORD", unquote(urlsplit(database).password or ""))

    def make(**settings: Any) -> Other:
        return Other(spark, broker, make_topic(partitions=3), database, **settings)

    return make


def events(*ids: Any) -> list[dict[str, Any]]:
    return [{"id": one, "ts": f"2026-01-02T{n % 4:02}:10:00Z"} for n, one in enumerate(ids)]


def found(report: Report) -> dict[str, int]:
    return {kind: number for kind, number in report.found.items() if number}


def details(report: Report, kind: str) -> list[str]:
    return [one.detail for one in report.findings if one.kind == kind]


def reasons(report: Report) -> str:
    return "; ".join(one.reason for one in report.undecided)


def test_by_id_each_kind_of_damage_and_none_without(other: Callable[..., Other]) -> None:
    one = other(given={"id": "id", "by": "hour(ts)"})
    one.send(*events(*range(60)))
    one.transaction(*events(900, 901), commit=False)  # aborted: never to be delivered
    one.deliver(*range(60))
    clean = one.audit()
    assert clean.verdict == "clean", clean.as_json()
    assert (clean.records, clean.accounted, clean.proof) == (60, 60, "content")
    assert clean.holes == 3  # two aborted records and the marker
    assert sum(hour.topic for hour in clean.hours) == 60
    assert [hour.group for hour in clean.hours] == [f"2026-01-02 0{n}:00:00" for n in range(4)]
    assert clean.complete_until.wall_time == clean.at

    one.sql("DELETE FROM delivered WHERE id IN (7, 59)")
    one.deliver(8, 8, 901, 5_000)
    damaged = one.audit()
    assert found(damaged) == {"lost": 2, "duplicated": 1, "unexpected": 2}
    assert damaged.exit_code == 1
    lost = [f for f in damaged.findings if f.kind == "lost"]
    assert {(f.detail, f.partition, f.offset) for f in lost} == {
        ("id 7: 1 record, no row", TopicPartition(one.topic, 1), 2),
        ("id 59: 1 record, no row", TopicPartition(one.topic, 2), 19),
    }
    assert details(damaged, "duplicated") == ["id 8: 3 rows for 1 record"]
    assert details(damaged, "unexpected") == [
        "id 5000: 1 row, no record",
        "id 901: 1 row, no record",
    ]
    assert not damaged.undecided
    assert (damaged.records, damaged.accounted) == (60, 58)
    hours = {hour.group: hour for hour in damaged.hours}
    assert hours["2026-01-02 03:00:00"].missing == 2
    assert hours["2026-01-02 00:00:00"].duplicated == 1
    assert hours["(none)"].unexpected == 2  # the table has no column ts
    wall = damaged.complete_until.wall_time
    assert wall is not None
    assert wall < damaged.at


def test_findings_are_capped_and_counted(other: Callable[..., Other]) -> None:
    one = other()
    one.send(*events(*range(500)))
    one.deliver(1)
    report = one.audit(limit=10)
    assert found(report) == {"lost": 499}
    assert len(report.findings) == 10


def test_records_without_an_id_and_ids_that_repeat_are_told(other: Callable[..., Other]) -> None:
    one = other()
    one.send(*events(1, 2, None, 3, 3, 4, 4), {"other": 1})
    produce(one.broker, one.topic, [(0, None, b"no json"), (0, None, None)])
    one.deliver(1, 2, 3, 3, 4)
    report = one.audit()
    assert report.verdict == "unknown", report.as_json()
    assert "4 records of the left side have no id" in reasons(report)
    assert "1 id occurs several times on the left and fewer times on the right, such as 4" in (
        reasons(report)
    )
    assert not report.findings
    keyed = one.audit(keyed=True)
    assert found(keyed) == {"duplicated": 1}
    assert details(keyed, "duplicated") == ["id 3: 2 rows for 2 records"]

    one.deliver(5)  # it may be the row of a record without an id
    report = one.audit()
    assert not found(report)
    assert "1 id would be unexpected, but 4 records without an id may be theirs" in reasons(report)
    one.deliver(6, 7, 8, 9)
    report = one.audit()
    assert found(report) == {"unexpected": 1}
    assert "at least 1 of 5 ids: 4 records without an id may be theirs" in str(report.findings)


def test_rows_without_an_id_may_be_the_missing_ones(other: Callable[..., Other]) -> None:
    one = other()
    one.send(*events(1, 2, 3))
    one.deliver(1, None, None)
    report = one.audit()
    assert report.verdict == "unknown"
    assert "2 ids would be lost, but 2 rows without an id may be theirs" in reasons(report)
    one.sql("DELETE FROM delivered WHERE id = 1")
    report = one.audit()
    assert found(report) == {"lost": 1}
    assert "at least 1 of 3 ids: 2 rows without an id may be theirs" in str(report.findings)


HOSTILE = [
    "'; DROP TABLE delivered; --", '"quoted"', "</script><b>", "a\nb\tc", "\u202eabc", "x" * 5_000,
    "", " ", "null", "NULL", "ü 中 🙂", "%s %d {} ${PATH}", "\\", "\u0001", "A", "a", "a ",
]  # fmt: skip


def test_hostile_ids(other: Callable[..., Other]) -> None:
    one = other(columns="id TEXT", given={"id_left": "name", "id_right": "id"})
    one.send(*({"name": name} for name in HOSTILE))
    one.deliver(*HOSTILE)
    report = one.audit()
    assert report.verdict == "clean", report.as_json()
    one.sql("DELETE FROM delivered")
    one.deliver(*HOSTILE[:-1], "A ")
    report = one.audit()
    assert details(report, "lost") == ["id a : 1 record, no row"]
    assert details(report, "unexpected") == ["id A : 1 row, no record"]
    one.sql("DELETE FROM delivered")
    assert found(one.audit()) == {"lost": len(HOSTILE)}


def test_ids_of_other_types(other: Callable[..., Other]) -> None:
    one = other(columns="id INT")
    one.send(*events(1, 2))
    one.deliver(1)
    for kind in ("INT", "SMALLINT", "NUMERIC(20, 0)"):
        one.sql(f"ALTER TABLE delivered ALTER id TYPE {kind}")
        assert found(one.audit()) == {"lost": 1}, kind
    one.sql("ALTER TABLE delivered ALTER id TYPE TEXT")
    with pytest.raises(ConfigError, match="bigint on the left and string on the right"):
        one.audit()
    one.given = {"id_left": "CAST(id AS STRING)", "id_right": "id"}
    assert details(one.audit(), "lost") == ["id 2: 1 record, no row"]
    for side, given in (
        ("left", {"id_left": "nowhere", "id_right": "id"}),
        ("right", {"id_left": "id", "id_right": "nowhere"}),
    ):
        one.given = given
        with pytest.raises(ConfigError, match=f"--id-{side}"):
            one.audit()


def test_records_that_are_appended_meanwhile_are_no_damage(
    other: Callable[..., Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = other()
    one.send(*events(*range(30)))
    one.deliver(*range(30))
    read = datasets.frame_of

    def later(*args: Any) -> Any:
        one.send(*events(7, *range(100, 110)))  # an id again, and new ones
        one.deliver(7, *range(100, 110), 999)
        return read(*args)

    monkeypatch.setattr(datasets, "frame_of", later)
    report = one.audit()
    assert report.records == 30
    assert details(report, "unexpected") == ["id 999: 1 row, no record"]
    assert found(report) == {"unexpected": 1}


COLUMNS = "kafka_topic TEXT, kafka_partition INT, kafka_offset BIGINT, id BIGINT"
NAMES = {"source_columns": "kafka_topic,kafka_partition,kafka_offset"}


def at_offsets(one: Other, *rows: tuple[Any, Any, Any]) -> None:
    one.sql("INSERT INTO delivered VALUES (%s, %s, %s, 0)", rows)


def test_by_offset(other: Callable[..., Other], monkeypatch: pytest.MonkeyPatch) -> None:
    one = other(columns=COLUMNS, given=NAMES)
    one.send(*events(*range(60)))
    one.transaction(*events(900, 901), commit=False)  # offsets 20 and 21, marker 22
    one.transaction(*events(902), commit=True)  # offset 23, marker 24
    whole = [(one.topic, p, o) for p in range(3) for o in range(20)]
    at_offsets(one, *whole, (one.topic, 0, 23), ("another-topic", 0, 77))
    clean = one.audit()
    assert clean.verdict == "clean", clean.as_json()
    assert (clean.records, clean.accounted, clean.holes, clean.proof) == (61, 61, 4, "offsets")
    assert [(p.records, p.holes, p.end) for p in clean.partitions] == [
        (21, 4, 25), (20, 0, 20), (20, 0, 20),
    ]  # fmt: skip

    one.sql("DELETE FROM delivered WHERE kafka_partition = 1 AND kafka_offset IN (3, 4)")
    at_offsets(
        one,
        (one.topic, 2, 9),
        (one.topic, 0, 21),
        (one.topic, 0, 25),
        (one.topic, 1, 10**9),
        (one.topic, 2, (1 << 63) - 1),
    )
    damaged = one.audit()
    where = {(f.kind, f.partition, f.offset) for f in damaged.findings}
    tp = [TopicPartition(one.topic, n) for n in range(3)]
    assert where == {
        ("lost", tp[1], 3), ("lost", tp[1], 4), ("duplicated", tp[2], 9),
        ("unexpected", tp[0], 21),  # aborted
        ("unexpected", tp[0], 25),  # beyond the end
        ("unexpected", tp[1], 10**9),
        ("unexpected", tp[2], None),  # no log has it
    }  # fmt: skip
    assert details(damaged, "duplicated") == ["2 rows for 1 record"]

    read = datasets.frame_of

    def later(*args: Any) -> Any:
        one.send(*events(1), partition=0)  # offset 25 becomes a record
        return read(*args)

    monkeypatch.setattr(datasets, "frame_of", later)
    assert found(one.audit()) == {"lost": 2, "duplicated": 1, "unexpected": 3}


def test_what_is_proved_is_not_compared_again(other: Callable[..., Other]) -> None:
    one = other(columns=COLUMNS, given=NAMES)
    one.send(*events(*range(30)))
    at_offsets(one, *((one.topic, p, o) for p in range(3) for o in range(10)))
    clean = one.audit()
    proved = {part.partition: part.compared.end for part in clean.partitions}
    assert one.audit(proved=proved).records == 0
    one.send(*events(*range(6)))
    at_offsets(one, *((one.topic, p, 10) for p in range(3)), (one.topic, 0, 3))
    added = one.audit(proved=proved)
    assert (added.records, added.accounted, found(added)) == (6, 3, {"lost": 3})
    assert {(f.offset, f.kind) for f in added.findings} == {(11, "lost")}
    assert found(one.audit()) == {"lost": 3, "duplicated": 1}


def test_rows_that_name_no_record(other: Callable[..., Other]) -> None:
    one = other(columns=COLUMNS, given=NAMES)
    one.send(*events(*range(6)))
    rows = [(one.topic, p, o) for p in range(3) for o in range(2)]
    at_offsets(one, *rows[:-1], (None, None, None))
    report = one.audit()
    assert report.verdict == "unknown"
    assert "1 row of the right side names no record" in reasons(report)
    one.given = {"source_columns": "kafka_topic,kafka_partition,nowhere"}
    with pytest.raises(ConfigError, match="--source-columns"):
        one.audit()


def test_deleted_records_are_unknown_and_not_unexpected(other: Callable[..., Other]) -> None:
    one = other()
    one.send(*events(*range(30)))
    one.deliver(*range(30))
    admin = ck.admin.AdminClient(one.broker.client_config())
    for done in admin.delete_records([ck.TopicPartition(one.topic, 1, 5)]).values():
        done.result(120)
    report = one.audit()
    assert report.verdict == "unknown"
    assert not report.findings
    assert "5 ids would be unexpected" in reasons(report)
    assert "deleted" in reasons(report)
    one.sql("DELETE FROM delivered WHERE id = 29")
    assert found(one.audit()) == {"lost": 1}


def test_records_that_are_deleted_while_they_are_read_fail_the_audit(
    other: Callable[..., Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = other()
    one.send(*events(*range(30)))
    inner = datasets.committed

    def later(*args: Any) -> Any:
        admin = ck.admin.AdminClient(one.broker.client_config())
        for done in admin.delete_records([ck.TopicPartition(one.topic, 1, 5)]).values():
            done.result(120)
        return inner(*args)

    monkeypatch.setattr(datasets, "committed", later)
    with pytest.raises(Unavailable, match="could not read a side: read the topics"):
        one.audit()


def test_between_two_times(other: Callable[..., Other]) -> None:
    one = other()

    def send_at(at: int, *ids: int) -> None:
        producer = ck.Producer(one.broker.client_config())
        for n in ids:
            body = json.dumps({"id": n}).encode()
            producer.produce(one.topic, body, partition=n % 3, timestamp=at)
        producer.flush(120)

    start = int(T0.timestamp() * 1000)
    send_at(start, *range(10))
    send_at(start + 60_000, *range(10, 20))
    send_at(start + 120_000, *range(20, 30))
    one.deliver(*range(4, 25))  # 0 to 3 are lost long since, 25 to 29 not delivered yet
    moments = [datetime.fromtimestamp((start + at) / 1000, UTC) for at in (60_000, 120_000)]
    report = one.audit(since=moments[0], until=moments[1])
    assert report.verdict == "clean", report.as_json()
    assert report.records == 10
    assert report.complete_until.wall_time == moments[1]
    ahead = one.audit(since=moments[1], until=datetime(2999, 1, 1, tzinfo=UTC))
    assert ahead.complete_until.wall_time is not None
    assert ahead.complete_until.wall_time <= ahead.at  # what is not over yet is not complete
    assert found(one.audit(since=moments[0])) == {"lost": 5}
    assert found(one.audit()) == {"lost": 9}
    one.deliver(1_000)
    report = one.audit(since=moments[0], until=moments[1])
    assert details(report, "unexpected") == ["id 1000: 1 row, no record"]


def test_files_against_files(spark: Any, tmp_path: Path) -> None:
    spark.range(1_000).selectExpr("id", "id % 3 AS kind").write.parquet(str(tmp_path / "a"))
    rows = "id AS order_id"
    spark.range(1_000).where("id <> 500").selectExpr(rows).union(
        spark.range(10, 12).selectExpr(rows)
    ).write.csv(str(tmp_path / "b"), header=True)
    pair = parse_pair(
        f"parquet:{tmp_path / 'a'}",
        f"csv:{tmp_path / 'b'}?header=true&schema=order_id INT",
        {"id_left": "id", "id_right": "order_id", "by": "kind"},
    )
    report = audit_pair(spark, pair)
    assert found(report) == {"lost": 1, "duplicated": 2}
    assert [(hour.group, hour.missing, hour.duplicated) for hour in report.hours] == [
        ("0", 0, 0), ("1", 0, 1), ("2", 1, 1),
    ]  # fmt: skip
    assert not report.partitions
    with pytest.raises(WrongInput, match="need a topic"):
        audit_pair(spark, pair, until=T0)
    same = parse_pair(f"parquet:{tmp_path / 'a'}", f"parquet:{tmp_path / 'a'}", {"id": "id"})
    assert audit_pair(spark, same).verdict == "clean"
    for spec in (f"parquet:{tmp_path / 'nowhere'}", "nosuchformat:/x"):
        with pytest.raises(ConfigError, match="left: Spark can't read"):
            audit_pair(spark, parse_pair(spec, f"parquet:{tmp_path / 'a'}", {"id": "id"}))


def test_a_topic_against_a_topic_with_a_sampled_schema(other: Callable[..., Other]) -> None:
    one = other()
    one.send(*({"id": f"k{n}", "n": {"x": n}} for n in range(20)))
    left = f"kafka:{one.topic}?brokers={one.broker.bootstrap}"
    pair = parse_pair(left, left, {"id_left": "value.n.x", "id_right": "n.x"})
    assert audit_pair(one.spark, pair).verdict == "clean"
    pair = parse_pair(left, left, {"id_left": "kafka_value", "id_right": "kafka_value"})
    assert audit_pair(one.spark, pair).verdict == "clean"


def test_a_topic_that_is_missing(other: Callable[..., Other]) -> None:
    one = other()
    one.topic = "no-such-topic-anywhere"
    with pytest.raises(ConfigError, match=r"left\.topic: no such topic"):
        one.audit()
