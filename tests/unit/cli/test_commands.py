"""Options that are fields of dataclasses, exit codes, and --debug of each command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from oncely.cli import options
from oncely.cli.options import Commands


@dataclass(frozen=True)
class Chosen:
    name: Annotated[str | None, typer.Option(help="Its name.")] = None
    number: Annotated[int, typer.Option(min=1, help="Its number.")] = 2


@pytest.fixture
def called() -> list[object]:
    return []


@pytest.fixture
def app(called: list[object]) -> Commands:
    commands = Commands("Commands.")

    @commands.verb()
    def take(
        file: Annotated[str, typer.Argument(metavar="FILE")],
        first: Annotated[bool, typer.Option("--first")] = False,
        *,
        chosen: Chosen,
        last: Annotated[bool, typer.Option("--last")] = False,
    ) -> int:
        """Take it."""
        called.append((file, first, chosen, last))
        return chosen.number

    @commands.group("inner", "Inner commands.").verb("none")
    def returns_nothing() -> None:
        """Do nothing."""

    return commands


def test_fields_of_a_dataclass_are_options(app: Commands, called: list[object]) -> None:
    done = CliRunner().invoke(app, ["take", "f", "--name", "n", "--number", "3", "--last"])
    assert done.exit_code == 3, done.output
    assert called == [("f", False, Chosen("n", 3), True)]


def test_they_have_their_defaults_and_limits(app: Commands, called: list[object]) -> None:
    assert CliRunner().invoke(app, ["take", "f"]).exit_code == 2
    assert called == [("f", False, Chosen(), False)]
    refused = CliRunner().invoke(app, ["take", "f", "--number", "0"])
    assert (refused.exit_code, len(called)) == (2, 1)
    assert "--number" in refused.output


def test_the_help_has_them_in_their_order_and_debug_at_the_end(app: Commands) -> None:
    shown = CliRunner().invoke(app, ["take", "--help"]).output
    names = ["--first", "--name", "--number", "--last", "--log-level", "--debug", "--help"]
    assert sorted(names, key=shown.index) == names
    assert "Take it." in shown


def test_without_an_exit_code_it_is_zero(app: Commands) -> None:
    assert CliRunner().invoke(app, ["inner", "none"]).exit_code == 0


def test_debug_is_set_before_the_command_runs(
    app: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options.log, "debug", False)
    monkeypatch.setattr(options.logs, "configure", lambda **_: None)
    assert CliRunner().invoke(app, ["inner", "none", "--debug"]).exit_code == 0
    assert options.log["debug"]


def test_variables_set_options(app: Commands, called: list[object]) -> None:
    """Their names are those of command and option; what is typed counts more."""
    env = {
        "ONCELY_TAKE_NUMBER": "7",
        "ONCELY_TAKE_LAST": "1",
        "ONCELY_TAKE_NAME": "of the variable",
    }
    done = CliRunner().invoke(app, ["take", "f", "--name", "n"], env=env)
    assert done.exit_code == 7, done.output
    assert called == [("f", False, Chosen("n", 7), True)]
    refused = CliRunner().invoke(app, ["take", "f"], env={"ONCELY_TAKE_NUMBER": "0"})
    assert (refused.exit_code, len(called)) == (2, 1)
    assert "ONCELY_TAKE_NUMBER" in refused.output
    assert "ONCELY_INNER_NONE_DEBUG" in CliRunner().invoke(app, ["inner", "none", "--help"]).output
