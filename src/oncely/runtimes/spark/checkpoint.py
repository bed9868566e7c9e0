"""A checkpoint of a foreign query, on any file system that Spark reaches.

The formats of its files are Spark's own: ``OffsetSeqLog`` for ``offsets/N`` and
``KafkaSourceInitialOffsetWriter`` for ``sources/0/0``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import InvariantViolation

_VERSION = "v1"
_NOTHING_YET = "-"


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
        return parse_offset_log(self._read(f"offsets/{batch_id}"))

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


def format_offsets(positions: Mapping[TopicPartition, Position]) -> str:
    """Spark's JSON for offsets: ``{"topic": {"0": 23}}``."""
    nested: dict[str, dict[str, int]] = {}
    for tp in sorted(positions):
        nested.setdefault(tp.topic, {})[str(tp.partition)] = positions[tp]
    return json.dumps(nested)


def parse_offset_log(text: str) -> list[dict[TopicPartition, Position] | None]:
    """Parse a file of the checkpoint's ``offsets`` folder: the ends of a micro-batch.

    Returns:
        For each source of the query, in order, the end of each topic-partition; an empty dict for a
            source without data; None for one that is not Kafka, and in a file of another version.
    """
    version, metadata, *sources = text.rstrip("\n").split("\n")
    known = version == _VERSION and metadata.startswith("{")
    return [_offsets(line) if known else None for line in sources]


def parse_initial_offsets(text: str) -> dict[TopicPartition, Position]:
    """Parse the checkpoint's ``sources/0/0``: the start of the query's first micro-batch.

    Spark puts a zero byte before the version, for readers of Spark 2.1 (SPARK-19517).

    Raises:
        InvariantViolation: the text is not such a file.
    """
    version, _, line = text.removeprefix("\0").partition("\n")
    found = _offsets(line) if version == _VERSION else None
    if found is None:
        raise InvariantViolation(f"not a file of initial offsets: {text[:200]!r}")
    return found


def _offsets(line: str) -> dict[TopicPartition, Position] | None:
    """``{"topic": {"0": 23}}`` as positions; None if the text is not an offset of Kafka."""
    if line == _NOTHING_YET:
        return {}
    try:
        return {
            TopicPartition(topic, int(partition)): _natural(offset)
            for topic, partitions in json.loads(line).items()
            for partition, offset in partitions.items()
        }
    except (ValueError, TypeError, AttributeError):
        return None


def _natural(offset: object) -> Position:
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(offset)
    return offset
