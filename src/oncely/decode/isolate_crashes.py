"""Finds the record that kills its decoder, and lets the rest through.

A parser written in C may crash on some bytes, or ask for memory until the kernel ends it. Spark
would try the task again, meet the same record, and give up on the batch: one record would stop
the pipeline for good. So a task that is tried again decodes carefully: a forked child goes
first. When it dies, the records are halved until the one that kills stands alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from oncely.decode.base import Decoded, Decoder, Rejection
from oncely.decode.collector import as_arrow
from oncely.errors import InvariantViolation

CRASHES = "crashes the decoder"
_SHORTEST_SECONDS = 5.0  # for a small part: a busy machine is no crash


def isolate_crashes(decoder: Decoder, records: pa.Table, *, seconds: float = 60.0) -> Decoded:
    """Decode, though some of the records may kill the process that decodes them.

    Each part is decoded for real only after a child has decoded the same part and lived. An
    error that the decoder raises is raised here too: it is a defect, or a server that does not
    answer, and no record's fault.

    Args:
        decoder: whose ``decode`` is tried.
        records: as ``decode`` takes them.
        seconds: how long a child may take for all records before it counts as dead; half
            of it for a half, down to 5 seconds.

    Raises:
        InvariantViolation: even without records a child dies: this process can't fork.
    """
    if not _survives(decoder, records.slice(0, 0), seconds):
        raise InvariantViolation("a forked child can't decode, even without records")
    parts: list[tuple[int, Decoded | None]] = []
    todo = [(0, len(records), seconds)]
    while todo:
        start, stop, limit = todo.pop()
        part = records.slice(start, stop - start)
        if _survives(decoder, part, limit):
            parts.append((start, decoder.decode(part)))
        elif stop - start == 1:
            parts.append((start, None))
        else:
            middle = (start + stop) // 2
            limit = max(limit / 2, min(seconds, _SHORTEST_SECONDS))
            todo += [(middle, stop, limit), (start, middle, limit)]
    return _joined(parts, decoder.decode(records.slice(0, 0)))


def _survives(decoder: Decoder, records: pa.Table, seconds: float) -> bool:
    """Decode in a child and throw the result away; False when a signal ended it.

    A child that ends by an error ends by itself: that counts as life, and the parent, decoding
    for real, raises the same error with its traceback.
    """
    child = os.fork()
    if child == 0:
        # No return from here: the parent's stack, its open connections and its exit handlers
        # are not this process's to unwind.
        try:
            _be_the_victim(seconds)
            decoder.decode(records)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def _be_the_victim(seconds: float) -> None:
    """Die quietly and in time.

    The clock is the kernel's and the child's own: it also ends a child whose parent was killed,
    which would hold the parent's connections open, so that nobody saw that the parent is gone.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux: when memory runs out, end the child first
        Path("/proc/self/oom_score_adj").write_text("1000")


def _joined(parts: list[tuple[int, Decoded | None]], nothing: Decoded) -> Decoded:
    """The outcomes of consecutive parts as one; None is a record that killed its child."""
    lived = [(start, part) for start, part in parts if part is not None]
    rejections: list[Rejection] = []
    for start, part in parts:
        if part is None:
            rejections.append(Rejection(start, "decode", CRASHES))
        else:
            rejections += (r._replace(record=r.record + start) for r in part.rejections)
    tombstones = [part.tombstones for _, part in lived if part.tombstones is not None]
    if nothing.tombstones is not None:
        tombstones.append(nothing.tombstones)
    return Decoded(
        rows=pa.concat_tables([nothing.rows, *(part.rows for _, part in lived)]),
        row_record=_shifted((start, part.row_record) for start, part in lived),
        rejections=rejections,
        tombstones=pa.concat_tables(tombstones) if tombstones else None,
        tombstone_record=_shifted((start, part.tombstone_record) for start, part in lived),
    )


def _shifted(parts: Iterable[tuple[int, pa.Int64Array]]) -> pa.Int64Array:
    return as_arrow(records.to_numpy() + start for start, records in parts)
