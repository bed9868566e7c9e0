"""What scenarios of the files sink share: a pipeline into files, and a reader of its own.

The reader uses nothing of Oncely: a plain ``read_committed`` consumer follows the manifest topic,
fastavro and pyarrow read the files, and the records are compared with the source topic.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastavro
import pyarrow.parquet as pq

from tests.scenarios.topic_world import TopicWorld
from tests.scenarios.world import assert_unbroken, produce, topic_content

SCHEMA = "id BIGINT, user STRING, ts TIMESTAMP, pad STRING"
USERS = 7
DAY = 86_400


@dataclass
class FilesWorld(TopicWorld):
    """A topic of events, a folder, the topics that name its files, and one pipeline name."""

    root: Path = field(default_factory=Path)
    s3: Mapping[str, str] | None = None
    infer: bool = False

    @property
    def manifest(self) -> str:
        """Where files are named."""
        return f"{self.name}.manifest"

    @property
    def rejects(self) -> str:
        """Where dead letters go."""
        return f"{self.name}.rejects"

    @property
    def url(self) -> str:  # type: ignore[override]
        """The root, as the pipeline file says."""
        return self.root.as_uri()

    @url.setter
    def url(self, _: str) -> None:
        """A world of tables has one; here it is the root's."""

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline file's content; keyword arguments add to its sections."""
        raw = super().settings(**sections)
        own = {**self.overrides.get("sink", {}), **sections.get("sink", {})}
        raw["sink"] = {
            "kind": "files",
            "url": self.url,
            "partition_by": ["user", "date(ts)", "hour(ts)"],
            "manifest_topic": self.manifest,
            "ledger_topic": self.ledger,
            "flush_interval": "0 seconds",
            **own,
        }
        raw["decode"] = {
            "format": "json",
            "schema": "infer" if self.infer else SCHEMA,
            **self.overrides.get("decode", {}),
            **sections.get("decode", {}),
        }
        spark = {k: v for k, v in raw["spark"].items() if k != "trigger"}
        return {**raw, "spark": spark}

    def publish(  # type: ignore[override]
        self, count: int, *, pad: int = 0, partitions: int = 4, first: int = 0, bad_every: int = 0
    ) -> None:
        """Events with ascending ids, of a few users, over two days."""
        produce(
            self.brokers,
            self.topic,
            (
                (i % partitions, None, b"{" if bad_every and i % bad_every == 0 else event(i, pad))
                for i in range(first, first + count)
            ),
        )

    def publish_values(
        self, values: Iterable[Mapping[str, Any] | bytes], partition: int = 0
    ) -> None:
        """Events as they are given, in one partition."""
        produce(
            self.brokers,
            self.topic,
            (
                (partition, None, one if isinstance(one, bytes) else json.dumps(one).encode())
                for one in values
            ),
        )

    def entries(self) -> dict[str, dict[str, Any]]:
        """What the manifest names now: path to entry."""
        found: dict[str, dict[str, Any]] = {}
        for message in self.records(self.manifest) if self.exists(self.manifest) else []:
            path = message.key().decode()
            if path.startswith("["):  # the topic's owner
                continue
            if message.value() is None:
                found.pop(path, None)
                continue
            entry = json.loads(message.value())
            for old in entry.get("replaces", []):
                found.pop(old, None)
            found[path] = entry
        return found

    def schemas(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The newest schema of each scope."""
        found = {}
        for message in self.records(f"{self.name}.schema"):
            kind, *scope = json.loads(message.key())
            assert kind == "schema"
            if message.value() is None:
                found.pop(tuple(scope), None)
                continue
            found[tuple(scope)] = json.loads(json.loads(message.value())["avro"])
        return found

    def stored(self) -> set[str]:
        """All files of rows below the root, named or not."""
        found = (str(one.relative_to(self.root)) for one in self.root.rglob("*") if one.is_file())
        return {path for path in found if not path.startswith(("_oncely/", "_READ_THE_"))}

    def content(self, path: str) -> bytes:
        """The bytes of a file."""
        return (self.root / path).read_bytes()

    def rows(self) -> list[dict[str, Any]]:
        """Every row of every named file, each file compared with what the manifest says of it."""
        found: list[dict[str, Any]] = []
        for path, entry in self.entries().items():
            data = self.content(path)
            assert hashlib.sha256(data).hexdigest() == entry["sha256"], path
            assert len(data) == entry["bytes"], path
            rows = read_file(data, entry["format"])
            assert len(rows) == entry["rows"], path
            found += rows
        return found


def event(i: int, pad: int = 0) -> bytes:
    """Event ``i``: its user and hour follow from its number."""
    return json.dumps(event_of(i, pad)).encode()


def event_of(i: int, pad: int = 0) -> dict[str, Any]:
    """The same, as a dict."""
    day, hour = 1 + i % 2, i // 2 % 3
    return {
        "id": i,
        "user": f"u{i % USERS}",
        "ts": f"2026-03-{day:02d}T{hour:02d}:00:{i % 60:02d}Z",
        "pad": "x" * pad,
    }


def read_file(data: bytes, form: str) -> list[dict[str, Any]]:
    """The rows of one file, by libraries that the pipeline does not write with."""
    if form == "avro":
        return list(fastavro.reader(io.BytesIO(data)))  # type: ignore[arg-type]
    return pq.read_table(io.BytesIO(data)).to_pylist()


def assert_exactly_once(world: FilesWorld) -> int:
    """Each record of the source is one row of a named file, or one dead letter; how many rows."""
    good: dict[int, tuple[int, int]] = {}
    bad: list[tuple[int, int]] = []
    for at, text in topic_content(world.brokers, world.topic).items():
        try:
            good[json.loads(text or b"")["id"]] = at
        except (ValueError, KeyError, TypeError):
            bad.append(at)
    letters = world.records(world.rejects) if world.exists(world.rejects) else []
    rejected = Counter(_origin(one) for one in letters)
    counts = Counter(row["id"] for row in world.rows())
    by_place = {at: i for i, at in good.items()}
    for at in rejected:  # a record whose content is refused, though it is JSON
        if at in by_place:
            counts[by_place[at]] += 1
    wrong = {
        "lost": sorted(good.keys() - counts.keys())[:5],
        "doubled": sorted(i for i, n in counts.items() if n > 1)[:5],
        "invented": sorted(counts.keys() - good.keys())[:5],
        "letters lost": sorted(set(bad) - rejected.keys())[:5],
        "letters doubled": sorted(at for at, n in rejected.items() if n > 1)[:5],
    }
    assert not any(wrong.values()), f"{len(good)} records: {wrong}"
    assert_ranges(world)
    assert_unbroken(world)
    return len(good) - sum(at in by_place for at in rejected)


def assert_ranges(world: FilesWorld) -> None:
    """What a file says of its ranges lies before the position, and no row is outside of them."""
    positions = world.positions()
    for path, entry in world.entries().items():
        for topic, partition, start, end in entry["ranges"]:
            assert topic == world.topic
            assert start < end <= positions[partition], (path, entry["ranges"], positions)


def _origin(message: Any) -> tuple[int, int]:
    headers = {name: value for name, value in message.headers() or ()}
    return int(headers["oncely.partition"]), int(headers["oncely.offset"])
