"""Jobs on Spark: a task is a task of Spark, which places it, and repeats it if it fails.

The answers of tasks over the rows of a DataFrame are rows, too: pickled values in one binary
column. Packets of rows, in Arrow's IPC format, are in another one.

Texts of failures are shortened: Spark matches the text of a batch's failure by regular expressions
that overflow its stack on a page-long one, such as the stack trace of a Java exception.

Between two tasks a worker invalidates the caches of its import path and collects garbage
(:func:`settle`). Two effects make that cost 0.2 to 0.3 s of processor time each, as much as 100,000
records do:

- PySpark's modules come out of a zip archive, and until Python 3.12 ``invalidate_caches`` reads the
  archive's directory at once, for each package in it that was ever imported.
- A full collection goes through every object of every module (100,000 of them), none of which will
  ever be garbage.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import re
import sys
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from zipimport import zipimporter

import pyarrow as pa

from oncely.errors import ConfigError, OncelyError, SchemaChanged, Unavailable, WrongInput
from oncely.runtimes import jobs
from oncely.runtimes.jobs import Attempt, Found, Given, Send, Share, ShuffleBlock, Stage, Task
from oncely.runtimes.spark import session as sessions
from oncely.secrets import carried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_POOL = "spark.scheduler.pool"
Batches = Iterator[pa.RecordBatch]
_ROW = pa.schema([("bucket", pa.int32()), ("answer", pa.binary()), ("packet", pa.binary())])


class SparkJobs:
    """Runs jobs in a Spark session.

    Args:
        session: that of the pipeline, in whose thread this object is created.
        name: the name of the pipeline.
    """

    def __init__(self, session: SparkSession, name: str) -> None:
        self.session = session
        self._context = session.sparkContext
        self._group = f"oncely-{name}-{uuid.uuid4().hex}"
        self._pool = self._context.getLocalProperty(_POOL)

    def enter(self, described: str) -> None:
        """Jobs of this thread belong to the session's pool, and can be cancelled together."""
        self._context.setJobGroup(self._group, described)
        self._context.setLocalProperty(_POOL, self._pool)
        sessions.activate(self.session)

    def run(self, task: Task[Share, Given], shares: Sequence[Share]) -> list[Found[Given]]:
        """See :class:`~oncely.runtimes.jobs.Jobs`."""
        numbers = self._context.parallelize(range(len(shares)), len(shares))
        found: list[Found[Given]] = numbers.mapPartitions(
            carried(partial(_answers, task, shares))
        ).collect()
        return found

    def shuffled(
        self, send: Send[Share, Given], shares: Sequence[Share], stage: Stage[Given], buckets: int
    ) -> list[Found[Given]]:
        """See :class:`~oncely.runtimes.jobs.Jobs`. Packets pass through Spark's shuffle."""
        numbers = self.session.range(0, len(shares), 1, len(shares))
        sent = answered(numbers, partial(_of_shares, send, shares))
        frame = sent.repartition(buckets, sent["bucket"]).select("answer", "packet")
        return collected(answered(frame, partial(_of_packets, stage)))

    def require(self) -> None:
        """See :class:`~oncely.runtimes.jobs.Jobs`.

        Raises:
            ConnectionError: Spark's Java process has ended.
        """
        process = sessions.java_process()
        if process is not None and process.poll() is not None:
            raise ConnectionError("Spark's Java process has ended")

    def cancel(self) -> None:
        """Cancel the jobs of the current batch."""
        self._context.cancelJobGroup(self._group)

    def meaning(self, error: Exception) -> Exception:
        """The relevant sentence of Spark's page-long message."""
        from pyspark.errors import AnalysisException

        if isinstance(error, AnalysisException):
            return WrongInput(
                f"{str(error).splitlines()[0]}",
                key="transform.spark",
                way_out="correct the function: Spark can't plan what it returns",
            )
        if is_java(error) and sessions.exit_code() is None:
            return spark_error(str(error))
        return error

    def close(self) -> None:
        """Nothing to do: the session is its creator's."""


def this_attempt() -> Attempt:
    """The attempt of the task of Spark that runs in this process."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return Attempt(0)
    return Attempt(context.taskAttemptId(), context.attemptNumber() > 0)


def answered(frame: DataFrame, task: Task[Batches, object]) -> DataFrame:
    """A frame of the answers of a task whose share is the record batches of a partition."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return frame.mapInArrow(carried(partial(_answering, task)), from_arrow_schema(_ROW))


def collected(frame: DataFrame) -> list[Any]:
    """The answers in a frame."""
    rows = frame.select("answer").collect()
    return [pickle.loads(bytes(row[0])) for row in rows]  # noqa: S301 - our own tasks' answers


def _answering(task: Task[Batches, object], batches: Batches) -> Batches:
    settle()
    for one in jobs.answers(task, batches, this_attempt()):
        values = zip(_row(one), _ROW, strict=True)
        arrays = [pa.array([value], field.type) for value, field in values]
        yield pa.RecordBatch.from_arrays(arrays, schema=_ROW)
    for _ in batches:  # after an error: Spark discards the worker if its input is not exhausted
        pass


