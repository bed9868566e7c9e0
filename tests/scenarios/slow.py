"""Pipelines whose input is slow, and a broken one that claims what it has not read.

Run as a program it is a child that a scenario may hurt:
``python -m tests.scenarios.slow FILE [--pause-in-copy MARKER] [--until latest]``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pgpq
import pyarrow as pa
from pyspark import cloudpickle

from oncely.clients.sql.postgres import PostgresConnection
from oncely.commit.backoff import Backoff
from oncely.commit.path import pass_over
from oncely.core.batch import Chunk
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.pipeline import Pipeline
from oncely.runtimes.spark import options as spark_options
from oncely.runtimes.spark.task import commit_chunks
from oncely.testing.halting import run_to_exit_code
from oncely.testing.processes import stop_self

SLEEP = "coalesce(reflect('java.lang.Thread', 'sleep', {ms}L), 'slept') is not null"
ARROW_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@dataclass(frozen=True)
class SlowPipeline(Pipeline):
    """Each record is held up in the JVM, so a task's input arrives in many Arrow messages."""

    milliseconds: int = 1

    def batches(self, spark: Any = None) -> Any:
        runner = super().batches(spark)
        plain = runner.run

        def slowly(frame: Any, batch_id: int, ranges: Any) -> Any:
            frame.sparkSession.conf.set(ARROW_RECORDS, "50")
            held = frame.where(SLEEP.format(ms=self.milliseconds))
            return plain(held, batch_id, ranges)

        runner.run = slowly
        return runner

    def run(self, *args: Any, **kwargs: Any) -> bool:
        """Fetch in the client's small default pieces.

        A cancelled task notices when it fetches, and in bulk that is after all of the records.
        """
        with mock.patch.dict(spark_options.IN_BULK, clear=True):
            return super().run(*args, **kwargs)


@dataclass(frozen=True)
class ClaimsPlannedEnd(SlowPipeline):
    """BROKEN on purpose: at the end of its input a task claims the range that was planned."""

    def batches(self, spark: Any = None) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        runner = super().batches(spark)
        slowly = runner.run

        def claiming(frame: Any, batch_id: int, ranges: Any) -> Any:
            return slowly(Claiming(frame, ranges), batch_id, ranges)

        runner.run = claiming
        return runner


class Claiming:
    """A frame whose tasks claim the planned end when their input ends, however it ended."""

    def __init__(self, frame: Any, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        self._frame, self._ranges = frame, ranges
        self.sparkSession = frame.sparkSession

    def where(self, condition: str) -> Claiming:
        return Claiming(self._frame.where(condition), self._ranges)

    def coalesce(self, tasks: int) -> Claiming:
        return Claiming(self._frame.coalesce(tasks), self._ranges)

    def mapInArrow(self, function: Any, schema: str) -> Any:
        plan = function.args[1].args[0]
        return self._frame.mapInArrow(partial(_claim, plan, self._ranges), schema)


def _claim(
    plan: Any, ranges: Mapping[TopicPartition, OffsetRange], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    seen: set[int] = set()

    def watched() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seen.update(batch.column("partition").to_pylist())
            yield batch

    yield from commit_chunks(plan, watched())
    entries = plan.delivery.ledger.positions(plan.fence)
    for tp, planned in ranges.items():
        if tp.partition in seen and entries[tp].position < planned.end:
            rest = Chunk.of_nothing({tp: OffsetRange(entries[tp].position, planned.end)})
            pass_over(plan.delivery, rest.ranges, plan.fence, "hole", Backoff())


class PausingInCopy(PostgresConnection):
    """Its process stops itself in the middle of the first COPY; only once for each marker."""

    def __init__(self, session: Any, marker: str) -> None:
        super().__init__(session)
        self._marker = Path(marker)

    def _send(self, statement: str, rows: pa.Table) -> int:
        encoder = pgpq.ArrowToPostgresBinaryEncoder(rows.schema)
        cursor = self._session.cursor()
        with cursor.copy(statement.encode()) as stream:
            stream.write(encoder.write_header())
            for batch in rows.to_batches(max_chunksize=500):
                stream.write(encoder.write_batch(batch))
                with contextlib.suppress(FileExistsError):
                    self._marker.touch(exist_ok=False)
                    stop_self()
            stream.write(encoder.finish())
        return cursor.rowcount


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
        pipeline = Pipeline(pipeline.settings, PauseInCopy(marker))
    return run_to_exit_code(pipeline, "latest" if "latest" in arguments else None, tell)


def tell(event: object) -> None:
    """What has happened, for a scenario that reads the child's output."""
    print(type(event).__name__, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
