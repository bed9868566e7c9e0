"""What all commands share: help, completion in a shell, a pipeline file from standard input."""

from __future__ import annotations

import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from oncely.cli import screen, verbs
from oncely.cli import verbs as module
from oncely.cli.opened import STDIN, opened
from oncely.cli.verbs import app
from oncely.errors import ConfigError, WrongInput
from oncely.kinds.sql.settings import SqlSinkSettings
from tests.conftest import repository

PIPELINE = (
    'name = "p"\n[source]\nbrokers = "127.0.0.1:1"\ntopics = ["t"]\n'
    '[decode]\nformat = "json"\nschema = "id BIGINT"\n'
    '[sink]\nkind = "sql"\nurl = "postgresql://u:${file:secret.txt}@h/d"\ntable = "t"\n'
)
NEEDED = {("offsets", "reset"): ["--to-earliest"]}
"""Options without which a command refuses to read its file."""


def commands(of: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command and group, with the words that call it."""
    command = typer.main.get_command(app) if of is None else of
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


def paths_of(command: Any) -> list[Any]:
    """The arguments that are pipeline files."""
    return [one for one in command.params if one.name in ("file", "files", "paths")]


ALL = dict(commands())
OF_A_FILE = [words for words, command in ALL.items() if paths_of(command)]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_each_command_has_a_help(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "-h"])
    assert (done.exit_code, done.stdout.split()[0]) == (0, "Usage:")
    assert "-h, --help" in done.stdout


def test_the_work_of_each_command_takes_its_options() -> None:
    table = re.findall(r"\.verb\((\w+), \"(.+)\"\)", inspect.getsource(module))
    assert len(table) == sum(not hasattr(one, "commands") for one in ALL.values())
    for options, work in table:
        asked, _ = get_type_hints(resolve_name(work)).values()
        assert asked is getattr(verbs, options), work


def test_each_option_has_a_variable_but_those_that_permit_a_loss() -> None:
    """Each name once, and none that has another meaning."""
    text = (repository() / "docs" / "environment.md").read_text()
    others = set(re.findall(r"\| `(ONCELY_\w+)`", text))
    found, without = [], set()
    for words, command in ALL.items():
        for one in [] if hasattr(command, "commands") else command.params:
            if one.envvar:
                found.append(one.envvar)
                (long, *_) = [name for name in one.opts if name.startswith("--")]
                assert (
                    one.envvar
                    == "_".join(["ONCELY", *words, long.strip("-")]).replace("-", "_").upper()
                )
            elif one.param_type_name == "option":
                without.add((*words, one.opts[-1]))
    assert others >= {"ONCELY_NATIVE", "ONCELY_WEB_TOKEN", "ONCELY_LOCAL_DIR"}
    assert len(found) == len(set(found)) > 100
    assert others.isdisjoint(found)
    assert without == {
        ("init", "--force"), ("web", "--token"), ("offsets", "reset", "--execute"),
        ("rejects", "discard", "--yes"), ("repair", "--execute"), ("backfill", "--execute"),
        ("files", "schema", "reset", "--execute"), ("local", "down", "--erase"),
    }  # fmt: skip


def test_a_shell_completes_commands_and_options() -> None:
    words = {"COMP_WORDS": "oncely plan --sa", "COMP_CWORD": "2"}
    env = {**os.environ, **words, "_ONCELY_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", "from oncely.cli import main; main()"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--sample"]
    assert "--install-completion" in CliRunner().invoke(app, ["-h"]).stdout


@pytest.mark.parametrize("words", OF_A_FILE, ids=" ".join)
def test_a_pipeline_file_comes_from_standard_input(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "-", *NEEDED.get(words, [])], input="no toml")
    assert isinstance(done.exception, WrongInput), done.output
    if words in (("web",), ("top",)):
        assert "this command is for several" in str(done.exception)
    else:
        assert str(done.exception).startswith("standard input: not TOML")


def test_it_may_not_be_one_of_several() -> None:
    done = CliRunner().invoke(app, ["run", "a.toml", "-"], input=PIPELINE)
    assert isinstance(done.exception, WrongInput)
    assert "way out: save it as a file" in str(done.exception)


def test_its_paths_are_relative_to_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def given(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "_secrets", screen._secrets)  # to be restored
    given(PIPELINE.encode())
    with pytest.raises(ConfigError, match=r"secret\.txt"):
        opened(STDIN)
    (tmp_path / "secret.txt").write_text("hidden")
    given(PIPELINE.encode())
    sink = opened(STDIN).settings.sink
    assert isinstance(sink, SqlSinkSettings)
    assert sink.url.get_secret_value() == "postgresql://u:hidden@h/d"
    given(b"\xff")
    with pytest.raises(ConfigError, match="standard input: not UTF-8"):
        opened(STDIN)
