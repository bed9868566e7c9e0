"""The pipeline of a command."""

from __future__ import annotations

import sys
from pathlib import Path

from oncely.cli import logs, screen
from oncely.pipeline import Pipeline
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
