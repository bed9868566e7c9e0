"""`oncely audit` on real servers: every kind of damage is named, legal holes are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncely.audit import audit, sql
from oncely.audit.report import Finding
from oncely.config import parse
from oncely.core.ranges import OffsetRange
from oncely.errors import ConfigError, TopicMissing, WrongInput
from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests.audittools import BAD, AuditWorld, Kept, Parts, found, value
from tests.scenarios.commands import oncely, oncely_json
from tests.sinktools import Place


def publish(world: AuditWorld) -> None:
    """Two partitions with aborted records, markers and a bad record."""
    world.publish(range(20))
    world.in_transaction(range(20, 25), commit=True)
    world.in_transaction(range(90, 95), commit=False)
    world.produce([(0, b"bad", BAD)])
    world.publish(range(25, 30))
    world.publish(range(100, 110), partition=1)


@pytest.fixture(scope="module")
def committed(parts: Callable[..., Parts]) -> Kept[AuditWorld]:
    world = AuditWorld(*parts(2))
    publish(world)
    world.run()
    return Kept(world)


@pytest.fixture
def world(committed: Kept[AuditWorld]) -> Iterator[AuditWorld]:
    """The topic's records, committed as a whole; the test may change rows of all tables."""
    with committed as world:
        yield world


