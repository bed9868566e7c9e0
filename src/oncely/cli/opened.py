"""The pipeline that a command works on."""

from __future__ import annotations

from pathlib import Path

from oncely.cli import screen
from oncely.pipeline import Pipeline


def opened(file: Path) -> Pipeline:
    """The pipeline of a file; its secrets are printed nowhere from now on.

    Raises:
        ConfigError: names every key that is wrong, and the way out.
    """
    pipeline = Pipeline.from_file(file)
    screen.hide(pipeline.secrets)
    return pipeline