def _row(one: object) -> tuple[int, bytes | None, bytes | None]:
    """Bucket, answer and packet; the bucket of an answer is arbitrary. Bytes are an answer that
    another task has pickled."""
    if isinstance(one, ShuffleBlock):
        return one.bucket, None if one.about is None else pickle.dumps(one.about), one.data
    return 0, one if isinstance(one, bytes) else pickle.dumps(one), None


def _answers(
    task: Task[Share, Given], shares: Sequence[Share], numbers: Iterable[int]
) -> Iterator[Found[Given]]:
    settle()
    for number in numbers:
        yield from jobs.answers(task, shares[number], this_attempt())


def _of_shares(
    task: Task[Share, Given], shares: Sequence[Share], numbers: Batches, attempt: Attempt
) -> Generator[Given, None, None]:
    """Before the shuffle: the task for shares with these numbers."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from task(shares[number], attempt)


def _of_packets(
    task: Stage[Given], batches: Batches, attempt: Attempt
) -> Generator[Given | OncelyError | bytes, None, None]:
    """After the shuffle: the answers of this task, and of those that have sent."""
    passed: list[bytes] = []

    def packets() -> Iterator[pa.Buffer]:
        for batch in batches:
            for answer, packet in zip(batch["answer"], batch["packet"], strict=True):
                if packet.is_valid:
                    yield packet.as_buffer()
                else:
                    passed.append(answer.as_py())

    left = packets()
    try:
        yield from task(left, attempt)
    except OncelyError as error:
        yield error
    deque(left, 0)
    yield from passed


# -- texts of failures ---------------------------------------------------------------------


_LONGEST = 1_500
_HEAD = 300


def is_java(error: BaseException) -> bool:
    """True for an error that was raised by Spark or by the connection to its JVM."""
    return type(error).__module__.startswith(("py4j", "pyspark"))


def without_stack(error: BaseException) -> str:
    """Type and message of a Java exception, as Spark itself reads them, without its stack trace.

    Spark still recognises an interruption: a query that was stopped within a batch ends without an
    error.
    """
    kind = type(error)
    lines = takewhile(lambda line: not line.startswith("\tat "), str(error).splitlines())
    text = f"{kind.__module__}.{kind.__name__}: " + "\n".join(lines)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_HEAD]}\n[...]\n{text[_HEAD - _LONGEST :]}"


def spark_error(text: str) -> OncelyError:
    """The relevant sentence of Spark's page-long message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = [line for line in lines if line.startswith("ModuleNotFoundError")]
    if missing:
        return WrongInput(
            f"an executor can't import a module of the pipeline: {missing[0]}",
            way_out="install it where the executors' Python finds it; `oncely plan` checks",
        )
    if ended := [line for line in lines if line.startswith("SystemExit")]:
        return ConfigError(
            "transform.spark",
            f"a function of it called sys.exit in an executor ({ended[-1]})",
            way_out="raise an exception instead",
        )
    if changed := [line for line in lines if line.startswith("oncely.errors.SchemaChanged: ")]:
        return SchemaChanged(changed[0].partition(": ")[2], way_out="start again")
    if re.search(r"OutOfMemoryError|exited with code 52\b|code 137\b", text):
        return Unavailable(
            "Spark: an executor ran out of memory",
            way_out='give it more, such as "spark.executor.memory" = "4g" in [spark.conf]; with a'
            ' local master it is "spark.driver.memory"',
        )
    telling = [line for line in lines if re.match(r"([\w.]+\.)?\w+(Error|Exception)\b", line)]
    causes = [line.removeprefix("Caused by").removeprefix(": ") for line in lines
              if line.startswith(("Caused by: ", ": "))]  # fmt: skip
    chosen = (telling or causes or lines[:1] or ["no message"])[-1]
    return Unavailable(f"Spark: {chosen[:500]}")


# -- between two tasks ----------------------------------------------------------------------

_State = tuple[int, int, int] | None


_tasks = itertools.count(1)


class _Unchanged:
    """Replaces an importer's ``invalidate_caches``: reads an archive only if it has changed."""

    def __init__(self, importer: zipimporter) -> None:
        self._read_again, self._archive = importer.invalidate_caches, importer.archive
        self._known: _State = None

    def __call__(self) -> None:
        state = _state(self._archive)  # before it is read: a change meanwhile is noticed next time
        if state is None or state != self._known:
            self._read_again()
            self._known = state


def settle() -> None:
    """Called by every task when it begins; cheap."""
    if next(_tasks) == 2:
        # The first task has imported the modules that tasks need, and its garbage was collected
        # after it.
        gc.freeze()
    for importer in list(sys.path_importer_cache.values()):
        if isinstance(importer, zipimporter) and "invalidate_caches" not in vars(importer):
            vars(importer)["invalidate_caches"] = _Unchanged(importer)


def _state(path: str) -> _State:
    """A state that changes when a file is changed or replaced; None: it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
