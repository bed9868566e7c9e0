"""Pipelines that are slow, and a broken one that claims what it has not read.

Run as a program it is a child that a scenario may hurt:
``python -m tests.scenarios.slow FILE [--pause-in-copy MARKER] [--until latest]``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pgpq
import pyarrow as pa
from pyspark import cloudpickle

from oncely.pipeline import Pipeline
from oncely.runtimes.chunks import ChunkBounds
from oncely.stores.sql.postgres import PostgresConnection
from oncely.testing.halting import run_to_exit_code
from oncely.testing.processes import stop_self

A_COMMIT = 200  # records


@dataclass(frozen=True)
class SlowDecoder:
    """Takes its time for each record."""

    decoder: Any
    milliseconds: int

    @property
    def schema(self) -> pa.Schema:
        return self.decoder.schema

    @property
    def needs(self) -> frozenset[str]:
        return self.decoder.needs  # type: ignore[no-any-return]

    def decode(self, records: pa.Table) -> Any:
        time.sleep(self.milliseconds * records.num_rows / 1_000)
        return self.decoder.decode(records)


@dataclass(frozen=True)
class SlowPipeline(Pipeline):
    """Each record is held up, and a task has many commits."""

    milliseconds: int = 1

    def batches(self, jobs: Any) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        runner = super().batches(jobs)
        context = runner.ledger.context
        slow = SlowDecoder(context.decoder, self.milliseconds)
        runner.ledger.context = replace(context, decoder=slow)
        runner.bounds = ChunkBounds(records=A_COMMIT)
        return runner


@dataclass(frozen=True)
class EndsEarly(Pipeline):
    """BROKEN on purpose: the end of what was read passes for the end of the ranges."""

    def batches(self, jobs: Any) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        runner = super().batches(jobs)
        context = runner.ledger.context
        runner.ledger.context = replace(context, source=FirstTables(context.source))
        return runner


@dataclass
class FirstTables:
    """A source whose reads end without an error after the first table."""

    source: Any

    def read(self, ranges: Any, needs: frozenset[str]) -> Iterator[pa.Table]:
        yield next(iter(self.source.read(ranges, needs)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)


class PausingInCopy(PostgresConnection):
    """Its process stops itself in the middle of the first COPY; only once for each marker."""

    def __init__(self, session: Any, marker: str) -> None:
        super().__init__(session)
        self._marker = Path(marker)

    def _encoded(self, rows: pa.Table) -> Iterator[bytes]:
        encoder = pgpq.ArrowToPostgresBinaryEncoder(rows.schema)
        yield encoder.write_header()
        for batch in rows.to_batches(max_chunksize=500):
            yield encoder.write_batch(batch)
            with contextlib.suppress(FileExistsError):
                self._marker.touch(exist_ok=False)
                stop_self()
        yield encoder.finish()


@dataclass(frozen=True)
class PauseInCopy:
    """How sessions are opened by a worker that stops in the middle of COPY."""

    marker: str

    def __call__(self, dialect: Any, application: str) -> Any:
        return PausingInCopy(dialect.connect(application)._session, self.marker)


def main(arguments: list[str]) -> int:
    """Run the slow pipeline as `oncely run` would."""
    pipeline: Pipeline = SlowPipeline.from_file(arguments[0])
    if "--pause-in-copy" in arguments:
        marker = arguments[arguments.index("--pause-in-copy") + 1]
        pipeline = pipeline.replaced(connect=PauseInCopy(marker))
    return run_to_exit_code(pipeline, "latest" if "latest" in arguments else None, tell)


def tell(event: object) -> None:
    """What has happened, for a scenario that reads the child's output."""
    print(type(event).__name__, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
