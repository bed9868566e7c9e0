"""The audit of a table against the plain Spark answer: a full outer join of topic and table.

A pipeline fills the table once. In each round the clean table is audited, then ten records are
damaged by SQL, the damaged table is audited and joined, and the damage is undone. The time of the
join does not depend on the damage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from pyspark.sql import functions as F

from bench.match import Contender, Match, Stage, against, flights
from bench.measure import Sample
from bench.sql import Sql, jdbc_options
from bench.workload import PARTITIONS
from oncely.audit import Report, audit
from oncely.audit.report import FindingKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GOALS = against({("oncely", "outer_join"): 10.0, ("oncely_damaged", "outer_join"): 5.0})
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

Joined = tuple[int, list[tuple[int, str]]]
"""The answer of the join: published records, and the ids that differ with their kinds."""


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


def measure(stage: Stage) -> None:
    """Rates of all ways."""
    records = stage.given.records or 10_000_000
    stage.publish("audit", records)
    with stage.database("audit") as (url, postgres):
        clean = Audited(stage, "audit", records, BATCH, url, damage=False)
        damaged = replace(clean, damage=True)
        with stage.console.status(f"a pipeline moves {records:,} records"):
            clean.fill()
        ways = [
            Contender("oncely", clean, clean.audit),
            Contender("oncely_damaged", damaged, damaged.audit),
            Contender("outer_join", damaged, damaged.outer_join),
        ]
        title = "Audit of a table in PostgreSQL, records per second"
        match = Match(title, ways, GOALS, (stage.broker.pid, postgres))
        goals = {label: goal for label, _, _, goal in GOALS}
        series = match.play(stage.given.rounds or 3)
        stage.write("audit", match.told(series, goals=goals, damaged=_DAMAGED))


@dataclass(frozen=True, kw_only=True)
class Audited(Sql):
    """A table that a pipeline has filled; its place is all damage of it.

    Attributes:
        damage: the table is damaged before a run.
    """

    damage: bool

    def fill(self) -> None:
        """Run the pipeline. It creates the table, so the rows contain their offsets."""
        self.oncely(_TABLE)
        with psycopg.connect(self.url, autocommit=True) as database:
            database.execute(f"VACUUM (ANALYZE) {_TABLE}".encode())

    @contextmanager
    def fresh(self, name: str) -> Iterator[Damages]:  # type: ignore[override]
        """Damage the table; undone at the end of the context."""
        del name
        done = damages(self.records) if self.damage else {}
        ids = [number for some in done.values() for number in some]
        with psycopg.connect(self.url, autocommit=True) as database:
            rows = database.execute(f"SELECT * FROM {_TABLE} WHERE {_IDS}".encode(), (ids,))
            kept = rows.fetchall()
            for kind, some in done.items():
                database.execute(_DAMAGES[kind].encode(), (list(some),))
            yield done
            if kept:
                database.execute(_DAMAGES["lost"].encode(), (ids,))
                values = ", ".join(["%s"] * len(kept[0]))
                with database.cursor() as cursor:
                    cursor.executemany(f"INSERT INTO {_TABLE} VALUES ({values})".encode(), kept)

    def wrong(self, place: Damages, result: Report | Joined, sample: Sample) -> str | None:  # type: ignore[override]
        """What is wrong with a report or with the answer of the join, or None."""
        del sample
        if isinstance(result, Report):
            return wrong(result, self.records, place)
        counted, found = result
        expected = {(number, kind) for kind, ids in place.items() for number in ids}
        if counted != self.records or sorted(found) != sorted(expected):
            return f"{counted} records, found {found[:20]}, expected {sorted(expected)}"
        return None

    def audit(self, _: Damages) -> Report:
        """``oncely audit``."""
        return audit(self.into(_TABLE))

    def outer_join(self, _: Damages) -> Joined:
        """What users write: read both sides with Spark, and join them by id.

        Values are compared by a hash, so that only ids and hashes are exchanged. The table has to
        be grouped by id to find duplicates; the join needs it in the same partitions.
        """
        content = F.xxhash64(*_VALUES).alias("content")
        topic = self._topic().select("id", content)
        rows = self._table().select("id", content).groupBy("id")
        table = rows.agg(F.count("*").alias("rows"), F.max("content").alias("content"))
        joined = topic.alias("t").join(table.alias("s"), F.expr("t.id = s.id"), "full_outer")
        answer = joined.selectExpr("coalesce(t.id, s.id) AS id", "t.id AS published", _FINDING)
        differing = F.when(F.expr("kind IS NOT NULL"), F.struct("id", "kind"))
        counted, found = answer.agg(F.count("published"), F.collect_list(differing)).collect()[0]
        return counted, [tuple(one) for one in found]

    def _topic(self) -> DataFrame:
        return flights(
            self.stage.session.read.format("kafka")
            .option("kafka.bootstrap.servers", self.brokers)
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("endingOffsets", "latest")
            .option("kafka.isolation.level", "read_committed")
            .load()
        )

    def _table(self) -> DataFrame:
        options = jdbc_options(self.url) | {
            "dbtable": _TABLE,
            "partitionColumn": "id",
            "lowerBound": "0",
            "upperBound": str(self.records),
            "numPartitions": str(_READERS),
            "fetchsize": str(_FETCH),
        }
        return self.stage.session.read.format("jdbc").options(**options).load()
