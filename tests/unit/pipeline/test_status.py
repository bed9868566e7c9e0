"""OK, WARN or STALL: by the time for which records have waited without a commit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.config import FilterSettings
from oncely.core.ranges import SourceIdentity, TopicPartition
from oncely.kafka.source import PartitionLag
from oncely.kinds.destination import LedgerState
from oncely.pipeline import status
from oncely.pipeline.status import Status
from oncely.stores.sql import tables as activity
from oncely.stores.sql.tables import Activity

NOW = datetime(2026, 11, 23, 6, tzinfo=UTC)


def lag(offsets: int, seconds: float | None) -> PartitionLag:
    return PartitionLag("t", 0, 10, 10 + offsets, offsets, seconds)


def judged(
    behind: list[PartitionLag], epoch: int, activity: Activity | None, waits: float = 0.0
) -> tuple[str, str]:
    found = Status(tuple(behind), 0, epoch, activity=activity, waits=waits).judgement
    return found.state, found.reason


def committed(seconds: float | None) -> Activity:
    at = None if seconds is None else NOW - timedelta(seconds=seconds)
    return Activity(at, seconds, 1.0)


@pytest.mark.parametrize(
    ("behind", "epoch", "activity", "state"),
    [
        (lag(0, 0.0), 3, committed(90_000), "OK"),      # nothing to do
        (lag(5, 2.0), 3, committed(90_000), "OK"),      # a record after an idle time
        (lag(5, 60.0), 3, committed(90_000), "OK"),
        (lag(5, 61.0), 3, committed(90_000), "WARN"),
        (lag(5, 300.0), 3, committed(90_000), "WARN"),
        (lag(5, 301.0), 3, committed(90_000), "STALL"),
        (lag(5, 90_000.0), 3, committed(301), "STALL"),
        (lag(5, 90_000.0), 3, committed(61), "WARN"),
        (lag(5, 90_000.0), 3, committed(1), "WARN"),    # it works off a backlog
        (lag(5, 200.0), 3, committed(1), "OK"),
        (lag(5, None), 3, committed(90_000), "OK"),     # markers of transactions only
        (lag(5, 90_000.0), 3, None, "WARN"),            # the ledger stores no times
        (lag(5, 90_000.0), 0, None, "WARN"),
        (lag(5, 90_000.0), 3, committed(None), "WARN"), # it has opened, and not committed
    ],
)  # fmt: skip
def test_the_verdict(
    behind: PartitionLag, epoch: int, activity: Activity | None, state: str
) -> None:
    found, reason = judged([lag(0, 0.0), behind], epoch, activity)
    assert found == state
    assert bool(reason) == (state != "OK")


def test_a_partition_without_commits_beside_others() -> None:
    t0, t1 = TopicPartition("t", 0), TopicPartition("t", 1)
    behind = [lag(5, 900.0), lag(7, 800.0)._replace(partition=1)]
    works = Activity(NOW, 1.0, 1.0, {t0: 1.0, t1: 299.0})
    assert judged(behind, 3, works) == ("WARN", "900 s behind")
    stands = replace(works, partitions={t0: 1.0, t1: 301.0})
    assert judged(behind, 3, stands) == (
        "WARN",
        "no commit of t-1 for 301 s, and 7 offsets are left",
    )
    never = replace(works, partitions={t0: 1.0})
    assert judged(behind, 3, never)[1] == "no commit of t-1 for 800 s, and 7 offsets are left"


def test_records_that_wait_as_a_filter_says_are_no_stall() -> None:
    behind, idle = [lag(5, 650.0)], committed(600.0)
    assert judged(behind, 3, idle)[0] == "STALL"
    said = "its filter makes records wait for 600 s"
    assert judged(behind, 3, idle, waits=600.0) == ("OK", said)


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [(660.0, "running"), (661.0, "behind"), (900.0, "behind"), (901.0, "stalled")],
)
def test_records_wait_for_the_next_batch(seconds: float, kind: str) -> None:
    found = Status((lag(5, seconds),), 0, 3, activity=committed(seconds), pause=600.0)
    assert found.judgement.kind == kind


@pytest.mark.parametrize(("oldest", "told"), [(1.0, ""), (2.0, "short"), (90.0, "short; long")])
def test_limits_of_commits_are_named_where_records_have_waited_for_longer(
    oldest: float, told: str
) -> None:
    lags = (lag(0, 0.0), lag(5, oldest), lag(3, None))
    said = status._limited({"short": 1.5, "long": 30.0}, lags)
    assert said == told
    found = Status(lags, 0, 3, (), committed(1), limited=said).judgement
    assert (found.reason, found.sentence.endswith(told)) == (told, True)
    late = Status((lag(5, 900.0),), 0, 3, (), committed(1), limited=told).judgement
    assert late.reason == "; ".join(filter(None, ("900 s behind", told)))


def test_what_the_next_start_would_refuse_is_a_warning() -> None:
    status = Status((lag(0, 0.0),), 0, 3, ("topic t was recreated",), committed(1))
    said = "Before the next start: topic t was recreated"
    assert status.judgement == ("refused", "topic t was recreated", said)
    assert (status.as_json()["state"], status.judgement.code) == ("WARN", 2)


@pytest.mark.parametrize(
    ("status", "kind", "state", "level", "code", "sentence"),
    [
        (Status((lag(0, 0.0),), 0, 3), "current", "OK", "fine", 0, "All records are committed"),
        (Status((lag(0, 0.0)._replace(position=None),), 0, 0), "never ran", "WARN", "unknown", 1,
         "It has never run"),
        (Status((lag(5, 2.0),), 0, 3), "running", "OK", "busy", 0,
         "Behind by 5 offsets; the oldest record waits for 2 s"),
        (Status((lag(5, 2.0),), 0, 3, members={"g": [], "h": []}), "running", "OK", "busy", 0,
         "Behind by 5 offsets; the oldest record waits for 2 s;"
         " no worker is there, and no run that stands by"),
        (Status((lag(5, 2.0),), 1, 3), "dead letters", "WARN", "warn", 1,
         "Behind by 5 offsets; 1 dead letter"),
        (Status((lag(0, 0.0),), 2, 3, hidden="t-0 waits"), "hidden", "WARN", "warn", 1,
         "All records are committed; t-0 waits; 2 dead letters"),
        (Status((lag(1, 900.0),), 0, 3, activity=committed(61)), "behind", "WARN", "warn", 1,
         "Behind by 1 offset; no commit for 61 s, and 1 offsets are left"),
        (Status((lag(1, 900.0),), 2, 3, activity=committed(301)), "stalled", "STALL", "bad", 2,
         "Stalled; no commit for 301 s, and 1 offsets are left; 2 dead letters"),
    ],
)  # fmt: skip
def test_every_verdict(
    status: Status, kind: str, state: str, level: str, code: int, sentence: str
) -> None:
    found = status.judgement
    assert (found.kind, found.state, found.level, found.code) == (kind, state, level, code)
    assert found.sentence == sentence
    assert status.as_json()["verdict"] == kind


def test_the_rate_of_the_last_minutes() -> None:
    def ranges(*known: tuple[str, float, int]) -> Activity:
        return activity.recent(
            [activity._Range(kind, NOW - timedelta(seconds=age), records)
             for kind, age, records in known], NOW,
        )  # fmt: skip

    assert ranges() == Activity(None, None, 0.0)
    found = ranges(("data", 10, 600), ("hole", 20, 0), ("data", 299, 300), ("data", 301, 9_000))
    assert (found.last_commit, found.seconds, found.rate) == (NOW - timedelta(seconds=10), 10, 3.0)
    assert ranges(("data", 301, 9_000)).rate == 0
    assert ranges(("data", 1, 50), ("joined", 5, 9_000), ("data", 10, 50)).rate == 10


def test_a_destination_that_the_next_start_refuses_is_a_warning() -> None:
    known = LedgerState(3, "c", {TopicPartition("t", 0): 10}, refused="'out' was deleted")
    pipeline: Any = SimpleNamespace(source=None)
    assert status._warnings(pipeline, known) == ("'out' was deleted",)
    found = Status((lag(0, 0.0),), 0, 3, status._warnings(pipeline, known))
    assert found.judgement[:2] == ("refused", "'out' was deleted")


@pytest.mark.parametrize(
    ("limits", "opened", "state", "said"),
    [
        ({"short": 1.5}, 0.0, "OK", "short"),
        ({}, 90.0, "WARN", "records of t-0 from offset 15 on wait for a transaction"),
        ({}, 60.0, "OK", ""),
    ],
)
def test_what_makes_records_wait_is_told(
    monkeypatch: pytest.MonkeyPatch, limits: Any, opened: float, state: str, said: str
) -> None:
    tp = TopicPartition("t", 0)
    known = LedgerState(3, None, {tp: 10}, activity=committed(1), time_limits=limits)
    source = SimpleNamespace(
        brokers="b:1", identity=lambda: SourceIdentity("c", {}), members=lambda _: ["one"]
    )
    settings = SimpleNamespace(
        filter=FilterSettings(), worker_group="w", standby_group="s", trigger_seconds=7.0
    )
    look = SimpleNamespace(look=lambda: known)
    pipeline: Any = SimpleNamespace(source=source, settings=settings, destination=look)
    monkeypatch.setattr(status, "measure_lag", lambda *_: [lag(5, 2.0)])
    monkeypatch.setattr(status, "open_transactions", lambda *_: {tp: opened} if opened else {})
    assert status.status(pipeline).pause == 7
    found = status.status(pipeline).judgement
    assert (found.state, found.reason[: len(said)], bool(said)) == (
        state, said, bool(found.reason),
    )  # fmt: skip
