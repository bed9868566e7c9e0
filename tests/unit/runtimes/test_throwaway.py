"""Checkpoints are private, and only those of dead owners are swept."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oncely.runtimes.spark.own_checkpoint import sweep_checkpoints, throwaway_checkpoint

OWNER = """
import sys
from oncely.runtimes.spark.own_checkpoint import throwaway_checkpoint
with throwaway_checkpoint() as folder:
    folder.mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, shared with nobody."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that holds a checkpoint."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_a_checkpoint_is_private_and_removed_at_the_end(folder: Path) -> None:
    with throwaway_checkpoint() as one, throwaway_checkpoint() as other:
        assert one != other
        parent = one.parent
        while parent != folder:
            found = parent.lstat()
            assert stat.S_IMODE(found.st_mode) == 0o700
            assert found.st_uid == os.getuid()
            parent = parent.parent
        one.mkdir()
    assert list(folder.iterdir()) == []


def test_a_sweep_tells_the_living_by_their_lock_and_not_by_a_process_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that shares the folder sees no process of the other one."""

    def no_process(*_: object) -> None:
        raise ProcessLookupError

    with owner() as (process, checkpoint):
        monkeypatch.setattr(os, "kill", no_process)
        assert sweep_checkpoints() == 0
        assert checkpoint.is_dir()
        monkeypatch.undo()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert sweep_checkpoints() == 1
        assert not checkpoint.exists()
    assert list(folder.iterdir()) == []


def test_a_sweep_leaves_alone_what_others_can_write_to(folder: Path) -> None:
    for name, mode in (("open", 0o777), ("group", 0o770)):
        planted = folder / f"oncely-checkpoint-{name}"
        planted.mkdir()
        planted.chmod(mode)
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / "oncely-checkpoint-link").symlink_to(folder / "elsewhere")
    assert sweep_checkpoints() == 0
    assert len(list(folder.iterdir())) == 4
    assert list((folder / "elsewhere").iterdir()) == []
