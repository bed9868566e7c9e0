"""The pipelines of a command, and its durations."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oncely.cli import logs, screen
from oncely.config import loads
from oncely.config.base import parse_seconds
from oncely.errors import WrongInput
from oncely.extras import require
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from oncely.pipeline.application import Application

STDIN = Path("-")
"""Standard input, as the name of a pipeline file."""


def opened_app(path: str) -> Pipeline:
    """The pipeline of a worker's handlers, as :func:`opened`.

    Raises:
        ConfigError: it can't be imported, or names every invalid key.
    """
    from oncely.pipeline.handling import worker_of

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    pipeline = worker_of(path).pipeline
    screen.hide(pipeline.secrets)
    pipeline.require_packages()
    logs.named(pipeline.settings.name)
    return pipeline


def opened(file: Path, *, imports: bool = False) -> Pipeline:
    """The pipeline of a file, or of standard input; its secrets are redacted in all output from
    now on.

    With ``imports`` the modules beside the file can be imported: the command runs its functions.

    Raises:
        ConfigError: names every invalid key, and the way out.
    """
    pipeline = _from_stdin() if file == STDIN else Pipeline.from_file(file)
    screen.hide(pipeline.secrets)
    pipeline.require_packages()
    logs.named(pipeline.settings.name)
    if imports:
        importable(file)
    return pipeline


def opened_together(files: Sequence[Path]) -> Application:
    """The pipelines of files that run in one Spark application, as :func:`opened`.

    Raises:
        ConfigError: names every invalid key of every file, and the way out.
    """
    from oncely.pipeline.application import Application, read

    found = Application((_from_stdin(),)) if list(files) == [STDIN] else read(files)
    screen.hide(*(one.secrets for one in found.pipelines))
    if any(one.settings.runtime == "spark" for one in found.pipelines):
        require("spark", "spark", "a run on Spark")
    for one in found.pipelines:
        one.require_packages()
    if len(found.pipelines) == 1:
        logs.named(found.name)
    return found


def importable(file: Path) -> None:
    """Let the driver and local workers import the modules beside the pipeline file."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else folder


def refuse_stdin(paths: Sequence[Path]) -> None:
    """Refuse standard input where a command shows or runs several pipelines.

    Raises:
        WrongInput: it is one of the paths.
    """
    if STDIN in paths:
        raise WrongInput(
            "- (standard input) has one pipeline, and this command is for several",
            way_out="save it as a file, and name that",
        )


def _from_stdin() -> Pipeline:
    if sys.stdin.isatty():
        screen.note("the pipeline file is read from standard input; Ctrl-D ends it")
    return Pipeline(loads(sys.stdin.buffer.read(), base=Path(), of="standard input"))


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The pipeline files: those that are given, and all of the folders that are given.

    Raises:
        WrongInput: a folder has no pipeline file, or standard input is one of several.
    """
    if len(paths) > 1:
        refuse_stdin(paths)
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside:
            raise WrongInput(
                f"{path}: no pipeline file", way_out="its pipelines are the files *.toml in it"
            )
        found += inside
    return found


def seconds(option: str, text: str) -> float:
    """A duration of the command line: ``30``, or ``"5 minutes"``.

    Raises:
        WrongInput: it is no duration.
    """
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_seconds(text)
    except ValueError:
        raise WrongInput(
            f"{option}: {text!r} is no duration", way_out='write 30, or "5 minutes"'
        ) from None
