"""What the probes of a run answer, as its events and the time go on."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oncely.core import events
from oncely.core.progress import TimesToLive
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.runtimes.health import Health, liveness, metrics, readiness
from oncely.secrets import Secrets
from tests.prometheus import samples

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Clock:
    now = 1_000.0
    wall = 5_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    """A run that has opened at 10 and 20, with nothing to read."""
    made = Health("orders", "g", TimesToLive(300, 60), Secrets.of(["s3cret!"]), clock,
                  lambda: clock.wall)  # fmt: skip
    made(events.PipelineOpened("orders", 7, {P0: 10, P1: 20}, first_start=False))
    made.ends({P0: 10, P1: 20})
    return made


def committed(tp: TopicPartition, start: int, end: int) -> events.RangeCommitted:
    return events.RangeCommitted(tp, OffsetRange(start, end), end - start, 3, 1, 2)


def errors(health: Health) -> list[str]:
    alive, document = health.liveness()
    assert alive == (document["status"] == "healthy") == (not document["reasons"])
    return sorted(name for name, failed in document["errors"].items() if failed)


def test_an_idle_run_is_alive_as_long_as_it_polls(health: Health, clock: Clock) -> None:
    clock.now += 299
    assert errors(health) == []
    health(events.Polled())
    clock.now += 300
    assert errors(health) == []
    clock.now += 1
    assert errors(health) == ["polling_ttl_exceeded"]
    health(events.BatchPlanned(0, {}))
    assert errors(health) == []


def test_records_without_a_commit_end_it(health: Health, clock: Clock) -> None:
    clock.now += 200  # an idle time does not count
    health.ends({P0: 10, P1: 25})
    clock.now += 60
    assert errors(health) == []
    clock.now += 1
    health(events.Polled())
    assert errors(health) == ["consuming_ttl_exceeded"]
    assert "61 s" in health.liveness()[1]["reasons"][0]
    assert " 5 offsets" in health.liveness()[1]["reasons"][0]
    health(committed(P1, 20, 22))  # still behind, and it moves
    assert errors(health) == []
    clock.now += 61
    assert errors(health) == ["consuming_ttl_exceeded"]
    health(events.BatchCommitted(1, 3, 3, 0, 0.5, {P1: 25}))
    clock.now += 200
    assert errors(health) == []


def test_a_partition_whose_commits_fail_ends_it_though_others_move(
    health: Health, clock: Clock
) -> None:
    health.ends({P0: 100, P1: 2_000})
    for at in range(20, 80):
        clock.now += 1
        health(events.BatchPlanned(at, {P0: OffsetRange(10, 100), P1: OffsetRange(at, at + 1)}))
        health(events.BatchFailed("a lock", 1, 0.5))
        health(events.PipelineOpened("orders", 7, {P0: 10, P1: at}, first_start=False))
        assert errors(health) == []
        health(events.BatchPlanned(at, {P1: OffsetRange(at, at + 1)}))
        health(events.BatchCommitted(at, 1, 1, 0, 0.5, {P1: at + 1}))
        health(events.Polled(frozenset({P0, P1}), frozenset({P0, P1})))
    assert not errors(health)
    clock.now += 2
    health(events.BatchCommitted(at, 1, 1, 0, 0.5, {P1: at + 2}))
    assert errors(health) == ["consuming_ttl_exceeded"]
    reasons = health.liveness()[1]["reasons"]
    assert reasons[0].startswith("consuming: no commit of t-0 for 62 s")
    health(committed(P0, 10, 11))
    assert errors(health) == []


@pytest.mark.parametrize("how", ["end", "revoked"])
def test_a_partition_without_records_does_not_fail(health: Health, clock: Clock, how: str) -> None:
    health.ends({P0: 100, P1: 20})
    health(events.BatchPlanned(1, {P0: OffsetRange(10, 100)}))
    health(events.BatchFailed("a lock", 1, 0.5))
    if how == "end":
        health.ends({P0: 10, P1: 20})
    else:
        health(events.PartitionsChanged("revoked", frozenset({P0})))
    clock.now += 61
    assert errors(health) == []


def test_ends_that_are_reached_by_others_means_are_no_lag(health: Health, clock: Clock) -> None:
    health.ends({P0: 12, P1: 20})
    clock.now += 50
    health.ends({P0: 10, P1: 20})  # the topic was recreated, or its records were deleted
    clock.now += 20
    assert errors(health) == []


def test_the_ledger_shows_the_progress_of_a_long_batch(health: Health, clock: Clock) -> None:
    health.ends({P0: 1_000})
    clock.now += 30
    assert not health.suspicious
    clock.now += 1
    assert health.suspicious
    health.stored({P0: 500, TopicPartition("other", 0): 1})
    assert not health.suspicious
    clock.now += 59
    assert errors(health) == []
    health.stored({P0: 500})  # nothing has moved
    clock.now += 2
    assert errors(health) == ["consuming_ttl_exceeded"]


def test_a_failure_is_told_without_secrets(health: Health, clock: Clock) -> None:
    health.ends({P0: 11})
    health(events.BatchFailed("login of admin:s3cret! refused", 1, 2.0))
    clock.now += 301
    assert errors(health) == ["consuming_ttl_exceeded", "polling_ttl_exceeded"]
    assert health.liveness()[1]["reasons"][-1] == "the last error: login of admin:*** refused"
    assert "s3cret!" not in str(health.liveness()) + metrics([health])


@pytest.mark.parametrize(
    ("event", "ready", "state"),
    [
        (events.StandingBy(), True, "standing by"),
        (events.Draining(), False, "draining"),
        (events.RunClosed(complete=True), False, "ended"),
        (events.FencedOut(7, 8), False, "fenced"),
        (events.FencedOut(7, 8, frozenset({P0})), True, "running"),
        (events.Polled(), True, "running"),
    ],
)
def test_readiness(health: Health, event: events.Event, ready: bool, state: str) -> None:
    health(event)
    found, document = health.readiness()
    assert (found, document["state"], bool(document["reasons"])) == (ready, state, not ready)


def test_it_is_not_ready_before_it_has_opened() -> None:
    assert Health("orders", "g").readiness()[0] is False
    assert Health("orders", "g").liveness()[0] is True


def test_a_member_is_ready_when_it_has_joined_its_group() -> None:
    member = Health("orders", "g")
    member(events.PipelineOpened("orders", 7, {}, first_start=False, every=False))
    ready, document = member.readiness()
    assert not ready
    assert document["reasons"] == ["the run is starting"]
    member(events.PartitionsChanged("assigned", frozenset()))
    assert member.readiness()[0], "it can take work over"
    member(events.PipelineOpened("orders", 7, {}, first_start=False, every=False))
    assert member.readiness()[0], "a look at the ledger changes nothing"


def test_a_fenced_run_has_no_lag(health: Health, clock: Clock) -> None:
    health.ends({P0: 100, P1: 200})
    health(events.FencedOut(7, 8))
    clock.now += 100
    assert errors(health) == []
    health.ends({P0: 100, P1: 200})
    clock.now += 100
    assert errors(health) == []
    assert "kafka_consumergroup_lag{" not in metrics([health])


def test_a_member_of_a_group_is_judged_by_its_partitions(clock: Clock) -> None:
    member = Health("orders", "g", TimesToLive(300, 60), clock=clock)
    member(events.PartitionsChanged("assigned", frozenset()))
    assert member.readiness()[0]
    member(events.PipelineOpened("orders", 7, {P0: 10, P1: 20}, first_start=False, every=False))
    member.ends({P0: 10, P1: 25})
    clock.now += 61
    member(events.Polled())
    assert errors(member) == ["consuming_ttl_exceeded"]
    member(events.PartitionsChanged("lost", frozenset({P1})))
    assert errors(member) == []
    assert member.readiness()[0]


def test_metrics(health: Health) -> None:
    health.ends({P0: 110, P1: 20})
    health(committed(P0, 10, 40))
    health(committed(P0, 40, 50))
    health(events.BatchCommitted(1, 40, 6, 2, 0.3, {P0: 60, P1: 20}))
    health(events.BatchFailed("x", 1, 1.0))
    found = samples(metrics([health]))
    group, mine = 'consumergroup="g",topic="t",partition="0"', 'pipeline="orders"'
    expected: dict[tuple[str, str], Any] = {
        ("kafka_consumergroup_current_offset", group): 60,
        ("kafka_consumergroup_lag", group): 50,
        ("kafka_consumergroup_lag", group.replace('"0"', '"1"')): 0,
        ("oncely_position", f'{mine},topic="t",partition="0"'): 60,
        ("oncely_end_offset", f'{mine},topic="t",partition="0"'): 110,
        ("oncely_lag_records", f'{mine},topic="t",partition="0"'): 50,
        ("oncely_lag_records", f'{mine},topic="t",partition="1"'): 0,
        ("oncely_commits_total", f'{mine},result="committed"'): 2,
        ("oncely_commits_total", f'{mine},result="replayed"'): 0,
        ("oncely_records_total", f'{mine},outcome="written"'): 34,
        ("oncely_records_total", f'{mine},outcome="rejected"'): 2,
        ("oncely_records_total", f'{mine},outcome="filtered"'): 4,
        ("oncely_rows_total", mine): 6,
        ("oncely_failures_total", mine): 1,
        ("oncely_fenced_total", mine): 0,
        ("oncely_gap_records_total", mine): 0,
        ("oncely_repeated_total", mine): 0,
        ("oncely_last_commit_timestamp_seconds", mine): 5_000,
        ("oncely_epoch", mine): 7,
        ("oncely_running", mine): 1,
        ("oncely_start_timestamp_seconds", mine): 5_000,
        ("oncely_build_info", f'version="{importlib.metadata.version("oncely")}"'): 1,
    }
    assert {key: found[key] for key in expected} == expected


def of_pipeline(health: Health, name: str, more: str = "") -> float | None:
    return samples(metrics([health])).get((name, f'pipeline="orders"{more}'))


def position(health: Health) -> float | None:
    of = 'pipeline="orders",topic="t",partition="0"'
    return samples(metrics([health])).get(("oncely_position", of))


def test_gaps_and_replays_are_counted(health: Health) -> None:
    health(events.GapFound(P0, OffsetRange(10, 17)))  # counted when it is in the history
    assert of_pipeline(health, "oncely_gap_records_total") == 0
    assert position(health) == 10
    health(events.RangeCommitted(P0, OffsetRange(10, 17), 0, 0, 0, 0, kind="gap"))
    health(events.RangeCommitted(P0, OffsetRange(17, 20), 3, 3, 0, 0, replayed=True))
    assert of_pipeline(health, "oncely_gap_records_total") == 7
    assert position(health) == 20
    assert of_pipeline(health, "oncely_commits_total", ',result="replayed"') == 1


def test_since_when_records_wait_without_a_commit(health: Health, clock: Clock) -> None:
    """Of each partition by itself: before its first commit, too, and whatever others do."""

    def since(partition: int) -> float | None:
        more = f',topic="t",partition="{partition}"'
        return of_pipeline(health, "oncely_waiting_since_timestamp_seconds", more)

    def passes(seconds: float) -> None:
        clock.now, clock.wall = clock.now + seconds, clock.wall + seconds

    assert (since(0), since(1)) == (None, None)
    health.ends({P0: 100, P1: 200})
    for at in range(11, 21):
        passes(60)
        health(events.PipelineOpened("orders", 8, {P0: at - 1, P1: 20}, first_start=False))
        health(committed(P0, at - 1, at))
    assert (since(0), since(1)) == (5_600, 5_000)
    health(sign({P0}, {P1}))  # as a filter says
    assert since(1) is None
    health(sign({P0}))
    assert since(1) == 5_600
    health(events.PartitionsChanged("revoked", frozenset({P1})))
    assert since(1) is None
    health.ends({P0: 20})
    assert since(0) is None
    health.ends({P0: 100})
    assert since(0) == 5_600
    health(events.RunClosed(False, "gone"))  # of several: OncelyDown tells of it
    health.ends({P0: 200})
    assert since(0) is None


def test_what_is_not_known_is_no_sample(health: Health, clock: Clock) -> None:
    at = ',topic="t",partition="0"'
    assert of_pipeline(health, "oncely_last_commit_timestamp_seconds") is None
    assert of_pipeline(health, "oncely_rejects_pending") is None
    assert of_pipeline(health, "oncely_lag_seconds", at) == 0
    health.ends({P0: 15, P1: 20})
    assert of_pipeline(health, "oncely_lag_seconds", at) is None
    assert health.unread() == {P0: 10}
    health.aged({P0: 4_990_000})
    health.rejected(0)
    assert of_pipeline(health, "oncely_lag_seconds", at) == 10
    assert of_pipeline(health, "oncely_rejects_pending") == 0
    health.aged({P0: None})
    assert of_pipeline(health, "oncely_lag_seconds", at) is None
    health.aged({P0: 6_000_000})  # a timestamp of the producer, in the future
    assert of_pipeline(health, "oncely_lag_seconds", at) == 0


def test_a_batch_waits_and_is_processed(health: Health, clock: Clock) -> None:
    def seconds(phase: str) -> tuple[float | None, ...]:
        more = f',phase="{phase}"'
        return tuple(of_pipeline(health, f"oncely_batch_seconds_{one}", more)
                     for one in ("sum", "count"))  # fmt: skip

    clock.now += 3
    health(events.BatchPlanned(0, {}))
    clock.now += 2
    health(events.BatchCommitted(0, 1, 1, 0, 2.5, phases={"decode": 0.5, "commit": 1.25}))
    assert (seconds("wait"), seconds("process")) == ((3, 1), (2, 1))
    assert (seconds("decode"), seconds("commit"), seconds("read")) == ((0.5, 1), (1.25, 1), (0, 0))
    health(events.BatchPlanned(1, {}))
    clock.now += 50
    health(events.BatchFailed("x", 1, 1.0))
    health(events.PipelineOpened("orders", 8, {P0: 10}, first_start=False))
    clock.now += 1
    health(events.BatchPlanned(0, {}))
    clock.now += 4
    health(events.BatchCommitted(0, 1, 1, 0, 4.0))
    assert (seconds("wait"), seconds("process")) == ((4, 3), (6, 2))


def test_of_several_runs_one_that_has_ended_is_alive_and_not_ready(
    health: Health, clock: Clock
) -> None:
    other = Health("clicks", "h", TimesToLive(300, 60), Secrets(), clock, lambda: clock.wall)
    other(events.PipelineOpened("clicks", 1, {P0: 0}, first_start=True))
    both = [health, other]
    assert readiness(both)[0]
    other(events.RunClosed(False, "gone"))
    clock.now += 290
    health(events.Polled())
    clock.now += 290
    assert liveness(both)[0]
    ready, document = readiness(both)
    assert not ready
    assert document["reasons"] == ["clicks: the run is ended"]
    assert [one["pipeline"] for one in document["pipelines"]] == ["orders", "clicks"]
    clock.now += 11
    alive, document = liveness(both)
    assert not alive
    assert [reason.split(":")[0] for reason in document["reasons"]] == ["orders"]


def test_the_metrics_of_several_runs_have_one_type_each(health: Health, clock: Clock) -> None:
    other = Health("clicks", "h", TimesToLive(), Secrets(), clock, lambda: clock.wall)
    page = metrics([health, other])
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    found = samples(page)
    assert found["oncely_running", 'pipeline="orders"'] == 1
    assert found["oncely_running", 'pipeline="clicks"'] == 0


def test_a_page_has_the_metrics_of_its_runs_alone(health: Health) -> None:
    """None of the process, and none of another run of the same name."""
    health(events.BatchFailed("x", 1, 1.0))
    another = Health("orders", "g")
    page = metrics([another])
    assert samples(page)["oncely_failures_total", 'pipeline="orders"'] == 0
    assert of_pipeline(health, "oncely_failures_total") == 1
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith(("oncely_", "kafka_consumergroup_")) for name in names)
    assert "_created" not in page


def test_scrapes_and_events_at_the_same_time(health: Health) -> None:
    """Each event is counted once, and each page is of one moment."""
    pages: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            threads.submit(lambda: [health(committed(P0, 0, 10)) for _ in range(200)])
        threads.submit(lambda: pages.extend(metrics([health]) for _ in range(20))).result()
    assert of_pipeline(health, "oncely_rows_total") == 3 * 600
    for found in map(samples, pages):
        commits = found["oncely_commits_total", 'pipeline="orders",result="committed"']
        assert found["oncely_rows_total", 'pipeline="orders"'] == 3 * commits


def sign(read: set[TopicPartition], waiting: set[TopicPartition] | None = None) -> events.Polled:
    return events.Polled(frozenset({P0, P1}), frozenset(read), frozenset(waiting or ()))


def test_a_partition_with_records_that_is_never_read(health: Health, clock: Clock) -> None:
    """It polls, and commits those of the other partition."""
    clock.now += 1_000  # an idle time does not count
    health(events.Polled())
    health.ends({P0: 1_000, P1: 25})
    for second in range(1, 302):
        assert errors(health) == []
        clock.now += 1
        health(sign({P0}))
        health(committed(P0, 9 + second, 10 + second))
        health.ends({P0: 1_000, P1: 25})
    assert errors(health) == ["polling_ttl_exceeded"]
    (reason,) = health.liveness()[1]["reasons"]
    assert (
        reason == "polling: t-1 has 5 offsets left to read, and was not read for 301 s (ttl 300 s)"
    )
    health(sign({P0, P1}))
    assert errors(health) == []


def test_a_planned_partition_is_read_as_long_as_its_batch_lasts(
    health: Health, clock: Clock
) -> None:
    health.ends({P0: 1_000, P1: 25})
    health(events.BatchPlanned(0, {P1: OffsetRange(20, 25)}))
    for _ in range(400):
        clock.now += 1
        health(committed(P0, 10, 11))
        health.ends({P0: 1_000, P1: 25})
    assert errors(health) == []
    health(events.BatchFailed("gone", 1, 2.0))
    for _ in range(301):
        clock.now += 1
        health(committed(P0, 10, 11))
        health.ends({P0: 1_000, P1: 25})
    assert errors(health) == ["consuming_ttl_exceeded", "polling_ttl_exceeded"]


def test_records_that_wait_as_a_filter_says_do_not_end_it(health: Health, clock: Clock) -> None:
    health.ends({P0: 10, P1: 25})
    for _ in range(500):
        clock.now += 1
        health(sign(set(), {P1}))
        health.ends({P0: 10, P1: 25})
        assert errors(health) == []
    health(sign(set()))
    clock.now += 61
    assert errors(health) == ["consuming_ttl_exceeded"]
    health(sign(set(), {P1}))
    health(events.PartitionsChanged("revoked", frozenset({P1})))
    health(events.PipelineOpened("orders", 8, {P1: 20}, first_start=False))
    clock.now += 61
    assert errors(health) == ["consuming_ttl_exceeded"]
