"""A pipeline that writes to topics and stands still inside a transaction, when it is asked to.

Run as a program it is a child that a scenario may hurt:
``python -m tests.scenarios.held FILE [--until latest]``. Where a file ``FILE.hold`` stands, the
next worker that has sent all records of a transaction takes it away, and stops itself before it
commits: the broker holds the records, and nothing has decided what becomes of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Producer

from oncely.clients.kafka.client import make
from oncely.errors import OncelyError
from oncely.pipeline import Pipeline
from oncely.runtimes.stop import StopSignal
from tests.scenarios.world import Child, await_that, child, tree


def hold_file(file: Path) -> Path:
    """The file that asks for a halt."""
    return file.with_suffix(".hold")


@dataclass(frozen=True)
class Holding:
    """``Pipeline.kafka_connect``: its producers can stop their process. Picklable."""

    marker: str
    topic: str

    def __call__(
        self, kind: Any, brokers: str, kafka: Mapping[str, object], trouble: Any, **own: Any
    ) -> Any:
        made = make(kind, brokers, kafka, trouble, **own)
        return _Holding(made, self) if issubclass(kind, Producer) else made


class _Holding:
    """Knows whether its transaction has records of the output in it."""

    def __init__(self, inner: Any, plan: Holding) -> None:
        self._inner, self._plan, self._records = inner, plan, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def produce_batch(self, topic: str, messages: Any) -> Any:
        self._records |= topic == self._plan.topic
        return self._inner.produce_batch(topic, messages)

    def commit_transaction(self, *args: Any) -> Any:
        if self._records:
            self._hold()
        return self._inner.commit_transaction(*args)

    def _hold(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._plan.marker, f"{self._plan.marker}.{os.getpid()}")
            while self._inner.flush(1):  # the broker must have them
                pass
            os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def running_held(file: Path, *arguments: str) -> Iterator[Child]:
    """The pipeline as a child."""
    with child(["tests.scenarios.held", str(file), *arguments], file, {}) as process:
        yield process


def held(pid: int, timeout: float = 300) -> psutil.Process:
    """Wait for the halt that was asked for: the worker that stands inside its transaction."""

    def stopped() -> psutil.Process | None:
        for one in tree(pid):
            with contextlib.suppress(psutil.Error):
                if one.status() == psutil.STATUS_STOPPED:
                    return one
        return None

    found: psutil.Process = await_that(stopped, "a worker inside a transaction", timeout)
    return found


def main(arguments: list[str]) -> int:
    """Run the pipeline as `oncely run` would."""
    file = Path(arguments[0])
    plain = Pipeline.from_file(file)
    topic = plain.settings.describe()["sink"]["topic"]
    pipeline = Pipeline(plain.settings, kafka_connect=Holding(str(hold_file(file)), topic))
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
    from tests.scenarios import held as myself

    sys.exit(myself.main(sys.argv[1:]))
