"""The event log: whole lines, stable keys, and failures that do not reach the run."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from oncely.core import events
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import WrongInput
from oncely.pipeline.event_log import EventLog
from oncely.secrets import Secrets
from oncely.verify.log import EventsLost, parsed

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SECRET = "s3cret-w0rd-of-the-file"
HEAD = ["time", "pipeline", "epoch", "run", "type"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


ALL: list[tuple[events.Event, dict[str, Any]]] = [
    (
        events.PipelineOpened("p", 3, {T0: 10, T1: 0}, first_start=False),
        {"type": "opened", "positions": {"t": {"0": 10, "1": 0}}, "first_start": False,
         "every_partition": True},
    ),
    (
        events.BatchPlanned(0, {T0: OffsetRange(10, 30)}),
        {"type": "planned", "batch": 0, "ranges": {"t": {"0": [10, 30]}}},
    ),
    (
        events.RangeCommitted(T0, OffsetRange(10, 28), 17, 15, 1, 1),
        {"type": "range_committed", "topic": "t", "partition": 0, "range": [10, 28],
         "kind": "data", "replayed": False, "records": 17, "rows": 15, "rejects": 1,
         "filtered": 1},
    ),
    (
        events.RangeCommitted(T0, OffsetRange(28, 30), 0, 0, 0, 0, kind="hole"),
        {"type": "range_committed", "topic": "t", "partition": 0, "range": [28, 30],
         "kind": "hole", "replayed": False, "records": 0, "rows": 0, "rejects": 0, "filtered": 0},
    ),
    (
        events.BatchCommitted(0, 17, 15, 1, 0.51234, {T0: 30}),
        {"type": "batch_committed", "batch": 0, "records": 17, "rows": 15, "rejects": 1,
         "seconds": 0.512, "positions": {"t": {"0": 30}}},
    ),
    (
        events.PartitionAdded(TopicPartition("t", 2), 5),
        {"type": "partition_added", "topic": "t", "partition": 2, "position": 5},
    ),
    (
        events.GapFound(T1, OffsetRange(0, 7)),
        {"type": "gap", "topic": "t", "partition": 1, "range": [0, 7]},
    ),
    (
        events.BatchFailed(f"no login as {SECRET}", 1, 2.0),
        {"type": "failed", "error": "no login as ***", "attempt": 1, "retry_in_seconds": 2.0},
    ),
    (
        events.PositionsReset(4, {T0: 30, T1: 7}, {T0: 0, T1: 7}),
        {"type": "reset", "before": {"t": {"0": 30, "1": 7}},
         "positions": {"t": {"0": 0, "1": 7}}},
    ),
    (events.FencedOut(3, 5), {"type": "fenced", "by_epoch": 5, "partitions": {}}),
    (
        events.FencedOut(3, 5, frozenset({T1, T0})),
        {"type": "fenced", "by_epoch": 5, "partitions": {"t": [0, 1]}},
    ),
    (events.StandingBy(), {"type": "standing_by"}),
    (events.Draining(), {"type": "draining"}),
    (
        events.PartitionsChanged("assigned", frozenset({T1})),
        {"type": "partitions_assigned", "partitions": {"t": [1]}},
    ),
    (
        events.RunClosed(False, f"password={SECRET}"),
        {"type": "closed", "complete": False, "error": "password=***"},
    ),
    (events.RunClosed(True), {"type": "closed", "complete": True, "error": None}),
]  # fmt: skip


def test_the_lines_of_all_events(tmp_path: Path) -> None:
    """Types and keys are a promise of docs/events.md: this test changes on purpose only."""
    path = tmp_path / "events"
    with EventLog(path, "p", Secrets.of([SECRET])) as log:
        for event, _ in ALL:
            log(event)
    first, *rest = lines(path)
    assert first["type"] == "started"
    assert (first["epoch"], first["version"], first["cut"]) == (None, 1, 0)
    epoch = None
    for found, (event, wanted) in zip(rest, ALL, strict=True):
        if isinstance(event, events.PipelineOpened | events.PositionsReset):
            epoch = event.epoch
        assert list(found)[:5] == HEAD
        assert (found["pipeline"], found["epoch"]) == ("p", epoch)
        assert found["run"] == first["run"]
        assert {k: v for k, v in found.items() if k not in HEAD[:4]} == wanted
    assert SECRET not in path.read_text()


def test_the_document_has_all_types_and_keys() -> None:
    text = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
    for _, wanted in ALL:
        assert all(f"`{key}`" in text for key in wanted), wanted
        assert f"`{wanted['type']}`" in text


def test_a_listener_behind_the_log_gets_every_event(tmp_path: Path) -> None:
    heard: list[events.Event] = []
    with EventLog(tmp_path / "events", "p", then=heard.append) as log:
        for event, _ in ALL:
            log(event)
    assert heard == [event for event, _ in ALL]


@pytest.mark.parametrize("name", ["no-folder/events", ".", "/dev/full"])
def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(WrongInput, match="can't be written"):
        EventLog(tmp_path / name, "p")


def test_the_log_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events"
    EventLog(path, "other").close()
    with pytest.raises(WrongInput, match="belongs to pipeline 'other'"):
        EventLog(path, "p")
    assert len(lines(path)) == 1


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("id,name\n")
    with pytest.raises(WrongInput, match="not an event log"):
        EventLog(path, "p")
    assert path.read_text() == "id,name\n"


def test_runs_that_append_at_the_same_time_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events"
    wide = {TopicPartition("t" * 200, n): OffsetRange(0, n) for n in range(2_000)}

    def append() -> None:
        with EventLog(path, "p") as log:
            for batch in range(20):
                log(events.BatchPlanned(batch, wide))

    threads = [threading.Thread(target=append) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = lines(path)
    assert len(found) == 4 * 21
    for run in {one["run"] for one in found}:
        own = [one["batch"] for one in found if one["run"] == run and one["type"] == "planned"]
        assert own == list(range(20))


@pytest.mark.parametrize("cut", [1, 70, 200_000])
def test_a_line_that_a_crash_has_cut_is_ended_by_the_next_run(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events"
    EventLog(path, "p").close()
    with path.open("ab") as file:
        file.write(b"x" * cut)
    EventLog(path, "p").close()
    texts = path.read_bytes().splitlines()
    assert [len(texts), texts[1]] == [3, b"x" * cut]
    assert json.loads(texts[2])["cut"] == cut


@pytest.mark.parametrize(("kept", "lost"), [(0.0, 1), (0.1, 1), (0.5, 3)])
def test_a_failure_during_the_run_is_told_once_and_later_in_the_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kept: float,
    lost: int,
) -> None:
    path, heard, full = tmp_path / "events", list[events.Event](), [False]
    write = os.write

    def written(file: int, data: bytes) -> int:
        return write(file, data[: int(len(data) * kept)] if full[0] else data)

    monkeypatch.setattr("oncely.pipeline.event_log.os.write", written)
    with EventLog(path, "p", then=heard.append) as log, caplog.at_level(logging.WARNING):
        log(ALL[0][0])
        full[0] = True
        for event, _ in ALL[1:4]:
            log(event)
        full[0] = False
        log(ALL[4][0])
        log(ALL[5][0])
    assert [one.message for one in caplog.records] == [
        f"the event log {path} is incomplete from here on: the disk is full"
    ]
    assert len(heard) == 6
    found = parsed(path.read_bytes(), "p", "events")
    assert not found.problems  # each incomplete line is followed by one that says so
    assert [type(line.event).__name__ for line in found.lines if line.event.epoch] == [
        "Opened", *["EventsLost"] * lost, "BatchCommitted", "PartitionAdded",
    ]  # fmt: skip
    told = [line.event for line in found.lines if isinstance(line.event, EventsLost)]
    assert told[-1].events == 3
