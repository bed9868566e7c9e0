"""A signal while a command still installs its handlers ends it like one right after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncely.cli.run import run_files, work_file
from oncely.cli.verbs import Run, Work

FILE = Path("never-read.toml")
COMMANDS: list[Callable[[Any], int]] = [
    lambda until: run_files(Run(files=[FILE], until=until)),
    lambda until: work_file(Work(file=FILE, until=until)),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("until", "code"), [(None, 0), ("latest", 1)])
def test_a_signal_while_handlers_are_installed(
    monkeypatch: pytest.MonkeyPatch, command: Callable[[Any], int], until: Any, code: int
) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "signals":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(threading.Thread, "start", started)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command(until) == code
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.set_wakeup_fd(-1)
