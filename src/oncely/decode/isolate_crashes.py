"""Finds the records that crash their decoder, and decodes the others.

A parser written in C may crash on some bytes, or allocate memory until the kernel ends it. Spark
would try the task again, meet the same record, and give up on the batch: one record would stop
the pipeline for good. So a task that is tried again decodes in a forked child first. When the
child dies, the records are halved until the crashing record is alone.
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

from oncely.core.batch import Rejection
from oncely.decode.base import Decoded, Decoder
from oncely.decode.collector import as_arrow
from oncely.errors import InvariantViolation

CRASHES = "crashes the decoder"
_SHORTEST_SECONDS = 5.0  # for a small part: a busy machine is no crash


def isolate_crashes(decoder: Decoder, records: pa.Table, *, seconds: float = 60.0) -> Decoded:
    """Decode records although some of them may crash the process that decodes them.

    A part is decoded here only after a child has decoded it and lived. An error that the decoder
    raises is raised here, too: it is a defect, or a server that does not answer.

    Args:
        decoder: decodes parts of the records.
        records: as ``decode`` takes them.
        seconds: after which a child with all records counts as dead; half of it for a half,
            down to 5 seconds.

    Raises:
        InvariantViolation: a child dies even without records: this process can't fork.
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
    """Decode in a child and drop the result; False when a signal ended the child.

    A child that ends by an error counts as alive: the parent, decoding the same records, raises
    the same error with its traceback.
    """
    child = os.fork()
    if child == 0:
        # Never returns: this process must not unwind the parent's stack, connections and exit
        # handlers.
        try:
            _prepare_to_die(seconds)
            decoder.decode(records)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def _prepare_to_die(seconds: float) -> None:
    """Die without a core dump, and after ``seconds`` at the latest.

    The kernel's timer belongs to the child: it also ends a child whose parent was killed. Such a
    child would hold the parent's connections open, and hide from their servers that it is gone.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux: when memory runs out, end the child first
        Path("/proc/self/oom_score_adj").write_text("1000")


def _joined(parts: list[tuple[int, Decoded | None]], nothing: Decoded) -> Decoded:
    """The outcomes of consecutive parts as one; None is a record that crashed its child."""
    rejections: list[Rejection] = []
    for start, part in parts:
        bad = [Rejection(0, "decode", CRASHES)] if part is None else part.rejections
        rejections += (each._replace(record=each.record + start) for each in bad)
    lived = [(0, nothing), *((start, part) for start, part in parts if part is not None)]
    tombstones = [part.tombstones for _, part in lived if part.tombstones is not None]
    return Decoded(
        rows=pa.concat_tables([part.rows for _, part in lived]),
        row_record=_shifted((start, part.row_record) for start, part in lived),
        rejections=rejections,
        tombstones=pa.concat_tables(tombstones) if tombstones else None,
        tombstone_record=_shifted((start, part.tombstone_record) for start, part in lived),
    )


def _shifted(parts: Iterable[tuple[int, pa.Int64Array]]) -> pa.Int64Array:
    return as_arrow(records.to_numpy() + start for start, records in parts)
