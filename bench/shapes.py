"""Kafka to PostgreSQL by the shape of the records: small, large, wide, compressed, or some bad.

Each shape is a topic of its own, read by the pipeline and by Spark's JDBC writer with the same
fetch settings.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from rich.console import Console

from bench.contenders import Contest, jdbc, oncely
from bench.measure import IN_BULK, Goal, Series, measured, show_goals, told
from bench.workload import publish, record
from oncely.testing.servers.kafka import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUT = Path("build/bench/shapes.json")
_BAD = 20  # one record of so many, where some are bad


@dataclass(frozen=True)
class Shape:
    """Records of one kind.

    Attributes:
        name: what is special about them.
        records: how many.
        columns: name and SQL type of each; the first one is ``id``.
        record: a record by its number.
        compression: the codec of the topic's batches.
        bad: some are no JSON.
    """

    name: str
    records: int
    columns: dict[str, str]
    record: Callable[[int], bytes]
    compression: str = "none"
    bad: bool = False

    @property
    def schema(self) -> str:
        """The columns as Spark's DDL."""
        return ", ".join(f"{name} {type_}" for name, type_ in self.columns.items())

    @property
    def ids(self) -> list[int]:
        """The numbers of the records that become rows."""
        return [n for n in range(self.records) if not (self.bad and n % _BAD == 0)]


def shapes(records: int) -> list[Shape]:
    """Shapes of about as much work as ``records`` of 100 bytes each."""
    usual = {
        "id": "BIGINT", "carrier": "STRING", "flight": "INT", "time_hour": "TIMESTAMP",
        "dep_delay": "DOUBLE",
    }  # fmt: skip

    def some_bad(n: int) -> bytes:
        return b"{" if n % _BAD == 0 else record(n)

    return [
        *(_padded(size, records) for size in (10, 1_000, 10_000, 100_000, 1_000_000)),
        Shape("100 bytes, 5 columns", records, usual, record),
        *(_wide(columns, records) for columns in (50, 200, 1_000)),
        *(Shape(one, records, usual, record, one) for one in ("lz4", "zstd")),
        Shape("5 % rejects", records, usual, some_bad, bad=True),
    ]


def _padded(size: int, records: int) -> Shape:
    """One text that makes records as long as that; ten bytes hold only the number."""

    def one(n: int) -> bytes:
        head = f'{{"id":{n}'.encode()
        pad = size - len(head) - len(b',"pad":""}')
        return head + b',"pad":"%s"}' % (b"x" * pad) if pad > 0 else head + b"}"

    columns = {"id": "BIGINT", "pad": "STRING"}
    return Shape(f"{size:,} bytes", min(records, records * 1_000 // size), columns, one)


def _wide(columns: int, records: int) -> Shape:
    names = [f"c{n}" for n in range(columns - 1)]

    def one(n: int) -> bytes:
        return json.dumps({"id": n, **{c: n + at for at, c in enumerate(names)}}).encode()

    typed = {"id": "BIGINT", **dict.fromkeys(names, "INT")}
    return Shape(f"{columns:,} columns", records * 10 // columns, typed, one)


def measure(
    spark: SparkSession,
    broker: Broker,
    url: str,
    servers: tuple[int, int],
    console: Console,
    *,
    records: int,
    rounds: int,
) -> None:
    """Measure all shapes; written to :data:`OUT`."""
    found = {}
    wanted = shapes(records)
    # The first one warms the JVM, and is not counted.
    for number, shape in enumerate([wanted[0], *wanted]):
        topic = f"shape-{uuid.uuid4().hex[:8]}"
        with console.status(f"publishing {shape.records:,} records: {shape.name}"):
            load = publish(
                broker, topic, shape.records, of=shape.record, compression=shape.compression
            )
        contest = Contest(spark, broker.bootstrap, url, load, 3_000_000, shape.schema)
        series = _rounds(contest, shape, servers, console, rounds)
        goals: list[Goal] = [(shape.name, "oncely", "jdbc_rewrite + fetch", 1.0)]
        per_second = series["oncely"].rate * len(shape.record(shape.ids[-1])) / 1e6
        broker.delete_topic(topic)
        if number == 0:
            continue
        console.print(
            f"{series['oncely'].rate:,.0f} records/s, {per_second:,.1f} MB/s,"
            f" {series['oncely'].cpu_per_million:,.2f} CPU s per million"
        )
        show_goals(console, series, goals)
        found[shape.name] = told(series, goals) | {"records": shape.records}
    ratios = {
        key: {name: one[key][name] for name, one in found.items()}  # type: ignore[index]
        for key in ("ratios", "ratio_rounds")
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"shapes": found, "records": records, **ratios}, indent=2) + "\n")
    console.print(f"written: {OUT}")


def _rounds(
    contest: Contest, shape: Shape, servers: tuple[int, int], console: Console, rounds: int
) -> dict[str, Series]:
    runs: dict[str, Callable[[str], None]] = {
        "oncely": lambda table: oncely(contest, table),
        "jdbc_rewrite + fetch": lambda table: jdbc(contest, table, rewrite=True, fetch=IN_BULK),
    }
    series = {name: Series(shape.records) for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            table = f"t_{uuid.uuid4().hex[:8]}"
            with psycopg.connect(contest.url, autocommit=True) as database:
                database.execute(_table(table, shape).encode())
                status = console.status(f"{shape.name}: round {number + 1} of {rounds}: {name}")
                with status, measured(servers) as one:
                    run(table)
                wrong = _wrong(database, table, shape)
                database.execute(f"DROP TABLE {table}".encode())
            if wrong:
                console.print(f"[bold red]{name}: a wrong result scores nothing: {wrong}")
                sys.exit(1)
            series[name].samples.append(one)
    return series


def _table(name: str, shape: Shape) -> str:
    types = {"STRING": "text", "DOUBLE": "double precision", "TIMESTAMP": "timestamptz"}
    columns = ", ".join(f"{c} {types.get(t, t)}" for c, t in shape.columns.items())
    return f"CREATE TABLE {name} ({columns})"


def _wrong(
    database: psycopg.Connection[tuple[object, ...]], table: str, shape: Shape
) -> str | None:
    """What is wrong with the table; the peer writes a row of NULLs for a bad record."""
    last = list(shape.columns)[-1]
    found = database.execute(
        f"SELECT count(*), count(DISTINCT id), sum(id), count({last}) FROM {table}"
        " WHERE id IS NOT NULL".encode()
    ).fetchone()
    ids = shape.ids
    filled = len(ids) if f'"{last}"'.encode() in shape.record(ids[-1]) else 0
    expected = (len(ids), len(ids), sum(ids), filled)
    return None if found == expected else f"{table}: found {found}, expected {expected}"
