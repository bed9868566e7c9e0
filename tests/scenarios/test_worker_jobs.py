"""`oncely.jobs`: calls that are enqueued take effect once, also when a worker is killed."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any

import pytest

from oncely import context
from oncely.testing.faults import closed_gate, waiting
from oncely.testing.processes import await_that, child
from tests.scenarios.commands import oncely
from tests.scenarios.world import World

MODULE = "tests.scenarios.mailing"


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(1)
    world.sql("CREATE TABLE mails (number bigint, text text, sender text)")
    return world


def test_jobs_are_done_once_by_workers_that_are_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = world.folder / "mailing.hold"
    given = {"NAME": world.name, "BROKERS": world.brokers, "URL": world.url, "TOPIC": world.topic}
    for name, value in {**given, "HOLD": str(hold)}.items():
        monkeypatch.setenv(f"MAILING_{name}", value)
    sys.modules.pop(MODULE, None)
    mailing = importlib.import_module(MODULE)
    for number in range(30):
        with context.using({"user": f"user {number}"}):
            mailing.mail.enqueue(number, text="ä")
    monkeypatch.setattr(mailing.mail, "name", "gone")
    mailing.mail.enqueue(30)

    hold.touch()
    log = world.folder / "killed.log"
    with child(["oncely.cli", "work", f"{MODULE}:app", *world.logged], log) as one:
        await_that(hold.with_suffix(".inside").exists, "a job that waits")
        with closed_gate(world.url, "oncely_ranges") as database:
            hold.unlink()
            await_that(lambda: waiting(database), "the offsets of jobs that are done")
            assert world.sql("SELECT count(*) FROM mails") == [(10,)]
            one.send_signal(signal.SIGKILL)
            one.wait(180)
    assert world.sql("SELECT count(*) FROM mails") == [(10,)]
    sys.modules.pop(MODULE)
    oncely("work", f"{MODULE}:app", "--until", "latest", *world.logged)
    done = world.sql("SELECT * FROM mails ORDER BY number")
    assert done == [(n, "ä", f"user {n}") for n in range(30) if n != 13]
    letters = world.sql('SELECT reason FROM oncely_rejects ORDER BY "offset"')
    assert letters[0][0].startswith("ValueError: unlucky (mailing.py:")
    assert letters[1][0].startswith("LookupError: no function is job 'gone'")
