"""The loop of a run: which batches it plans, when it looks, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from oncely.commit.path import Outcome
from oncely.core import events
from oncely.core.claim import Counts, Fence, Opened
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.errors import DataLost, Fenced, SourceMismatch, Unavailable, UnreadableBatch
from oncely.kafka.source import Look, Watermarks
from oncely.runtimes import takeover
from oncely.runtimes.batches import run as runs
from oncely.runtimes.batches.run import BatchRun
from oncely.runtimes.takeover import Takeovers
from oncely.threads import StopSignal
from tests.jobtools import HurriedStop, InlineJobs

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
IDS = {"t": "id"}


@dataclass
class Source:
    """Topics that grow when they are looked at."""

    ends: dict[TopicPartition, int]
    grow: Callable[[Source], None] = lambda _: None
    looks: int = 0
    ids: Mapping[str, str] = field(default_factory=lambda: IDS)
    epoch: int = 0
    refusal: dict[TopicPartition, str] = field(default_factory=dict)

    def look(self) -> Look:
        self.looks += 1
        self.grow(self)
        return Look(dict(self.ids), dict(self.ends), self.leader_epochs())

    def identity(self) -> SourceIdentity:
        return SourceIdentity("c", self.ids)

    def topic_ids(self) -> Mapping[str, str]:
        return self.ids

    def watermarks(self) -> dict[TopicPartition, Watermarks]:
        return {tp: Watermarks(0, end, end) for tp, end in self.ends.items()}

    def earliest(self) -> dict[TopicPartition, int]:
        return dict.fromkeys(self.ends, 0)

    def leader_epochs(self) -> dict[TopicPartition, int]:
        return dict.fromkeys(self.ends, self.epoch)

    def truncated(self, positions: Any) -> dict[TopicPartition, str]:
        return self.refusal


@dataclass
class Batches:
    """Commits everything at once, unless told otherwise."""

    done: list[dict[TopicPartition, OffsetRange]] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None
    asked: Callable[[], None] = lambda: None
    fence: Fence = field(default_factory=lambda: Fence("p", 1))
    added: dict[TopicPartition, int] = field(default_factory=dict)
    opens: int = 0
    epochs: dict[TopicPartition, int] = field(default_factory=dict)

    expected: list[int | None] = field(default_factory=list)

    @property
    def ledger(self) -> Batches:
        return self

    def opened(self) -> None:
        pass

    def open(self, takeover: Any) -> Any:
        self.expected.append(takeover.expected)
        self.opens += 1
        positions = {T0: 0} | {tp: one.end for ranges in self.done for tp, one in ranges.items()}
        return Opened(self.fence, positions, first_start=False)

    def run(self, number: int, ranges: dict[TopicPartition, OffsetRange]) -> list[Outcome]:
        self.meanwhile()
        self.done.append(dict(ranges))
        return [
            Outcome(tp, one, Counts(one.end - one.start, 0, 0, 0)) for tp, one in ranges.items()
        ]

    def positions(self) -> dict[TopicPartition, int]:
        self.asked()
        return {}

    def same_topics(self, ids: Mapping[str, str]) -> None:
        if ids != IDS:
            raise SourceMismatch("another topic")

    def add_partitions(self, positions: dict[TopicPartition, int], source: Any) -> None:
        self.added |= positions

    @property
    def leader_epochs(self) -> dict[TopicPartition, int]:
        return self.epochs

    def note_leader_epochs(self, epochs: Any) -> None:
        self.epochs |= epochs

    def finish(self) -> None:
        pass


class Quiet:
    """A mirror."""

    def start(self, positions: Any) -> None:
        pass

    put = start

    def finish(self) -> None:
        pass


class Cancelling(InlineJobs):
    """Jobs whose cancellation can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class Told:
    """The names of the events of a run."""

    names: list[str] = field(default_factory=list)

    def __call__(self, event: events.Event) -> None:
        self.names.append(type(event).__name__)


def made(
    source: Source,
    batches: Batches,
    *,
    limit: int = 100,
    trigger: float = 0,
    on_gap: str = "fail",
    **more: Any,
) -> Any:
    ledger: Any = batches
    listener = more.pop("listener", lambda _: None)
    takeovers = Takeovers(ledger, source, "p", "earliest", on_gap, listener)  # type: ignore[arg-type]
    given: dict[str, Any] = {"jobs": InlineJobs(), "mirror": Quiet(), "retries": 2, **more}
    return BatchRun(
        batches=ledger, takeovers=takeovers, trigger_seconds=trigger,
        max_records_per_batch=limit, **given,
    )  # fmt: skip


