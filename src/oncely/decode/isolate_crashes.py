"""Isolates records that crash their decoder, or make it raise, and decodes the others.

A parser written in C may crash on some bytes, or allocate memory until the kernel ends it. Spark
would repeat the task with the same record and fail the batch: one record would stop the pipeline
permanently. So a repeated task decodes in a forked child first. When the child dies, the records
are halved until the crashing record is alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

from oncely.core.batch import OF_VALUES, Rejection, isolated, unexpected
from oncely.decode.base import Decoded, Decoder
from oncely.decode.columns import as_arrow
from oncely.errors import InvariantViolation, OncelyError
from oncely.per_process import no_gc

log = logging.getLogger(__name__)

CRASHES = "crashes the decoder"
_SHORTEST_SECONDS = 5.0  # minimum for a small part: a slow machine is no crash


def isolate_crashes(decoder: Decoder, records: pa.Table, *, seconds: float = 60.0) -> Decoded:
    """Decode records of which some may crash the process.

    A part is decoded in this process only after a child has decoded it without dying. An error of
    the decoder is raised here, too: it is a defect, or a server does not answer.

    Args:
        decoder: decodes parts of the records.
        records: as ``decode`` takes them.
        seconds: time limit of a child with all records; half of it for a half, with a minimum of 5
            seconds.

    Raises:
        InvariantViolation: a child dies even without records: this process cannot fork.
    """
    if _survives(decoder, records, seconds):
        return decoder.decode(records)
    if not _survives(decoder, records.slice(0, 0), seconds):
        raise InvariantViolation("a forked child can't decode, even without records")
    parts: list[tuple[int, Decoded | str]] = []
    dead = [(0, len(records), seconds)]
    while dead:
        start, stop, limit = dead.pop()
        if stop - start == 1:
            parts.append((start, CRASHES))
            continue
        middle = (start + stop) // 2
        limit = max(limit / 2, min(seconds, _SHORTEST_SECONDS))
        for first, end in ((start, middle), (middle, stop)):
            part = records.slice(first, end - first)
            if _survives(decoder, part, limit):
                parts.append((first, decoder.decode(part)))
            else:
                dead.append((first, end, limit))
    parts.sort(key=lambda one: one[0])
    return _joined(parts, decoder.decode(records.slice(0, 0)))


def _survives(decoder: Decoder, records: pa.Table, seconds: float) -> bool:
    """Decode in a child and drop the result; False when a signal ended the child.

    A child that ends by an error counts as alive: the parent, decoding the same records, raises
    the same error with its traceback.
    """
    # A collection in the child, also by a library that starts threads in each child, could destroy
    # clients whose threads are the parent's: a crash that is no record's.
    with no_gc():
        child = os.fork()
        if child == 0:
            # Never returns: the child must not unwind the parent's stack, connections and exit
            # handlers.
            try:
                _prepare_to_die(seconds)
                decoder.decode(records)
            finally:
                os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def _prepare_to_die(seconds: float) -> None:
    """Make the child end without a core dump, and after ``seconds`` at the latest.

    The kernel's timer belongs to the child: it also ends a child whose parent was killed. Such a
    child would keep the parent's connections open, so their servers would not notice its death.
    """
    for asked in (signal.SIGINT, signal.SIGTERM):  # to the parent's group: not the record's fault
        signal.signal(asked, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux: let the OOM killer choose the child first
        Path("/proc/self/oom_score_adj").write_text("1000")


def isolate_errors(decode: Callable[[pa.Table], Decoded], records: pa.Table) -> Decoded:
    """Decode records; one for which the decoder raises an error of values is a rejection.

    Decoders reject what they can't read. This is for what they have not foreseen: otherwise such a
    record would stop the pipeline at each start.
    """
    try:
        return decode(records)
    except OF_VALUES as error:
        if isinstance(error, OncelyError | MemoryError):
            raise
        log.warning("isolating a record that the decoder has not foreseen", exc_info=True)
    done, bad = isolated(
        lambda start, stop: decode(records.slice(start, stop - start)), len(records)
    )
    parts: list[tuple[int, Decoded | str]] = [*done]
    parts += ((row, unexpected(error)) for row, error in bad.items())
    return _joined(sorted(parts, key=itemgetter(0)), decode(records.slice(0, 0)))


def _joined(parts: Sequence[tuple[int, Decoded | str]], nothing: Decoded) -> Decoded:
    """The outcomes of consecutive parts as one; a text is the reason of a record's rejection."""
    rejections: list[Rejection] = []
    for start, part in parts:
        bad = [Rejection(0, "decode", part)] if isinstance(part, str) else part.rejections
        rejections += (each._replace(record=each.record + start) for each in bad)
    lived = [(0, nothing), *((at, part) for at, part in parts if not isinstance(part, str))]
    tombstones = [part.tombstones for _, part in lived if part.tombstones is not None]
    return Decoded(
        rows=pa.concat_tables([part.rows for _, part in lived]),
        row_record=_shifted((start, part.row_record) for start, part in lived),
        rejections=rejections,
        tombstones=pa.concat_tables(tombstones) if tombstones else None,
        tombstone_record=_shifted((start, part.tombstone_record) for start, part in lived),
        dropped=sum(part.dropped for _, part in lived),
    )


def _shifted(parts: Iterable[tuple[int, pa.Int64Array]]) -> pa.Int64Array:
    return as_arrow(records.to_numpy() + start for start, records in parts)
