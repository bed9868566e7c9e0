"""What is moved: a topic of flights with keys, and the two jobs that everybody does with it."""

from __future__ import annotations

from typing import Literal

from bench.workload import delay, flight

Job = Literal["bytes", "json"]
"""``bytes``: key and value pass through. ``json``: decode, keep the late ones, write JSON."""

JOBS: tuple[Job, ...] = ("bytes", "json")
SCHEMA = "id BIGINT, carrier STRING, flight INT, time_hour STRING, dep_delay DOUBLE"
"""The time stays text: contenders without a schema would not look into it either."""
LATE = 15
"""Minutes of ``dep_delay``; 85 of 100 records are later."""
FILTER = f"dep_delay > {LATE}"


def key(i: int) -> bytes:
    """The key of record ``i``: its field ``flight``, 8,000 keys in all."""
    return str(flight(i)).encode()


def kept(i: int) -> bool:
    """Whether record ``i`` passes the filter of the ``json`` job."""
    return delay(i) > LATE


def outputs(job: Job, records: int) -> list[int]:
    """The ids that a job writes."""
    return [i for i in range(records) if job == "bytes" or kept(i)]
