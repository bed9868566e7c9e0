"""The time of a start and of a commit into PostgreSQL, by the number of partitions.

``python -m bench.commits [--partitions 1,10,1000] [--history 1000] [--commits 50]``. Each commit
has ten rows of each of ten partitions at most; with ``--all`` of every partition. No broker is
involved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import Delivery, commit
from oncely.core.batch import Chunk
from oncely.core.claim import Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql.table import TableSpec
from oncely.stores.sql.connection import TableName
from oncely.stores.sql.dialects import dialect_for
from oncely.testing.servers.postgres import Postgres

ROWS = 10
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
SOURCE = SourceIdentity("cluster", {"t": "id"})


def main() -> None:
    """Print one line of JSON for each number of partitions."""
    options = argparse.ArgumentParser(prog="bench.commits", description=__doc__)
    options.add_argument("--partitions", default="1,10,1000")
    options.add_argument("--history", type=int, default=1_000, help="ranges of each partition")
    options.add_argument("--commits", type=int, default=50)
    options.add_argument("--all", action="store_true", help="commit records of every partition")
    given = options.parse_args()
    with Postgres() as server:
        for number in map(int, given.partitions.split(",")):
            url = server.create_database(f"commits_{number}")
            found = measure(url, number, given.history, given.commits, whole=given.all)
            print(json.dumps({"partitions": number, "history": given.history} | found), flush=True)


def measure(url: str, number: int, history: int, commits: int, *, whole: bool) -> dict[str, Any]:
    """Milliseconds of the second start, of a read of the ledger, and of a commit."""
    partitions = [TopicPartition("t", one) for one in range(number)]
    sink = SqlSink("p", dialect_for(url), TableSpec(TableName(None, "rows"), SCHEMA))
    start = dict.fromkeys(partitions, history)
    takeover = Takeover(SOURCE, lambda: start, start)
    first = _timed(lambda: sink.open(takeover))
    _fill(url, number, history)
    second = _timed(lambda: sink.open(takeover))
    fence = sink.open(takeover).fence
    sink = sink.bind()
    tidied = _timed(lambda: sink.ledger.tidy(fence))
    reads = [_timed(lambda: sink.ledger.positions(fence)) for _ in range(20)]
    own = partitions if whole else partitions[:10]
    delivery, times, cpu = Delivery(sink, sink.ledger), [], 0.0
    for at in range(commits + 5):
        chunk = _chunk(own, history + at * ROWS)
        cpu = time.process_time() if at == 5 else cpu
        times.append(
            _timed(lambda chunk=chunk: list(commit(delivery, chunk, fence, None, Backoff())))  # type: ignore[misc]
        )
    cpu = (time.process_time() - cpu) / commits
    times = sorted(times[5:])
    return {
        "committed": len(own),
        "first_open_ms": first,
        "open_ms": second,
        "tidy_ms": tidied,
        "read_ms": statistics.median(reads),
        "commit_ms": statistics.median(times),
        "commit_p99_ms": times[int(len(times) * 0.99)],
        "commit_client_cpu_ms": round(cpu * 1000, 2),
    }


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return round((time.perf_counter() - began) * 1000, 2)


def _fill(url: str, number: int, history: int) -> None:
    """Ranges of one record each, as a worker with many small commits has left them."""
    with psycopg.connect(url, autocommit=True) as database:
        database.execute("DELETE FROM oncely_ranges")
        database.execute(
            'INSERT INTO oncely_ranges (pipeline, topic, "partition", range_start, range_end,'
            " epoch, kind, records, written, rejected, filtered)"
            " SELECT 'p', 't', p, r, r + 1, 1, 'data', 1, 1, 0, 0"
            f" FROM generate_series(0, {number - 1}) p, generate_series(0, {history - 1}) r"
        )
        database.execute("ANALYZE")


def _chunk(partitions: list[TopicPartition], start: int) -> Chunk:
    count = len(partitions) * ROWS
    ids = np.arange(count, dtype=np.int64)
    return Chunk(
        ranges=dict.fromkeys(partitions, OffsetRange(start, start + ROWS)),
        partitions=tuple(partitions),
        partition=(ids // ROWS).astype(np.int32),
        offset=start + ids % ROWS,
        rows=pa.table([pa.array(ids), pa.array([f"name {one}" for one in ids])], schema=SCHEMA),
        row_record=ids,
        deletes=None,
        delete_record=ids[:0],
        rejections=(),
        dead_letters=lambda _: [],
    )


if __name__ == "__main__":
    main()
