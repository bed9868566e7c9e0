"""Progress of a job over time, seen from outside: what its database and its checkpoint say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from demo.job import Job
from demo.moment import Database

_EVERY = 0.25

Positions = dict[int, int]
"""Partition to its committed position."""
Progress = tuple[Positions, int]
"""Committed positions, and rows in the table."""
Look = Callable[[Database], Progress | None]


class Sample(NamedTuple):
    """What was seen ``at`` seconds after the job's first start."""

    at: float
    positions: Positions
    rows: int

    @property
    def offsets(self) -> int:
        """How far the topic is committed: the sum of the positions, which begin at zero."""
        return sum(self.positions.values())


def ledger(pipeline: str, table: str) -> Look:
    """Oncely's progress: positions of its ledger and rows of its table, in one statement."""
    sql = (
        f'SELECT "partition", "position", (SELECT COUNT(*) FROM {table}) FROM oncely_positions'
        " WHERE pipeline = %s"
    )

    def look(database: Database) -> Progress | None:
        found = database.query(sql, pipeline)
        return ({row[0]: row[1] for row in found}, found[0][2]) if found else None

    return look


def checkpoint(directory: Path, table: str) -> Look:
    """The control's progress: its checkpoint's last committed batch, and rows of its table."""

    def look(database: Database) -> Progress | None:
        positions = committed(directory)
        rows = database.query(f"SELECT COUNT(*) FROM {table}")
        return (positions, rows[0][0]) if rows else None

    return look


def batches(directory: Path, log: str) -> int:
    """Number of the newest batch in a checkpoint's log (``offsets`` or ``commits``), or -1."""
    try:
        names = [entry.name for entry in (directory / log).iterdir()]
    except FileNotFoundError:
        return -1
    return max((int(name) for name in names if name.isdigit()), default=-1)


def committed(directory: Path) -> Positions:
    """The end offsets of a checkpoint's last committed batch."""
    newest = batches(directory, "commits")
    if newest < 0:
        return {}
    last_line = (directory / "offsets" / str(newest)).read_text().splitlines()[-1]
    (topic,) = json.loads(last_line).values()
    return {int(partition): end for partition, end in topic.items()}


class Watch:
    """Samples a job's progress from a thread of its own until it is closed."""

    def __init__(self, job: Job, look: Look) -> None:
        self.samples: list[Sample] = []
        self._job, self._look = job, look
        self._database = Database(job.plan.url)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def offsets(self) -> int:
        """Committed offsets at the last look."""
        return self.samples[-1].offsets if self.samples else 0

    def start(self) -> None:
        """Begin, with zero at zero."""
        self.samples.append(Sample(0.0, {}, 0))
        self._thread.start()

    def close(self) -> None:
        """Look a last time and end."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._sample()
        self._database.close()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY):
            self._sample()

    def _sample(self) -> None:
        at = self._job.seconds
        progress = self._look(self._database)
        if progress is not None:  # None: the database is away, or nothing was created yet
            self.samples.append(Sample(at, *progress))


class RowsBeforeCheckpoint:
    """Rows of a batch can be seen in the table, and the checkpoint does not know the batch.

    The baseline of a batch is counted when its entry in ``offsets`` has been seen, which Spark
    writes after the ``commits`` of the batch before: all rows beyond the baseline are this batch's.
    """

    def __init__(self, directory: Path, table: str, database: Database) -> None:
        self._directory, self._count = directory, f"SELECT COUNT(*) FROM {table}"
        self._database = database
        self._batch, self._rows = -1, 0
        self.seen = ""

    def observe(self) -> None:
        """Count the rows at the beginning of each batch."""
        begun = batches(self._directory, "offsets")
        if begun > self._batch:
            rows = self._database.query(self._count)
            if rows:
                self._batch, self._rows = begun, rows[0][0]

    def holds(self) -> bool:
        """Whether some of the batch's tasks, and not all, have made their rows visible."""
        if batches(self._directory, "commits") >= self._batch or self._batch < 0:
            return False
        rows = self._database.query(self._count)
        more = rows[0][0] - self._rows if rows else 0
        self.seen = (
            f"{more:,} rows of batch {self._batch} visible, commits/{self._batch} not written"
        )
        return more > 0
