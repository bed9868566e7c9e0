"""Threads that divide a partition by key, killed and paused inside their transactions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import pytest

from oncely.core.batch import lane_of
from oncely.core.ranges import OffsetRange
from oncely.pipeline import working
from oncely.testing.processes import Child, await_that, child
from oncely.verify.log import Fenced, Planned, read
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.test_worker_handlers import APP, environment, file_of, until_latest
from tests.scenarios.world import World, assert_exactly_once, assert_steps, good, produce

THREADS = {"THREADS": "4"}
BEFORE, RECORDS = 60, 900  # a thread has more than one piece
Logged = TypeVar("Logged")
HELD = (160, 162)  # records of two threads: the first ones that are left


@pytest.fixture
def world(make_world: Any) -> World:
    """One partition, of which a part is done."""
    assert lane_of(b"g6", 4) != lane_of(b"g1", 4)
    world: World = make_world(1)
    world.make_table()
    publish(world, 0, BEFORE)
    until_latest(world, **THREADS)
    publish(world, BEFORE, RECORDS)
    return world


def publish(world: World, start: int, end: int) -> None:
    """Records of seven keys, which are also in the column ``grp``; the handler refuses none."""
    ids = range(100 + start, 100 + end)
    produce(world.brokers, world.topic, ((0, key_of(one), good(one)) for one in ids))


def key_of(number: int) -> bytes:
    """The key of a record."""
    return b"g%d" % (number % 7)


def planned(world: World) -> list[OffsetRange]:
    """The ranges of the batches that workers have begun."""
    return [OffsetRange(*one.ranges[world.topic][0]) for one in logged(world, Planned)]


def logged(world: World, kind: type[Logged]) -> list[Logged]:
    """The events of a kind in the event log."""
    lines = read([world.events], world.name).lines
    return [one.event for one in lines if isinstance(one.event, kind)]


def of_other_threads(world: World) -> set[int]:
    """The records of the last batch whose threads do not wait."""
    waiting = {lane_of(key_of(one), 4) for one in HELD}
    ids = (100 + offset for offset in range(*astuple(planned(world)[-1])))
    return {one for one in ids if lane_of(key_of(one), 4) not in waiting}


def taken_effect(world: World) -> set[int]:
    """The records that have taken effect."""
    return {of for (of,) in world.sql("SELECT id FROM rows")}


@contextmanager
def inside(world: World, name: str = "worker") -> Iterator[Child]:
    """A worker of which two threads are inside their transactions, and others have committed."""
    hold = held_by(world, name)
    hold.touch()
    held = " ".join(map(str, HELD))
    given = environment(world, HOLD=str(hold), HELD=held, **THREADS)
    log = world.folder / f"{name}.log"
    with child(["oncely.cli", "work", APP, *world.logged], log, given) as one:
        for number in HELD:
            await_that(hold.with_suffix(f".inside{number}").exists, "a thread that waits")
        await_that(
            lambda: of_other_threads(world) <= taken_effect(world), "commits of other threads"
        )
        yield one
        hold.unlink(missing_ok=True)


def held_by(world: World, name: str) -> Path:
    """The file while which the two threads of a worker wait."""
    return world.folder / f"{name}.hold"


def killed_inside(world: World) -> set[int]:
    """The records that had taken effect when a worker was killed; the position is before them."""
    with inside(world) as one:
        one.send_signal(signal.SIGKILL)
        one.wait(180)
        await_that(lambda: not transactions(world), "the end of its transactions")
    assert world.sql('SELECT "position" FROM oncely_positions') == [(BEFORE,)]
    return taken_effect(world)


def transactions(world: World) -> int:
    """The open transactions of pipelines."""
    return int(
        world.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'oncely/%' AND state <> 'idle'"
        )[0][0]
    )


def called(world: World) -> set[int]:
    """The records with which a worker has called the handler, until it was at the end."""
    calls = world.folder / "calls"
    until_latest(world, CALLS=str(calls), **THREADS)
    return set(map(int, calls.read_text().split()))


def test_killed_inside_transactions_only_what_was_not_committed_is_done_again(
    world: World,
) -> None:
    done = killed_inside(world)
    file = file_of(world)
    assert done == {*range(100, 100 + BEFORE), *of_other_threads(world)}
    assert len(done) > BEFORE
    assert oncely_json("status", file)["partitions"][0]["lag"] == RECORDS - BEFORE
    oncely("verify", file, *world.logged)
    assert called(world) == set(range(100, 100 + RECORDS)) - done
    assert_exactly_once(world, of="grp")
    assert_steps(world)


def test_paused_inside_transactions_and_taken_over_it_commits_nothing(world: World) -> None:
    """Also while the new owner has not handled these records yet."""
    with inside(world, "former") as one:
        one.send_signal(signal.SIGSTOP)
        with inside(world, "owner") as other:
            held_by(world, "former").unlink()
            one.send_signal(signal.SIGCONT)
            await_that(lambda: logged(world, Fenced), "the former owner is fenced")
            assert taken_effect(world).isdisjoint(HELD)
            held_by(world, "owner").unlink()
            publish(world, RECORDS, RECORDS + 100)
            await_that(lambda: world.count() >= RECORDS + 100, "more rows")
            for each in (one, other):
                each.send_signal(signal.SIGTERM)
                assert each.wait(180) == 0
    assert_exactly_once(world, of="grp")
    assert_steps(world)


def test_threads_have_a_limited_number_of_records_in_hand(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few ranges are finished beyond the position."""
    monkeypatch.setattr(working, "_AHEAD", 200)
    before = len(planned(world))
    until_latest(world, **THREADS)
    assert max(one.end - one.start for one in planned(world)[before:]) <= 200
    assert_exactly_once(world, of="grp")


@pytest.mark.parametrize("to", [30, 100])
def test_a_reset_undoes_what_was_finished_beyond_its_target(world: World, to: int) -> None:
    """Also when it moves the position forward."""
    done, file = killed_inside(world), file_of(world)
    oncely("offsets", "reset", file, "--to-offset", str(to), "--execute", *world.logged)
    world.sql("DELETE FROM rows WHERE kafka_offset >= %s", to)
    assert called(world) == set(range(100 + to, 100 + RECORDS))
    rows = taken_effect(world)
    assert rows == set(range(100 + to, 100 + RECORDS)) | {one for one in done if one < 100 + to}
    assert world.count() == len(rows)
    assert_steps(world)
