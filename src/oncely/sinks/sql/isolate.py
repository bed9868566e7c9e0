"""Isolation of rows that the database refuses; the others are written.

All of it happens inside the commit's transaction, under savepoints, so that rejects and rows still
take effect together. Only errors that belong to a row are handled (``BadData``): a full disk or a
deadlock is unrelated to it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from oncely.clients.sql.connection import BadData, Connection
from oncely.core.batch import IntArray
from oncely.errors import TableMismatch, WrongInput

log = logging.getLogger(__name__)

Insert = Callable[[pa.Table], None]
Refuse = Callable[[int, str], None]
InsertEach = Callable[[pa.Table], list[tuple[int, str]]]

_SAVEPOINT = "SAVEPOINT oncely_rows"
_UNDO = "ROLLBACK TO SAVEPOINT oncely_rows"
_RELEASE = "RELEASE SAVEPOINT oncely_rows"
_FIRST_WINDOW = 8_192
_SECONDS_A_LINE = 10.0  # between lines of the log
_MANY = 16  # refused rows, beyond which it is cheaper to insert the others separately
_SLICE = 512  # rows that are inserted separately by one statement, which no signal interrupts


def insert_or_isolate(
    connection: Connection,
    insert: Insert,
    rows: pa.Table,
    still_ours: Callable[[], None],
    refuse: Refuse,
    insert_each: InsertEach | None = None,
    *,
    first: IntArray | None = None,
    separately: bool = False,
) -> None:
    """Insert the rows of records; each record of which the database refuses a row goes to
    ``refuse`` instead, with all of its rows.

    Args:
        insert: writes a slice of the rows in the open transaction, and checks deferred
            constraints.
        still_ours: raises ``PositionMoved`` if the ledger has moved. Called after every refusal: a
            unique key may be violated only because another attempt has written the same rows, which
            are then a replay and no rejects. Also raises if the table has been altered.
        refuse: called with the record's index and the reason; may raise to stop (reject budget).
        insert_each: writes rows separately, and returns the refused ones.
        first: the first row of each record, ascending; None if each record has one row.
        separately: insert no two records together.
    """
    if not rows.num_rows:
        return
    first = np.arange(rows.num_rows) if first is None else first
    insert_each = insert_each if len(first) == rows.num_rows else None
    inner = (connection, insert, rows, still_ours, refuse, insert_each)
    _Isolation(*inner, np.append(first, rows.num_rows), separately).run()


@dataclass
class _Isolation:
    """Splits the records at each refusal until a single one is refused.

    A reported line counts only after its record was refused alone. The window of records tried at
    once halves on a refusal and doubles on success, so a few bad ones among many cost little. If
    many are refused, the rest is inserted separately inside the database. All parts are in order,
    so a record sees the records before it, and only those that were accepted.
    """

    connection: Connection
    insert: Insert
    rows: pa.Table
    still_ours: Callable[[], None]
    refuse: Refuse
    insert_each: InsertEach | None
    first: IntArray
    separately: bool
    refused: int = 0
    logged: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Insert all records except the refused ones."""
        count = len(self.first) - 1
        parts = deque([(0, count)])
        window = 2 * max(_FIRST_WINDOW, count)  # all of them at first
        while parts:
            start, stop = parts.popleft()
            self._log_progress(start)
            each = self.insert_each is not None and (self.separately or self.refused >= _MANY)
            if self.separately or each:
                window = _SLICE if each else 1
            if stop - start > window:
                parts.appendleft((start + window, stop))
                stop = start + window
            if each and stop - start > 1 and self._one_by_one(start, stop):
                continue
            if self.separately and stop - start > 1:
                parts.extendleft(reversed(_cut(start, stop, None)))
                continue
            error = self._try(start, stop)
            if error is None:
                # A part that was cut off by a refusal must not enlarge the window: it would grow
                # with every bad row.
                window *= 2 if stop - start == window else 1
            elif stop - start == 1:
                self._refuse(start, error.reason)
            elif error.line is None and stop - start <= _SLICE and self._one_by_one(start, stop):
                window = _SLICE
            else:
                window = min(_FIRST_WINDOW, max(1, window // 2))
                parts.extendleft(reversed(_cut(start, stop, self._record(start, error.line))))

    def _record(self, start: int, line: int | None) -> int | None:
        """The record of a row of the part that begins with the record ``start``."""
        if line is None or line < 0:
            return None
        return int(np.searchsorted(self.first, self.first[start] + line, "right")) - 1 - start

    def _of(self, start: int, stop: int) -> pa.Table:
        return self.rows.slice(self.first[start], self.first[stop] - self.first[start])

    def _log_progress(self, done: int) -> None:
        """Log a line every few seconds: if no row is reported, isolation may take minutes.

        A warning, because a Spark worker does not log lower levels.
        """
        now = time.monotonic()
        if now - self.logged < _SECONDS_A_LINE:
            return
        self.logged = now
        text = "isolating refused rows: %d of %d rows done, %d refused"
        log.warning(text, self.first[done], self.rows.num_rows, self.refused)

    def _try(self, start: int, stop: int) -> BadData | None:
        self.connection.defer(_SAVEPOINT)
        try:
            self.insert(self._of(start, stop))
        except (BadData, TableMismatch) as error:
            self._undo()
            self.still_ours()
            if isinstance(error, TableMismatch):
                raise
            return error
        if stop - start < len(self.first) - 1:  # COMMIT releases the only one
            self.connection.defer(_RELEASE)
        return None

    def _one_by_one(self, start: int, stop: int) -> bool:
        """Insert separately; False if the database cannot do it for this part, or any."""
        if self.insert_each is None:
            return False
        self.connection.defer(_SAVEPOINT)
        try:
            refused = self.insert_each(self._of(start, stop))
            self.connection.defer(_RELEASE)
        except (BadData, WrongInput) as error:
            # A value that no table accepts, or a user who may not create temporary tables.
            self._undo()
            self.insert_each = self.insert_each if isinstance(error, BadData) else None
            return False
        if refused:
            self.still_ours()
        for row, reason in refused:
            self._refuse(start + row, reason)
        return True

    def _undo(self) -> None:
        self.connection.defer(_UNDO)
        self.connection.defer(_RELEASE)

    def _refuse(self, record: int, reason: str) -> None:
        self.refused += 1
        self.refuse(record, reason)


def _cut(start: int, stop: int, line: int | None) -> list[tuple[int, int]]:
    """Three parts around the reported record, or two halves if none is reported."""
    if line is None or not 0 <= line < stop - start:
        middle = (start + stop) // 2
        parts = [(start, middle), (middle, stop)]
    else:
        at = start + line
        parts = [(start, at), (at, at + 1), (at + 1, stop)]
    return [part for part in parts if part[0] < part[1]]
