"""Damage of a PostgreSQL table, its dead letters and its ledger, by plain SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from oncely import Pipeline
from oncely.audit import Report, audit
from oncely.audit.report import FindingKind
from oncely.config import parse
from oncely.errors import check
from oncely.testing.servers.kafka import Broker
from truth.damage import Damage, Place, Throw
from truth.source import SCHEMA, Pool, Pools, Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLES = ("orders", "oncely_rejects", "oncely_positions", "oncely_ranges")
_ON = "kafka_partition = %s AND kafka_offset = %s"
_COPY = "id, customer, cents, share, at, paid, kafka_topic"
_EVERY = 1_000_000

Throws = Callable[[psycopg.Connection[Any], Place], None]


def _update(what: str) -> Throws:
    return partial(_execute, f"UPDATE orders SET {what} WHERE {_ON}")


def _execute(statement: str, database: psycopg.Connection[Any], place: Place) -> None:
    done = database.execute(statement.encode(), place)
    check(done.rowcount == 1, f"{statement}: {done.rowcount} rows at {place}")


_INSERT = (
    f"INSERT INTO orders ({_COPY}, kafka_partition, kafka_offset)"
    f" SELECT {_COPY}, %s, %s FROM orders LIMIT 1"
)
_NO_LETTER = 'DELETE FROM oncely_rejects WHERE "partition" = %s AND "offset" = %s'
_AGAIN = f"INSERT INTO orders SELECT * FROM orders WHERE {_ON}"
_KINDS: Mapping[str, tuple[Pool, FindingKind, Throws]] = {
    "row removed": ("row", "lost", partial(_execute, f"DELETE FROM orders WHERE {_ON}")),
    "row doubled": ("row", "duplicated", partial(_execute, _AGAIN)),
    "text altered": ("row", "altered", _update("customer = customer || ' '")),
    "number altered": ("row", "altered", _update("cents = cents + 1")),
    "value set to 0": ("row", "altered", _update("cents = 0")),
    "value set to null": ("row", "altered", _update("share = NULL")),
    "flag turned": ("row", "altered", _update("paid = NOT paid")),
    "moved to another hour": ("row", "altered", _update("at = at + interval '1 hour'")),
    "dead letter removed": ("dead letter", "lost", partial(_execute, _NO_LETTER)),
    "row of a dead letter": ("dead letter", "duplicated", partial(_execute, _INSERT)),
    "row of a hole": ("hole", "unexpected", partial(_execute, _INSERT)),
    "row beyond the position": ("beyond", "unexpected", partial(_execute, _INSERT)),
    "row of another partition": ("nowhere", "unexpected", partial(_execute, _INSERT)),
}


class SqlWorld:
    """A table in PostgreSQL, filled by a pipeline on Spark.

    Args:
        broker: the source's cluster.
        url: an empty database.
        spark: a session.
        records: the number of records.
        random: the source of chance.
    """

    name = "sql"

    def __init__(
        self, broker: Broker, url: str, spark: SparkSession, records: int, random: Random
    ) -> None:
        self._url = url
        broker.create_topic("truth-sql", 4)
        self._source = Source(broker.bootstrap, "truth-sql", 4, random)
        self._source.publish(records)
        self._broker = broker
        self.pipeline = Pipeline(parse(self._settings()))
        check(bool(self.pipeline.run("latest", spark=spark)), "the pipeline was stopped")
        with self._database() as database:
            for table in _TABLES:
                copy = sql.SQL("CREATE TABLE {} AS TABLE {}")
                database.execute(
                    copy.format(sql.Identifier(f"kept_{table}"), sql.Identifier(table))
                )

    def _settings(self) -> dict[str, Any]:
        return {
            "name": "truth-sql",
            "delivery": "exactly_once",
            "source": {"brokers": self._source.brokers, "topics": [self._source.topic]},
            "decode": {"format": "json", "schema": SCHEMA},
            "sink": {"kind": "sql", "url": self._url, "table": "orders", "max_rejects": "50%"},
            "spark": {"master": "local[2,4]", "trigger": "0 seconds"},
        }

    def audit(self) -> Report:
        """Audit the table."""
        return audit(self.pipeline, limit=_EVERY)

    @contextmanager
    def _database(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self._url) as database:
            yield database

    # -- at many records -------------------------------------------------------------------

    @contextmanager
    def throw(self, random: Random, number: int) -> Iterator[Sequence[Damage]]:
        """Damage rows and dead letters; each record at most once."""
        with self._database() as database:
            damages = list(self._thrown(database, random, number))
        yield damages
        self._restore()

    def _thrown(
        self, database: psycopg.Connection[Any], random: Random, number: int
    ) -> Iterator[Damage]:
        pools = Pools(self._source, self._ends(), random)
        for _ in range(number):
            kind, place = pools.draw({kind: pool for kind, (pool, _, _) in _KINDS.items()})
            _, finding, throws = _KINDS[kind]
            throws(database, place)
            yield Damage.at(kind, [place], finding)

    # -- alone -----------------------------------------------------------------------------

    def large(self, random: Random) -> Iterator[Throw]:
        """A position that was moved, a range of rows that is gone."""
        for partition, end in self._ends().items():
            back = random.randint(1, end // 2)
            yield partial(self._moved, "position moved back", partition, end - back)
            yield partial(self._moved, "position moved forward", partition, end + back)
            first = random.randrange(end // 2)
            yield partial(self._range_gone, partition, first, first + random.randint(2, end // 2))

    def last(self, random: Random) -> Iterator[Throw]:
        """A source that was made again."""
        del random
        yield partial(self._source.made_again, self._broker, self._ends())

    @contextmanager
    def _moved(self, kind: str, partition: int, to: int) -> Iterator[Sequence[Damage]]:
        end = self._ends()[partition]
        if to > end:
            self._source.plain(to - end, partition)
            self._source.look()
        lost = [p for p in self._source.records if p[0] == partition and end <= p[1] < to]
        with self._database() as database:
            database.execute(
                'UPDATE oncely_positions SET "position" = %s WHERE "partition" = %s',
                (to, partition),
            )
        yield [Damage.moved(kind, partition, lost)]
        self._restore()

    @contextmanager
    def _range_gone(self, partition: int, start: int, end: int) -> Iterator[Sequence[Damage]]:
        with self._database() as database:
            for table, number, offset in (
                ("orders", "kafka_partition", "kafka_offset"),
                ("oncely_rejects", "partition", "offset"),
            ):
                statement = sql.SQL("DELETE FROM {} WHERE {} = %s AND {} >= %s AND {} < %s").format(
                    *map(sql.Identifier, (table, number, offset, offset))
                )
                database.execute(statement, (partition, start, end))
        gone = [p for p in self._source.records if p[0] == partition and start <= p[1] < end]
        yield [Damage.at("range of rows removed", gone, "lost")]
        self._restore()

    def _ends(self) -> dict[int, int]:
        with self._database() as database:
            return dict(
                database.execute('SELECT "partition", "position" FROM kept_oncely_positions')
            )

    def _restore(self) -> None:
        with self._database() as database:
            for table in _TABLES:
                kept, own = sql.Identifier(f"kept_{table}"), sql.Identifier(table)
                database.execute(sql.SQL("TRUNCATE {}").format(own))
                database.execute(sql.SQL("INSERT INTO {} TABLE {}").format(own, kept))
