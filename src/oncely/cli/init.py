"""``oncely init``: the proposed pipeline file."""

from __future__ import annotations

import sys
from pathlib import Path

from oncely.cli import screen
from oncely.errors import ConfigError
from oncely.pipeline.init import Wanted, default_file, exports, given_pipeline, pipeline_file


def write_proposal(wanted: Wanted, out: Path | None, *, force: bool) -> None:
    """Write the file; ``-`` is standard output.

    Raises:
        ConfigError: the file exists, or can't be written.
    """
    file = default_file(wanted.topic) if out is None else out
    shown = str(file) != "-"
    if shown and file.exists() and not force:
        raise ConfigError("--out", f"{file} exists", way_out="--force replaces it; - prints it")
    given = given_pipeline(wanted)
    screen.hide(given.secrets)
    text = pipeline_file(wanted, given, str(file) if shown else "FILE")
    if not shown:
        sys.stdout.write(text)
        return
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError("--out", f"can't write {file}: {error.strerror}") from None
    steps = (exports(wanted), f"oncely plan {file} --sample {wanted.sample}")
    screen.out.print("\n  ".join([f"wrote {file}; next:", *filter(None, steps)]))
