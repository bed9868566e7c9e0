"""A pipeline whose processes stop themselves inside a commit to Kafka, or after writing a file.

``python -m oncely.testing.halting FILE [--until latest]`` runs a pipeline file as ``oncely run``
does, and with ``--work`` as ``oncely work`` does. After :func:`ask_to_halt` the next process that
reaches the point stops itself (SIGSTOP):

- ``commit``: its transaction contains the records of a Kafka sink, or the manifest messages of a
  files sink; the broker has them, and the transaction is not decided;
- ``write``: a worker has written a file that is not published.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from oncely.core import events
from oncely.errors import OncelyError
from oncely.kafka.client import make
from oncely.kafka.sender import Producer
from oncely.pipeline import Pipeline
from oncely.stores.objects.store import FileSystem, connect
from oncely.testing.processes import Child, await_that, child, stop_self, tree
from oncely.threads import StopSignal

Point = Literal["commit", "write"]

_FILES = (".avro", ".parquet")


@contextlib.contextmanager
def running_halting(file: Path, *arguments: str) -> Iterator[Child]:
    """Run the pipeline as a child; remaining processes are killed at the end.

    Args:
        file: the pipeline file; the output goes to a file beside it with the suffix ``.log``.
        arguments: ``"--until", "latest"``, ``"--work"``, both, or none.
    """
    with child([__name__, str(file), *arguments], file.with_suffix(".log")) as process:
        yield process


def ask_to_halt(file: Path, point: Point) -> None:
    """Request a halt of the pipeline of a file; only the next process at the point stops."""
    _marker(file, point).touch()


def halted(pid: int, timeout: float = 300.0) -> psutil.Process:
    """Wait for the requested halt, and return the stopped process, ``pid`` or a descendant.

    Raises:
        AssertionError: no process has stopped within ``timeout`` seconds.
    """

    def stopped() -> psutil.Process | None:
        for one in tree(pid):
            with contextlib.suppress(psutil.Error):
                if one.status() == psutil.STATUS_STOPPED:
                    return one
        return None

    found: psutil.Process = await_that(stopped, "a process that has halted", timeout)
    return found


def run_to_exit_code(
    pipeline: Pipeline,
    until: Literal["latest"] | None,
    listener: events.Listener = lambda _: None,
    *,
    works: bool = False,
) -> int:
    """Run a pipeline in this process until it ends or a signal ends it; returns the exit code.

    With ``works`` as a member of a consumer group.
    """
    stop = StopSignal()
    on_spark = not works and pipeline.settings.runtime == "spark"
    spark = pipeline.start_spark() if on_spark else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.ask())
    try:
        if works:
            pipeline.work(until, stop=stop, listener=listener)
        else:
            pipeline.run(until, stop=stop, spark=spark, listener=listener)
    except OncelyError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _marker(file: Path, point: Point) -> Path:
    return file.with_suffix(f".halt-{point}")


@dataclass(frozen=True)
class Halting:
    """``Parts.kafka_connect`` and ``Parts.files_connect``. Picklable.

    Attributes:
        file: the pipeline file.
        topic: the output or manifest topic; a transaction with records for it halts.
    """

    file: Path
    topic: str

    def at(self, point: Point) -> None:
        """Stop this process if a halt was requested; of several processes only one stops."""
        marker = _marker(self.file, point)
        with contextlib.suppress(FileNotFoundError):
            marker.rename(f"{marker}.{os.getpid()}")
            stop_self()

    def wanted(self, point: Point) -> bool:
        """True if a halt is requested."""
        return _marker(self.file, point).exists()

    def kafka(
        self, kind: Any, brokers: str, kafka: Mapping[str, object], error_state: Any, **own: Any
    ) -> Any:
        """Create a client; a producer can halt."""
        made = make(kind, brokers, kafka, error_state, **own)
        return _Producer(made, self) if issubclass(kind, Producer) else made

    def files(self, url: str, s3: Any) -> Any:
        """Open a store that can halt."""
        return _Store(connect(url, s3), self)


class _Producer:
    """A producer that tracks whether its transaction has records of the topic."""

    def __init__(self, inner: Any, halting: Halting) -> None:
        self._inner, self._halting, self._holds = inner, halting, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def produce(self, topic: str, *arguments: Any, **own: Any) -> Any:
        self._holds |= topic == self._halting.topic
        return self._inner.produce(topic, *arguments, **own)

    def produce_batch(self, topic: str, messages: Any) -> Any:
        self._holds |= topic == self._halting.topic
        return self._inner.produce_batch(topic, messages)

    def commit_transaction(self, *arguments: Any) -> Any:
        if self._holds and self._halting.wanted("commit"):
            while self._inner.flush(1):  # the broker must have them
                pass
            self._halting.at("commit")
        return self._inner.commit_transaction(*arguments)


class _Store:
    """A store that tracks written files."""

    def __init__(self, inner: FileSystem, halting: Halting) -> None:
        self._inner, self._halting = inner, halting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, path: str, data: Any) -> None:
        self._inner.write(path, data)
        if path.endswith(_FILES):
            self._halting.at("write")


def main(file: Path, until: Literal["latest"] | None, *, works: bool = False) -> int:
    """Run the pipeline file; returns the exit code."""
    settings = Pipeline.from_file(file).settings
    sink = settings.describe()["sink"]
    halting = Halting(file, sink.get("manifest_topic") or sink["topic"])
    pipeline = Pipeline(settings).replaced(kafka_connect=halting.kafka, files_connect=halting.files)
    return run_to_exit_code(pipeline, until, works=works)


if __name__ == "__main__":
    # Imported by name, or it would be pickled by value for the workers.
    from oncely.testing import halting as myself  # noqa: PLW0406

    given = sys.argv[1:]
    sys.exit(
        myself.main(
            Path(given[0]), "latest" if "latest" in given else None, works="--work" in given
        )
    )
