"""Contenders in processes of their own: a job a line goes in, its answer comes out.

Kafka Streams is a Java program that is compiled here, exactly once, with two threads. quixstreams
has an environment of its own, as it pins an older confluent-kafka.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

from bench.kafka.workload import LATE
from oncely.artifacts import cache_directory, java, resolve
from oncely.errors import Unavailable, WrongInput

KAFKA_STREAMS = "org.apache.kafka:kafka-streams:4.1.0"

Ask = Callable[..., str]
"""Hands over a job and waits for its answer."""

_HERE = Path(__file__).parent
_LAST_LINES = 15


class Child:
    """The process; a context manager that ends it.

    It reads jobs from its standard input and ends when that is closed, also by our death.

    Args:
        name: for messages.
        command: program and arguments.
        log: where its standard error goes.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def ask(self, *words: object, timeout: float = 300.0) -> str:
        """Hand over a job and wait for its answer.

        Raises:
            Unavailable: the process ended, or ``timeout`` seconds went by and it was killed;
                with the end of its log.
        """
        timer = threading.Timer(timeout, self._process.kill)
        timer.start()
        try:
            pipe = _pipe(self._process.stdin)
            pipe.write(" ".join(map(str, words)) + "\n")
            pipe.flush()
            answer = _pipe(self._process.stdout).readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            tail = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise Unavailable("\n".join([f"{self.name} ended without an answer", *tail]))
        return answer.strip()


class Children:
    """Several processes that share each job; a context manager that ends all of them."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._left = ExitStack()

    def __enter__(self) -> Self:
        for child in self._children:
            self._left.enter_context(child)
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def ask(self, *words: object, timeout: float = 300.0) -> str:
        """Hand the job to each; the earliest answer in milliseconds, of those that had records."""
        with ThreadPoolExecutor(len(self._children)) as pool:
            answers = list(pool.map(lambda one: one.ask(*words, timeout=timeout), self._children))
        return str(min((int(answer) for answer in answers if int(answer)), default=0))


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def kafka_streams(brokers: str, place: Path) -> Child:
    """Compile the program into ``place`` and start it.

    Raises:
        WrongInput: there is no Java compiler, or the program does not compile.
        Unavailable: the jars can't be fetched.
    """
    jars = os.pathsep.join(map(str, resolve(KAFKA_STREAMS)))
    classes, source = place / "classes", _HERE / "Passing.java"
    done = _run([_javac(), "-d", str(classes), "-cp", jars, str(source)])
    if done.returncode:
        raise WrongInput(f"{source.name} does not compile: {done.stderr}")
    path = os.pathsep.join([str(classes), jars])
    program = [java(), "-Xmx1g", "-cp", path, "Passing", brokers, str(place / "state"), str(LATE)]
    return Child("kafka_streams", program, place / "kafka_streams.log")


def _javac() -> str:
    """The compiler of the Java that runs everything else, or the one on PATH."""
    beside = Path(java()).resolve().with_name("javac")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("javac")
    if found is None:
        raise WrongInput(
            "no javac: this Java is a runtime only", way_out="install a JDK, 17 or later"
        )
    return found


def quixstreams(brokers: str, place: Path, name: str = "quixstreams") -> Child:
    """Start the program, installing quixstreams at first use.

    Raises:
        Unavailable: it can't be installed.
    """
    program = str(_HERE / "quix_program.py")
    command = [str(_interpreter()), "-P", program, brokers, str(place / name), str(LATE)]
    return Child(name, command, place / f"{name}.log")


def two_of_quixstreams(brokers: str, place: Path) -> Children:
    """Start it twice: two processes of one group, as it is scaled over processors."""
    return Children([quixstreams(brokers, place, f"quixstreams-{n}") for n in (1, 2)])


STARTS: Mapping[str, Callable[[str, Path], Child | Children]] = {
    "quixstreams": quixstreams,
    "quixstreams, 2 processes": two_of_quixstreams,
    "kafka_streams": kafka_streams,
}
"""The contenders; each is given the brokers and a directory."""


def _interpreter() -> Path:
    """The environment's Python. What is installed there is noted last, so it is whole."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = cache_directory() / "bench" / f"quixstreams-python{version}"
    python, installed = home / "bin" / "python", home / "installed.txt"
    constraints = _HERE / "quixstreams-constraints.txt"
    wanted = constraints.read_text()
    if installed.is_file() and installed.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [str(python), *pip, "--constraint", str(constraints), "quixstreams"],
    ):
        done = _run(command)
        if done.returncode:
            tail = (done.stderr or done.stdout).splitlines()[-5:]
            raise Unavailable(
                "quixstreams can't be installed: " + "\n".join(tail),
                way_out="check the network and pip's settings",
            )
    installed.write_text(wanted)
    return python


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
