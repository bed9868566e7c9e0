"""Damage of a Delta table by delta-rs and the file system, as other writers would do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

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

_EVERY = 1_000_000
Row = dict[str, Any]


def _altered(**changes: Callable[[Any], Any]) -> Callable[[Row], list[Row]]:
    return lambda row: [{**row, **{name: change(row[name]) for name, change in changes.items()}}]


_KINDS: Mapping[str, tuple[Pool, FindingKind, Callable[[Row], list[Row]]]] = {
    "row removed": ("row", "lost", lambda _: []),
    "row doubled": ("row", "duplicated", lambda row: [row, row]),
    "text altered": ("row", "altered", _altered(customer=lambda text: text + " ")),
    "number altered": ("row", "altered", _altered(cents=lambda cents: cents + 1)),
    "value set to 0": ("row", "altered", _altered(cents=lambda _: 0)),
    "value set to null": ("row", "altered", _altered(share=lambda _: None)),
    "flag turned": ("row", "altered", _altered(paid=lambda paid: not paid)),
    "moved to another hour": ("row", "altered", _altered(at=lambda at: at + timedelta(hours=1))),
    "row of a dead letter": ("dead letter", "duplicated", lambda row: [row]),
    "row of a hole": ("hole", "unexpected", lambda row: [row]),
    "row beyond the position": ("beyond", "unexpected", lambda row: [row]),
    "row of another partition": ("nowhere", "unexpected", lambda row: [row]),
}


class DeltaWorld:
    """A Delta table in a folder, filled by a pipeline on Spark in several commits.

    Args:
        broker: the source's cluster.
        root: an empty folder.
        spark: a session.
        records: the number of records.
        random: the source of chance.
    """

    name = "delta"

    def __init__(
        self, broker: Broker, root: Path, spark: SparkSession, records: int, random: Random
    ) -> None:
        self._root, self._broker = root, broker
        broker.create_topic("truth-delta", 4)
        self._source = Source(broker.bootstrap, "truth-delta", 4, random)
        self.pipeline = Pipeline(parse(self._settings()))
        for _ in range(3):
            self._source.publish(records // 3)
            check(bool(self.pipeline.run("latest", spark=spark)), "the pipeline was stopped")
        self._kept = self._rows()
        self._ends = dict(self._positions()["truth-delta"])
        self._version = DeltaTable(root.as_uri()).version()

    def _settings(self) -> dict[str, Any]:
        return {
            "name": "truth-delta",
            "delivery": "exactly_once",
            "source": {"brokers": self._source.brokers, "topics": [self._source.topic]},
            "decode": {"format": "json", "schema": SCHEMA},
            "sink": {"kind": "delta", "url": self._root.as_uri(), "max_rejects": "50%"},
            "spark": {"master": "local[2,4]"},
        }

    def audit(self) -> Report:
        """Audit the table, and read its rows."""
        return audit(self.pipeline, limit=_EVERY, download=True)

    # -- at many records -------------------------------------------------------------------

    @contextmanager
    def throw(self, random: Random, number: int) -> Iterator[Sequence[Damage]]:
        """Damage rows, each record at most once, in one commit of another writer."""
        ends = {int(partition): end for partition, end in self._ends.items()}
        pools = Pools(self._source, ends, random)
        rows: dict[Place, list[Row]] = {}
        for row in self._kept.to_pylist():
            rows.setdefault((row["kafka_partition"], row["kafka_offset"]), []).append(row)
        any_row = next(iter(rows.values()))[0]
        damages = []
        for _ in range(number):
            kind, place = pools.draw({kind: pool for kind, (pool, _, _) in _KINDS.items()})
            _, finding, change = _KINDS[kind]
            foreign = {**any_row, "kafka_partition": place[0], "kafka_offset": place[1]}
            rows[place] = [new for row in rows.get(place, [foreign]) for new in change(row)]
            damages.append(Damage.at(kind, [place], finding))
        self._overwrite([row for own in rows.values() for row in own])
        yield damages
        self._restore()

    # -- alone -----------------------------------------------------------------------------

    def large(self, random: Random) -> Iterator[Throw]:
        """What a VACUUM of others removes, a file that was cut, rows deleted by a condition, an
        edited ledger."""
        for full in (False, True):
            yield partial(self._vacuumed, full=full)
        for version in range(self._version):
            yield partial(self._vacuumed_by_an_old_version, version)
        for _ in range(4):
            yield partial(self._cut, random.choice(self._files()))
        for partition, end in sorted(self._ends.items()):
            first = random.randrange(end // 2)
            last = first + random.randint(2, end // 2)
            yield partial(self._deleted, int(partition), first, last)
            yield partial(self._moved, "position moved back", int(partition), -(end // 3))
            yield partial(self._moved, "position moved forward", int(partition), end // 3)

    def last(self, random: Random) -> Iterator[Throw]:
        """VACUUM after others have rewritten the table, and a source that was made again."""
        del random
        for full in (False, True):
            yield partial(self._vacuumed, full=full)
        yield partial(self._source.made_again, self._broker, map(int, self._ends))

    @contextmanager
    def _vacuumed(self, *, full: bool) -> Iterator[Sequence[Damage]]:
        self._vacuum(full=full, dry_run=False)
        yield [Damage.harmless(f"VACUUM {'FULL' if full else 'LITE'} of others")]

    @contextmanager
    def _vacuumed_by_an_old_version(self, version: int) -> Iterator[Sequence[Damage]]:
        """Remove what another tool takes for unused that has not seen the newest commits."""
        removed = self._vacuum(version, full=True, dry_run=True)
        kept = {one: (self._root / one).read_bytes() for one in removed if one in self._files()}
        places = {one: self._of_file(one) for one in kept}
        for one in kept:
            (self._root / one).unlink()
        kind = "file removed by a VACUUM of an old version"
        yield [Damage.at(kind, of, "lost") for of in places.values()]
        for one, data in kept.items():
            (self._root / one).write_bytes(data)

    @contextmanager
    def _cut(self, file: str) -> Iterator[Sequence[Damage]]:
        path = self._root / file
        data, places = path.read_bytes(), self._of_file(file)
        path.write_bytes(data[: len(data) // 2])
        yield [Damage.at("file truncated", places, "lost")]
        path.write_bytes(data)

    @contextmanager
    def _deleted(self, partition: int, start: int, end: int) -> Iterator[Sequence[Damage]]:
        condition = (
            f"kafka_partition = {partition} AND kafka_offset >= {start} AND kafka_offset < {end}"
        )
        DeltaTable(self._root.as_uri()).delete(condition)
        gone = self._good(partition, start, end)
        yield [Damage.at("rows deleted by a condition", gone, "lost")]
        self._restore()

    @contextmanager
    def _moved(self, kind: str, partition: int, by: int) -> Iterator[Sequence[Damage]]:
        end = self._ends[str(partition)]
        if by > 0:
            self._source.plain(by, partition)
            self._source.look()
        low, high = sorted((end, end + by))
        records = self._source.records
        places = [one for one in records if one[0] == partition and low <= one[1] < high]
        document = self._document()
        kept = document.read_bytes()
        found = json.loads(kept)
        found["positions"]["truth-delta"][str(partition)] = end + by
        document.write_text(json.dumps(found))
        yield [Damage.moved(kind, partition, places if by > 0 else ())]
        document.write_bytes(kept)

    def _good(self, partition: int, start: int, end: int) -> list[Place]:
        return [
            one
            for one in self._source.records.keys() - self._source.bad
            if one[0] == partition and start <= one[1] < end
        ]

    # -- the table -------------------------------------------------------------------------

    def _vacuum(self, version: int | None = None, *, full: bool, dry_run: bool) -> list[str]:
        table = DeltaTable(self._root.as_uri(), version=version)
        removed: list[str] = table.vacuum(0, dry_run, enforce_retention_duration=False, full=full)
        return removed

    def _files(self) -> list[str]:
        """The table's files, with rows."""
        found = pa.table(DeltaTable(self._root.as_uri()).get_add_actions(flatten=True))
        return sorted(row["path"] for row in found.to_pylist() if row["num_records"])

    def _of_file(self, file: str) -> list[Place]:
        rows = pq.read_table(self._root / file, columns=["kafka_partition", "kafka_offset"])
        return [(row["kafka_partition"], row["kafka_offset"]) for row in rows.to_pylist()]

    def _rows(self) -> pa.Table:
        return DeltaTable(self._root.as_uri()).to_pyarrow_table()

    def _overwrite(self, rows: list[Row]) -> None:
        table = pa.Table.from_pylist(rows, self._kept.schema)
        write_deltalake(self._root.as_uri(), table, mode="overwrite")

    def _restore(self) -> None:
        write_deltalake(self._root.as_uri(), self._kept, mode="overwrite")

    def _positions(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = json.loads(self._document().read_bytes())["positions"]
        return found

    def _document(self) -> Path:
        version = DeltaTable(self._root.as_uri()).transaction_version("oncely/truth-delta")
        return self._root / "_oncely" / "ledger-truth-delta" / f"{version}.json"
