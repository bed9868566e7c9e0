"""Processes that end between being listed and being asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from oncely.testing import processes
from oncely.testing.processes import command_of, jvm_of, name_of, tree


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
