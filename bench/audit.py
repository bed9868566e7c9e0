"""The audit of a table against the plain Spark answer: a full outer join of topic and table.

A pipeline fills the table once. In each round the clean table is audited, then ten records are
damaged by SQL, the damaged table is audited and joined, and the damage is undone. The time of the
join does not depend on the damage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from rich.console import Console

from bench.contenders import Contest, jdbc_options
from bench.measure import Goal, Sample, Series, measured, show, told
from bench.workload import PARTITIONS, SCHEMA
from oncely.audit import Report, audit
from oncely.audit.report import FindingKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OUT = Path("build/bench/audit.json")
GOALS: Sequence[Goal] = (
    ("oncely / outer_join", "oncely", "outer_join", 10.0),
    ("oncely_damaged / outer_join", "oncely_damaged", "outer_join", 5.0),
)
_TABLE = "audited"
_DAMAGED = 10
_KINDS: Sequence[FindingKind] = ("lost", "duplicated", "altered")
BATCH = 500_000  # records of a batch of the pipeline that fills the table
_READERS = 8  # connections of the join to the database, on two cores
_FETCH = 10_000  # rows that the JDBC driver requests at once; it would keep all by default
_IDS = "id = ANY(%s)"
_VALUES = ("carrier", "flight", "time_hour", "dep_delay")
_FINDING = """
CASE WHEN t.id IS NULL THEN 'unexpected' WHEN s.id IS NULL THEN 'lost'
WHEN rows > 1 THEN 'duplicated' WHEN t.content <> s.content THEN 'altered' END AS kind
"""
_DAMAGES: Mapping[FindingKind, str] = {
    "lost": f"DELETE FROM {_TABLE} WHERE {_IDS}",
    "duplicated": f"INSERT INTO {_TABLE} SELECT * FROM {_TABLE} WHERE {_IDS}",
    "altered": f"UPDATE {_TABLE} SET flight = flight + 1 WHERE {_IDS}",
}

Damages = Mapping[FindingKind, Sequence[int]]
"""By kind of damage, the ids of its records."""

Way = Callable[[Damages], str | None]
"""Compares table and topic, given all damage; returns what is wrong with the result, or None."""


class Place(NamedTuple):
    """Where the records of the benchmark are: id ``i`` is the next one of partition ``i`` modulo
    the number of partitions, and nothing else is in the topic."""

    partition: int
    offset: int

    @classmethod
    def of(cls, number: int) -> Place:
        """The place of an id."""
        return cls(number % PARTITIONS, number // PARTITIONS)


def damages(records: int) -> Damages:
    """Ten records, evenly over the topic, in turn lost, duplicated and altered."""
    ids = [(2 * at + 1) * records // (2 * _DAMAGED) for at in range(_DAMAGED)]
    return {kind: ids[at :: len(_KINDS)] for at, kind in enumerate(_KINDS)}


def wrong(report: Report, records: int, done: Damages) -> str | None:
    """What is wrong with the report of an audit, or None.

    Args:
        records: the number of records in the topic.
        done: all damage of the table.
    """
    found = {
        (one.kind, one.partition and one.partition.partition, one.offset) for one in report.findings
    }
    expected = {(kind, *Place.of(number)) for kind, ids in done.items() for number in ids}
    verdict = "damaged" if expected else "clean"
    if report.verdict != verdict or report.undecided:
        return f"verdict {report.verdict}, not {verdict}; {list(report.undecided)[:3]}"
    if report.records != records:
        return f"{report.records} records of {records}"
    if found != expected or sum(report.found.values()) != len(expected):
        return f"found {sorted(found, key=str)}, expected {sorted(expected)}"
    return None


@dataclass(frozen=True)
class AuditContest:
    """A table that a pipeline has filled, and the ways to compare it with its topic."""

    contest: Contest

    @property
    def records(self) -> int:
        """The number of records."""
        return self.contest.workload.records

    def fill(self) -> None:
        """Run the pipeline. It creates the table, so the rows contain their offsets."""
        contest = self.contest
        contest.pipeline(_TABLE, _TABLE).run("latest", spark=contest.session)
        with psycopg.connect(contest.url, autocommit=True) as database:
            database.execute(f"VACUUM (ANALYZE) {_TABLE}".encode())

    @contextmanager
    def damaged(self) -> Iterator[Damages]:
        """Damage the table; undone at the end of the context."""
        done = damages(self.records)
        ids = [number for some in done.values() for number in some]
        with psycopg.connect(self.contest.url, autocommit=True) as database:
            rows = database.execute(f"SELECT * FROM {_TABLE} WHERE {_IDS}".encode(), (ids,))
            kept = rows.fetchall()
            for kind, some in done.items():
                database.execute(_DAMAGES[kind].encode(), (list(some),))
            yield done
            database.execute(_DAMAGES["lost"].encode(), (ids,))
            values = ", ".join(["%s"] * len(kept[0]))
            with database.cursor() as cursor:
                cursor.executemany(f"INSERT INTO {_TABLE} VALUES ({values})".encode(), kept)

    def oncely(self, done: Damages) -> str | None:
        """``oncely audit``; what is wrong with its report, or None."""
        report = audit(self.contest.pipeline(_TABLE, _TABLE))
        return wrong(report, self.records, done)

    def outer_join(self, done: Damages) -> str | None:
        """What users write: read both sides with Spark, and join them by id.

        Values are compared by a hash, so that only ids and hashes are exchanged. The table has to
        be grouped by id to find duplicates; the join needs it in the same partitions.
        """
        from pyspark.sql import functions as F

        content = F.xxhash64(*_VALUES).alias("content")
        topic = self._topic().select("id", content)
        rows = self._table().select("id", content).groupBy("id")
        table = rows.agg(F.count("*").alias("rows"), F.max("content").alias("content"))
        joined = topic.alias("t").join(table.alias("s"), F.expr("t.id = s.id"), "full_outer")
        answer = joined.selectExpr("coalesce(t.id, s.id) AS id", "t.id AS published", _FINDING)
        differing = F.when(F.expr("kind IS NOT NULL"), F.struct("id", "kind"))
        counted, found = answer.agg(F.count("published"), F.collect_list(differing)).collect()[0]
        expected = {(number, kind) for kind, ids in done.items() for number in ids}
        if counted != self.records or sorted(map(tuple, found)) != sorted(expected):
            return f"{counted} records, found {found[:20]}, expected {sorted(expected)}"
        return None

    def _topic(self) -> DataFrame:
        from pyspark.sql import functions as F

        contest = self.contest
        records = (
            contest.session.read.format("kafka")
            .option("kafka.bootstrap.servers", contest.brokers)
            .option("subscribe", contest.workload.topic)
            .option("startingOffsets", "earliest")
            .option("endingOffsets", "latest")
            .option("kafka.isolation.level", "read_committed")
            .load()
        )
        value = F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")
        return records.select(value).select("v.*")

    def _table(self) -> DataFrame:
        options = jdbc_options(self.contest.url) | {
            "dbtable": _TABLE,
            "partitionColumn": "id",
            "lowerBound": "0",
            "upperBound": str(self.records),
            "numPartitions": str(_READERS),
            "fetchsize": str(_FETCH),
        }
        return self.contest.session.read.format("jdbc").options(**options).load()


def measure(contest: Contest, servers: Sequence[int], console: Console, rounds: int) -> None:
    """Rates of all ways; written to :data:`OUT`. Ends with exit code 1 if a result was wrong."""
    audited = AuditContest(contest)
    with console.status(f"a pipeline moves {audited.records:,} records"):
        audited.fill()
    series = {name: Series(audited.records) for name in ("oncely", "oncely_damaged", "outer_join")}
    for number in range(-1, rounds):  # the first round warms the JVM and is not counted
        label = f"audit, round {number + 1} of {rounds}"
        for name, problem, sample in _round(audited, servers, console, label):
            if problem:
                console.print(f"[bold red]{name}: a wrong result scores nothing: {problem}")
                sys.exit(1)
            console.print(f"{label}: {name}: {audited.records / sample.seconds:,.0f}/s")
            if number >= 0:
                series[name].samples.append(sample)
    show(console, "Audit of a table in PostgreSQL, records per second", series, GOALS)
    result = {
        **told(series, GOALS),
        "goals": {label: goal for label, _, _, goal in GOALS},
        "records": audited.records,
        "damaged": _DAMAGED,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {OUT}")


def _round(
    audited: AuditContest, servers: Sequence[int], console: Console, label: str
) -> Iterator[tuple[str, str | None, Sample]]:
    """Each way once: its name, what is wrong with its result, and its time."""

    def run(name: str, way: Way, done: Damages) -> tuple[str, str | None, Sample]:
        with console.status(f"{label}: {name}"), measured(servers) as sample:
            problem = way(done)
        return name, problem, sample

    yield run("oncely", audited.oncely, {})
    with audited.damaged() as done:
        yield run("oncely_damaged", audited.oncely, done)
        yield run("outer_join", audited.outer_join, done)
