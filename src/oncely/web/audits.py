"""Reports of ``oncely audit --json`` in a folder: the newest of each pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from oncely.audit.report import (
    KINDS,
    CompleteUntil,
    Finding,
    Hour,
    PartitionResult,
    Report,
    Undecided,
)
from oncely.core.ranges import OffsetRange, TopicPartition

_LARGEST = 64 << 20  # bytes


def newest(folder: Path, pipeline: str) -> Report | None:
    """The newest report of a pipeline; other files, and reports that are invalid, are ignored."""
    found = [one for path in folder.glob("*.json") if (one := _read(path, pipeline)) is not None]
    return max(found, key=lambda one: one.at, default=None)


def _read(path: Path, pipeline: str) -> Report | None:
    """The last report of a file; a watch has written one a line."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        value = json.loads(path.read_text("utf-8").strip().rpartition("\n")[2])
        return report_of(value) if value["pipeline"] == pipeline else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def report_of(value: Mapping[str, Any]) -> Report:
    """The report from its JSON: the inverse of ``Report.as_json``, without cluster and topic ids.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is no report.
    """
    until = value["complete_until"]
    return Report(
        str(value["pipeline"]),
        None,
        value["proof"],
        datetime.fromisoformat(value["at"]),
        float(value["seconds"]),
        int(value["records"]),
        int(value["accounted"]),
        int(value["holes"]),
        [_finding(kind, one) for kind in KINDS for one in value[kind]],
        {kind: int(value["found"][kind]) for kind in KINDS},
        [_undecided(one) for one in value["undecided"]],
        [_partition(one) for one in value["partitions"]],
        [Hour(**one) for one in value["hours"]],
        CompleteUntil(_moment(until["event_time"]), _moment(until["wall_time"])),
        [str(one) for one in value["limits"]],
    )


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _place(one: Mapping[str, Any]) -> TopicPartition | None:
    if one["topic"] is None:
        return None
    return TopicPartition(str(one["topic"]), int(one["partition"]))


def _finding(kind: Any, one: Mapping[str, Any]) -> Finding:
    within = tuple(
        (TopicPartition(topic, number), OffsetRange(start, end))
        for topic, number, start, end in one.get("within", ())
    )
    detail, file = str(one["detail"]), one.get("file", "")
    return Finding(_place(one), one["offset"], kind, detail, within, file)


def _undecided(one: Mapping[str, Any]) -> Undecided:
    whole = one["start"] is None
    return Undecided(
        _place(one), None if whole else OffsetRange(one["start"], one["end"]), str(one["reason"])
    )


def _partition(one: Mapping[str, Any]) -> PartitionResult:
    return PartitionResult(
        TopicPartition(str(one["topic"]), int(one["partition"])),
        OffsetRange(int(one["start"]), int(one["position"])),
        int(one["end"]),
        int(one["ranges"]),
        [OffsetRange(*both) for both in one["differing"]],
        *(int(one[name]) for name in ("records", "accounted", "holes")),
    )