def test_until_latest_ends_at_the_ends_of_the_start() -> None:
    def grow(source: Source) -> None:
        source.ends[T0] += 1_000

    source, batches = Source({T0: 150}, grow), Batches()
    assert made(source, batches).run(until_latest=True)
    ranges = [one[T0] for one in batches.done]
    assert ranges[0].start == 0
    assert ranges[-1].end == 1_150
    assert all(a.end == b.start for a, b in pairwise(ranges))


@pytest.mark.parametrize("until_latest", [True, False])
@pytest.mark.parametrize("commits_before", [False, True], ids=["whole", "by chunk"])
@pytest.mark.parametrize("offset", [0, 70])
def test_what_precedes_records_that_cannot_be_decompressed_is_committed(
    offset: int, commits_before: bool, until_latest: bool
) -> None:
    """Also by a sink that has committed it before the batch failed."""

    @dataclass
    class Undecodable(Batches):
        def run(self, number: int, ranges: dict[TopicPartition, OffsetRange]) -> list[Outcome]:
            if ranges[T0].end > offset:
                if commits_before and offset:
                    self.done.append({T0: OffsetRange(0, offset)})
                raise UnreadableBatch("t", 0, offset, 1)
            return super().run(number, ranges)

    batches = Undecodable()
    with pytest.raises(UnreadableBatch, match=f"the records from offset {offset} on"):
        made(Source({T0: 100}), batches, stop=HurriedStop()).run(until_latest=until_latest)
    assert batches.done == ([{T0: OffsetRange(0, offset)}] if offset else [])


def test_a_retry_has_the_same_goal() -> None:
    failures = [Unavailable("away")]

    def grow(source: Source) -> None:
        source.ends[T0] += 1_000

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    batches = Batches(meanwhile=fail_once)
    assert made(Source({T0: 0}, grow), batches, stop=HurriedStop()).run(until_latest=True)
    assert batches.opens == 2
    assert batches.done[-1][T0].end == 1_000


def test_a_run_that_has_opened_expects_its_epoch_though_a_check_after_it_has_failed() -> None:
    """A run that was started in the meantime is newer, and keeps the ledger."""

    @dataclass
    class AwayOnce(Source):
        left: int = 1

        def leader_epochs(self) -> dict[TopicPartition, int]:
            if self.left:
                self.left -= 1
                raise Unavailable("away")
            return super().leader_epochs()

    batches = Batches()
    assert made(AwayOnce({T0: 10}), batches, stop=HurriedStop()).run(until_latest=True)
    assert batches.expected == [None, 1]


def test_an_end_that_goes_back_for_a_moment_is_waited_for() -> None:
    """A new leader may answer with an older last stable offset."""

    def grow(source: Source) -> None:
        source.ends[T0] = 0 if source.looks == 2 else 150

    batches = Batches()
    assert made(Source({T0: 150}, grow), batches).run(until_latest=True)
    assert batches.done[-1][T0].end == 150


@pytest.mark.parametrize("until_latest", [True, False])
def test_an_end_that_stays_before_the_position_is_a_cut_log(
    monkeypatch: pytest.MonkeyPatch, *, until_latest: bool
) -> None:
    monkeypatch.setattr(runs, "_STALE_LEADER_SECONDS", 0.05)

    def cut(source: Source) -> None:
        source.ends[T0] = 150 if source.looks < 3 else 20

    batches = Batches()
    run = made(Source({T0: 150}, cut), batches, limit=50)
    with pytest.raises(SourceMismatch, match="t-0 ends at 20, and the ledger has read up to 100"):
        run.run(until_latest=until_latest)
    assert batches.opens == 1


class Cut(Source):
    """The records from 120 on are gone at the second look, before they were read."""

    def look(self) -> Look:
        self.ends[T0] = 150 if self.looks < 1 else 120
        return super().look()


def test_a_goal_that_was_cut_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_LOOK_SECONDS", 0.02)
    batches = Batches()
    with pytest.raises(DataLost, match=r"t-0 ends at 120, and has ended at 150 when the run began"):
        made(Cut({T0: 150}), batches, limit=100).run(until_latest=True)
    assert batches.done[-1] == {T0: OffsetRange(100, 120)}, "what is there was committed"


def test_a_goal_that_was_cut_away_is_where_the_log_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(takeover, "_LOOK_SECONDS", 0.02)
    batches = Batches()
    run = made(Cut({T0: 150}), batches, limit=100, on_gap="record")
    assert run.run(until_latest=True)
    assert batches.done[-1] == {T0: OffsetRange(100, 120)}
    assert "t-0 ends at 120" in caplog.text


