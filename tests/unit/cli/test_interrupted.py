"""A signal while a command still installs its handlers ends it like one right after."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oncely.cli.run import run_files, work_file
from oncely.cli.verbs import Run, Work

FILE = Path("never-read.toml")
COMMANDS = [(run_files, Run(files=[FILE])), (work_file, Work(file=FILE))]


@pytest.mark.parametrize(("command", "asked"), COMMANDS)
@pytest.mark.parametrize(("until", "code"), [(None, 0), ("latest", 1)])
def test_a_signal_while_handlers_are_installed(
    monkeypatch: pytest.MonkeyPatch, command: Any, asked: Any, until: str | None, code: int
) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "signals":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(threading.Thread, "start", started)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command(replace(asked, until=until)) == code
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.set_wakeup_fd(-1)
