"""What a run tells: tallies, sentences, the live line at any width."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console, Group

from oncely.cli import screen
from oncely.cli.progress import LiveLine, LiveLines, LogLines, Tally, sentence
from oncely.cli.screen import FIELDS
from oncely.core import events
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
OPENED = events.PipelineOpened("p", 3, {T0: 10, T1: 0}, first_start=False)
FENCED = events.FencedOut(3, 4)
EVENTS = [
    OPENED,
    events.BatchPlanned(0, {T0: OffsetRange(10, 30)}),
    events.RangeCommitted(T0, OffsetRange(10, 30), 20, 18, 2, 0),
    events.BatchCommitted(0, 20, 18, 2, 0.5, {T0: 30}),
    events.PartitionAdded(TopicPartition("t", 2), 5),
    events.GapFound(T1, OffsetRange(0, 7)),
    events.RangeCommitted(T1, OffsetRange(0, 7), 0, 0, 0, 0, kind="gap"),
    events.BatchFailed("PostgreSQL: gone", 1, 2.0),
    FENCED,
    events.StandingBy(),
    events.Draining(),
]
HELD = [one for one in EVENTS if one is not FENCED]


def test_a_tally_knows_positions_and_counts() -> None:
    tally = Tally()
    for event in HELD:
        tally.take(event)
    assert (tally.epoch, tally.counts) == (3, Counts(20, 18, 2, 0))
    assert tally.positions == {T0: 30, T1: 7, TopicPartition("t", 2): 5}
    assert tally.summary().startswith("20 records: 18 rows, 2 rejects in ")
    tally.take(FENCED)
    assert (tally.state, tally.positions) == ("fenced", {})


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_every_event_is_one_line(event: events.Event) -> None:
    level, text = sentence(event)
    assert level >= logging.DEBUG
    assert text
    assert "\n" not in text


def test_log_lines_hear_each_event_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "oncely.run"), LogLines() as progress:
        for event in EVENTS:
            progress(event)
    assert len(caplog.records) == len(EVENTS)
    assert progress.tally.counts.rows == 18


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_live_line_stays_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(screen, "err", console)
    # A command that ran in this process has set up the log, and it goes to the same screen.
    monkeypatch.setattr(logging.getLogger("oncely.run"), "propagate", False)
    line = LiveLine("flights-of-the-year", lambda: {T0: 1_000_030, T1: 7})
    for event in HELD:
        line(event)
    line._ends.ends = {T0: 1_000_030, T1: 7}
    console.print(Group(line.shown()))  # as Live does
    (shown,) = written.getvalue().strip("\n").splitlines()
    assert "flights-of-the-year" in shown
    assert len(shown) <= width
    if width >= 80:
        assert "18 rows" in shown
        assert "2 rejects" in shown
        assert "lag 1,000,000" in shown


def test_the_end_of_a_partition_that_nobody_reads_is_no_lag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, record=True)
    monkeypatch.setattr(screen, "err", console)
    line = LiveLine("p", dict)
    line(OPENED)
    line._ends.ends = {TopicPartition("t", 9): 100, T0: 10, T1: 0}
    console.print(line.shown())
    assert "lag 0" in console.export_text()


def test_a_batch_in_json_has_its_counts_and_lag(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "oncely.run"):
        lines = LogLines(dict)
        lines._ends.ends = {T0: 40, T1: 7}
        for event in (*EVENTS, events.BatchCommitted(1, 5, 3, 1, 0.12345, {T0: 35}, 9, 1)):
            lines(event)
    found = [getattr(one, FIELDS) for one in caplog.records]
    assert [one["event"] for one in found[:2]] == ["PipelineOpened", "BatchPlanned"]
    assert all(one["epoch"] == 3 for one in found[:-1])
    assert found[-1] == {
        "event": "BatchCommitted", "epoch": 9, "batch": 1, "seconds": 0.123, "lag": 5,
        "records": 5, "rows": 3, "rejects": 1, "filtered": 1,
    }  # fmt: skip


def test_without_a_look_at_the_ends_there_is_no_lag(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "oncely.run"), LogLines() as lines:
        lines(EVENTS[3])
    assert getattr(caplog.records[0], FIELDS)["lag"] is None


def test_each_pipeline_has_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, width=100, height=20, force_terminal=True, color_system=None)
    monkeypatch.setattr(screen, "err", console)
    monkeypatch.setattr(logging.getLogger("oncely.run"), "propagate", False)
    lines = LiveLines()
    with LiveLine("orders", dict, lines) as orders, LiveLine("clicks", dict, lines) as clicks:
        orders(EVENTS[3])
        clicks(events.RunClosed(False, "gone"))
        # What is printed to the screen itself is followed by the live lines once more.
        apart = Console(file=io.StringIO(), width=100)
        with apart.capture() as capture:
            apart.print(lines.shown())
        first, second = capture.get().splitlines()
        assert "orders" in first
        assert "18 rows" in first
        assert "clicks" in second
        assert "failed: gone" in second
