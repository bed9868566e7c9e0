"""The end of Spark's Java process is reported as such, wherever a call to it has failed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from oncely.errors import Unavailable
from oncely.pipeline import running
from oncely.runtimes.spark import session

Jvm = Callable[[str], None]


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Jvm:
    """``jvm(program)``: Spark's Java process is one that runs this program."""

    def start(program: str) -> None:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program])
        process.wait(180)
        monkeypatch.setattr(session, "java_process", lambda: process)

    return start


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "has ended by signal 9"),
        ("raise SystemExit(7)", "has ended with exit code 7"),
        (f"raise SystemExit({running._OUT_OF_MEMORY})", "has ended: it ran out of memory"),
    ],
)
def test_how_it_has_ended_is_told(jvm: Jvm, program: str, told: str) -> None:
    jvm(program)
    error = running.meaning(ConnectionRefusedError(111, "Connection refused"))
    assert isinstance(error, Unavailable)
    assert str(error).startswith(f"Spark's Java process {told}")
    assert "start" in error.way_out


def test_an_error_of_other_code_stays(jvm: Jvm) -> None:
    jvm("pass")
    error = subprocess.SubprocessError("another")
    assert running.meaning(error) is error
