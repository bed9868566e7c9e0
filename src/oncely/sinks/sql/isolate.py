"""Rows that the database refuses are found and set aside; the others are written.

All of it happens inside the commit's transaction, under savepoints, so that rejects and rows
still take effect together. Only SQLSTATE classes 22 and 23 come here (``BadData``): a full
disk or a deadlock says nothing about a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pyarrow as pa

from oncely.sinks.sql.connection import BadData, Connection

Insert = Callable[[pa.Table], None]
Refuse = Callable[[int, str], None]

_SAVEPOINT = "SAVEPOINT oncely_rows"
_UNDO = "ROLLBACK TO SAVEPOINT oncely_rows"
_RELEASE = "RELEASE SAVEPOINT oncely_rows"
_FIRST_WINDOW = 8_192


def insert_or_isolate(
    connection: Connection,
    insert: Insert,
    rows: pa.Table,
    still_ours: Callable[[], None],
    refuse: Refuse,
) -> None:
    """Insert ``rows``; each row that the database refuses goes to ``refuse`` instead.

    Args:
        insert: writes a slice of the rows in the open transaction.
        still_ours: raises ``PositionMoved`` when the ledger has moved. Asked after every
            refusal: a unique key may be violated only because another attempt has written
            these very rows, and then they are no rejects but a replay.
        refuse: takes the row's index and the reason; may raise to stop (reject budget).
    """
    if not rows.num_rows:
        return
    connection.execute(_SAVEPOINT)
    try:
        insert(rows)
        connection.check_constraints()
    except BadData as error:
        connection.execute(_UNDO)
        still_ours()
        _isolate(connection, insert, rows, error, still_ours, refuse)


def _isolate(
    connection: Connection,
    insert: Insert,
    rows: pa.Table,
    first: BadData,
    still_ours: Callable[[], None],
    refuse: Refuse,
) -> None:
    """Cut the rows at each refusal until what is refused is a single row.

    A named line is believed only after that row was refused alone. The window of rows tried at
    once halves on a refusal and doubles on success, so a few bad rows among many cost little
    and many bad rows don't cost a whole chunk each.
    """
    window = _FIRST_WINDOW
    parts = deque(_cut(0, rows.num_rows, first.line))
    while parts:
        start, stop = parts.popleft()
        if stop - start > window:
            parts.appendleft((start + window, stop))
            stop = start + window
        connection.execute(_SAVEPOINT)
        try:
            insert(rows.slice(start, stop - start))
            connection.check_constraints()
            connection.execute(_RELEASE)
            # What a refusal cut off says nothing of a window: it would grow with every bad row.
            window *= 2 if stop - start == window else 1
        except BadData as error:
            connection.execute(_UNDO)
            connection.execute(_RELEASE)
            still_ours()
            if stop - start == 1:
                refuse(start, error.reason)
            else:
                window = max(1, window // 2)
                parts.extendleft(reversed(_cut(start, stop, error.line)))


def _cut(start: int, stop: int, line: int | None) -> list[tuple[int, int]]:
    """Three parts round the named row, or two halves when none is named."""
    if line is None or not 0 <= line < stop - start:
        middle = (start + stop) // 2
        parts = [(start, middle), (middle, stop)]
    else:
        at = start + line
        parts = [(start, at), (at, at + 1), (at + 1, stop)]
    return [part for part in parts if part[0] < part[1]]
