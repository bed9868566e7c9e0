"""What tests of the pages share: pipelines with a ledger in SQLite, and topics without a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oncely.core.claim import Takeover
from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.errors import Unavailable
from oncely.kafka.records import KafkaRecord
from oncely.kafka.source import GroupMember, Watermarks
from oncely.pipeline import Pipeline
from oncely.web.model import Subject
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Place,
    Rec,
    chunk,
    commit_all,
    numbered,
    open_sink,
    sink_to,
)

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\u202e'
PASSWORD = "Geheim-7391-xyz"

FILE = """
name = "{name}"
[source]
brokers = "127.0.0.1:1"
topics = ["t"]
[source.kafka]
"security.protocol" = "SASL_PLAINTEXT"
"sasl.mechanism" = "PLAIN"
"sasl.username" = "ann"
"sasl.password" = "{password}"
[decode]
format = "json"
schema = "id BIGINT, name STRING"
[sink]
kind = "sql"
url = "{url}"
table = "rows"
keep_source = false
"""


@dataclass
class Topics:
    """The topics of a pipeline, without a broker."""

    ends: dict[TopicPartition, int] = field(default_factory=lambda: {T0: 130, T1: 40})
    down: bool = False
    mirrored_to: list[Mapping[TopicPartition, Position]] = field(default_factory=list)

    def identity(self) -> SourceIdentity:
        if self.down:
            raise Unavailable("the broker does not answer", way_out="start it")
        return SOURCE

    def watermarks(self) -> dict[TopicPartition, Watermarks]:
        self.identity()
        return {tp: Watermarks(0, end, end) for tp, end in self.ends.items()}

    def timestamps_at(self, at: Mapping[TopicPartition, Position]) -> dict[TopicPartition, int]:
        return dict.fromkeys(at, 1_700_000_000_000)

    def offsets_at(self, timestamp_ms: int) -> dict[TopicPartition, Position]:
        return dict.fromkeys(self.ends, 5)

    def members(self, group: str) -> list[GroupMember]:
        worker = GroupMember("oncely-work/shop/<b>", "10.0.0.7", (T0, T1))
        return [worker] if group == "oncely-shop" else []

    def resolve_start(self, start: str) -> dict[TopicPartition, Position]:
        return dict.fromkeys(self.ends, 0)

    def fetch_committed(self, tp: TopicPartition, offsets: Sequence[int]) -> dict[int, KafkaRecord]:
        return {}  # deleted by retention

    def mirror(self, group: str, positions: Mapping[TopicPartition, Position]) -> None:
        self.mirrored_to.append(positions)


def pipeline_file(folder: Path, name: str = "shop", url: str | None = None) -> Path:
    """A pipeline into SQLite."""
    file = folder / f"{name}.toml"
    url = f"sqlite:///{folder}/{name}.db" if url is None else url
    file.write_text(FILE.format(name=name, url=url, password=PASSWORD))
    return file


def subject(file: Path, topics: Topics | None = None) -> Subject:
    """The pipeline of a file, over topics of this process."""
    pipeline = Pipeline.from_file(file)
    pipeline.__dict__["source"] = Topics() if topics is None else topics  # a cached property
    return Subject(pipeline.settings.name, file, pipeline)


def filled(folder: Path, name: str = "shop") -> Path:
    """A pipeline with three epochs: dead letters, a takeover, a reset, and 30 offsets to read.

    Offsets of t-0: epoch 1 has committed 0 to 60, with two dead letters; epoch 2 60 to 100; the
    reset of epoch 3 goes back to 80, and epoch 4 has committed 80 to 100 again.
    """
    file = pipeline_file(folder, name)
    sink = sink_to(Place(f"sqlite:///{folder}/{name}.db"), pipeline=name)
    begin = {T0: 0, T1: 0}
    fence = open_sink(sink, begin).fence
    sink = sink.bind()
    bad = [
        Rec(57, bad=HOSTILE, key=b"k-57", value=b'{"id": "<b>57</b>"', headers=[("h", b"\xff")]),
        Rec(58, bad="name: not a string", value=f"pw {PASSWORD} in a record".encode()),
        Rec(59, bad="name: not a string", value=b'{"id": 59, "name": "fixed"}'),
    ]
    for start in (0, 20, 40):
        end = min(start + 20, 57)
        records = [*numbered(start, end), *(bad if end == 57 else [])]
        commit_all(sink, chunk({T0: (start, records)}), fence)
    commit_all(sink, chunk({T1: (0, numbered(0, 40))}), fence)
    fence = open_sink(sink, begin).fence
    commit_all(sink, chunk({T0: (60, numbered(60, 100))}), fence)
    back = Takeover(SOURCE, lambda: begin, begin, reset=lambda now: {**now, T0: 80})
    sink.open(back)
    fence = open_sink(sink, begin).fence
    commit_all(sink, chunk({T0: (80, numbered(80, 100))}), fence)
    return file
