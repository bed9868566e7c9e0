"""A task's ranges as chunks: fetched, decoded, transformed, and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from oncely.commit.run import OpenRun
from oncely.core.batch import Chunk
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import DataLost, Unavailable
from oncely.runtimes.batches.plan import Ranges
from oncely.runtimes.chunks import Bounds, Processing, dead_letters
from oncely.runtimes.row_transform import RowTransform
from oncely.sources.kafka import KafkaSource


@dataclass(frozen=True)
class Reading:
    """The conversion of ranges to chunks.

    Attributes:
        source: the topics.
        decoder: decodes the records.
        transform: transforms the decoded rows.
        needs: the columns of the records that decoder and sink read.
        bounds: the limits of a chunk.
        headers: the sink reads the records' headers.
    """

    source: KafkaSource
    decoder: Decoder
    transform: RowTransform
    needs: frozenset[str]
    bounds: Bounds = field(default_factory=Bounds)
    headers: bool = False

    @classmethod
    def of(cls, run: OpenRun[Any, RowTransform], bounds: Bounds = Bounds()) -> Reading:  # noqa: B008 - frozen
        """The reading of a run."""
        headers = "headers" in run.sink.needs
        return cls(run.source, run.decoder, run.transform, run.needs, bounds, headers)

    def processing(self, *, again: bool = False) -> Processing:
        """Makes chunks of records."""
        decode, letters = isolating(self.decoder, again=again), partial(dead_letters, self.source)
        return Processing(decode, self.transform, letters, self.headers)

    def chunks(self, ranges: Ranges, *, again: bool) -> Iterator[Chunk]:
        """The records of ranges. A normal end proves that all of them were read.

        Raises the errors of :func:`fetched`.
        """
        starts = {tp: range_.start for tp, range_ in ranges.items()}
        with closing(self.source):
            tables = fetched(self.source, ranges, self.needs)
            yield from self.processing(again=again).chunks(starts, tables, self.bounds)


def fetched(source: KafkaSource, ranges: Ranges, needs: frozenset[str]) -> Iterator[pa.Table]:
    """The records of ranges as tables, ascending in each partition.

    Raises:
        Unavailable: no answer; or records were deleted since the ranges were planned, which the
            run finds when it opens again.
        ConfigError: the broker refuses the client.
    """
    try:
        yield from source.read(ranges, needs)
    except DataLost as error:
        raise Unavailable(error.message) from None


def isolating(decoder: Decoder, *, again: bool) -> Callable[[pa.Table], Decoded]:
    """The decoder; in a task's second attempt it runs in a child process first.

    The first attempt may have died of a record that crashes the decoder.
    """
    return partial(isolate_crashes, decoder) if again else decoder.decode
