"""The pipelines of the first wave: what they are, what they read, what they were rejected for.

Shared by ``make.py``, which runs them with the first wave's code, and by the test that goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST, SECOND, THIRD = range(0, 24), range(24, 60), range(60, 84)
"""Records that the first run read, that the killed one was to read, and that the test adds."""

PARTITIONS = 2
NARROW, WIDE = "id INT NOT NULL, k INT, grp STRING", "id BIGINT NOT NULL, k INT, grp STRING"
_BIG = 1 << 40


def ident(i: int) -> int:
    """The id of record ``i``; one in ten is too large for the columns of the first wave."""
    return _BIG + i if i % 10 == 7 else i


def good(i: int) -> bool:
    """Whether record ``i`` is JSON at all."""
    return i % 10 != 3


def key(i: int) -> bytes:
    """The key of record ``i``."""
    return json.dumps({"k": i % 8}).encode()


def value(i: int) -> bytes:
    """Record ``i``."""
    row = {"id": ident(i), "k": i % 8, "grp": f"g{i % 3}"}
    return json.dumps(row).encode() if good(i) else b"no JSON"


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Attributes:
        name: its own, and that of its topics and tables.
        sink: the section of the pipeline file; ``{…}`` stands for what a restore knows.
        dies: where its second run was killed, in the words of ``oncely semantics``; or
            ``"opening"``: a takeover was killed when the epoch was given out and no position
            taken. Empty: it ended in order.
        infer: columns are inferred, so no record is too large.
        transform: a Spark transform, which makes it a batch commit.
        replays: dead letters were replayed with wider columns, after the first run.
        grows: a partition was added to the source before the takeover that was killed.
        compacts: files were compacted after the first run.
        forgets: the test deletes its positions from the ledger topic, so that the stamps of the
            group offsets are all that tells them.
    """

    name: str
    sink: Mapping[str, Any]
    dies: str = ""
    infer: bool = False
    transform: bool = False
    replays: bool = False
    grows: bool = False
    compacts: bool = False
    forgets: bool = False

    @property
    def topic(self) -> str:
        """Of the records."""
        return f"{self.name}-source"

    @property
    def partitions(self) -> int:
        """Of the source, at the end."""
        return PARTITIONS + self.grows

    def settings(self, known: Mapping[str, str], *, wide: bool) -> dict[str, Any]:
        """The pipeline file's content.

        Args:
            known: what the placeholders stand for.
            wide: with columns that take every id.
        """
        schema = "infer" if self.infer else WIDE if wide else NARROW
        sink = {
            key: one.format(**known) if isinstance(one, str) else one
            for key, one in self.sink.items()
        }
        made: dict[str, Any] = {
            "name": self.name,
            "delivery": "exactly_once",
            "source": {"brokers": known["brokers"], "topics": [self.topic]},
            "decode": {"format": "json", "schema": schema},
            "sink": {"max_rejects": "100%", **sink},
            "spark": {"master": "local[2,4]", "max_records_per_batch": 12},
        }
        if "keys" in sink:
            made["decode"]["key"] = {"format": "json", "schema": "k INT NOT NULL"}
        if self.transform:
            made["transform"] = {"spark": "tests.first_wave.transforms:shouted"}
        return made


_POSTGRES = {"kind": "sql", "url": "{postgres}"}
_SQLITE = {"kind": "sql", "url": "{sqlite}"}
_UPSERT = {"mode": "upsert", "keys": ["k"], "version": "id"}


def _topic(name: str) -> dict[str, Any]:
    return {
        "kind": "kafka",
        "topic": f"out-{name}",
        "key": "grp",
        "ledger_topic": f"ledger-{name}",
        "transaction_timeout": "10 seconds",
    }


def _files(name: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "files",
        "url": "{files}/" + name,
        "partition_by": ["grp"],
        "manifest_topic": f"{name}.manifest",
        "ledger_topic": f"ledger-{name}",
        "flush_interval": "0 seconds",
        "transaction_timeout": "10 seconds",
        **more,
    }


_POSITION, _RECORDS, _NAMING = "after the position", "after the records", "half the files named"

CASES = [
    Case(
        "wave1-append",
        {**_POSTGRES, "table": "appended", "keep_source": True},
        dies=_POSITION,
        replays=True,
    ),
    Case("wave1-upsert", {**_POSTGRES, "table": "upserted", **_UPSERT}, dies="opening"),
    Case("wave1-batch", {**_POSTGRES, "table": "staged"}, dies=_POSITION, transform=True),
    Case("wave1-sqlite", {**_SQLITE, "table": "appended", "keep_source": True}, dies=_POSITION),
    Case("wave1-sqlite-upsert", {**_SQLITE, "table": "upserted", **_UPSERT}),
    Case("wave1-topic", _topic("wave1-topic"), dies=_RECORDS, replays=True, forgets=True),
    Case("wave1-grown", _topic("wave1-grown"), dies="opening", grows=True),
    Case(
        "wave1-topic-batch",
        _topic("wave1-topic-batch"),
        dies=_POSITION,
        transform=True,
        forgets=True,
    ),
    Case("wave1-files", _files("wave1-files"), dies=_NAMING, infer=True, compacts=True),
    Case("wave1-parquet", _files("wave1-parquet", format="parquet"), replays=True),
]
