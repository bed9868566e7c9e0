"""Options that are fields of dataclasses, exit codes, and --debug of each command."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from oncely.cli import options
from oncely.cli.options import Commands, Options, argument, flag, option


class Chosen(Options):
    name: str | None = option(None, "Its name.")
    number: int = option(None, "Its number.", default=2, min=1)


class Take(Options):
    """Take it."""

    file: str = argument("FILE", "The file.")
    first: bool = flag(None)
    chosen: Chosen = Chosen()
    last: bool = flag(None)


class Inner(Options):
    """Do nothing."""


CALLED: list[Take] = []


def take(given: Take) -> int:
    CALLED.append(given)
    return given.chosen.number


def nothing(_: Inner) -> None:
    pass


@pytest.fixture
def called() -> list[Take]:
    CALLED.clear()
    return CALLED


@pytest.fixture
def app(called: list[Take]) -> Commands:
    commands = Commands("Commands.")
    commands.verb(Take, f"{__name__}:take")
    commands.group("inner", "Inner commands.").verb(Inner, f"{__name__}:nothing")
    return commands


def test_fields_of_a_dataclass_are_options(app: Commands, called: list[Take]) -> None:
    done = CliRunner().invoke(app, ["take", "f", "--name", "n", "--number", "3", "--last"])
    assert done.exit_code == 3, done.output
    assert called == [Take(file="f", chosen=Chosen(name="n", number=3), last=True)]


def test_they_have_their_defaults_and_limits(app: Commands, called: list[Take]) -> None:
    assert CliRunner().invoke(app, ["take", "f"]).exit_code == 2
    assert called == [Take(file="f")]
    refused = CliRunner().invoke(app, ["take", "f", "--number", "0"])
    assert (refused.exit_code, len(called)) == (2, 1)
    assert "--number" in refused.output


def test_the_help_has_them_in_their_order_and_debug_at_the_end(app: Commands) -> None:
    shown = CliRunner().invoke(app, ["take", "--help"]).output
    names = ["--first", "--name", "--number", "--last", "--log-level", "--debug", "--help"]
    assert sorted(names, key=shown.index) == names
    assert "Take it." in shown


def test_without_an_exit_code_it_is_zero(app: Commands) -> None:
    assert CliRunner().invoke(app, ["inner", "inner"]).exit_code == 0


def test_debug_is_set_before_the_command_runs(
    app: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options.log, "debug", False)
    monkeypatch.setattr(options.screen, "configure", lambda **_: None)
    assert CliRunner().invoke(app, ["inner", "inner", "--debug"]).exit_code == 0
    assert options.log["debug"]


def test_variables_set_options(app: Commands, called: list[Take]) -> None:
    """Their names are those of command and option; what is typed counts more."""
    env = {
        "ONCELY_TAKE_NUMBER": "7",
        "ONCELY_TAKE_LAST": "1",
        "ONCELY_TAKE_NAME": "of the variable",
    }
    done = CliRunner().invoke(app, ["take", "f", "--name", "n"], env=env)
    assert done.exit_code == 7, done.output
    assert called == [Take(file="f", chosen=Chosen(name="n", number=7), last=True)]
    refused = CliRunner().invoke(app, ["take", "f"], env={"ONCELY_TAKE_NUMBER": "0"})
    assert (refused.exit_code, len(called)) == (2, 1)
    assert "ONCELY_TAKE_NUMBER" in refused.output
    assert (
        "ONCELY_INNER_INNER_DEBUG" in CliRunner().invoke(app, ["inner", "inner", "--help"]).output
    )
