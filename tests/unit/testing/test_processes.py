"""Processes that end between being listed and being asked, and processes that are stopped."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from threading import Timer

import psutil
import pytest

from oncely.testing import processes
from oncely.testing.processes import await_that, command_of, jvm_of, name_of, stop_all, tree


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its standard input does."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_a_process_that_has_ended_has_no_name(child: subprocess.Popen[bytes]) -> None:
    (listed,) = tree(child.pid)
    assert name_of(listed).startswith("python")
    assert "input()" in command_of(listed)
    child.kill()
    child.wait()
    assert (name_of(listed), command_of(listed)) == ("", "")
    assert tree(child.pid) == []


def test_a_process_that_ends_meanwhile_hides_no_jvm(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Jvm:
        @staticmethod
        def name() -> str:
            return "java"

    (listed,) = tree(child.pid)
    child.kill()
    child.wait()
    monkeypatch.setattr(processes, "tree", lambda _: [listed, Jvm])
    assert jvm_of(child.pid) is Jvm
    monkeypatch.setattr(processes, "tree", lambda _: [listed])
    with pytest.raises(LookupError, match=f"no JVM below process {child.pid}"):
        jvm_of(child.pid)


STOPS_ITSELF = """
import os, threading
from oncely.testing.processes import stop_self

def work():
    while True:
        stop_self()
        os.write(1, b"!")

threading.Thread(target=work).start()
threading.Event().wait()
"""


def test_a_thread_that_stops_its_process_runs_on_when_the_process_continues() -> None:
    """Each time: a signal to the process is taken by another thread, sooner or later."""
    with subprocess.Popen([sys.executable, "-c", STOPS_ITSELF], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        process = psutil.Process(child.pid)
        try:
            for _ in range(25):
                await_that(lambda: process.status() == psutil.STATUS_STOPPED, "the stop", 180)
                assert select.select([child.stdout], [], [], 0) == ([], [], [])
                process.send_signal(signal.SIGCONT)
                assert os.read(child.stdout.fileno(), 2) == b"!"
        finally:
            child.kill()


def test_processes_that_are_stopped_run_no_more(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ended one among them is ignored; one that takes the signal late is waited for."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(ended.pid)
    ended.wait()
    late = psutil.Process(child.pid)
    monkeypatch.setattr(
        late, "send_signal", lambda number: Timer(0.2, child.send_signal, [number]).start()
    )
    stop_all([late, gone])
    assert late.status() == psutil.STATUS_STOPPED
