"""The pipelines of a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from oncely.cli import logs, screen
from oncely.errors import WrongInput
from oncely.pipeline import Pipeline
from oncely.pipeline.application import Application, read
from oncely.pipeline.handling import worker_of


def opened_app(path: str) -> Pipeline:
    """The pipeline of a worker's handlers, as :func:`opened`.

    Raises:
        ConfigError: it can't be imported, or names every invalid key.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    pipeline = worker_of(path).pipeline
    screen.hide(pipeline.secrets)
    logs.named(pipeline.settings.name)
    return pipeline


def opened(file: Path) -> Pipeline:
    """The pipeline of a file; its secrets are redacted in all output from now on.

    Raises:
        ConfigError: names every invalid key, and the way out.
    """
    pipeline = Pipeline.from_file(file)
    screen.hide(pipeline.secrets)
    logs.named(pipeline.settings.name)
    return pipeline


def opened_together(files: Sequence[Path]) -> Application:
    """The pipelines of files that run in one Spark application, as :func:`opened`.

    Raises:
        ConfigError: names every invalid key of every file, and the way out.
    """
    found = read(files)
    screen.hide(*(one.secrets for one in found.pipelines))
    if len(found.pipelines) == 1:
        logs.named(found.name)
    return found


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The pipeline files: those that are given, and all of the folders that are given.

    Raises:
        WrongInput: a folder has no pipeline file.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside:
            raise WrongInput(
                f"{path}: no pipeline file", way_out="its pipelines are the files *.toml in it"
            )
        found += inside
    return found
