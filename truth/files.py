"""Damage of files and of their manifest, by the file system and a plain producer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer

from oncely import Pipeline
from oncely.audit import Report, audit
from oncely.audit.report import FindingKind
from oncely.config import parse
from oncely.errors import check
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from truth.damage import Damage, Place, Throw
from truth.source import SCHEMA, Source
from truth.topics import kept, moved, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EVERY = 1_000_000
_MANIFEST, _LEDGER = "truth-files.manifest", "truth-files.ledger"
_KINDS: dict[str, tuple[FindingKind, ...]] = {
    "file deleted": ("lost", "altered"),
    "file truncated": ("lost", "altered"),
    "byte changed": ("lost", "altered"),
    "values of a file altered": ("lost", "altered"),
    "entry of the manifest dropped": ("lost", "altered"),
    "file named twice": ("duplicated",),
    "bytes changed, rows the same": (),
}


class FilesWorld:
    """Parquet files in directories by day, filled by a pipeline on Spark in several batches.

    Args:
        broker: the cluster of source and manifest.
        root: an empty folder.
        spark: a session.
        records: the number of records.
        random: the source of chance.
    """

    name = "files"

    def __init__(
        self, broker: Broker, root: Path, spark: SparkSession, records: int, random: Random
    ) -> None:
        self._root, self._broker = root, broker
        broker.create_topic("truth-files", 4)
        self._source = Source(broker.bootstrap, "truth-files", 4, random)
        self.pipeline = Pipeline(parse(self._settings()))
        for _ in range(3):
            self._source.publish(records // 3)
            check(bool(self.pipeline.run("latest", spark=spark)), "the pipeline was stopped")
        self._entries = {
            one.key().decode(): one.value()
            for one in messages(broker.bootstrap, _MANIFEST)
            if not one.key().startswith(b"[")
        }
        self._bytes = {path: (root / path).read_bytes() for path in self._entries}
        self._places = self._by_file()
        self._ledger = kept(broker.bootstrap, _LEDGER)
        self._ends = {
            one.parts[3]: one.entry["position"]
            for one in self._ledger
            if one.parts[0] == "position"
        }

    def _settings(self, ledger: str = _LEDGER) -> dict[str, Any]:
        return {
            "name": "truth-files",
            "delivery": "exactly_once",
            "source": {"brokers": self._source.brokers, "topics": [self._source.topic]},
            "decode": {"format": "json", "schema": SCHEMA},
            "sink": {
                "kind": "files",
                "format": "parquet",
                "url": self._root.as_uri(),
                "partition_by": ["date(at)"],
                "manifest_topic": _MANIFEST,
                "ledger_topic": ledger,
                "max_rejects": "50%",
            },
            "spark": {"master": "local[2,4]"},
        }

    def audit(self) -> Report:
        """Audit the files, and read each of them."""
        return audit(self.pipeline, limit=_EVERY, download=True)

    def large(self, random: Random) -> Iterator[Throw]:
        """A position that was moved forward, and each kind of damage at a file of its own."""
        for number, end in sorted(self._ends.items()):
            yield partial(self._moved, number, random.randint(1, end // 2))
        for kind in _KINDS:
            yield partial(self._thrown, [(kind, random.choice(sorted(self._entries)))])

    def last(self, random: Random) -> Iterator[Throw]:
        """A source that was made again."""
        del random
        yield partial(self._source.made_again, self._broker, self._ends)

    @contextmanager
    def _moved(self, partition: int, by: int) -> Iterator[Sequence[Damage]]:
        """Audit with a copy of the ledger topic in which a position is beyond its range."""
        end, own, brokers = self._ends[partition], self.pipeline, self._source.brokers
        self._source.plain(by, partition)
        self._source.look()
        places = [p for p in self._source.records if p[0] == partition and end <= p[1] < end + by]
        copy = f"{_LEDGER}-{partition}"
        self._broker.create_topic(copy, 16)
        write(brokers, copy, moved(self._ledger, "truth-files", partition, by))
        self.pipeline = Pipeline(parse(self._settings(copy)))
        yield [Damage.at("position moved forward", places, "lost", "altered")]
        self.pipeline = own

    @contextmanager
    def throw(self, random: Random, number: int) -> Iterator[Sequence[Damage]]:
        """Damage files, each at most once: up to a third of them."""
        paths = random.sample(sorted(self._entries), min(number, len(self._entries) // 3))
        with self._thrown([(random.choice(list(_KINDS)), path) for path in paths]) as damages:
            yield damages

    @contextmanager
    def _thrown(self, chosen: Sequence[tuple[str, str]]) -> Iterator[Sequence[Damage]]:
        for kind, path in chosen:
            self._damage(kind, path)
        yield [self._damaged(kind, path, alone=len(chosen) == 1) for kind, path in chosen]
        for _, path in chosen:
            (self._root / path).write_bytes(self._bytes[path])
            self._say(path, self._entries[path])
            self._say(_copy(path), None)
            (self._root / _copy(path)).unlink(missing_ok=True)

    def _damaged(self, kind: str, path: str, *, alone: bool) -> Damage:
        match kind:
            case "bytes changed, rows the same":
                text = f"{path}: its SHA-256 is another one than was published"
                return Damage.noted(kind, f"{text}; no record is affected" if alone else text)
            case "byte changed":
                return Damage.at(kind, self._differing(path), *_KINDS[kind])
        return Damage.at(kind, self._places[path], *_KINDS[kind])

    def _damage(self, kind: str, path: str) -> None:
        file, data = self._root / path, self._bytes[path]
        match kind:
            case "file deleted":
                file.unlink()
            case "file truncated":
                file.write_bytes(data[: len(data) // 2])
            case "byte changed":
                self._change_a_byte(path, lambda: bool(self._differing(path)))
            case "bytes changed, rows the same":
                self._change_a_byte(path, lambda: not self._differing(path))
            case "values of a file altered":
                rows = pq.read_table(file).to_pylist()
                altered = [{**row, "cents": 0} for row in rows]
                pq.write_table(pq.read_table(file).from_pylist(altered, pq.read_schema(file)), file)
            case "entry of the manifest dropped":
                self._say(path, None)
            case "file named twice":
                (self._root / _copy(path)).write_bytes(data)
                entry = json.loads(self._entries[path])
                self._say(_copy(path), json.dumps({**entry, "path": _copy(path)}).encode())

    def _change_a_byte(self, path: str, is_wanted: Callable[[], bool]) -> None:
        """Change the first byte behind a third of a file that has the effect."""
        data = self._bytes[path]
        for at in range(len(data) // 3, len(data)):
            changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            (self._root / path).write_bytes(changed)
            if is_wanted():
                return
        raise AssertionError(f"{path}: no byte has the effect")

    def _differing(self, path: str) -> list[Place]:
        """The records of a file whose row is not there any more."""
        places, before = self._places[path], _rows(self._bytes[path])
        try:
            now = _rows((self._root / path).read_bytes())
        except Exception:
            return places
        return [place for place, row in zip(places, before, strict=True) if row not in now]

    def _say(self, path: str, value: bytes | None) -> None:
        producer = Producer({"bootstrap.servers": self._source.brokers})
        producer.produce(_MANIFEST, value, path.encode(), partition=0)
        check(producer.flush(30) == 0, "the broker does not answer")

    def _by_file(self) -> dict[str, list[Place]]:
        """The records of each file, by their ids."""
        places = {
            json.loads(value)["id"]: place
            for place, value in self._source.records.items()
            if place not in self._source.bad
        }
        found: dict[str, list[Place]] = defaultdict(list)
        for path in self._entries:
            for id_ in pq.read_table(self._root / path).column("id").to_pylist():
                found[path].append(places[id_])
        return found


def _rows(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(pa.BufferReader(data)).to_pylist()
    return found


def _copy(path: str) -> str:
    return path.replace(".parquet", "-copy.parquet")
