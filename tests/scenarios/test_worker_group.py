"""Members of a group that are killed or paused: the others take over, and nothing is doubled."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oncely.kafka.source import KafkaSource
from oncely.testing.faults import inside_a_commit
from oncely.testing.processes import Child, await_that, child
from oncely.testing.servers.process import free_port
from tests.prometheus import samples
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.test_probes import asked
from tests.scenarios.world import World, assert_exactly_once, assert_steps

PROTOCOLS = [
    "cooperative",
    pytest.param("eager", marks=pytest.mark.long),
    pytest.param("consumer", marks=pytest.mark.long),  # its session lasts 45 s by the broker
]
LETS_GO = {"session_timeout": "6 seconds", "revoke_timeout": "2 seconds"}
RESTARTS = pytest.param("cooperative, restart", marks=pytest.mark.long)


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(4)
    world.make_table()
    return world


@contextmanager
def member(world: World, *options: str, **sections: Any) -> Iterator[Child]:
    """`oncely work` as a process; its output is beside its pipeline file."""
    file = world.file(**sections)
    words = ["oncely.cli", "work", str(file), *options, *world.logged]
    with child(words, file.with_suffix(".log")) as one:
        yield one


def holders(world: World) -> int:
    """The number of epochs that hold the positions."""
    if not world.sql("SELECT to_regclass('oncely_positions')")[0][0]:
        return 0
    return len(world.sql("SELECT DISTINCT epoch FROM oncely_positions WHERE epoch > 0"))


@pytest.mark.parametrize("protocol", [*PROTOCOLS, RESTARTS])
def test_a_member_is_killed_inside_a_commit(world: World, protocol: str) -> None:
    worker = {**LETS_GO, "protocol": protocol}
    if protocol.endswith("restart"):
        worker |= {"protocol": "cooperative", "on_rebalance": "restart"}
    with member(world, worker=worker) as first:
        world.publish(400)
        await_that(lambda: world.count() == 400 or first.poll() is not None, "rows")
        with member(world, worker=worker) as second:
            await_that(lambda: holders(world) >= 2, "two members with partitions")
            with inside_a_commit(
                world.url, "rows", first.pid, lambda: world.publish(400, first=400)
            ):
                first.kill()
            world.publish(400, first=800)
            await_that(
                lambda: world.count() == 1_200 or second.poll() is not None, "rows of the other"
            )
            second.send_signal(signal.SIGTERM)
            assert second.wait(180) == 0
    assert_exactly_once(world)
    assert_steps(world)


@pytest.mark.parametrize("is_static", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_idle_member_takes_over_from_a_killed_one(make_world: Any, is_static: bool) -> None:
    """There are more members than partitions."""
    world: World = make_world(1)
    world.make_table()
    one, two = (LETS_GO | ({"instance": name} if is_static else {}) for name in ("one", "two"))
    port = free_port()
    with member(world, worker=one) as first:
        world.publish(100, partitions=1)
        await_that(lambda: world.count() == 100, "rows")
        with member(world, "--http", f":{port}", worker=two) as second:
            group = f"oncely-{world.name}"
            source = KafkaSource(world.brokers, (world.topic,))
            await_that(lambda: len(source.members(group)) == 2, "two members")
            shown = oncely_json("status", world.file())["members"]
            assert sorted(len(one["partitions"]) for one in shown) == [0, 1]
            assert {(one["group"], one["host"]) for one in shown} == {(group, "127.0.0.1")}
            await_that(lambda: asked(port, "/readyz")[0] == 200, "ready without partitions")
            assert asked(port, "/livez")[0] == 200
            assert "oncely_lag_records{" not in asked(port, "/metrics")[1]  # those of the other
            with inside_a_commit(
                world.url,
                "rows",
                first.pid,
                lambda: world.publish(100, partitions=1, first=100),
            ):
                first.kill()
            world.publish(100, partitions=1, first=200)
            await_that(lambda: world.count() == 300, "rows of the idle one")
            lag = (
                "oncely_lag_records",
                f'pipeline="{world.name}",topic="{world.topic}",partition="0"',
            )
            await_that(
                lambda: samples(asked(port, "/metrics")[1]).get(lag) == 0, "the lag is its own"
            )
            second.send_signal(signal.SIGTERM)
            assert second.wait(180) == 0
    assert_exactly_once(world)
    assert_steps(world)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_is_paused_inside_a_commit_and_wakes_up(world: World, protocol: str) -> None:
    worker = {**LETS_GO, "protocol": protocol}
    with member(world, worker=worker) as first, member(world, worker=worker) as second:
        world.publish(400)
        await_that(lambda: world.count() == 400 and holders(world) >= 2, "both have partitions")
        with inside_a_commit(world.url, "rows", first.pid, lambda: world.publish(400, first=400)):
            await_that(lambda: world.count() == 800, "all rows, by the other")
        # The paused one has woken up: it is fenced, asks, and lets go or goes on.
        world.publish(400, first=800)
        await_that(lambda: world.count() == 1_200, "rows after it woke up")
        assert (first.poll(), second.poll()) == (None, None)
        for one in (first, second):
            one.send_signal(signal.SIGTERM)
            assert one.wait(180) == 0
    assert_exactly_once(world)
    assert_steps(world)


def test_another_destination_of_the_same_name(world: World) -> None:
    """By default it has the same group. A client id of its own hides where it writes: what it holds
    is named then, and its lag is exported."""
    elsewhere = {"url": f"sqlite:///{world.folder}/{world.name}.db"}
    world.publish(400)
    port = free_port()
    with member(world, "--http", f":{port}", worker=LETS_GO) as one:
        await_that(lambda: world.count() == 400, "rows")
        refused = oncely("work", world.file(sink=elsewhere), "--until", "latest", expect=2).stderr
        assert f"worker.group: pipeline '{world.name}' works in group" in refused
        assert "too, and writes into another destination: oncely-work/" in refused
        own = {"client.id": "staging"}
        with member(world, sink=elsewhere, source={"kafka": own}, worker=LETS_GO):
            files = list(world.folder.glob("*.log"))
            told = "no member of this pipeline reads it: staging at"
            await_that(lambda: any(told in one.read_text() for one in files), "the holder")
            world.publish(400, first=400)

            def lags() -> list[float]:
                known = samples(asked(port, "/metrics")[1])
                return sorted(at for (of, _), at in known.items() if of == "oncely_lag_records")

            await_that(lambda: lags() == [0, 0, 100, 100], "the lags of all partitions")
        assert one.poll() is None


def test_a_reset_ends_the_workers_and_workers_that_are_started_later_go_on(world: World) -> None:
    """As a run on Spark does, it takes all partitions over."""
    with member(world) as worker:
        world.publish(400)
        await_that(lambda: world.count() == 400, "rows")
        oncely("offsets", "reset", world.file(), "--to-latest", "--execute", *world.logged)
        assert worker.wait(180) == 3  # also without records to commit
        world.publish(100, first=400)
    oncely("work", world.file(), "--until", "latest", *world.logged)
    assert world.count() == 500
    assert_exactly_once(world)
    assert_steps(world)


@pytest.mark.both
@pytest.mark.long  # a reset, which takes over as a run does, is in every run
def test_a_pipeline_moves_between_run_and_work(world: World, runtime: Any) -> None:
    with member(world) as worker:
        world.publish(400)
        await_that(lambda: world.count() == 400, "rows")
        world.run(runtime)
        world.publish(100, first=400)
        assert worker.wait(180) == 3
    world.run(runtime)
    world.publish(100, first=500)
    oncely("work", world.file(), "--until", "latest", *world.logged)
    world.publish(100, first=600)
    world.run(runtime)
    assert world.count() == 700
    assert_exactly_once(world)
    assert_steps(world)
