"""The event log: the events of runs as lines of JSON, appended to a file (docs/events.md).

A line is written by one call, to a file that was opened for appending, so the lines of several runs
do not mix. Only the last line of a run can be incomplete, when its process or the disk fails; the
next writer ends that line and states its length.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from oncely.core import events
from oncely.core.ranges import OffsetRange, Position, TopicPartition, by_topic, grouped
from oncely.errors import WrongInput
from oncely.secrets import Secrets

log = logging.getLogger("oncely.run")

VERSION = 1
"""The version of the format. New keys and types are added without a new version."""

_ONE = 1 << 16  # bytes that are read at once
_LONGEST_ERROR = 2_000  # characters


class EventLog:
    """A listener that appends events to a file.

    Args:
        path: the file; created if it is missing.
        pipeline: the pipeline's name. A file contains the events of one pipeline.
        secrets: values that are redacted in error texts.
        then: called with each event after it was written.

    Raises:
        WrongInput: the file can't be written, or it is the log of another pipeline.
    """

    def __init__(
        self,
        path: str | Path,
        pipeline: str,
        secrets: Secrets = Secrets(),  # noqa: B008 - a frozen value
        then: events.Listener = lambda _: None,
    ) -> None:
        self._path, self._pipeline, self._secrets, self._then = Path(path), pipeline, secrets, then
        self._run, self._epoch = uuid.uuid4().hex, 0
        self._lock = threading.Lock()
        self._missed, self._cut = 0, 0
        try:
            cut = self._inspect()
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._append(self._line("started", {"version": VERSION, "cut": cut}), cut > 0)
            except OSError:
                os.close(self._file)
                raise
        except OSError as error:
            raise WrongInput(
                f"the event log {self._path} can't be written: {error.strerror or error}",
                way_out="name a file in a folder that exists, on a disk with room",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; later events are not written."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def __call__(self, event: events.Event) -> None:
        """Append an event. A failure is logged once, and does not reach the run."""
        with self._lock:
            if isinstance(event, events.PipelineOpened | events.PositionsReset):
                self._epoch = event.epoch
            if self._file >= 0 and not isinstance(event, events.Polled):
                self._write(event)
        self._then(event)

    def _write(self, event: events.Logged) -> None:
        kind, fields = described(event, self._secrets)
        data = self._line(kind, fields, _epoch(event))
        if self._missed:
            told = {"events": self._missed, "cut": self._cut}
            data = self._line("events_lost", told) + data
        try:
            self._append(data, self._cut > 0)
            if isinstance(event, events.BatchPlanned | events.RunClosed):
                # Before tasks commit: all earlier lines, and the bounds of what they may commit.
                self._sync()
        except OSError as error:
            if not self._missed:
                log.warning(
                    "the event log %s is incomplete from here on: %s",
                    self._path,
                    error.strerror or error,
                )
            self._missed += 1
            return
        self._missed = self._cut = 0

    def _append(self, data: bytes, cut: bool) -> None:
        """Write by one call; ``cut``: first end an incomplete line."""
        whole = b"\n" + data if cut else data
        written = os.write(self._file, whole)
        if written < len(whole):
            begun = whole[:written].rpartition(b"\n")
            self._cut = len(begun[2]) + (0 if begun[1] else self._cut)
            raise OSError(0, "the disk is full")

    def _sync(self) -> None:
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            os.fsync(self._file)

    def _line(self, kind: str, fields: Mapping[str, Any], epoch: int = 0) -> bytes:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        head = {
            "time": now,
            "pipeline": self._pipeline,
            "epoch": epoch or self._epoch or None,
            "run": self._run,
            "type": kind,
        }
        return msgspec.json.encode({**head, **fields}) + b"\n"

    def _inspect(self) -> int:
        """The length of an incomplete last line; 0 if there is none.

        Raises:
            WrongInput: the file is something else, or the log of another pipeline.
        """
        if not self._path.exists() or not stat.S_ISREG(self._path.stat().st_mode):
            return 0
        with self._path.open("rb") as file:
            first = file.readline(_ONE)
            if first.endswith(b"\n"):
                self._require_own(first)
            size = file.seek(0, os.SEEK_END)
            return _after_last_newline(file, size)

    def _require_own(self, first: bytes) -> None:
        try:
            found = msgspec.json.decode(first)
            of = found["pipeline"]
        except (msgspec.DecodeError, TypeError, KeyError):
            raise WrongInput(
                f"{self._path} is not an event log: its first line is something else",
                way_out="name another file",
            ) from None
        if of != self._pipeline:
            raise WrongInput(
                f"the event log {self._path} belongs to pipeline {of!r}",
                way_out="name another file: each pipeline has a log of its own",
            )


def has_opened(path: str | Path) -> bool:
    """True if the log tells near its begin that a run has opened the ledger."""
    try:
        with Path(path).open("rb") as file:
            return b'"type":"opened"' in file.read(_ONE)
    except OSError:
        return False


def _epoch(event: events.Event) -> int:
    """The epoch of an event that is not of the last takeover's; else 0."""
    match event:
        case events.BatchPlanned() | events.RangeCommitted() | events.BatchCommitted():
            return event.epoch
        case _:
            return 0


