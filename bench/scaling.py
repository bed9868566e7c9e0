"""What a load takes: processors, commits and ledger rows, by the costs that were measured here.

``python -m bench.scaling [--terabytes 10] [--bytes 1000] [--partitions 240] [--cores 8]`` simulates
two days of batches, with twice the mean load at noon, and an outage of an hour before that. No
server is needed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

_DAY = 86_400.0
_OUTAGE = (11 * 3_600.0, 12 * 3_600.0)  # of the second day
_KEPT = 1_250  # ranges of a partition that the ledger keeps: joined from 1,500 down to 1,000


@dataclass(frozen=True)
class Costs:
    """Processor seconds as measured for docs/speed.md and docs/scaling.md.

    Attributes:
        record: of a record without its bytes; broker, executors and database together.
        byte: of a byte of it.
        batch: seconds of a batch's own, whatever it holds.
        range: of one partition in a commit, on either side.
        database: the database's share of the first two.
    """

    record: float = 0.3e-6
    byte: float = 9e-9
    batch: float = 0.08
    range: float = 0.1e-3
    database: float = 0.5


@dataclass(frozen=True)
class Load:
    """A load and what carries it.

    Attributes:
        terabytes: of records a day.
        bytes: of a record.
        partitions: of the topics.
        cores: of the executors.
        database_cores: of the database.
        trigger: seconds between the beginnings of batches, at least.
        most: records of a batch, at most.
    """

    terabytes: float
    bytes: int
    partitions: int
    cores: int
    database_cores: int
    trigger: float
    most: int

    @property
    def mean(self) -> float:
        """Records a second."""
        return self.terabytes * 1e12 / _DAY / self.bytes

    def rate(self, at: float) -> float:
        """Records a second at a time of the day: none at midnight, twice the mean at noon."""
        return self.mean * (1 - math.cos(2 * math.pi * at / _DAY))

    def arrived(self, until: float) -> float:
        """Records from the beginning until a time."""
        return self.mean * (until - math.sin(2 * math.pi * until / _DAY) * _DAY / (2 * math.pi))


@dataclass(frozen=True)
class Batch:
    """A batch: its begin, its end, its records, and those that wait behind it."""

    began: float
    ended: float
    records: float
    left: float


def seconds(load: Load, costs: Costs, records: float) -> float:
    """The time of a batch: executors and database work side by side, the slower one counts."""
    each = records * (costs.record + costs.byte * load.bytes)
    ranges = costs.range * load.partitions
    client = (each * (1 - costs.database) + ranges) / min(load.cores, load.partitions)
    return costs.batch + max(client, (each * costs.database + ranges) / load.database_cores)


def batches(load: Load, costs: Costs, until: float) -> Iterator[Batch]:
    """The batches of a run from midnight on, one after the other, none in the outage."""
    now, done = load.trigger, 0.0
    while now < until:
        begin = _DAY + _OUTAGE[0]
        if begin <= now < _DAY + _OUTAGE[1]:
            now = _DAY + _OUTAGE[1]
        records = min(load.most, load.arrived(now) - done)
        done += records
        end = now + seconds(load, costs, records)
        yield Batch(now, end, records, load.arrived(end) - done)
        now = max(end, now + load.trigger)


def simulate(load: Load, costs: Costs) -> dict[str, object]:
    """What two days show."""
    all_ = list(batches(load, costs, 2 * _DAY))
    first = [one for one in all_ if one.began < _DAY]
    back = _DAY + _OUTAGE[1]
    late = [one for one in all_ if one.began >= back and one.left > load.most]
    busy = sum(one.ended - one.began for one in first) / _DAY
    return {
        "records_a_second": round(load.mean),
        "at_noon": round(2 * load.mean),
        "batches_a_day": len(first),
        "busy": round(busy, 2),
        "longest_batch_seconds": round(max(one.ended - one.began for one in first), 1),
        "ledger_rows": load.partitions * _KEPT,
        "ledger_rows_written_a_day": load.partitions * len(first),
        "minutes_to_catch_up_an_hour": round((late[-1].ended - back) / 60) if late else 0,
        "keeps_up": all_[-1].left <= load.most,
    }


def main() -> None:
    """Print a line of JSON."""
    options = argparse.ArgumentParser(prog="bench.scaling", description=__doc__)
    options.add_argument("--terabytes", type=float, default=10.0)
    options.add_argument("--bytes", type=int, default=1_000)
    options.add_argument("--partitions", type=int, default=240)
    options.add_argument("--cores", type=int, default=8)
    options.add_argument("--database-cores", type=int, default=8)
    options.add_argument("--trigger", type=float, default=10.0)
    options.add_argument("--most", type=int, default=20_000_000)
    load = Load(**vars(options.parse_args()))
    print(json.dumps(asdict(load) | simulate(load, Costs())))


if __name__ == "__main__":
    main()
