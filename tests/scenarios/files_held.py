"""A pipeline that writes files and stands still where it is asked to.

``python -m tests.scenarios.files_held FILE [--until latest]``. Where a file ``FILE.hold.write``
stands, the next worker that has written a file takes it away and stops itself; ``FILE.hold.commit``
is for the driver, when its transaction names all files and is not decided.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from confluent_kafka import Producer

from oncely.clients.files.filesystem import FileSystem, connect
from oncely.clients.kafka.client import make
from oncely.errors import OncelyError
from oncely.pipeline import Pipeline
from oncely.runtimes.stop import StopSignal
from tests.scenarios.held import hold_file
from tests.scenarios.world import Child, child

Word = Literal["write", "commit"]


def ask(file: Path, word: Word) -> None:
    """Ask for a halt."""
    Path(f"{hold_file(file)}.{word}").touch()


@dataclass(frozen=True)
class Halt:
    """Where a process stops itself. Picklable."""

    marker: str

    def here(self, word: Word) -> bool:
        """Take the request away, if it is this one."""
        try:  # of several workers one succeeds
            os.rename(f"{self.marker}.{word}", f"{self.marker}.{word}.{os.getpid()}")
        except FileNotFoundError:
            return False
        return True

    def kafka(
        self, kind: Any, brokers: str, kafka: Mapping[str, object], trouble: Any, **own: Any
    ) -> Any:
        """``Pipeline.kafka_connect``."""
        made = make(kind, brokers, kafka, trouble, **own)
        return _Producer(made, self) if issubclass(kind, Producer) else made

    def files(self, url: str, s3: Any) -> FileSystem:
        """``Pipeline.files_connect``."""
        return _Place(connect(url, s3), self)  # type: ignore[return-value]


class _Producer:
    def __init__(self, inner: Any, halt: Halt) -> None:
        self._inner, self._halt, self._names = inner, halt, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def produce(self, topic: str, *args: Any, **own: Any) -> Any:
        self._names |= topic.endswith(".manifest")
        return self._inner.produce(topic, *args, **own)

    def commit_transaction(self, *args: Any) -> Any:
        if self._names and self._halt.here("commit"):
            while self._inner.flush(1):  # the broker must have them
                pass
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._inner.commit_transaction(*args)


class _Place:
    def __init__(self, inner: FileSystem, halt: Halt) -> None:
        self._inner, self._halt = inner, halt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, path: str, data: Any) -> None:
        self._inner.write(path, data)
        if path.endswith((".avro", ".parquet")) and self._halt.here("write"):
            os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def running_held(file: Path, *arguments: str) -> Iterator[Child]:
    """The pipeline as a child."""
    with child(["tests.scenarios.files_held", str(file), *arguments], file, {}) as process:
        yield process


def main(arguments: list[str]) -> int:
    """Run the pipeline as `oncely run` would."""
    file = Path(arguments[0])
    halt = Halt(str(hold_file(file)))
    settings = Pipeline.from_file(file).settings
    pipeline = Pipeline(settings, kafka_connect=halt.kafka, files_connect=halt.files)
    stop = StopSignal()
    spark = pipeline.start_spark()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.ask())
    try:
        pipeline.run("latest" if "latest" in arguments else None, stop=stop, spark=spark)
    except OncelyError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    # By its name, or it would travel to the workers by value.
    from tests.scenarios import files_held as myself

    sys.exit(myself.main(sys.argv[1:]))