def described(event: events.Logged, secrets: Secrets) -> tuple[str, dict[str, Any]]:
    """Type and fields of an event's line. They are a promise: docs/events.md."""
    match event:
        case events.PipelineOpened():
            return "opened", {
                "positions": _positions(event.positions),
                "first_start": event.first_start,
                "every_partition": event.every,
                **({"beyond": _several(event.beyond)} if event.beyond else {}),
                **({"begun": _numbers(event.begun)} if event.begun else {}),
            }
        case events.BatchPlanned():
            return "planned", {"batch": event.batch_id, "ranges": _ranges(event.ranges)}
        case events.RangeCommitted():
            return "range_committed", _committed(event)
        case events.BatchCommitted():
            return "batch_committed", {
                "batch": event.batch_id,
                "records": event.records,
                "rows": event.rows,
                "rejects": event.rejects,
                "seconds": round(event.seconds, 3),
                "positions": _positions(event.positions),
            }
        case events.PartitionAdded():
            return "partition_added", {**_at(event.partition), "position": event.position}
        case events.GapFound():
            return "gap", {**_at(event.partition), "range": _range(event.missing)}
        case events.PositionsReset():
            before, now = _positions(event.before), _positions(event.positions)
            return "reset", {"before": before, "positions": now}
        case events.RecordsRewritten():
            return "rewritten", _rewritten(event)
        case events.PartitionsChanged():
            return f"partitions_{event.change}", {"partitions": _numbers(event.partitions)}
        case _:
            return _ending(event, secrets)


def _ending(
    event: events.BatchFailed
    | events.FencedOut
    | events.StandingBy
    | events.Draining
    | events.RunClosed,
    secrets: Secrets,
) -> tuple[str, dict[str, Any]]:
    match event:
        case events.BatchFailed():
            said = secrets.redact(event.error)[:_LONGEST_ERROR]
            pause = round(event.retry_in_seconds, 3)
            return "failed", {"error": said, "attempt": event.attempt, "retry_in_seconds": pause}
        case events.FencedOut():
            return "fenced", {"by_epoch": event.theirs, "partitions": _numbers(event.partitions)}
        case events.StandingBy():
            return "standing_by", {}
        case events.Draining():
            return "draining", {}
        case events.RunClosed():
            said = secrets.redact(event.error)[:_LONGEST_ERROR]
            return "closed", {"complete": event.complete, "error": said or None}


def _committed(event: events.RangeCommitted) -> dict[str, Any]:
    return {
        **_at(event.partition),
        "range": _range(event.range),
        "kind": event.kind,
        "replayed": event.replayed,
        "records": event.records,
        "rows": event.rows,
        "rejects": event.rejects,
        "filtered": event.filtered,
    }


def _rewritten(event: events.RecordsRewritten) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "ranges": by_topic({tp: list(map(_range, own)) for tp, own in event.ranges.items()}),
        "removed_rows": event.removed_rows,
        "removed_rejects": event.removed_rejects,
        "rows": event.rows,
        "rejects": event.rejects,
        "filtered": event.filtered,
    }


def _at(tp: TopicPartition) -> dict[str, Any]:
    return {"topic": tp.topic, "partition": tp.partition}


def _range(one: OffsetRange) -> list[int]:
    return [one.start, one.end]


def _ranges(ranges: Mapping[TopicPartition, OffsetRange]) -> dict[str, dict[int, list[int]]]:
    return by_topic({tp: _range(one) for tp, one in ranges.items()})


def _several(
    ranges: Mapping[TopicPartition, Sequence[OffsetRange]],
) -> dict[str, dict[int, list[list[int]]]]:
    return by_topic({tp: [_range(one) for one in some] for tp, some in ranges.items()})


def _positions(positions: Mapping[TopicPartition, Position]) -> dict[str, dict[int, int]]:
    return by_topic(positions)


def _numbers(partitions: Collection[TopicPartition]) -> dict[str, list[int]]:
    return grouped(sorted(partitions))


def _after_last_newline(file: BinaryIO, size: int) -> int:
    """The number of bytes behind the last line break."""
    at = size
    while at:
        start = max(0, at - _ONE)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return size - (start + found + 1)
        at = start
    return size
