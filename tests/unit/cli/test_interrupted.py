"""A signal while a command still installs its handlers ends it like one right after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oncely.cli.run import run_files, work_file

COMMANDS = [partial(run_files, spark_log=None), work_file]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("until", "code"), [(None, 0), ("latest", 1)])
def test_a_signal_while_handlers_are_installed(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., int], until: Any, code: int
) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "signals":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(threading.Thread, "start", started)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command(Path("never-read.toml"), until=until) == code
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.set_wakeup_fd(-1)
