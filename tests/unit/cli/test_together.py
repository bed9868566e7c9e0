"""Several pipelines of a command: one that fails ends alone, and what is told of all."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.cli import run as run_module
from oncely.cli import screen, verbs
from oncely.cli.opened import files_of
from oncely.cli.progress import Failed, LogLines, Run, each, refuse_failed, telling
from oncely.cli.run import ended, run_files
from oncely.config import parse
from oncely.errors import Fenced, TooManyRejects, Unavailable, WrongInput
from oncely.pipeline import Pipeline
from oncely.secrets import Secrets
from oncely.threads import StopSignal, Thread
from tests.jobtools import HurriedStop


def run_of(name: str, *, alone: bool = False) -> Run:
    raw: dict[str, Any] = {
        "name": name,
        "source": {"brokers": "b:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": "postgresql://h/d", "table": "t"},
    }
    progress = LogLines()
    return Run(Pipeline(parse(raw)), progress, progress, alone)


def failing(**errors: BaseException) -> Any:
    """A work that fails for the runs of these names."""

    def work(run: Run) -> bool:
        if run.name in errors:
            raise errors[run.name]
        return True

    return work


def test_an_error_ends_one_and_the_others_go_on() -> None:
    runs = [run_of(name) for name in "abc"]
    failed, went_on = threading.Event(), []

    def work(run: Run) -> bool:
        if run.name == "b":
            failed.set()
            raise SystemExit(7)  # whatever the user's code raises
        assert failed.wait(180)
        went_on.append(run.name)
        return True

    each(runs, work)
    assert sorted(went_on) == ["a", "c"]
    assert [one.done for one in runs] == [True, False, True]
    with pytest.raises(Failed, match="1 of 3 pipelines failed") as caught:
        refuse_failed(runs)
    assert caught.value.exit_code == 1
    first, second, third = caught.value.details[0], *caught.value.details[1:3]
    assert first.startswith("a: 0 records: ")
    assert second == "b: unexpected SystemExit: 7"
    assert "report it as a defect" in third


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ({"a": Unavailable("gone")}, 1),
        ({"a": Unavailable("gone"), "b": WrongInput("table")}, 2),
        ({"a": Fenced("a", 1, 2), "b": WrongInput("table"), "c": Unavailable("gone")}, 3),
    ],
)
def test_the_exit_code_is_the_highest(errors: dict[str, BaseException], code: int) -> None:
    runs = [run_of(name) for name in "abc"]
    each(runs, failing(**errors))
    with pytest.raises(Failed) as caught:
        refuse_failed(runs)
    assert caught.value.exit_code == code


def test_the_error_of_the_only_pipeline_is_raised_as_it_is() -> None:
    runs = [run_of("a", alone=True)]
    each(runs, telling(failing(a=Unavailable("gone"))))
    for before in (True, False):
        with pytest.raises(Unavailable, match=r"^gone$"):
            refuse_failed(runs, unless_any_is_left=before)


def test_before_the_start_an_error_of_all_ends_the_command() -> None:
    runs = [run_of(name) for name in "ab"]
    each(runs, failing(a=WrongInput("table")))
    refuse_failed(runs, unless_any_is_left=True)
    each(runs, failing(a=WrongInput("table"), b=Unavailable("gone")))
    with pytest.raises(Failed, match="2 of 2 pipelines failed") as caught:
        refuse_failed(runs, unless_any_is_left=True)
    assert caught.value.details == ["a: table", "b: gone"]
    each(runs, failing())
    refuse_failed(runs)


def test_entries_of_all_threads_of_a_run_name_its_pipeline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    screen.configure(debug=False)

    def work(run: Run) -> bool:
        beside = Thread(lambda: logging.getLogger("oncely.run").info("beside"), "beside")
        beside.start()
        beside.join(180)
        raise TooManyRejects(f"spent by {run.name}\nmore")

    runs = [run_of(name) for name in "ab"]
    each(runs, telling(work))
    logging.getLogger("oncely.run").info("all")
    said = [line.partition(" oncely.run")[2] for line in capsys.readouterr().err.splitlines()]
    for name in "ab":
        assert f" [{name}]: beside" in said
        assert f" [{name}]: failed, and ends alone: sink.max_rejects: spent by {name}" in said
    assert said[-1] == ": all"


def test_the_end_of_each_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(name) for name in "ab"]
    each(runs, failing())
    assert ended(StopSignal(), "latest", runs) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("a: 0 records: 0 rows, 0 rejects in ")
    assert second.startswith("b: 0 records: ")
    runs[1].done = False
    assert ended(StopSignal(), "latest", runs) == 1
    assert ended(StopSignal(), None, runs) == 0


def test_a_value_that_one_shows_is_hidden_if_it_is_a_secret_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(screen, "_secrets", ())
    screen.hide(Secrets.of(["pw!1"], public=["hunter-2!"]), Secrets.of(["hunter-2!"]))
    assert screen.redact("pw!1 hunter-2!") == "*** ***"


def test_folders_stand_for_their_files(tmp_path: Path) -> None:
    for name in ("b.toml", "a.toml", "rules.py"):
        (tmp_path / name).touch()
    single = tmp_path / "a.toml"
    assert files_of([tmp_path]) == [single, tmp_path / "b.toml"]
    assert files_of([single]) == [single]
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongInput, match="empty: no pipeline file"):
        run_files(verbs.Run(files=[tmp_path / "empty"]))


@dataclass
class Servers:
    """Those of pipeline b are away for a number of checks; the others run at once.

    Attributes:
        away: how often b is refused.
        opened: the pipelines that have run.
    """

    away: float
    opened: list[str] = field(default_factory=list)

    def check(self, pipeline: Pipeline) -> None:
        if pipeline.settings.name == "b" and self.away > 0:
            self.away -= 1
            raise Unavailable("no answer")

    def run(self, pipeline: Pipeline) -> bool:
        self.check(pipeline)
        self.opened.append(pipeline.settings.name)
        return True


def started(servers: Servers, stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs of a command with three pipelines, without Spark."""
    runs = [run_of(name) for name in "abc"]
    monkeypatch.setattr(run_module, "preflight", servers.check)
    monkeypatch.setattr(run_module, "_on_spark", lambda *given: given[-1](None))
    monkeypatch.setattr(Pipeline, "run", lambda self, *_, **__: servers.run(self))
    application: Any = SimpleNamespace(enter=lambda *_: None, start_spark=None, on_spark=True)
    nothing: Any = None
    run_module._run(application, runs, verbs.Run(files=[]), stop, nothing, nothing)
    return runs


def test_a_pipeline_whose_server_is_away_at_the_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(away=4)
    runs = started(servers, HurriedStop(), monkeypatch)
    assert all(one.done for one in runs)
    assert sorted(servers.opened) == ["a", "b", "c"]


def test_a_server_that_stays_away_ends_its_pipeline_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(away=float("inf"))
    with pytest.raises(Failed, match="1 of 3 pipelines failed") as caught:
        started(servers, HurriedStop(), monkeypatch)
    assert caught.value.exit_code == 1
    assert sorted(servers.opened) == ["a", "c"]


def test_a_stop_ends_the_wait_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(StopSignal):
        def wait(self, seconds: float) -> bool:
            self.ask()
            return True

    servers = Servers(away=float("inf"))
    *_, last = sorted(started(servers, Stopped(), monkeypatch), key=lambda one: one.name == "b")
    assert (last.name, last.done, last.error) == ("b", False, None)
