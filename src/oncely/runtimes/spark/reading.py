"""A task's Arrow batches as chunks: decoded, transformed, and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.commit.run import OpenRun
from oncely.core.batch import Chunk, RecordFetcher
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.runtimes.chunks import Bounds, Chunks
from oncely.runtimes.dead_letters import dead_letters
from oncely.runtimes.row_transform import RowTransform

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True)
class Reading:
    """The conversion of a task's records to chunks.

    Attributes:
        only_topic: the topic, if there is only one: its name is not sent with each record.
        headers: True if the sink needs the records' headers.
    """

    source: RecordFetcher
    decoder: Decoder
    transform: RowTransform
    starts: Mapping[TopicPartition, Position]
    only_topic: str | None
    bounds: Bounds = field(default_factory=Bounds)
    headers: bool = False

    @classmethod
    def of(
        cls,
        run: OpenRun[Any, RowTransform],
        ranges: Mapping[TopicPartition, OffsetRange],
        bounds: Bounds,
    ) -> Reading:
        """The reading of a run's ranges."""
        starts = {tp: range_.start for tp, range_ in ranges.items()}
        headers = "headers" in run.sink.needs
        return cls(run.source, run.decoder, run.transform, starts, run.only_topic, bounds, headers)

    def chunks(self, batches: Batches) -> Iterator[Chunk]:
        """The task's records, decoded and transformed."""
        decode, letters = isolating_decode(self.decoder), partial(dead_letters, self.source)
        chunks = Chunks(
            self.starts, decode, self.transform, letters, self.bounds, headers=self.headers
        )
        return chunks.cut(with_topic(batch, self.only_topic) for batch in batches)


def is_retry() -> bool:
    """True in a task that Spark repeats."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def isolating_decode(decoder: Decoder) -> Callable[[pa.Table], Decoded]:
    """The decoder; in a task's second attempt it runs in a child process first.

    The first attempt may have died of a record that crashes the decoder.
    """
    return partial(isolate_crashes, decoder) if is_retry() else decoder.decode


def with_topic(batch: pa.RecordBatch, only_topic: str | None) -> pa.Table:
    """The batch as a table with its topic, which is not sent if there is only one."""
    table = pa.Table.from_batches([batch])
    if only_topic is None:
        return table
    codes = pa.array(np.zeros(table.num_rows, dtype=np.int32))
    topic = pa.DictionaryArray.from_arrays(codes, pa.array([only_topic]))
    return table.append_column("topic", topic)
