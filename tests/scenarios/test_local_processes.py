"""A server ends with the process that started it, whatever ends that process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from oncely.errors import Unavailable
from oncely.testing.servers.process import Process, wait_until

_SERVER = ["/bin/sleep", "1000"]
_STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.1; done"

_PARENT = """
import os, signal, sys, time
from pathlib import Path
from oncely.testing.servers.process import Process
here = Path(sys.argv[1])
server = Process("x", ["/bin/sleep", "1000"], directory=here, log=here / "log", remove={remove})
print(server.pid, server._guard.pid, flush=True)
{then}
"""
_WAIT = "time.sleep(1000)"
_READ = "sys.stdin.readline()"


def _parent(tmp_path: Path, then: str = _WAIT, remove: str = "None") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT.format(then=then, remove=remove), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _children(parent: subprocess.Popen[str]) -> list[psutil.Process]:
    assert parent.stdout is not None
    return [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]


def _gone(processes: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=60)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return not left


def _start(tmp_path: Path, command: list[str]) -> Process:
    return Process("x", command, directory=tmp_path, log=tmp_path / "log")


def _ends_parent_by(number: int) -> Callable[[subprocess.Popen[str]], None]:
    return lambda parent: parent.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_parent_is_ended_by_a_signal(tmp_path: Path, number: int) -> None:
    with _parent(tmp_path) as parent:
        children = _children(parent)
        parent.send_signal(number)
    assert _gone(children)


def test_ctrl_c_reaches_the_parent_alone_and_ends_all(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the foreground group; the server must be ended in order."""
    then = """
try:
    print("ready", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print(server.running, flush=True)
"""
    with _parent(tmp_path, then) as parent:
        children = _children(parent)
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "True\n"
    assert _gone(children)


def test_the_parent_ends_of_its_own_accord(tmp_path: Path) -> None:
    with _parent(tmp_path, _READ) as parent:
        children = _children(parent)
        assert parent.stdin is not None
        parent.stdin.close()
        parent.wait(180)
        assert not any(child.is_running() for child in children)  # it has waited for them
    assert _gone(children)


def test_a_fork_of_the_parent_does_not_keep_the_server(tmp_path: Path) -> None:
    """A forked child has a copy of the lifeline; it must have let go of it."""
    with _parent(tmp_path, "if fork := os.fork(): print(fork, flush=True)\n" + _WAIT) as parent:
        children = _children(parent)
        assert parent.stdout is not None
        fork = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        try:
            assert _gone(children)
            assert fork.is_running()
        finally:
            fork.kill()


def test_the_end_of_the_thread_that_started_it_means_nothing(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG would fire here if we were the server's parent ourselves."""
    started: list[Process] = []
    thread = threading.Thread(target=lambda: started.append(_start(tmp_path, _SERVER)))
    thread.start()
    thread.join()
    assert started[0].wait(0.5) is None
    started[0].kill()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_guard_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    server = _start(tmp_path, _SERVER)
    seen = psutil.Process(server.pid)
    server._guard.kill()
    assert _gone([seen])
    assert not server.running


def test_the_directory_of_a_dead_parent_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    (place / "file").touch()
    with _parent(tmp_path, remove=f"Path({str(place)!r})") as parent:
        children = _children(parent)
        parent.kill()
    assert _gone(children)
    assert not place.exists()


def test_a_server_that_does_not_obey_is_killed(tmp_path: Path) -> None:
    server = _start(tmp_path, ["/bin/sh", "-c", _STUBBORN])
    wait_until(lambda: "up" in server.log_tail(), process=server, timeout=10, what="trap is set")
    server.stop(timeout=0.3)
    assert server.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(server.pid)


def test_what_the_server_has_started_ends_with_it(tmp_path: Path) -> None:
    server = _start(tmp_path, ["/bin/sh", "-c", "sleep 1000 & echo $!; wait"])
    wait_until(lambda: bool(server.log_tail()), process=server, timeout=10, what="it has a child")
    below = psutil.Process(int(server.log_tail()))
    server.kill()
    assert _gone([below])


def test_exit_codes(tmp_path: Path) -> None:
    assert _start(tmp_path, ["/bin/sh", "-c", "exit 7"]).wait(180) == 7
    server = _start(tmp_path, _SERVER)
    assert server.wait(0) is None
    server.stop()
    assert server.returncode == -signal.SIGTERM
    server.send(signal.SIGKILL)  # nobody is there: nothing happens
    server.stop()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"could not be started.*No such file"):
        _start(tmp_path, [str(tmp_path / "missing")])


def test_an_early_end_is_reported_with_the_last_words(tmp_path: Path) -> None:
    server = _start(tmp_path, ["/bin/sh", "-c", "echo the disk is upside down; exit 3"])
    with pytest.raises(Unavailable, match="ended with code 3 before it was up\nthe disk is upside"):
        wait_until(lambda: False, process=server, timeout=10, what="it was up")


def test_a_deadline_is_kept(tmp_path: Path) -> None:
    server = _start(tmp_path, _SERVER)
    with pytest.raises(Unavailable, match="took more than"):
        wait_until(lambda: False, process=server, timeout=0.2, what="it was up")
    server.kill()


def test_the_server_is_not_in_our_process_group(tmp_path: Path) -> None:
    server = _start(tmp_path, _SERVER)
    assert os.getpgid(server.pid) == server.pid
    server.kill()


def test_a_child_left_behind_fails_the_test_run(tmp_path: Path) -> None:
    """The guard over this very test suite, seen at work in a suite of its own."""
    own = Path(__file__).resolve().parent.parent / "conftest.py"
    (tmp_path / "conftest.py").write_text(own.read_text())
    (tmp_path / "test_it.py").write_text(
        "import subprocess\n"
        "def test_it():\n"
        "    global left\n"
        "    left = subprocess.Popen(['/bin/sleep', '40'])\n"
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(own.parent.parent)}  # the guard's file imports from here
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert "1 passed" in done.stdout
    assert "left behind" in done.stdout
    assert done.returncode == 1
