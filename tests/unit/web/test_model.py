"""What the pages show, read from ledgers in SQLite, over topics without a broker."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest

from oncely.cli.web import subjects_of
from oncely.core.claim import Counts
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, RejectSummary, Unavailable, WrongInput
from oncely.kafka.source import PartitionLag
from oncely.pipeline.status import Status
from oncely.secrets import Secrets
from oncely.testing.processes import await_that
from oncely.verify.reading import DATA, TAKEN, Entry, Held, Ledger
from oncely.web.model import (
    POINTS,
    Detail,
    History,
    Letters,
    Overview,
    Point,
    Problem,
    Reading,
    Subject,
    detail,
    extended,
    grouped,
    history_of,
    judged,
    overview,
)
from oncely.wording import duration, printable
from tests.sinktools import T0, T1
from tests.webtools import HOSTILE, PASSWORD, Topics, filled, pipeline_file, subject


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject(filled(tmp_path_factory.mktemp("shop")))


@pytest.fixture(scope="module")
def read(shop: Subject) -> Detail:
    return detail(shop)


def test_the_progress_in_words(shop: Subject) -> None:
    found = overview(shop)
    assert found.status is not None
    assert (found.status.lag, found.status.rejects, found.status.epoch) == (30, 3, 4)
    assert found.verdict.level == "warn"
    said = r"Behind by 30 offsets; [\d,]+ s behind; 3 dead letters"
    assert re.fullmatch(said, found.verdict.sentence)
    assert shop.route == "t → sql rows"
    assert shop.guarantee is not None
    assert shop.guarantee.delivery == "exactly_once"


def test_the_history_with_its_takeovers_and_the_reset(read: Detail) -> None:
    history = read.history
    assert isinstance(history, History)
    spans = {one.partition: [tuple(span[:5]) for span in one.spans] for one in history.lanes}
    assert spans == {
        T0: [
            (0, 60, "data", 1, 3),
            (60, 80, "data", 2, 1),  # the reset to 80 has marked the whole range
            (80, 100, "data", 4, 1),
            (80, 100, "undone", 2, 1),
        ],
        T1: [(0, 40, "data", 1, 1)],
    }
    assert [one.number for one in history.epochs] == [4, 3, 2, 1]
    assert [one.counts.records for one in history.epochs] == [20, 0, 0, 100]
    assert history.epochs[1].events == {"reset": 1}
    assert history.epochs[2].events == {"undone range": 1}
    assert history.last_commit is not None


def test_dead_letters_by_reason_without_secrets(read: Detail) -> None:
    letters = read.letters
    assert isinstance(letters, Letters)
    assert (letters.read, letters.total) == (3, 3)
    assert [(one.reason, one.number) for one in letters.reasons] == [
        ("name: not a string", 2),
        (printable(HOSTILE), 1),
    ]
    assert [one.place for one in letters.reasons[0].letters] == ["t-0@58", "t-0@59"]
    assert letters.reasons[0].letters[0].value == "pw *** in a record"
    assert letters.reasons[1].letters[0].headers == [("h", "base64: /w==")]
    assert PASSWORD not in repr(read)


def test_a_database_that_is_down_and_a_broker_that_is_down(tmp_path: Path) -> None:
    url = f"postgresql://app:{PASSWORD}@127.0.0.1:2/db"
    billing = subject(pipeline_file(tmp_path, "billing", url))
    found = overview(billing)
    assert found.verdict.level == "bad"
    assert found.verdict.sentence.startswith("Can't be read: no connection to PostgreSQL")
    parts = detail(billing)
    assert (parts.history, parts.letters, parts.problems) == (None, None, (found.problem,))
    assert PASSWORD not in repr((found, parts))
    shop = subject(filled(tmp_path), Topics(down=True))
    found = overview(shop)
    assert (found.verdict.level, found.problem) == (
        "bad",
        Problem("the broker does not answer", "start it"),
    )
    parts = detail(shop)  # the ledger answers
    assert isinstance(parts.history, History)
    assert isinstance(parts.letters, Letters)


def test_an_error_that_nobody_expected_is_shown(tmp_path: Path) -> None:
    shop = subject(pipeline_file(tmp_path))
    assert shop.pipeline is not None
    shop.pipeline.__dict__["source"] = None
    found = overview(shop)
    assert found.verdict.sentence.startswith("Can't be read: unexpected AttributeError")


# -- verdicts ------------------------------------------------------------------------------------


def of(position: int | None, end: int = 100, age: float | None = 5.0, **more: Any) -> Status:
    lag = end - (position or 0)
    lines = (PartitionLag("t", 0, position, end, lag, age if lag else 0.0),)
    return Status(lines, **{"rejects": 0, "epoch": 1, **more})


def judge(*readings: tuple[float, Status]) -> Overview:
    """The last of several readings, each with its time."""
    last = None
    for clock, status in readings:
        last = judged(Overview(status.judgement, status, clock=clock), last)
    assert last is not None
    return last


def test_a_pipeline_that_does_not_move_is_stalled() -> None:
    old = of(50, age=900.0)
    assert judge((0.0, of(50)), (59.0, of(50))).verdict.level == "busy"
    late = "Behind by 50 offsets; no commit for 61 s, and 50 offsets are left"
    assert judge((0.0, old), (30.0, old), (61.0, old)).verdict[::2] == ("behind", late)
    stalled = ("stalled", "Stalled; no commit for 301 s, and 50 offsets are left")
    assert judge((0.0, old), (301.0, old)).verdict[::2] == stalled
    delayed = judge((0.0, of(50, age=350.0, waits=600.0)), (301.0, of(50, age=650.0, waits=600.0)))
    assert delayed.verdict.level == "busy"
    assert delayed.verdict.sentence.endswith("; its filter makes records wait for 600 s")
    moved = judge((0.0, of(50)), (61.0, of(50)), (63.0, of(52)))
    assert (moved.verdict.level, moved.per_second, moved.still) == ("busy", 1.0, 0.0)
    assert judge((0.0, of(50)), (61.0, of(50, epoch=2))).verdict.level == "busy"
    assert judge((0.0, of(100)), (90.0, of(100))).verdict.level == "fine"  # nothing waits


def test_a_log_of_moves() -> None:
    """Into topics nothing is marked as superseded: a reset undoes what was beyond it."""
    tp, ten = TopicPartition("t", 0), Counts(10, 10, 0, 0)
    steps = [
        Entry(tp, 0, 0, 1, TAKEN),
        Entry(tp, 0, 10, 1, DATA, ten),
        Entry(tp, 10, 20, 1, DATA, ten),
        Entry(tp, 5, 5, 2, TAKEN),
        Entry(tp, 5, 15, 2, DATA, ten),
    ]
    ledger = Ledger("p", 2, {tp: Held(15, 2)}, steps, moves=True, resets={tp: {2: 5}})
    history = history_of(ledger)
    assert [(span.start, span.end, span.kind) for span in history.lanes[0].spans] == [
        (0, 5, "data"),
        (5, 15, "data"),
        (5, 20, "undone"),
    ]
    assert history.epochs[0].events == {"reset": 1}
    half = replace(ledger, positions={tp: Held(15, 2), TopicPartition("t", 1): Held(3, 1)})
    holds = {one.number: one.holds for one in history_of(half).epochs}
    assert holds == {2: (tp,), 1: (TopicPartition("t", 1),)}


def test_durations() -> None:
    shown = [duration(one) for one in (0.2, 5, 119, 120, 7_300, 200_000)]
    assert shown == ["0.2 s", "5 s", "119 s", "2 min", "2 h", "2 d"]


# -- which pipelines -----------------------------------------------------------------------------


def test_a_folder_of_pipelines(tmp_path: Path) -> None:
    pipeline_file(tmp_path, "b")
    pipeline_file(tmp_path, "a")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "odd.toml").write_text("name = 'odd'\n[source]\n[sink]\n")
    (tmp_path / "torn.toml").write_text("name = ")
    found = subjects_of([tmp_path])
    assert [one.name for one in found] == ["a", "b", "odd.toml", "torn.toml"]
    assert [one.pipeline is None for one in found] == [False, False, True, True]
    shown = overview(found[2])
    assert shown.verdict.level == "bad"
    assert "source" in shown.verdict.sentence


def test_what_can_not_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="there is no pipeline file"):
        subjects_of([tmp_path])
    (tmp_path / "odd.toml").write_text("name = 'odd'\n[source]\n[sink]\n")
    with pytest.raises(ConfigError):
        subjects_of([tmp_path / "odd.toml"])
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(WrongInput, match="are both named 'a'"):
        subjects_of([pipeline_file(tmp_path, "a"), pipeline_file(other, "a")])


# -- dead letters, what was read before, and the line over time -----------------------------------


def letter(reason: str, offset: int = 0) -> dict[str, Any]:
    return {
        "topic": "t", "partition": 0, "offset": offset, "timestamp_ms": None, "key": None,
        "value": None, "headers": [], "stage": "decode", "reason": reason,
    }  # fmt: skip


def test_reasons_that_differ_in_values_are_one_group() -> None:
    found = [letter(f"id: 'x{n}' is no BIGINT", n) for n in range(6)]
    found += [letter("name: not a string"), letter(f"password {PASSWORD} of user 7 is refused")]
    letters = grouped([*found, found[-1]], 9, Secrets.of([PASSWORD]))
    assert [(one.reason, one.number) for one in letters.reasons] == [
        ("id: … is no BIGINT", 6),
        ("password *** of user 7 is refused", 2),
        ("name: not a string", 1),
    ]
    told = [one.reason for one in letters.reasons[0].letters]
    assert told == [f"id: 'x{n}' is no BIGINT" for n in range(6)]
    assert letters.reasons[1].letters[0].reason is None  # as that of the group
    summary = RejectSummary.of([one["reason"] for one in found], lambda _: ())
    assert [number for _, number in summary.reasons] == [6, 1, 1]  # as `oncely rejects list`


def test_what_can_not_be_read_now_is_shown_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = Topics()
    shop = subject(filled(tmp_path), topics)
    before, parts = overview(shop), detail(shop)
    topics.down = True
    now = overview(shop, overview(shop, before))
    assert (now.verdict.kind, now.status, now.at) == ("unreadable", before.status, before.at)
    assert now.age > 0
    assert [one.lag for one in now.points] == [30, None, None]
    with monkeypatch.context() as broken:
        problem = Unavailable("the database does not answer")
        broken.setattr("oncely.web.model.read_ledger", raising(problem))
        kept = detail(shop, detail(shop, parts))
    assert (kept.history, kept.letters, kept.at) == (parts.history, parts.letters, parts.at)
    assert kept.problems == (Problem("the database does not answer"),)
    topics.down = False
    again = overview(shop, now)
    assert (again.age, again.problem, again.verdict.kind) == (0.0, None, before.verdict.kind)
    assert detail(shop, kept).at > parts.at


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def test_a_line_over_time_is_bounded_and_keeps_peaks_and_sums() -> None:
    points: Sequence[Point] = ()
    for n in range(2_000):  # 8 hours, every 15 seconds
        lag = None if 1_400 <= n < 1_600 else 10_000 if n == 1_234 else 7
        points = extended(points, Point(15.0 * n, lag, 100.0 if n == 1_234 else 2.0))
    assert len(points) == POINTS
    assert (points[0].at, points[-1].at) == (0.0, 15.0 * 1_999)
    assert max(one.at - last.at for last, one in pairwise(points)) < 200
    assert max(one.lag or 0 for one in points) == 10_000
    moved = sum(one.per_second * (one.at - last.at) for last, one in pairwise(points))
    assert moved == pytest.approx(15 * (1_998 * 2.0 + 100.0))
    unread = [one.at for one in points if one.lag is None]
    assert unread[0] == pytest.approx(21_000, abs=200)
    assert unread[-1] == pytest.approx(24_000, abs=200)
    later = extended(points, Point(15.0 * 1_999 + 80_000.0, 1))
    assert later[0].at > later[-1].at - 86_400.0


def test_an_overview_is_read_while_nobody_looks_and_at_once_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oncely.web.model._KEEP", 0.0)
    read = threading.Semaphore(0)

    def count(before: int | None) -> int:
        read.release()
        return (before or 0) + 1

    unseen = Reading(count, 0.0, unseen=0.001)
    assert unseen.get(10.0)
    for _ in range(5):
        assert read.acquire(timeout=10.0)
    unseen.close()

    slow = Reading(count, 0.0, unseen=3600.0)
    first = slow.get(10.0)
    await_that(lambda: slow.get() != first, "a reading for who looks")
    slow.close()

    ending = Reading(count, 0.0)
    ending.get(10.0)
    await_that(lambda: ending._thread is None, "the end")