def test_position_and_goal_beyond_an_open_transaction_are_no_cut_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "_STALE_LEADER_SECONDS", 0.0)
    monkeypatch.setattr(takeover, "_LOOK_SECONDS", 0.0)

    class Held(Source):
        def watermarks(self) -> dict[TopicPartition, Watermarks]:
            return {T0: Watermarks(0, 20, 150)}

    def hold(source: Source) -> None:
        source.ends[T0] = 20 if 1 < source.looks < 9 else 150

    batches = Batches()
    assert made(Held({T0: 150}, hold), batches, limit=100).run(until_latest=True)
    assert batches.done[-1][T0].end == 150


def test_leader_epochs_are_compared_without_records() -> None:
    source, batches = Source({T0: 50}), Batches()

    def cut(source: Source) -> None:
        source.epoch, source.refusal = source.looks, {T0: "it was cut"} if source.looks > 2 else {}

    source.grow = cut
    with pytest.raises(SourceMismatch, match="the topic has gone back: its log was cut"):
        made(source, batches).run(until_latest=False)
    assert len(batches.done) == 1


def test_new_partitions_begin_at_their_first_offset() -> None:
    def grow(source: Source) -> None:
        source.ends = {T0: 50, T1: 50}

    told, batches = Told(), Batches()
    assert made(Source({T0: 50}, grow), batches, listener=told).run(until_latest=True)
    assert batches.added == {T1: 0}
    assert batches.done[0] == {T0: OffsetRange(0, 50), T1: OffsetRange(0, 50)}
    assert "PartitionAdded" in told.names


def test_a_topic_that_is_made_again_in_a_batch_ends_the_run() -> None:
    source = Source({T0: 50})
    batches = Batches(meanwhile=lambda: setattr(source, "ids", {"t": "new"}))
    with pytest.raises(SourceMismatch):
        made(source, batches).run(until_latest=True)
    assert batches.opens == 1


def test_a_batch_is_told_though_the_broker_is_away_after_it() -> None:
    """It is committed: it is not repeated, and nobody else would tell it."""

    @dataclass
    class AwayOnce(Source):
        left: int = 1

        def topic_ids(self) -> Mapping[str, str]:
            if self.left:
                self.left -= 1
                raise Unavailable("away")
            return super().topic_ids()

    told = Told()
    assert made(AwayOnce({T0: 50}), Batches(), stop=HurriedStop(), listener=told).run(
        until_latest=True
    )
    assert told.names.count("BatchCommitted") == 1


def test_the_first_request_to_stop_lets_the_batch_finish() -> None:
    stop, told = StopSignal(), Told()
    batches = Batches(meanwhile=stop.ask)
    assert not made(Source({T0: 500}), batches, stop=stop, listener=told).run(until_latest=True)
    assert len(batches.done) == 1
    assert told.names[-2:] == ["BatchCommitted", "Draining"]


def test_the_second_request_cancels_the_job() -> None:
    stop, jobs, told = StopSignal(), Cancelling(), Told()

    def long() -> None:
        stop.ask()
        stop.ask()
        assert jobs.cancelled.wait(180)
        raise RuntimeError("cancelled")

    run = made(Source({T0: 500}), Batches(meanwhile=long), stop=stop, jobs=jobs, listener=told)
    assert not run.run(until_latest=True)
    assert "BatchCommitted" not in told.names


def test_a_run_without_records_notices_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_LOOK_SECONDS", 0.02)
    told = Told()

    def asked() -> None:
        raise Fenced("p", 1, 2)

    with pytest.raises(Fenced):
        made(Source({T0: 0}), Batches(asked=asked), listener=told).run(until_latest=False)
    assert "Polled" in told.names


def test_a_run_without_records_notices_that_no_job_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(InlineJobs):
        def require(self) -> None:
            raise ConnectionError("the JVM has ended")

    monkeypatch.setattr(runs, "_LOOK_SECONDS", 0.02)
    with pytest.raises(ConnectionError):
        made(Source({T0: 0}), Batches(), jobs=Dead()).run(until_latest=False)


def test_a_trigger_is_the_time_between_two_starts() -> None:
    stop = StopSignal()
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        stop.ask()
        return True

    stop.wait = wait  # type: ignore[method-assign]
    assert not made(Source({T0: 50}), Batches(), trigger=3.0, stop=stop).run(until_latest=False)
    assert 2.5 < waits[0] <= 3.0