@pytest.fixture
def alone(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> AuditWorld:
    """The same with a topic and tables of its own, which the test may change."""
    world = AuditWorld(broker.bootstrap, place, make_topic(partitions=2), tmp_path)
    publish(world)
    world.run()
    return world


def test_clean(world: AuditWorld) -> None:
    report = world.audit()
    assert (report.verdict, report.found, report.undecided) == ("clean", {}, [])
    assert (report.records, report.accounted) == (41, 41)
    assert report.holes == 1 + 5 + 1  # a marker, aborted records, their marker
    assert [(one.compared.end, one.records) for one in report.partitions] == [(38, 31), (10, 10)]
    assert report.complete_until.wall_time == report.at
    assert all(not one.differing for one in report.partitions)


def test_the_command(world: AuditWorld) -> None:
    whole = oncely_json("audit", world.file())
    assert (whole["verdict"], whole["records"], whole["accounted"], whole["holes"]) == (
        "clean", 41, 41, 7
    )  # fmt: skip
    assert whole["lost"] == whole["duplicated"] == whole["altered"] == whole["unexpected"] == []
    shown = oncely("audit", world.file()).stdout
    assert shown.startswith("clean")
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset IN (3, 4, 5, 9)")
    shown = oncely("audit", world.file(), expect=1).stdout
    assert shown.startswith("damaged")
    assert f"{world.tp()} offset 3 to 5, 9: neither a row nor a dead letter" in shown
    limited = oncely_json("audit", world.file(), "--limit", 2, expect=1)
    assert [one["offset"] for one in limited["lost"]] == [3, 4]
    assert limited["found"]["lost"] == 4


def test_lost_rows_and_dead_letters(world: AuditWorld) -> None:
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset IN (4, 21)")
    world.sql("DELETE FROM rows WHERE kafka_partition = 1 AND kafka_offset = 9")
    world.sql("DELETE FROM oncely_rejects")
    report = world.audit()
    assert report.verdict == "damaged"
    assert found(report) == {"lost": [(0, 4), (0, 21), (0, 32), (1, 9)]}
    assert (report.records, report.accounted) == (41, 37)
    assert report.complete_until.event_time is not None


def test_duplicated_rows(world: AuditWorld) -> None:
    world.sql("INSERT INTO rows SELECT * FROM rows WHERE kafka_partition = 0 AND kafka_offset = 7")
    reject = "SELECT id, name, kafka_topic, kafka_partition, 32 FROM rows WHERE id = 3"
    world.sql(f"INSERT INTO rows {reject}")  # the dead letter's offset
    report = world.audit()
    assert found(report) == {"duplicated": [(0, 7), (0, 32)]}
    details = [one.detail for one in report.findings]
    assert details == ["2 rows instead of 1", "a row and a dead letter"]


def test_one_lost_and_another_twice(world: AuditWorld) -> None:
    """The number of rows is right."""
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset = 3")
    world.sql("INSERT INTO rows SELECT * FROM rows WHERE kafka_partition = 0 AND kafka_offset = 4")
    assert found(world.audit()) == {"lost": [(0, 3)], "duplicated": [(0, 4)]}


def test_an_offset_with_digits_after_the_point_is_of_no_record(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> None:
    world = AuditWorld(broker.bootstrap, place, make_topic(partitions=1), tmp_path)
    type_, strict = ("numeric", "") if place.is_postgres else ("REAL", " STRICT")
    own = f"id INT, name TEXT, kafka_topic TEXT, kafka_partition INT, kafka_offset {type_}"
    world.sql(f"CREATE TABLE rows ({own}){strict}")
    world.publish(range(10))
    world.run()
    assert world.audit().verdict == "clean"
    world.sql("UPDATE rows SET kafka_offset = 5.25 WHERE kafka_offset = 5")
    assert found(world.audit()) == {"lost": [(0, 5)], "unexpected": [(0, None)]}


@pytest.mark.parametrize(
    ("offset", "where"),
    [(20 + 5, "a marker"), (20 + 6, "an aborted record"), (500, "beyond the position")],
)
def test_unexpected_rows(world: AuditWorld, offset: int, where: str) -> None:
    world.sql("INSERT INTO rows SELECT id, name, kafka_topic, 0, ? FROM rows WHERE id = 3", offset)
    assert found(world.audit()) == {"unexpected": [(0, offset)]}, where


def test_rows_of_other_partitions_and_without_an_offset(world: AuditWorld) -> None:
    world.sql("INSERT INTO rows SELECT id, name, kafka_topic, 7, 1 FROM rows WHERE id = 3")
    world.sql("INSERT INTO rows (id, name) VALUES (1, 'written by hand')")
    assert sorted(found(world.audit())["unexpected"]) == [(-1, None), (7, 1)]


def test_the_position_was_moved_forward(alone: AuditWorld) -> None:
    alone.publish(range(200, 205), partition=1)
    alone.sql('UPDATE oncely_positions SET "position" = 13 WHERE "partition" = 1')
    report = alone.audit()
    assert found(report) == {"lost": [(1, 10), (1, 11), (1, 12)]}


@pytest.mark.parametrize("keep_source", [True, False])
def test_records_that_a_reset_passed_over_are_not_lost(
    broker: Broker,
    make_topic: Callable[..., str],
    on_sqlite: Place,
    tmp_path: Path,
    keep_source: bool,
) -> None:
    world = AuditWorld(broker.bootstrap, on_sqlite, make_topic(), tmp_path, keep_source)
    world.publish(range(10))
    world.run()
    world.publish(range(10, 20))
    world.reset({world.tp(): 14})
    world.run()
    report = world.audit()
    assert (report.verdict, report.found, report.records) == ("clean", {}, 16)
    assert any("[10, 14) was passed over by a reset" in one for one in report.limits)
    world.sql("DELETE FROM rows WHERE id IN (3, 17)")
    report = world.audit()
    assert (report.verdict, sum(report.found.values())) == ("damaged", 2)


def test_the_position_was_moved_back(world: AuditWorld) -> None:
    world.sql('UPDATE oncely_positions SET "position" = 8 WHERE "partition" = 1')
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {}), "the rows are those of their records"
    (left,) = [one for one in report.undecided if "does not account for 2 rows" in one.reason]
    assert (left.partition, left.range) == (world.tp(1), OffsetRange(8, 10))
    assert "beyond the position, 8" in left.reason


def test_the_position_is_beyond_the_topic(world: AuditWorld) -> None:
    world.sql('UPDATE oncely_positions SET "position" = 12 WHERE "partition" = 1')
    report = world.audit()
    assert report.verdict == "unknown"
    assert "beyond the end of the topic, 10" in report.undecided[0].reason


def test_another_cluster(world: AuditWorld) -> None:
    world.sql("UPDATE oncely_pipelines SET cluster_id = 'other'")
    report = world.audit()
    assert report.verdict == "unknown"
    assert "Kafka cluster other" in report.undecided[0].reason


def test_the_topic_was_made_again(alone: AuditWorld, broker: Broker) -> None:
    broker.delete_topic(alone.topic)
    with pytest.raises(TopicMissing):
        alone.audit()
    broker.create_topic(alone.topic, 2)
    alone.publish(range(50), partition=0)
    report = alone.audit()
    assert report.verdict == "unknown"
    reasons = {one.partition.partition: one.reason for one in report.undecided if one.partition}
    assert sorted(reasons) == [0, 1]
    assert all("deleted and made again" in one or "no longer" in one for one in reasons.values())
    assert report.accounted == 41, "what has a row or a dead letter"


def test_retention_with_every_offset_covered(alone: AuditWorld, broker: Broker) -> None:
    broker.delete_records(alone.topic, {0: 15, 1: 10})
    report = alone.audit()
    assert (report.verdict, report.accounted) == ("clean", 41)


def test_retention_beyond_holes(alone: AuditWorld, broker: Broker) -> None:
    """The topic no longer shows that the offsets without a row were holes."""
    broker.delete_records(alone.topic, {0: 35})
    report = alone.audit()
    assert report.verdict == "unknown"
    ranges = [(one.range.start, one.range.end) for one in report.undecided if one.range]
    assert min(ranges)[0] == 25
    assert max(ranges)[1] == 32


def test_retention_after_a_loss(alone: AuditWorld, broker: Broker) -> None:
    """The ledger still counts the lost record."""
    alone.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset = 4")
    broker.delete_records(alone.topic, {0: 15})
    report = alone.audit()
    assert report.verdict == "damaged"
    assert found(report) == {"lost": [(0, 4)]}


def test_until(world: AuditWorld) -> None:
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset = 4")
    early = oncely_json("audit", world.file(), "--until", "2020-01-01T00:00:00Z")
    assert (early["verdict"], early["records"]) == ("clean", 0)
    late = oncely_json("audit", world.file(), "--until", "2100-01-01", expect=1)
    assert late["records"] == 41
    wrong = oncely("audit", world.file(), "--until", "yesterday", expect=2)
    assert "ISO 8601" in wrong.stderr


def test_a_history_in_disorder(world: AuditWorld) -> None:
    world.sql('UPDATE oncely_ranges SET epoch = 9 WHERE "partition" = 0 AND range_start = 7')
    report = world.audit()
    assert report.verdict == "unknown"
    assert "not in order" in report.undecided[0].reason


def test_what_can_not_be_audited(alone: AuditWorld) -> None:
    elsewhere: dict[str, Any] = {"delivery": "at_least_once", "offsets": {"store": "kafka"}}
    with pytest.raises(ConfigError, match="not beside the rows"):
        audit(Pipeline(parse({**alone.settings(), **elsewhere})))
    alone.sql("UPDATE oncely_pipelines SET pipeline = 'other'")
    with pytest.raises(WrongInput, match="no pipeline"):
        alone.audit()
    alone.sql("DROP TABLE oncely_positions")
    with pytest.raises(WrongInput, match="there is no table"):
        alone.audit()


def test_an_audit_beside_a_running_pipeline(
    alone: AuditWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits, new records and a takeover between the snapshot and the look at the topic."""
    real = sql.open_evidence

    def meanwhile(*args: Any, **more: Any) -> Any:
        evidence = real(*args, **more)
        if alone.place.is_postgres:
            alone.publish(range(300, 320))
            alone.in_transaction(range(320, 325), commit=False)
            alone.run()
        else:  # SQLite's readers do not wait for a writer in WAL mode, and see their snapshot
            alone.publish(range(300, 320))
            alone.run()
        return evidence

    monkeypatch.setattr(sql, "open_evidence", meanwhile)
    report = alone.audit()
    assert (report.verdict, report.records) == ("clean", 41)
    assert all(one.compared.end <= one.end for one in report.partitions)
    monkeypatch.undo()
    assert alone.audit().records == 61


def test_nothing_is_written_by_a_reader(
    broker: Broker, make_topic: Callable[..., str], on_postgres: Place, tmp_path: Path
) -> None:
    """SELECT is enough, and without it the error names the tables."""
    world = AuditWorld(broker.bootstrap, on_postgres, make_topic(), tmp_path)
    world.publish(range(5))
    world.run()
    role = f"reader_{on_postgres.schema}"
    world.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    world.sql(f"GRANT USAGE ON SCHEMA {on_postgres.schema} TO {role}")
    url = on_postgres.url.replace("://", f"://{role}:secret@", 1)
    if "@" in on_postgres.url:
        head, _, tail = on_postgres.url.partition("@")
        url = f"{head.partition('://')[0]}://{role}:secret@{tail}"
    refused = oncely("audit", world.file(sink={"url": url}), expect=2)
    assert "may not read" in refused.stderr
    assert "GRANT SELECT" in refused.stderr
    world.sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {on_postgres.schema} TO {role}")
    assert oncely_json("audit", world.file(sink={"url": url}))["verdict"] == "clean"
    world.sql("ALTER TABLE rows ENABLE ROW LEVEL SECURITY")
    hidden = oncely("audit", world.file(sink={"url": url}), expect=2)
    assert "row-level security" in hidden.stderr
    world.sql(f"DROP OWNED BY {role}")
    world.sql(f"DROP ROLE {role}")


def test_records_before_the_start_are_not_compared(
    broker: Broker, make_topic: Callable[..., str], on_sqlite: Place, tmp_path: Path
) -> None:
    world = AuditWorld(broker.bootstrap, on_sqlite, make_topic(), tmp_path)
    world.publish(range(10))
    world.run(fence=world.open({world.tp(): 6}))
    report = world.audit()
    assert (report.verdict, report.records) == ("clean", 4)
    world.sql("UPDATE rows SET kafka_offset = 2 WHERE kafka_offset = 7")
    assert found(world.audit()) == {"lost": [(0, 7)], "unexpected": [(0, 2)]}


def test_compacted(
    broker: Broker, make_topic: Callable[..., str], on_sqlite: Place, tmp_path: Path
) -> None:
    """A record that was compacted after its commit, and one that was compacted before."""
    topic = make_topic(
        config={
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.01",
            "max.compaction.lag.ms": "100",
        }
    )
    world = AuditWorld(broker.bootstrap, on_sqlite, topic, tmp_path)
    world.publish(range(10))
    world.run()
    world.publish(range(5))  # the same keys again
    compaction(world, gone=range(5))
    world.run()
    report = world.audit()
    ((rows,),) = world.sql("SELECT COUNT(*) FROM rows")
    assert (report.verdict, report.records, report.accounted) == ("clean", rows, rows)
    assert rows + report.holes == world.ends()[world.tp()]
    assert rows > len(messages(world.brokers, world.topic))


def compaction(world: AuditWorld, gone: range) -> None:
    """Wait until the broker has removed records."""

    def removed() -> bool:
        world.publish([1_000])  # rolls the segment
        left = {one.offset() for one in messages(world.brokers, world.topic)}
        return not left & set(gone)

    await_that(removed, "the compaction", timeout=120)


# -- values --------------------------------------------------------------------------------


def test_altered_rows(world: AuditWorld) -> None:
    world.sql("UPDATE rows SET name = 'other' WHERE kafka_partition = 0 AND kafka_offset = 5")
    world.sql("UPDATE rows SET id = id + 1 WHERE kafka_partition = 1 AND kafka_offset = 3")
    world.sql("UPDATE rows SET name = NULL WHERE kafka_partition = 1 AND kafka_offset = 4")
    report = world.audit()
    assert found(report) == {"altered": [(0, 5), (1, 3), (1, 4)]}
    assert (report.verdict, report.records, report.accounted) == ("damaged", 41, 38)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('"value" = CAST(\'{"id": 7}\' AS BYTES)', "another value"),
        ('"value" = NULL', "another value"),
        ("\"key\" = CAST('k' AS BYTES)", "another key"),
        ("headers = '[[\"h\", null]]'", "another headers"),
        ("headers = 'none'", "another headers"),
        ("timestamp_ms = 1", "another timestamp"),
        ("stage = 'handled'", "another stage: handled"),
        ("stage = 'discarded'", "another key and value"),
    ],
)
def test_an_altered_dead_letter(world: AuditWorld, change: str, named: str) -> None:
    world.sql(f"UPDATE oncely_rejects SET {change.replace('BYTES', world.bytes)}")
    report = world.audit()
    assert found(report) == {"altered": [(0, 32)]}
    assert named in report.findings[0].detail
    assert (report.verdict, report.records, report.accounted) == ("damaged", 41, 40)


def test_a_replay_takes_the_record_of_the_topic_and_not_an_altered_dead_letter(
    world: AuditWorld,
) -> None:
    content = 'SELECT timestamp_ms, "key", "value", headers FROM oncely_rejects'
    kept = world.sql(content)
    forged = 'UPDATE oncely_rejects SET "key" = ?, "value" = ?, headers = ?, timestamp_ms = 1'
    world.sql(forged, b"", value(7), "[]")
    assert Pipeline(parse(world.settings())).replay() == (0, 1)
    assert world.sql("SELECT count(*) FROM rows WHERE id = 7") == [(1,)]
    assert world.sql(content) == kept
    assert world.audit().verdict == "clean"


def test_a_repair_puts_the_content_of_a_dead_letter_right(world: AuditWorld) -> None:
    content = 'SELECT timestamp_ms, "key", "value", headers FROM oncely_rejects'
    kept = world.sql(content)
    world.sql('UPDATE oncely_rejects SET "value" = ?', value(7))
    altered = [Finding(f.partition, f.offset, f.kind) for f in world.audit().findings]
    Pipeline(parse(world.settings())).repair(altered, execute=True)
    assert world.sql(content) == kept
    assert world.audit().verdict == "clean"


def test_the_stage_of_a_dead_letter_that_is_refused_for_its_reason(world: AuditWorld) -> None:
    (refused,) = world.refusals()
    world.sql("UPDATE oncely_rejects SET reason = ?", refused.reason)
    assert world.audit().verdict == "clean"
    world.sql("UPDATE oncely_rejects SET stage = 'write'")
    report = world.audit()
    assert found(report) == {"altered": [(0, 32)]}
    assert "another stage: write" in report.findings[0].detail


def test_dead_letters_whose_records_are_gone_are_told(alone: AuditWorld, broker: Broker) -> None:
    broker.delete_records(alone.topic, {0: 33})
    alone.sql('UPDATE oncely_rejects SET "value" = NULL')
    report = alone.audit()
    assert report.findings == []
    assert "1 dead letters can't be compared" in report.limits[-1]


def test_rows_that_exchanged_their_values(world: AuditWorld) -> None:
    world.sql("UPDATE rows SET id = 15 - id WHERE kafka_partition = 0 AND kafka_offset IN (7, 8)")
    assert found(world.audit()) == {"altered": [(0, 7), (0, 8)]}


def test_altered_beside_lost_rows(world: AuditWorld) -> None:
    world.sql("UPDATE rows SET name = 'other' WHERE kafka_partition = 0 AND kafka_offset = 5")
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset IN (6, 21)")
    assert found(world.audit()) == {"lost": [(0, 6), (0, 21)], "altered": [(0, 5)]}


def test_altered_rows_of_deleted_records(alone: AuditWorld, broker: Broker) -> None:
    """The topic can't say which row it is."""
    broker.delete_records(alone.topic, {0: 15})
    alone.sql("UPDATE rows SET name = 'other' WHERE kafka_partition = 0 AND kafka_offset = 5")
    report = alone.audit()
    assert found(report) == {"altered": [(0, None)]}
    assert "[0, 7)" in report.findings[0].detail


def test_a_history_without_digests(world: AuditWorld) -> None:
    """The values are recomputed from the topic."""
    world.sql("UPDATE oncely_ranges SET digest = NULL, recipe = NULL")
    assert world.audit().verdict == "clean"
    world.sql("UPDATE rows SET name = 'other' WHERE kafka_partition = 0 AND kafka_offset = 5")
    report = world.audit()
    assert report.verdict == "unknown", "the transform may have changed since"
    assert "no digest" in report.undecided[0].reason


def test_a_filter_that_came_after_a_history_without_digests(world: AuditWorld) -> None:
    """Rows that it drops today were right."""
    world.sql("UPDATE oncely_ranges SET digest = NULL, recipe = NULL")
    report = world.audit(sections={"transform": {"sql": "SELECT * FROM input WHERE id <> 5"}})
    assert (report.verdict, report.found) == ("unknown", {})


def test_a_transform_that_changed_since(world: AuditWorld) -> None:
    """The digest of the history counts, not what today's transform gives."""
    sections = {"transform": {"sql": "SELECT id + 1 AS id, name FROM input"}}
    assert world.audit(sections=sections).verdict == "clean"
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset = 4")
    report = world.audit(sections=sections)
    assert found(report) == {"lost": [(0, 4)]}
    assert "today's" in report.undecided[0].reason


def test_an_altered_digest_in_the_history(world: AuditWorld) -> None:
    world.sql('UPDATE oncely_ranges SET digest = 1 WHERE "partition" = 1 AND range_start = 0')
    report = world.audit()
    assert report.verdict == "unknown"
    assert "give today" in report.undecided[0].reason


def test_a_column_whose_type_changed(alone: AuditWorld) -> None:
    if not alone.place.is_postgres:
        alone.sql("ALTER TABLE rows RENAME COLUMN name TO title")
    else:
        alone.sql("ALTER TABLE rows ALTER COLUMN id TYPE text")
    report = alone.audit()
    assert (report.verdict, report.found) == ("unknown", {})
    assert "can't be recomputed" in report.undecided[0].reason


@pytest.fixture(scope="module")
def filtered(parts: Callable[..., Parts]) -> Kept[AuditWorld]:
    world = AuditWorld(*parts(), expand=expand)
    world.publish(range(30))
    world.run()
    return Kept(world)


@pytest.fixture
def filtering(filtered: Kept[AuditWorld]) -> Iterator[AuditWorld]:
    """A transform that drops odd numbers, and makes two rows of each multiple of ten."""
    with filtered as world:
        yield world


SECTIONS = {
    "transform": {
        "sql": "SELECT id, name FROM (SELECT *, UNNEST(CASE WHEN id % 2 = 1 THEN []"
        " WHEN id % 10 = 0 THEN [1, 2] ELSE [1] END) FROM input)"
    }
}


def expand(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if row["id"] % 2 else [row, row] if row["id"] % 10 == 0 else [row]


def test_filtered_records_and_several_rows(filtering: AuditWorld) -> None:
    report = filtering.audit(sections=SECTIONS)
    assert (report.verdict, report.records, report.accounted) == ("clean", 30, 30)
    filtering.sql("DELETE FROM rows WHERE id = 4")
    assert found(filtering.audit(sections=SECTIONS)) == {"lost": [(0, 4)]}


@pytest.mark.parametrize("keep_source", [True, False])
def test_a_changed_amendment_of_the_ledger_is_no_lost_record(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path, keep_source: bool
) -> None:
    topic = make_topic(partitions=1)
    world = AuditWorld(broker.bootstrap, place, topic, tmp_path, keep_source, expand)
    world.publish(range(20))
    world.run()
    world.sql(
        'INSERT INTO oncely_amendments (pipeline, topic, "partition", amendment, range_start,'
        " range_end, epoch, kind, records, written, rejected, filtered, digest, recipe)"
        " SELECT pipeline, topic, \"partition\", 'a', 7, 8, epoch, 'replay', 1, 1, 0, 0, 0, recipe"
        " FROM oncely_ranges WHERE range_start = 7"
    )
    broker.delete_records(topic, {0: 18})
    report = world.audit(sections=SECTIONS)
    assert (report.verdict, report.found) == ("unknown", {})
    assert any("in its amendments or ranges" in one.reason for one in report.undecided)


def test_a_filter_that_changed_since(filtering: AuditWorld) -> None:
    """The rows are those that were committed, and as many records as then have none."""
    report = filtering.audit(sections={})
    assert (report.verdict, report.records, report.accounted) == ("clean", 30, 30)
    filtering.sql("DELETE FROM rows WHERE id = 4")
    assert filtering.audit(sections={}).verdict == "damaged"


def test_one_of_several_rows_is_lost_or_there_again(filtering: AuditWorld) -> None:
    row = "SELECT MIN(ctid) FROM rows" if filtering.place.is_postgres else (
        "SELECT MIN(rowid) FROM rows"
    )  # fmt: skip
    name = "ctid" if filtering.place.is_postgres else "rowid"
    filtering.sql(f"DELETE FROM rows WHERE {name} IN ({row} WHERE id = 10)")
    filtering.sql(f"INSERT INTO rows SELECT * FROM rows WHERE {name} IN ({row} WHERE id = 20)")
    report = filtering.audit(sections=SECTIONS)
    assert found(report) == {"lost": [(0, 10)], "duplicated": [(0, 20)]}
    assert [one.detail for one in report.findings] == [
        "3 rows instead of 2", "1 rows instead of 2"
    ]  # fmt: skip


def test_a_row_of_a_filtered_record(filtering: AuditWorld) -> None:
    filtering.sql("UPDATE rows SET kafka_offset = 5 WHERE kafka_offset = 6")
    assert found(filtering.audit(sections=SECTIONS)) == {"lost": [(0, 6)], "unexpected": [(0, 5)]}


def test_filters_that_can_not_be_recomputed(filtering: AuditWorld) -> None:
    filtering.sql("DELETE FROM rows WHERE id = 4")
    report = audit(filtering.file(**SECTIONS))
    assert (report.verdict, report.found) == ("damaged", {"lost": 2})


# -- rows without offsets ------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_content(parts: Callable[..., Parts]) -> Kept[AuditWorld]:
    world = AuditWorld(*parts(), keep_source=False)
    world.publish(range(20))
    world.produce([(0, b"bad", BAD)])
    world.in_transaction(range(20, 25), commit=True)
    world.run()
    return Kept(world)


@pytest.fixture
def without(by_content: Kept[AuditWorld]) -> Iterator[AuditWorld]:
    """A table whose rows do not contain their offsets."""
    with by_content as world:
        yield world


def test_clean_by_content(without: AuditWorld) -> None:
    report = without.audit()
    assert (report.verdict, report.proof, report.found) == ("clean", "content", {})
    assert (report.records, report.accounted, report.holes) == (26, 26, 1)


def test_damage_by_content(without: AuditWorld) -> None:
    """Records are named by the values of their rows."""
    without.sql("DELETE FROM rows WHERE id = 4")
    without.sql("INSERT INTO rows SELECT * FROM rows WHERE id = 7")
    assert found(without.audit()) == {"lost": [(0, 4)], "duplicated": [(0, 7)]}
    without.sql("UPDATE rows SET name = 'other' WHERE id = 9")
    report = without.audit()
    assert report.verdict == "damaged"
    assert (0, 9) in {*found(report).get("altered", []), *found(report)["lost"]}


def test_content_without_digests_in_the_history(without: AuditWorld) -> None:
    without.sql("UPDATE oncely_ranges SET digest = NULL, recipe = NULL")
    assert without.audit().verdict == "clean", "by today's decode and transform"
    report = audit(without.file())
    assert (report.verdict, report.proof) == ("unknown", "counts")
    without.sql("DELETE FROM rows WHERE id = 4")
    assert audit(without.file()).found == {"lost": 1}


def test_content_up_to_a_time_is_refused(without: AuditWorld) -> None:
    refused = oncely("audit", without.file(), "--until", "2100-01-01", expect=2)
    assert "without offsets" in refused.stderr
