"""`oncely work module:app`: what handlers do takes effect once, with the offsets."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that, child
from oncely.web.model import Letters, Subject, detail
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, assert_exactly_once, assert_steps, good, toml

APP = "tests.scenarios.billing:app"


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(2)
    world.publish(1_000, partitions=2)
    world.make_table()
    return world


def environment(world: World, **more: str) -> dict[str, str]:
    given = {"NAME": world.name, "BROKERS": world.brokers, "URL": world.url, "TOPIC": world.topic}
    return {f"BILLING_{name}": value for name, value in {**given, **more}.items()}


def until_latest(world: World, expect: int = 0, **more: str) -> str:
    """The standard error of a worker that ends by itself."""
    sys.modules.pop(APP.partition(":")[0], None)  # as a new process: it reads its environment
    words = ("work", APP, "--until", "latest", *world.logged)
    return oncely(*words, env=environment(world, **more), expect=expect).stderr


def file_of(world: World) -> Path:
    """The worker's settings as a pipeline file."""
    raw = world.settings()
    raw["sink"] = {"kind": "handlers", "url": world.url, "max_rejects": 10}
    file = world.folder / "billing.toml"
    file.write_text(toml(raw))
    return file


def test_killed_inside_a_handler_it_goes_on_from_its_offsets(world: World) -> None:
    hold = world.folder / "billing.hold"
    hold.touch()
    environ, log = environment(world, HOLD=str(hold)), world.folder / "killed.log"
    with child(["oncely.cli", "work", APP, *world.logged], log, environ) as one:
        await_that(lambda: [*world.folder.glob("billing.inside*")], "a handler that waits")
        one.send_signal(signal.SIGKILL)
        one.wait(180)
    assert world.count() == 0
    hold.unlink()
    said = until_latest(world)
    assert said.splitlines()[-1].startswith("1,000 records: 998 rows, 2 rejects in ")
    assert_exactly_once(world, rejects=2)
    assert_steps(world)
    letters = world.sql("SELECT stage, reason FROM oncely_rejects ORDER BY reason")
    assert letters[1] == ("handle", "not billable")
    assert letters[0][1].startswith("ValueError: unlucky (billing.py:")


def test_records_that_a_function_drops_are_counted_as_filtered(world: World) -> None:
    assert "1,000 records: 988 rows, 2 rejects in " in until_latest(world, DROP="77")
    assert world.sql("SELECT count(*) FROM rows WHERE id % 100 = 77") == [(0,)]
    assert world.sql("SELECT sum(filtered), sum(records) FROM oncely_ranges") == [(10, 1_000)]
    assert_steps(world)


def test_paused_inside_a_handler_and_taken_over_it_commits_nothing(world: World) -> None:
    hold = world.folder / "billing.hold"
    hold.touch()
    environ, log = environment(world, HOLD=str(hold)), world.folder / "paused.log"
    with child(["oncely.cli", "work", APP, *world.logged], log, environ) as one:
        await_that(lambda: [*world.folder.glob("billing.inside*")], "a handler that waits")
        one.send_signal(signal.SIGSTOP)
        until_latest(world)
        hold.unlink()
        one.send_signal(signal.SIGCONT)
        world.publish(100, partitions=2, first=1_000)
        await_that(lambda: world.count() == 1_098 or one.poll() is not None, "more rows")
        one.send_signal(signal.SIGTERM)
        assert one.wait(180) == 0, log.read_text()
    assert_exactly_once(world, rejects=2)
    assert_steps(world)


def test_a_commit_of_a_handler_is_refused(world: World) -> None:
    said = until_latest(world, expect=1, SQL="COMMIT; BEGIN")
    assert "handler tests.scenarios.billing:bill: it has ended its transaction" in said
    assert world.count() == 0


def test_other_commands_know_the_ledger_of_handlers_and_no_rows(world: World) -> None:
    file = file_of(world)
    assert "ledger of handlers" in oncely("plan", file).stdout
    until_latest(world)
    assert [one["lag"] for one in oncely_json("status", file)["partitions"]] == [0, 0]
    assert "handle" in oncely("rejects", "list", file).stdout
    for words, said in (
        (("run", file), "oncely work module:app"),
        (("work", file), "oncely work module:app"),
        (("rejects", "replay", file), "can't be replayed"),
        (("audit", file), "can't tell what handlers have written"),
    ):
        assert said in oncely(*words, expect=2).stderr
    assert_exactly_once(world, rejects=2)


def test_a_discard_beside_a_worker(world: World) -> None:
    """The ledger of handlers has dead letters as any other; the worker waits inside a handler."""
    file, hold = file_of(world), world.folder / "billing.hold"
    assert oncely_json("rejects", "discard", file, "--yes")["discarded"] == 0
    until_latest(world)
    hold.touch()
    world.publish(100, partitions=2, first=1_000)
    environ, log = environment(world, HOLD=str(hold)), world.folder / "beside.log"
    with child(["oncely.cli", "work", APP, *world.logged], log, environ) as one:
        await_that(lambda: [*world.folder.glob("billing.inside*")], "a handler that waits")
        which = ("--reason", "not billable")
        planned = oncely_json("rejects", "discard", file, *which)
        reasons = [{"reason": "not billable", "rejects": 1}]
        assert planned == {"discarded": 1, "executed": False, "reasons": reasons}
        assert oncely_json("rejects", "discard", file, *which, "--yes")["discarded"] == 1
        hold.unlink()
        await_that(lambda: world.count() == 1_098 or one.poll() is not None, "more rows")
        one.send_signal(signal.SIGTERM)
        assert one.wait(180) == 0, log.read_text()
    letters = world.sql('SELECT stage, "key", "value", reason FROM oncely_rejects ORDER BY stage')
    assert letters[0] == ("discarded", None, None, "not billable")
    assert letters[1][:3] == ("handle", b"13", good(13))
    assert oncely_json("status", file)["rejects"] == 1
    assert oncely_json("rejects", "list", file, "--discarded")["total"] == 1
    assert_exactly_once(world, rejects=2)
    assert_steps(world)
    page = detail(Subject(world.name, file, Pipeline.from_file(file)))
    assert isinstance(page.letters, Letters)
    assert (page.letters.total, page.letters.no_discard) == (1, None)
    assert page.letters.no_replay is not None
    assert "can't be replayed" in page.letters.no_replay.message
