"""The contender quixstreams, with an environment of its own: it pins an older confluent-kafka."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.kafka.child import Child, Children
from bench.kafka.workload import LATE
from oncely.artifacts import cache_directory
from oncely.errors import Unavailable

_CONSTRAINTS = Path(__file__).with_name("quixstreams-constraints.txt")
_PROGRAM = Path(__file__).with_name("quix_program.py")


def start(brokers: str, place: Path, name: str = "quixstreams") -> Child:
    """Start the program, installing quixstreams at first use.

    Raises:
        Unavailable: it can't be installed.
    """
    command = [str(_interpreter()), "-P", str(_PROGRAM), brokers, str(place / name), str(LATE)]
    return Child(name, command, place / f"{name}.log")


def start_two(brokers: str, place: Path) -> Children:
    """Start it twice: two processes of one group, as it is scaled over processors."""
    return Children([start(brokers, place, f"quixstreams-{n}") for n in (1, 2)])


def _interpreter() -> Path:
    """The environment's Python. What is installed there is noted last, so it is whole."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = cache_directory() / "bench" / f"quixstreams-python{version}"
    python, installed = home / "bin" / "python", home / "installed.txt"
    wanted = _CONSTRAINTS.read_text()
    if installed.is_file() and installed.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", str(home)])
    _run([str(python), *pip, "--constraint", str(_CONSTRAINTS), "quixstreams"])
    installed.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = (done.stderr or done.stdout).splitlines()[-5:]
        raise Unavailable(
            "quixstreams can't be installed: " + "\n".join(tail),
            way_out="check the network and pip's settings",
        )
