"""The second signal ends a run though Spark hangs; the third one ends it at once."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from oncely.cli import run, screen
from oncely.runtimes.spark import session
from oncely.threads import StopSignal

Codes = queue.Queue[int]
"""Exit codes with which the process would have ended."""


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not end by itself, in place of Spark's."""
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        monkeypatch.setattr(session, "java_process", lambda: process)
        yield process
        process.kill()


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Codes:
    left = Codes()
    monkeypatch.setattr(screen, "leave_now", left.put)
    return left


def ended(jvm: subprocess.Popen[bytes], codes: Codes, capsys: pytest.CaptureFixture[str]) -> None:
    assert codes.get(timeout=60) == 1
    assert jvm.wait(180) == -signal.SIGKILL
    assert "the run did not end in time and was killed" in capsys.readouterr().err


@pytest.mark.parametrize("signals", [2, 3])
def test_after_the_second_signal_spark_is_killed_when_it_hangs_and_the_third_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
    jvm: subprocess.Popen[bytes],
    codes: Codes,
    capsys: pytest.CaptureFixture[str],
    signals: int,
) -> None:
    if signals == 2:
        monkeypatch.setattr(run, "_PATIENCE", 0.0)
    else:
        monkeypatch.setattr(threading.Timer, "start", lambda _: None)
    stop = StopSignal()
    asked = run.asked_to_stop(stop, run.force)
    asked()
    assert (stop.draining, stop.now) == (True, False)
    assert jvm.poll() is None
    asked()
    assert stop.now
    if signals == 3:
        assert codes.empty()
        asked()
    ended(jvm, codes, capsys)
