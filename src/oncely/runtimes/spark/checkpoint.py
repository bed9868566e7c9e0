"""A checkpoint of a foreign query, on any file system that Spark reaches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import InvariantViolation
from oncely.runtimes.spark.options import parse_initial_offsets, parse_offset_log


class BatchRanges(NamedTuple):
    """The input of a micro-batch.

    Attributes:
        known: ranges of Kafka's topic-partitions.
        complete: False if there was input that these ranges do not describe: another kind of
            source, or a topic that two sources of the query read, which offsets cannot distinguish.
            Such a query is keyed by checkpoint and batch only.
    """

    known: Mapping[TopicPartition, OffsetRange]
    complete: bool


@dataclass(frozen=True)
class Checkpoint:
    """Reads a streaming query's checkpoint through Hadoop's file system API."""

    session: Any
    location: str

    def query_id(self) -> str:
        """The id of the checkpoint, constant for its lifetime.

        Raises:
            InvariantViolation: Spark has not written it, although a batch runs.
        """
        return str(json.loads(self._read("metadata"))["id"])

    def ranges(self, batch_id: int) -> BatchRanges:
        """The ranges of Kafka offsets that the micro-batch has read; empty ranges are kept."""
        ends = self._sources(batch_id)
        starts = self._sources(batch_id - 1) if batch_id > 0 else [{} for _ in ends]
        ranges: dict[TopicPartition, OffsetRange] = {}
        twice: set[str] = set()
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end is None:
                continue
            twice |= {tp.topic for tp in end} & {tp.topic for tp in ranges}
            before = start or {}
            first = self._initial(number) if end.keys() - before.keys() else {}
            for tp, at in end.items():
                ranges[tp] = OffsetRange(before.get(tp, first.get(tp, 0)), at)
        known = {tp: range_ for tp, range_ in ranges.items() if tp.topic not in twice}
        return BatchRanges(known, complete=not twice and None not in ends)

    def plan(self, batch_id: int) -> str:
        """A digest of the micro-batch's entry in the offset log.

        Spark repeats a batch according to the existing entry. An entry that was lost and written
        again has another time of planning, and so another digest.
        """
        return hashlib.sha256(self._read(f"offsets/{batch_id}").encode()).hexdigest()[:32]

    def _sources(self, batch_id: int) -> list[dict[TopicPartition, Position] | None]:
        """The ends of each source, None for a source that is not Kafka."""
        version, metadata, *sources = self._read(f"offsets/{batch_id}").splitlines()
        return [_kafka_offsets(f"{version}\n{metadata}\n{line}") for line in sources]

    def _initial(self, source: int) -> dict[TopicPartition, Position]:
        return parse_initial_offsets(self._read(f"sources/{source}/0"))

    def _read(self, name: str) -> str:
        jvm = self.session._jvm
        path = jvm.org.apache.hadoop.fs.Path(f"{self.location.rstrip('/')}/{name}")
        files = path.getFileSystem(self.session._jsc.hadoopConfiguration())
        if not files.exists(path):
            raise InvariantViolation(f"the checkpoint {self.location} has no {name}")
        stream = files.open(path)
        try:
            content = jvm.org.apache.commons.io.IOUtils.toByteArray(stream)
        finally:
            stream.close()
        return bytes(content).decode()


def _kafka_offsets(log: str) -> dict[TopicPartition, Position] | None:
    try:
        (offsets,) = parse_offset_log(log)
    except InvariantViolation:
        return None
    return offsets
