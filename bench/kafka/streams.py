"""The contender Kafka Streams: a Java program that is compiled here, exactly once, two threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.kafka.child import Child
from bench.kafka.workload import LATE
from oncely.artifacts import java, resolve
from oncely.errors import WrongInput

KAFKA_STREAMS = "org.apache.kafka:kafka-streams:4.1.0"
_SOURCE = Path(__file__).with_name("Passing.java")


def start(brokers: str, place: Path) -> Child:
    """Compile the program into ``place`` and start it.

    Raises:
        WrongInput: there is no Java compiler, or the program does not compile.
        Unavailable: the jars can't be fetched.
    """
    compiler = _javac()
    jars = os.pathsep.join(map(str, resolve(KAFKA_STREAMS)))
    classes = place / "classes"
    command = [compiler, "-d", str(classes), "-cp", jars, str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongInput(f"{_SOURCE.name} does not compile: {done.stderr}")
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
