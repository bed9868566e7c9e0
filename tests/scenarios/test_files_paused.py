"""A driver that is stopped (SIGSTOP) while it publishes, and a vacuum that runs meanwhile.

Both are processes of their own, and the time that passes is real: the values are small, and the
slack for clocks of several machines is taken away.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from oncely.kinds.files import maintenance as maintenance_module
from oncely.kinds.files.maintenance import vacuum
from oncely.kinds.files.table import Table
from oncely.kinds.files.verify import verify
from oncely.kinds.partitions import is_file
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.filestools import IDS, FilesPlace, make_place, open_sink
from tests.scenarios import files_jobs as jobs
from tests.scenarios.zygote import Job, Zygote

LOW = {"max_staging_age": 2.0, "transaction_timeout": 2.0}


@pytest.fixture
def place(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FilesPlace:
    monkeypatch.setattr(maintenance_module, "SLACK", timedelta(0))
    return make_place(broker, tmp_path)


def paused(zygote: Zygote, place: FilesPlace, step: str, **values: float) -> Job:
    """A driver that lives by these values, stopped; its files are older than ``LOW`` allows."""
    fence = open_sink(place.sink(**values)).fence
    job = zygote.start(jobs.paused, place, fence, step, values)
    job.wait_until_stopped()
    store, limit = place.table().store, timedelta(seconds=sum(LOW.values()))
    newest = max(one.modified for one in store.list() if is_file(one.path))
    await_that(lambda: store.now() - newest > limit, "files that a vacuum may take")
    return job


def assert_whole(table: Table, place: FilesPlace) -> None:
    """Exactly once, and every file that is named is there."""
    assert place.ids() == IDS
    assert verify(table).problems == ()


def test_a_vacuum_by_a_lowered_age_takes_nothing_that_a_paused_driver_still_names(
    zygote: Zygote, place: FilesPlace
) -> None:
    job = paused(zygote, place, "begin_transaction", **{**LOW, "max_staging_age": 3600.0})
    table = place.table(**LOW)
    assert vacuum(table).orphans == ()
    job.go_on()
    ended = job.wait()
    assert ended.value == "published", ended
    assert_whole(table, place)


@pytest.mark.parametrize("step", ["begin_transaction", "commit_transaction"])
def test_a_driver_that_was_paused_for_too_long_names_nothing_that_was_vacuumed(
    zygote: Zygote, place: FilesPlace, step: str
) -> None:
    """Before its own look at the age it refuses; after it the broker has ended its transaction."""
    job = paused(zygote, place, step, **LOW)
    table = place.table(**LOW)
    gone = {one.path for one in vacuum(table).orphans}
    assert gone
    job.go_on()
    ended = job.wait()
    assert "may have been vacuumed" in str(ended.value), ended
    assert place.ids() == []
    done = zygote.run(jobs.restart, place)
    assert not done.error, done.error
    assert_whole(table, place)
    assert not gone & place.world.stored()
