"""`oncely rejects discard`: whole or not at all when it is killed; audits stay clean."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.pipeline.rejects import RejectFilter
from oncely.testing.faults import KillAt
from oncely.testing.servers.kafka import Broker
from tests.audittools import BAD, AuditWorld
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.zygote import Zygote, kills
from tests.sinktools import Place, losing_first_commit, through
from tests.verifytools import verified

HOUR = 3_600_000


@pytest.fixture
def world(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> AuditWorld:
    """Seven records, of which four were rejected: offsets 3 to 5, and 0 of the other partition."""
    world = AuditWorld(broker.bootstrap, place, make_topic(partitions=2), tmp_path)
    world.publish(range(3))
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for partition in (0, 0, 0, 1):
        producer.produce(world.topic, BAD, b"secret", partition)
    assert producer.flush(20) == 0
    world.run()
    return world


def pending(world: AuditWorld) -> int:
    """The number of dead letters with content; the others have none at all."""
    rows = world.sql('SELECT "key", "value", stage FROM oncely_rejects')
    assert {row for row in rows if row[2] == "discarded"} <= {(None, None, "discarded")}
    assert len(rows) == 4
    return sum(1 for row in rows if bytes(row[1] or b"") == BAD)


def test_the_commands(world: AuditWorld) -> None:
    file = world.file()
    which = ("--partition", f"{world.topic}:0", "--reason", "json", "--since", "1h")
    planned = oncely_json("rejects", "discard", file, *which)
    reasons = [{"reason": "no JSON", "rejects": 3}]
    assert planned == {"discarded": 3, "executed": False, "reasons": reasons}
    shown = oncely("rejects", "discard", file, *which)
    assert "3 rejects would be discarded" in shown.stdout
    assert "--yes" in shown.stderr
    assert pending(world) == 4

    assert oncely_json("rejects", "discard", file, "--before", "1h")["discarded"] == 0
    assert "3 rejects discarded" in oncely("rejects", "discard", file, *which, "--yes").stdout
    assert pending(world) == 1
    listed = oncely_json("rejects", "list", file)
    assert [(one["partition"], one["offset"]) for one in listed["rejects"]] == [(1, 0)]
    gone = oncely_json("rejects", "list", file, "--discarded")
    assert [(one["offset"], one["key"], one["value"]) for one in gone["rejects"]] == [
        (n, None, None) for n in (3, 4, 5)
    ]
    assert "3 discarded rejects" in oncely("rejects", "list", file, "--discarded").stdout
    assert oncely_json("status", file)["rejects"] == 1
    assert oncely_json("rejects", "replay", file) == {"moved": 0, "kept": 1}
    assert_accounted(world)


def assert_accounted(world: AuditWorld) -> None:
    report = world.audit()
    assert (report.verdict, report.records, report.accounted) == ("clean", 7, 7)
    assert report.found == {}
    assert not verified(parse(world.settings())).broken


def test_killed_before_and_after_each_kind_of_statement(world: AuditWorld, zygote: Zygote) -> None:
    world.sql("CREATE TABLE kept_rejects AS SELECT * FROM oncely_rejects")
    settings = world.settings()
    ended = zygote.run(discard, settings, {})
    assert not ended.error, ended.error
    found, calls = ended.value
    assert (found, pending(world)) == (4, 0)
    for kill in kills(calls, every=False):
        world.sql("DELETE FROM oncely_rejects")
        world.sql("INSERT INTO oncely_rejects SELECT * FROM kept_rejects")
        died = zygote.run(discard, settings, kill)
        assert died.signal == signal.SIGKILL, died.error
        assert pending(world) in (0, 4)
        assert_accounted(world)


def discard(settings: dict[str, Any], kill: dict[str, Any]) -> Any:
    """Discard all, dying where ``kill`` says; and the calls that it took."""
    plan = KillAt(**{"call": -1, "armed_by": "BEGIN", **kill})
    pipeline = Pipeline(parse(settings)).replaced(connect=plan)
    return pipeline.discard(RejectFilter(), execute=True).total, plan.counter.seen


def test_an_answer_that_is_lost(world: AuditWorld) -> None:
    lost: list[str] = []
    connect = through(losing_first_commit(lost))
    Pipeline(parse(world.settings())).replaced(connect=connect).discard(
        RejectFilter(), execute=True
    )
    assert (lost, pending(world)) == (["commit"], 0)
    assert_accounted(world)


def test_an_hour_is_of_the_record(world: AuditWorld) -> None:
    """The age is that of the record, not of its rejection."""
    earlier = f"timestamp_ms = timestamp_ms - {3 * HOUR}"
    world.sql(f'UPDATE oncely_rejects SET {earlier} WHERE "offset" = 4')
    world.sql('UPDATE oncely_rejects SET timestamp_ms = NULL WHERE "offset" = 5')
    done = oncely_json("rejects", "discard", world.file(), "--before", "2 hours", "--yes")
    assert done["discarded"] == 1
    assert pending(world) == 3


def test_before_the_first_run(
    broker: Broker, topic_name: str, place: Place, tmp_path: Path
) -> None:
    world = AuditWorld(broker.bootstrap, place, topic_name, tmp_path)
    for arguments in (("discard", "--yes"), ("list", "--discarded")):
        verb, *rest = arguments
        assert oncely("rejects", verb, world.file(), *rest).stdout.strip().startswith("0 ")
