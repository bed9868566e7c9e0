"""Killed before and after every call to table and store: in a commit, when opening, in a replay."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.deltatools import Committing, DeltaPlace, make_place
from tests.filestools import BAD, ENDS, IDS, START, open_sink
from tests.replaytools import bad, judging
from tests.scenarios import delta_jobs as jobs
from tests.scenarios.zygote import Ended, Zygote
from tests.sinktools import T0, T1, at_t0, commit_all, numbered, ready

MODES = ["append", "upsert"]


def look(place: DeltaPlace, *, there: bool = True) -> None:
    """The table has everything once, or nothing."""
    assert place.ids() == (IDS if there else [])
    assert place.letters() == ([("t", 0, BAD)] if there else [])
    at = {tp: place.told()[0]["positions"][tp.topic][str(tp.partition)] for tp in ENDS}
    assert at == (ENDS if there else START)


def killed(
    zygote: Zygote, folder: Path, mode: str, at: int, when: str, only: str = ""
) -> tuple[Ended, bool]:
    """Killed at a step, looked at, and started again; whether it had taken effect before."""
    place = make_place(folder)
    fence = open_sink(place.sink(keys=jobs.KEYS[mode])).fence  # type: ignore[arg-type]
    ended = zygote.run(jobs.stage_and_publish, place, mode, fence, at, when, only)
    assert not ended.error, ended.error
    done = zygote.run(jobs.restart, place, mode)
    assert not done.error, done.error
    look(place)
    return ended, done.value


TELLING = [
    (2, jobs.HALF, "write", False),
    (3, "after", "write", False),  # the dead letters
    (4, jobs.HALF, "write", False),  # the ledger's document
    (1, "before", "commit", False),
    (1, "after", "commit", True),
    (1, "after", "delete", True),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("at", "when", "step", "done"), TELLING)
def test_killed_where_it_tells_most(
    zygote: Zygote, tmp_path: Path, mode: str, at: int, when: str, step: str, done: bool
) -> None:
    ended, replayed = killed(zygote, tmp_path, mode, at, when, step)
    assert ended.signal == signal.SIGKILL
    assert replayed == done


def every_step(kill: Callable[[int], Ended]) -> list[str]:
    """``kill`` at each step in turn; the steps of the run that came to its end."""
    for at in itertools.count(1):
        ended = kill(at)
        assert not ended.error, ended.error
        if not ended.signal:
            assert at == len(ended.value) + 1
            return list(ended.value)
    raise AssertionError


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["after", jobs.HALF])
def test_a_batch_killed_at_every_step(zygote: Zygote, tmp_path: Path, mode: str, when: str) -> None:
    """After each step, which is before the next one, and in the middle of each file."""
    effects: list[bool] = []
    only = "write" if when == jobs.HALF else ""
    for at in itertools.count(1):
        ended, replayed = killed(zygote, tmp_path, mode, at, when, only)
        if not ended.signal:
            break
        effects.append(replayed)
    assert ended.value.count("commit") == 1
    assert effects == sorted(effects), "it takes effect at one step, and stays"
    assert effects[-1] == (when != jobs.HALF)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("at", "step"), [(1, "load"), (1, "write"), (2, "load"), (1, "commit")])
def test_a_zombie_wakes_up_when_a_newer_run_has_published(
    zygote: Zygote, tmp_path: Path, mode: str, at: int, step: str
) -> None:
    place = make_place(tmp_path)
    fence = open_sink(place.sink(keys=jobs.KEYS[mode])).fence  # type: ignore[arg-type]
    job = zygote.start(jobs.zombie, place, mode, fence, at, step)
    job.wait_until_stopped()
    done = zygote.run(jobs.restart, place, mode)
    assert not done.error, done.error
    look(place)
    job.go_on()
    assert job.wait().value == "fenced"
    look(place)


@pytest.mark.long
@pytest.mark.parametrize("there", [None, "empty", "narrow"])
def test_an_opening_killed_at_every_step(zygote: Zygote, tmp_path: Path, there: str | None) -> None:
    """No table yet, one that was opened before, and one that lacks a column."""

    def kill(at: int) -> Ended:
        place = make_place(tmp_path)
        if there == "empty":
            open_sink(place.sink())  # type: ignore[arg-type]
        elif there == "narrow":
            DeltaTable.create(place.root, jobs.narrow())
        ended = zygote.run(jobs.open_table, place, at, "after")
        again, fence = ready(Committing(place.sink()), {T0: 0, T1: 0})
        assert fence.epoch in ((2, 3) if there == "empty" else (1, 2))
        commit_all(again, at_t0(0, numbered(0, 3)), fence)
        assert place.ids() == [0, 1, 2]
        return ended

    assert every_step(kill).count("commit") == 1


def with_letters(folder: Path) -> DeltaPlace:
    """Ten records, of which six were rejected, in two files."""
    place = make_place(folder)
    sink, fence = ready(Committing(place.sink()), {T0: 0, T1: 0})
    commit_all(sink, at_t0(0, [*numbered(0, 2), *bad(2, 3, 4)]), fence)
    commit_all(sink, at_t0(5, [*numbered(5, 7), *bad(7, 8, 9)]), fence)
    return place


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_replay_killed_at_every_step(zygote: Zygote, tmp_path: Path) -> None:
    def kill(at: int) -> Ended:
        place = with_letters(tmp_path)
        ended = zygote.run(jobs.replay, place, at, "after")
        assert sorted([*place.ids(), *(n for *_, n in place.letters())]) == [*range(10)]
        jobs.replayed(place.sink(), judging(jobs.passes))
        assert place.ids() == [0, 1, 2, 4, 5, 6, 8]
        assert place.letters() == [("t", 0, 3), ("t", 0, 7), ("t", 0, 9)]
        return ended

    assert every_step(kill).count("commit") >= 3


def discard_killed(zygote: Zygote, folder: Path, *where: Any) -> Ended:
    """Killed at a step, looked at, and repeated."""
    place = with_letters(folder)
    ended = zygote.run(jobs.discard, place, *where)
    assert not ended.error, ended.error
    assert pending(place) in ([2, 3, 4, 7, 8, 9], [3, 7, 9])
    jobs.discarded(place.sink())
    assert pending(place) == [3, 7, 9]
    assert len(place.letters()) == 6
    kept = [
        file for file in (place.root / "_oncely").rglob("*.parquet") if b"v2" in file.read_bytes()
    ]
    assert not kept, "content of a discarded dead letter"
    return ended


def pending(place: DeltaPlace) -> list[int]:
    """The offsets of dead letters that have their content."""
    ledger = place.sink().ledger
    named = ledger.read().document.rejects
    letters = [one for path, _ in named for one in ledger.letters(path)]
    assert {one.offset for one in letters if one.value is None} == {
        one.offset for one in letters if not one.pending
    }
    return sorted(one.offset for one in letters if one.pending)


@pytest.mark.parametrize(
    "where",
    [(2, jobs.HALF, "write"), (3, "after", "write"), (1, "before", "commit"),
     (1, "after", "commit"), (1, "after", "delete")],
    ids=lambda where: " ".join(map(str, where)),
)  # fmt: skip
def test_a_discard_killed_where_it_tells_most(
    zygote: Zygote, tmp_path: Path, where: tuple[int, str, str]
) -> None:
    assert discard_killed(zygote, tmp_path, *where).signal == signal.SIGKILL


@pytest.mark.long
def test_a_discard_killed_at_every_step(zygote: Zygote, tmp_path: Path) -> None:
    steps = every_step(lambda at: discard_killed(zygote, tmp_path, at, "after"))
    assert steps.count("commit") == 1


def test_a_reset_killed_at_every_step(zygote: Zygote, tmp_path: Path) -> None:
    def kill(at: int) -> Ended:
        place = with_letters(tmp_path)
        ended = zygote.run(jobs.reset_to, place, 4, at, "after")
        begun, left = place.told()[0]["positions"]["t"]["0"], len(place.letters())
        assert (begun, left) in ((10, 6), (4, 2))
        sink, fence = ready(Committing(place.sink()), {T0: 0, T1: 0})
        if begun == 4:
            commit_all(sink, at_t0(4, numbered(4, 10)), fence)
        jobs.replayed(place.sink(), judging())
        assert set(place.ids()) == {*range(10)}
        assert place.ids().count(8) == 1, "by its dead letter, or read again: once"
        return ended

    assert every_step(kill).count("commit") == 1
