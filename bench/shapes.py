"""Kafka to PostgreSQL by the shape of the records: small, large, wide, compressed, or some bad.

Each shape is a topic of its own, read by the pipeline and by Spark's JDBC writer with the same
fetch settings.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psycopg

from bench.match import Contender, Match, Stage
from bench.measure import IN_BULK, Goal, Sample
from bench.sql import Sql
from bench.workload import record

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
    def table(self) -> str:
        """The columns as PostgreSQL's DDL."""
        types = {"STRING": "text", "DOUBLE": "double precision", "TIMESTAMP": "timestamptz"}
        return ", ".join(f"{name} {types.get(one, one)}" for name, one in self.columns.items())

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


def measure(stage: Stage) -> None:
    """Measure all shapes."""
    found = {}
    records, rounds = stage.given.records or 300_000, stage.given.rounds or 2
    wanted = shapes(records)
    with stage.database("shapes") as (url, postgres):
        # The first one warms the JVM, and is not counted.
        for number, shape in enumerate([wanted[0], *wanted]):
            topic = f"shape-{uuid.uuid4().hex[:8]}"
            stage.publish(topic, shape.records, of=shape.record, compression=shape.compression)
            contest = Shaped(stage, topic, shape.records, 3_000_000, url, shape.schema,
                             shape.table, shape=shape)  # fmt: skip
            peer = partial(contest.jdbc, rewrite=True, fetch=IN_BULK)
            ways = [
                Contender("oncely", contest, contest.oncely),
                Contender("jdbc_rewrite + fetch", contest, peer),
            ]
            goals: list[Goal] = [(shape.name, "oncely", "jdbc_rewrite + fetch", 1.0)]
            match = Match(shape.name, ways, goals, (stage.broker.pid, postgres))
            series = match.play(rounds, warm_up=False)
            stage.broker.delete_topic(topic)
            if number:
                per_second = series["oncely"].rate * len(shape.record(shape.ids[-1])) / 1e6
                stage.console.print(f"{per_second:,.1f} MB/s")
                found[shape.name] = match.told(series)
    ratios = {
        key: {name: one[key][name] for name, one in found.items()}  # type: ignore[index]
        for key in ("ratios", "ratio_rounds")
    }
    stage.write("shapes", {"shapes": found, "records": records, **ratios})


@dataclass(frozen=True, kw_only=True)
class Shaped(Sql):
    """A topic of a shape."""

    shape: Shape

    def wrong(self, place: str, result: int | None, sample: Sample) -> str | None:
        """What is wrong with the table; the peer writes a row of NULLs for a bad record."""
        del result, sample
        last = list(self.shape.columns)[-1]
        with psycopg.connect(self.url) as database:
            found = database.execute(
                f"SELECT count(*), count(DISTINCT id), sum(id), count({last}) FROM {place}"
                " WHERE id IS NOT NULL".encode()
            ).fetchone()
        ids = self.shape.ids
        filled = len(ids) if f'"{last}"'.encode() in self.shape.record(ids[-1]) else 0
        expected = (len(ids), len(ids), sum(ids), filled)
        return None if found == expected else f"{place}: found {found}, expected {expected}"
