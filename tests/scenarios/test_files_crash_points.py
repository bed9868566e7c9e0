"""Batches into files, killed at every step: file writes, and every call to a producer."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from oncely.core.batch import StagedRowsGone
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.filestools import (
    ENDS,
    IDS,
    START,
    FilesPlace,
    make_place,
    open_sink,
    publish_all,
    stage,
    what,
)  # fmt: skip
from tests.scenarios import files_jobs as jobs
from tests.scenarios.zygote import Ended, Zygote


def look(place: FilesPlace, *, there: bool = True) -> None:
    """The manifest names everything once, or nothing; what it names is there and whole."""
    assert place.ids() == (IDS if there else [])
    world = place.world
    assert len(world.records(world.rejects)) == int(there)
    assert world.shown() == {tp.partition: at for tp, at in (ENDS if there else START).items()}


def killed(
    zygote: Zygote, broker: Broker, folder: Path, at: int, when: str, only: str = ""
) -> tuple[Ended, bool, int]:
    """Killed at a step, looked at, and started again; whether it had taken effect before."""
    place = make_place(broker, folder)
    fence = open_sink(place.sink()).fence
    ended = zygote.run(jobs.stage_and_publish, place, fence, at, when, only)
    assert not ended.error, ended.error
    done = zygote.run(jobs.restart, place)
    assert not done.error, done.error
    look(place)
    named = set(place.world.entries())
    orphans = place.world.stored() - named
    return ended, done.value, len(orphans)


TELLING = [
    (2, jobs.HALF, "write", False),
    (1, "before", "sync", False),
    (2, "after", "sync", False),
    (1, "before", "begin_transaction", False),
    (3, "after", "produce", False),
    (1, "before", "commit_transaction", False),
    (1, "after", "commit_transaction", True),
]


@pytest.mark.parametrize(("at", "when", "step", "done"), TELLING)
def test_killed_where_it_tells_most(
    zygote: Zygote, broker: Broker, tmp_path: Path, at: int, when: str, step: str, done: bool
) -> None:
    ended, replayed, orphans = killed(zygote, broker, tmp_path, at, when, step)
    assert ended.signal == signal.SIGKILL
    assert replayed == done
    assert bool(orphans) == (not done)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["after", jobs.HALF])
def test_killed_at_every_step(zygote: Zygote, broker: Broker, tmp_path: Path, when: str) -> None:
    """After each step, which is before the next one, and in the middle of each file."""
    effects = []
    only = "write" if when == jobs.HALF else ""
    for at in itertools.count(1):
        ended, replayed, _ = killed(zygote, broker, tmp_path, at, when, only)
        if not ended.signal:
            break
        effects.append(replayed)
    steps = [name for name in ended.value if name == (only or name)]
    assert at == len(steps) + 1
    assert ended.value.count("commit_transaction") == 1
    # All or nothing: it takes effect at one step, and stays.
    commit = ended.value.index("commit_transaction") if not only else len(steps)
    assert effects == [one >= commit for one in range(len(effects))]


@pytest.mark.parametrize("step", ["write", "begin_transaction", "produce", "commit_transaction"])
def test_a_zombie_wakes_up_when_a_newer_run_has_published(
    zygote: Zygote, broker: Broker, tmp_path: Path, step: str
) -> None:
    place = make_place(broker, tmp_path)
    fence = open_sink(place.sink()).fence
    job = zygote.start(jobs.zombie, place, fence, 1, step)
    job.wait_until_stopped()
    done = zygote.run(jobs.restart, place)
    assert not done.error, done.error
    job.go_on()
    ended = job.wait()
    assert ended.value == "fenced", ended
    look(place)
    await_that(lambda: not place.world.held_back(place.world.manifest), "its transaction's end")


def test_files_that_may_have_been_vacuumed_are_not_named(broker: Broker, tmp_path: Path) -> None:
    """Told when the broker holds all names, and the commit is next: no pause can come between."""
    place = make_place(broker, tmp_path)
    sink = place.sink(max_staging_age=3600.0)
    fence = open_sink(sink).fence
    sink.begin_batch()
    staged = stage(sink, fence)
    sink._began -= 3601  # the machine was asleep
    with pytest.raises(StagedRowsGone, match="may have been vacuumed"):
        publish_all(sink, what(staged), fence)
    look(place, there=False)
    sink.begin_batch()
    again = stage(sink, fence)
    publish_all(sink, what(again), fence)
    look(place)
