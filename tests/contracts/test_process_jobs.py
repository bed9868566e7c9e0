"""Jobs on processes of this machine: processes that die, signals, and a parent that dies.

What jobs on processes share with those on Spark: test_jobs.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from oncely.errors import Unavailable, WrongInput
from oncely.runtimes.jobs import Attempt, ProcessJobs, all_of
from oncely.testing.processes import await_that
from tests.conftest import repository


@pytest.fixture(scope="module")
def jobs() -> Iterator[ProcessJobs]:
    with contextlib.closing(ProcessJobs(2)) as made:
        yield made


# -- tasks, which other processes import -------------------------------------------------------


def twice(share: int, attempt: Attempt) -> Iterator[object]:
    yield 2 * share


def waiting(folder: Path, share: int, attempt: Attempt) -> Iterator[object]:
    (folder / str(os.getpid())).touch()
    time.sleep(600)
    yield share


def again(share: int, attempt: Attempt) -> Iterator[object]:
    yield attempt.again


def pid_of(share: int, attempt: Attempt) -> Iterator[object]:
    yield os.getpid()


def session_of(share: int, attempt: Attempt) -> Iterator[object]:
    yield os.getsid(0)


# -- tests ---------------------------------------------------------------------------------


def test_a_process_that_dies_between_two_jobs_is_replaced(jobs: ProcessJobs) -> None:
    (pid, *_) = all_of(jobs.run(pid_of, [0]))
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: jobs._pool._broken, "a pool that takes nothing any more")
    for _ in range(2):
        assert all_of(jobs.run(twice, [3, 4, 5])) == [6, 8, 10]


def test_the_process_that_starts_others_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again; a process that it was asked for meanwhile is not there."""
    start, failures = ForkServerProcess._Popen, iter([EOFError(), ConnectionResetError()])

    def fails(process: Any) -> Any:
        for failure in failures:
            raise failure
        return start(process)

    monkeypatch.setattr(ForkServerProcess, "_Popen", staticmethod(fails))
    with contextlib.closing(ProcessJobs(1)) as made:
        assert made.run(twice, [4])[0] == 8

    failures = itertools.repeat(EOFError())
    with pytest.raises(Unavailable, match="can't be started"):
        ProcessJobs(1)


PROGRAM = """
import sys
from functools import partial
from pathlib import Path
from oncely.runtimes.jobs import ProcessJobs
from tests.contracts.test_process_jobs import waiting

if __name__ == "__main__":
    ProcessJobs(2).run(partial(waiting, Path(sys.argv[1])), [0, 1])
"""


def test_the_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    pids = tmp_path / "pids"
    pids.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(program), str(pids)],
        cwd=repository(),
        env={**os.environ, "PYTHONPATH": str(repository())},
    )
    try:
        await_that(lambda: len(list(pids.iterdir())) == 2, "both tasks")
    finally:
        parent.kill()
        parent.wait()
    for one in pids.iterdir():
        await_that(partial(_is_gone, int(one.name)), "the end of a process")


def test_a_script_without_a_guard_is_told_so_at_once(tmp_path: Path) -> None:
    """Each process would import the script, and begin the run again."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('if __name__ == "__main__":', "if True:"))
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        cwd=repository(),
        env={**os.environ, "PYTHONPATH": str(repository())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "WrongInput: no process of the pipeline has started" in ended.stderr
    assert "below `if __name__ == '__main__':`" in ended.stderr


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_signals_to_the_group_of_the_parent_are_not_for_them(jobs: ProcessJobs) -> None:
    found: Any = all_of(jobs.run(session_of, [0]))
    assert found[0] != os.getsid(0)


def test_sigterm_for_the_group_repeats_no_task() -> None:
    """`timeout` and supervisors send it to all processes of a group; the driver ends in order."""
    with contextlib.closing(ProcessJobs(1)) as made:
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, signal.SIGTERM)
        for _ in range(3):
            assert all_of(made.run(again, [0])) == [False]
        assert psutil.Process(server).is_running()


def test_a_task_that_cannot_be_sent_is_no_temporary_error(jobs: ProcessJobs) -> None:
    def local(share: int, attempt: Attempt) -> Iterator[object]:
        yield share

    with pytest.raises(WrongInput, match=r"can't be sent to other processes.*local"):
        jobs.run(local, [1])
    assert all_of(jobs.run(twice, [1])) == [2]
