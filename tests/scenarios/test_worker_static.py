"""Static members: two processes of one name."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.testing.processes import await_that
from tests.scenarios.commands import oncely
from tests.scenarios.test_worker_group import member
from tests.scenarios.world import World, assert_exactly_once, assert_steps


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(2)
    world.make_table()
    world.publish(100, partitions=2)
    return world


def test_the_newcomer_takes_the_place_of_the_member_and_that_one_ends_with_3(world: World) -> None:
    """KIP-345."""
    worker = {"instance": "one", "session_timeout": "30 seconds"}
    with member(world, worker=worker) as first:
        await_that(lambda: world.count() == 100, "rows")
        with member(world, worker=worker) as second:
            assert first.wait(180) == 3
            world.publish(100, partitions=2, first=100)
            await_that(lambda: world.count() == 200, "rows of the newcomer")
            assert second.poll() is None
    assert_exactly_once(world)
    assert_steps(world)


def test_a_member_that_is_killed_and_started_again_does_not_wait_for_its_session(
    world: World,
) -> None:
    worker = {"instance": "one", "session_timeout": "5 minutes"}
    with member(world, worker=worker) as first:
        await_that(lambda: world.count() == 100, "rows")
        first.kill()
        first.wait(180)
    with member(world, worker=worker):
        world.publish(100, partitions=2, first=100)
        await_that(lambda: world.count() == 200, "rows, long before the end of the session", 180)
    assert_exactly_once(world)
    assert_steps(world)


def test_under_kip_848_the_newcomer_is_refused(world: World) -> None:
    worker = {"instance": "one", "protocol": "consumer"}
    with member(world, worker=worker) as first:
        await_that(lambda: world.count() == 100, "rows")
        said = oncely("work", world.file(worker=worker), expect=2).stderr
        assert "worker.instance: 'one' is still a member of the group" in said
        world.publish(100, partitions=2, first=100)
        await_that(lambda: world.count() == 200, "rows of the member")
        assert first.poll() is None
    assert_exactly_once(world)
    assert_steps(world)
