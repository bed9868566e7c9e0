"""Signals reach the listener though the main thread is busy, and handlers are put back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from oncely.cli.run import Interrupted, Signals, run_files, work_file
from oncely.cli.verbs import Run, Work


def test_every_signal_is_heard_and_the_old_handlers_come_back() -> None:
    heard = threading.Semaphore(0)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals(heard.release) as signals:
        signals.idle = False
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert heard.acquire(timeout=60)
        # PySpark puts a handler of its own in place when a SparkContext starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signals.install()
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.acquire(timeout=60)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_for_a_forked_child_is_its_own() -> None:
    """As multiprocessing's pools end their processes."""
    heard = threading.Semaphore(0)
    with Signals(heard.release) as signals:
        signals.idle = False
        ready, written = os.pipe()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.write(written, b"x")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not heard.acquire(timeout=0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.acquire(timeout=60)


def test_while_nothing_is_in_hand_a_signal_interrupts_once() -> None:
    heard = threading.Semaphore(0)
    with Signals(heard.release):
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM) or signal.pause()
        os.kill(os.getpid(), signal.SIGTERM)  # heard, but what tidies up goes on
        assert heard.acquire(timeout=60)
        assert heard.acquire(timeout=60)


def test_a_signal_before_the_block_has_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The handlers are put back, and the command ends as it does after a later signal."""
    install, before = Signals.install, signal.getsignal(signal.SIGTERM)

    def at_once(self: Signals) -> None:
        install(self)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Signals, "install", at_once)
    file = tmp_path / "none.toml"
    assert work_file(Work(file=file)) == 0
    assert work_file(Work(file=file, until="latest")) == 1
    assert run_files(Run(files=[file])) == 0
    assert signal.getsignal(signal.SIGTERM) is before
