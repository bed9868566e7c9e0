"""What repairs and backfills have in common: records are read and processed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from oncely.core import events
from oncely.core.batch import Chunk, Reject, Rejection
from oncely.core.change import RewriteKind, Rewritten, Tell, silent
from oncely.core.expected import Span
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import DataLost, WrongInput
from oncely.pipeline.event_log import EventLog
from oncely.pipeline.guarantee import check_rewrite
from oncely.pipeline.rejects import decoding
from oncely.runtimes.chunks import Origin, Processing, records_of

if TYPE_CHECKING:
    from oncely.pipeline.expected import PipelineExpected
    from oncely.pipeline.parts import Parts

_AT_ONCE = 10_000  # offsets that are fetched by one call


S = TypeVar("S")


@dataclass(frozen=True)
class RepairContext(Generic[S]):
    """What repairs and backfills of a pipeline have in common.

    Attributes:
        pipeline: the pipeline.
        sink: its destination, checked.
        schema: the columns of the rows.
        positions: the partitions that have a position.
        lows: the first offset of each partition.
        ends: the end of each partition.
        compacted: the compacted topics.
        deletes: the tombstones of an upsert; None of another destination.
        lacks: the kinds of damage that can't be repaired there, with the reason.
        tell: is called after each transaction.
        execute: write; otherwise a dry run.
        progress: called with the number of offsets after every transaction.
    """

    pipeline: Parts
    sink: S
    schema: pa.Schema
    positions: Set[TopicPartition]
    lows: Mapping[TopicPartition, Position]
    ends: Mapping[TopicPartition, Position]
    compacted: frozenset[str]
    deletes: Deletes | None
    lacks: Mapping[str, str]
    tell: Tell
    execute: bool
    progress: Callable[[int], None]

    @property
    def late_delete(self) -> str | None:
        """The reason why a tombstone is not processed again."""
        return self.pipeline.destination.late_delete

    def fetch(self, tp: TopicPartition, offsets: Sequence[int]) -> dict[int, Reject]:
        """The committed records at these offsets, as dead letters without a reason."""
        found: dict[int, Reject] = {}
        for at in range(0, len(offsets), _AT_ONCE):
            read = self.pipeline.source.fetch_committed(tp, offsets[at : at + _AT_ONCE])
            for offset, one in read.items():
                kept = (one.timestamp_ms, one.key, one.value, one.headers)
                found[offset] = Reject(tp, offset, *kept, "", "")
        return found

    def chunk(self, tp: TopicPartition, records: Sequence[Reject]) -> Chunk:
        """The present outcome of records, in order of offset."""
        if not records:
            return Chunk.of_nothing({tp: OffsetRange(0, 0)})
        by_offset = {one.offset: one for one in records}

        def letters(_: Any, origins: Sequence[Origin], why: Sequence[Rejection]) -> list[Reject]:
            return [by_offset[o].because(one) for (_, o), one in zip(origins, why, strict=True)]

        decode = decoding(self.pipeline.decoder, self.late_delete)
        headers = "headers" in self.pipeline.destination.sink(self.schema).needs
        again = Processing(decode, self.pipeline.row_transform, letters, headers)
        return again.chunk(records_of(records))

    def standing(
        self, tp: TopicPartition, records: Sequence[Reject], end: Position
    ) -> Sequence[Reject]:
        """The records of an upsert whose keys are not deleted by later ones, up to an end."""
        if self.deletes is None or not records:
            return records
        gone = self.deletes.after(tp, self.chunk(tp, records), end)
        return [one for one in records if one.offset not in gone]


@dataclass
class Deletes:
    """The last tombstone of each key of an upsert. The topic is read once, and on from there.

    Attributes:
        expected: decodes and transforms records.
    """

    expected: PipelineExpected
    _read: dict[TopicPartition, Position] = field(default_factory=dict, init=False)
    _last: dict[TopicPartition, dict[int, Position]] = field(default_factory=dict, init=False)

    def after(self, tp: TopicPartition, chunk: Chunk, end: Position) -> set[int]:
        """The offsets of those records of a chunk that later ones delete, up to an end; the chunk
        is not before an earlier one of the partition."""
        own = self.expected.changes_of(chunk)
        last = self._last.setdefault(tp, {})
        start = self._read.setdefault(tp, int(chunk.offset.min()))
        if start < end:
            for one in self.expected.changes(Span(tp, OffsetRange(start, end))):
                dead = one.key[one.deleted].tolist(), one.offset[one.deleted].tolist()
                last.update(zip(*dead, strict=True))
            self._read[tp] = end
        stay: dict[int, bool] = {}
        for offset, key in zip(own.offset.tolist(), own.key.tolist(), strict=True):
            stay[offset] = stay.get(offset, False) or last.get(key, -1) < offset
        return {offset for offset, stays in stay.items() if not stays}


@contextmanager
def rewriting(
    pipeline: Parts,
    kind: RewriteKind,
    path: str | Path | None,
    *,
    execute: bool,
    progress: Callable[[int], None],
) -> Iterator[RepairContext[Any]]:
    """Check the pipeline, and begin; what is rewritten is appended to an event log."""
    lacks = check_rewrite(pipeline, kind)
    _same_source(pipeline)
    source, schema = pipeline.source, pipeline.row_schema()
    with ExitStack() as stack:
        sink = stack.enter_context(pipeline.destination.rewriting(schema, kind))
        tell: Tell = silent
        if path is not None and execute:
            log = EventLog(path, pipeline.settings.name, pipeline.secrets)
            tell = _telling(stack.enter_context(log))
        yield RepairContext(
            pipeline,
            sink,
            schema,
            sink.entries().keys(),
            source.earliest(),
            source.stable_end(),
            frozenset(source.compacted()),
            _deletes(pipeline, stack),
            lacks,
            tell,
            execute,
            progress,
        )


def _telling(listener: events.Listener) -> Tell:
    """Each transaction as an event."""

    def tell(
        kind: RewriteKind,
        ranges: Mapping[TopicPartition, Sequence[OffsetRange]],
        done: Rewritten,
    ) -> None:
        removed, made = (done.removed_rows, done.removed_rejects), done.counts
        listener(
            events.RecordsRewritten(kind, ranges, *removed, made.rows, made.rejects, made.filtered)
        )

    return tell


def _deletes(pipeline: Parts, stack: ExitStack) -> Deletes | None:
    expected = pipeline.expected
    if pipeline.destination.late_delete is None or expected is None:
        return None
    if not expected.replaces:
        return None  # a topic keeps the records before a tombstone; or a table accepts no row now
    return Deletes(stack.enter_context(closing(expected)))


def _same_source(pipeline: Parts) -> None:
    """Refuse to write records of another topic.

    Raises:
        SourceMismatch: the topic was deleted and recreated, or it is another cluster.
    """
    known, now, name = (
        pipeline.destination.look(),
        pipeline.source.identity(),
        pipeline.settings.name,
    )
    if known.cluster_id is None:
        raise WrongInput(
            f"pipeline {name!r} has never run: there is nothing to repair",
            way_out="run it, or check name and sink",
        )
    known.refuse_another_source(now, name)


def records_gone(tp: TopicPartition, gone: OffsetRange) -> DataLost:
    """The error for records that the topic no longer has."""
    return DataLost(
        f"{tp}: the topic no longer has offsets {gone}: their rows can't be made again",
        way_out=f"begin at offset {gone.end}",
    )
