"""Records as chunks: decoded, transformed, and each committed by one transaction.

A chunk claims only what was READ: its range ends after the last record that was read, never at the
planned end. Audits compare chunks of records that are read again with the destination; repairs,
backfills and replays of dead letters write them.

Each column of the records costs time, so key, headers and timestamp are read only if the decoder
or the sink needs them. For the few records that are rejected they are read from Kafka again, by
offset, to make their dead letters.

A chunk is committed in a thread while the next one is read and decoded (:class:`PipelinedCommit`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import ByKey, Delivery, Outcome, commit
from oncely.commit.run import CommitContext
from oncely.core.batch import Chunk, IntArray, Reject, Rejection
from oncely.core.claim import Budget, Fence
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes, isolate_errors
from oncely.errors import DataLost, Unavailable, check
from oncely.kafka.records import RECORDS, KafkaRecord
from oncely.kafka.source import KafkaSource
from oncely.kinds.base import CommitsChunks, Sink
from oncely.phases import phase, timed
from oncely.runtimes.row_transform import RowTransform

T = TypeVar("T")


@dataclass(frozen=True)
class ChunkBounds:
    """The limits of a chunk, of which the first one applies."""

    records: int = 100_000
    bytes: int = 32 << 20
    seconds: float = 5.0


Origin = tuple[TopicPartition, int]
Ranges = Mapping[TopicPartition, OffsetRange]
Letters = Callable[[pa.Table, Sequence[Origin], Sequence[Rejection]], list[Reject]]
"""Creates dead letters: (the rejected records' columns, their origins, the reasons)."""


_ALL_AT_ONCE = ChunkBounds(records=1 << 40, bytes=1 << 60, seconds=1e9)


def _no_letters(*_: Any) -> list[Reject]:
    return []


@dataclass(frozen=True)
class Processing:
    """Decodes and transforms records, and splits them into chunks. Writes nothing.

    Attributes:
        decode: decodes records to rows, tombstones and rejections.
        transform: transforms rows.
        letters: creates dead letters of rejected records; none by default.
        headers: include the records' headers.
    """

    decode: Callable[[pa.Table], Decoded]
    transform: RowTransform
    letters: Letters = _no_letters
    headers: bool = False

    def chunks(
        self,
        starts: Mapping[TopicPartition, Position],
        tables: Iterable[pa.Table],
        bounds: ChunkBounds = _ALL_AT_ONCE,
    ) -> Iterator[Chunk]:
        """Yield a chunk whenever one is full, and the rest at the end of the input.

        Args:
            starts: the partitions of the records, and offsets that are not above theirs.
            tables: records of the form of :data:`~oncely.kafka.records.RECORDS`, ascending
                in each partition.
            bounds: the limits of a chunk; by default all records are one.
        """
        claimed = dict(starts)
        parts: list[_Part] = []
        began = 0.0
        for records in timed("read", tables):
            for piece in _slices(records, bounds):
                began = began if parts else time.monotonic()
                parts.append(self._part(piece))
                if _full(parts, began, bounds):
                    yield self._chunk(parts, claimed)
                    parts = []
        if parts:
            yield self._chunk(parts, claimed)

    def chunk(self, records: pa.Table) -> Chunk:
        """Records as one chunk; at least one record."""
        starts = dict.fromkeys(partitions_of(records)[0], 0)
        (chunk,) = self.chunks(starts, [records])
        return chunk

    @phase("decode")
    def _part(self, records: pa.Table) -> _Part:
        decoded = isolate_errors(self.decode, records)
        check(
            decoded.rows.num_rows
            + len(decoded.rejections)
            + len(decoded.tombstone_record)
            + decoded.dropped
            == records.num_rows,
            "the decoder gave not exactly one outcome for each record",
        )
        record = decoded.row_record.to_numpy(zero_copy_only=False)
        formed = self.transform.apply(decoded.rows, record)
        return _Part(
            records,
            formed.rows,
            formed.row_record,
            decoded.tombstones,
            decoded.tombstone_record.to_numpy(zero_copy_only=False),
            (*decoded.rejections, *formed.rejections),
            records.nbytes,
        )

    @phase("decode")
    def _chunk(self, parts: Sequence[_Part], claimed: dict[TopicPartition, Position]) -> Chunk:
        first = np.cumsum([0, *(part.records.num_rows for part in parts)])
        records = pa.concat_tables([part.records for part in parts])
        partitions, partition = partitions_of(records)
        offset = records.column("offset").to_numpy()
        removed = [part.deletes for part in parts if part.deletes is not None]
        rejections = tuple(
            Rejection(one.record + int(at), one.stage, one.reason)
            for part, at in zip(parts, first, strict=False)
            for one in part.rejections
        )

        def dead_letters(wanted: Sequence[Rejection]) -> list[Reject]:
            index = [one.record for one in wanted]
            origin = [(partitions[int(partition[i])], int(offset[i])) for i in index]
            return self.letters(records.take(pa.array(index, pa.int64())), origin, wanted)

        return Chunk(
            ranges=_claim(claimed, partitions, partition, offset),
            partitions=partitions,
            partition=partition,
            offset=offset,
            rows=pa.concat_tables([part.rows for part in parts], promote_options="default"),
            row_record=_shifted([part.row_record for part in parts], first),
            deletes=pa.concat_tables(removed) if removed else None,
            delete_record=_shifted([part.delete_record for part in parts], first),
            rejections=rejections,
            dead_letters=dead_letters,
            headers=records.column("headers") if self.headers else None,
            timestamps=records.column("timestamp") if "timestamp" in records.column_names else None,
        )


@dataclass(frozen=True)
class _Part:
    """One decoded and transformed piece of the input; record indices count from its own start."""

    records: pa.Table
    rows: pa.Table
    row_record: IntArray
    deletes: pa.Table | None
    delete_record: IntArray
    rejections: tuple[Rejection, ...]
    bytes: int


def _slices(records: pa.Table, bounds: ChunkBounds) -> Iterator[pa.Table]:
    """Pieces small enough that no chunk exceeds its limits by much."""
    if not records.num_rows:
        return
    fraction = max(records.num_rows / bounds.records, records.nbytes / bounds.bytes)
    step = max(1, int(records.num_rows / max(1.0, fraction)))
    for at in range(0, records.num_rows, step):
        yield records.slice(at, step)


def _full(parts: Sequence[_Part], began: float, bounds: ChunkBounds) -> bool:
    return (
        sum(part.records.num_rows for part in parts) >= bounds.records
        or sum(part.bytes for part in parts) >= bounds.bytes
        or time.monotonic() - began >= bounds.seconds
    )


def _claim(
    claimed: dict[TopicPartition, Position],
    partitions: tuple[TopicPartition, ...],
    partition: IntArray,
    offset: IntArray,
) -> dict[TopicPartition, OffsetRange]:
    """Ranges from the end of the preceding chunk to the offset after the last record read."""
    ranges = {}
    for index, tp in enumerate(partitions):
        own = offset[partition == index]
        check(bool((np.diff(own) > 0).all()), f"{tp}: offsets do not ascend")
        check(tp in claimed, f"{tp} is not in this batch's plan")
        check(int(own[0]) >= claimed[tp], f"{tp}: offset {own[0]} was not requested")
        ranges[tp] = OffsetRange(claimed[tp], int(own[-1]) + 1)
        claimed[tp] = ranges[tp].end
    return ranges


def _shifted(indices: Sequence[IntArray], first: IntArray) -> IntArray:
    return np.concatenate(
        [one + at for one, at in zip(indices, first, strict=False)], dtype=np.int64
    )


def _only_topic(topics: pa.ChunkedArray) -> str | None:
    """The topic of all records, if their dictionary has only one."""
    if not pa.types.is_dictionary(topics.type):
        return None
    names = {name for chunk in topics.chunks for name in chunk.dictionary.to_pylist()}
    return names.pop() if len(names) == 1 else None


def partitions_of(records: pa.Table) -> tuple[tuple[TopicPartition, ...], IntArray]:
    """The topic-partitions of the records, sorted, and each record's index into them."""
    number = records.column("partition").to_numpy()
    only = _only_topic(records.column("topic"))
    if only is not None and number.min() == number.max():  # the common case, which saves a sort
        return (TopicPartition(only, int(number[0])),), np.zeros(len(number), dtype=np.int32)
    topics = records.column("topic").combine_chunks().dictionary_encode()
    if isinstance(topics, pa.ChunkedArray):
        topics = topics.combine_chunks()
    names = topics.dictionary.to_pylist()
    pair = topics.indices.to_numpy().astype(np.int64) << 32 | number.astype(np.int64)
    # Records of a partition come in long runs: only their beginnings are sorted.
    begins = np.flatnonzero(np.diff(pair, prepend=pair[0] - 1))
    codes, of_run = np.unique(pair[begins], return_inverse=True)
    inverse = np.repeat(of_run, np.diff(begins, append=len(pair)))
    found = [TopicPartition(names[int(c >> 32)], int(c & 0xFFFFFFFF)) for c in codes]
    order = sorted(range(len(found)), key=found.__getitem__)
    place = np.empty(len(found), dtype=np.int32)
    place[order] = np.arange(len(found), dtype=np.int32)
    return tuple(found[i] for i in order), place[inverse]


def records_of(found: Sequence[Reject]) -> pa.Table:
    """Rejects as source records."""
    rows = [
        {
            "topic": one.partition.topic,
            "partition": one.partition.partition,
            "offset": one.offset,
            "timestamp": None if one.timestamp_ms is None else one.timestamp_ms * 1000,
            "key": one.key,
            "value": one.value,
            "headers": [{"key": name, "value": value} for name, value in one.headers],
        }
        for one in found
    ]
    return pa.Table.from_pylist(rows, schema=RECORDS)


# -- dead letters --------------------------------------------------------------------------


def dead_letters(
    source: KafkaSource, records: pa.Table, origins: Sequence[Origin], why: Sequence[Rejection]
) -> list[Reject]:
    """A reject for each origin: the value from its columns, the rest from the broker."""
    wanted: dict[TopicPartition, list[int]] = {}
    for tp, offset in origins:
        wanted.setdefault(tp, []).append(offset)
    found = {tp: source.fetch(tp, sorted(offsets)) for tp, offsets in wanted.items()}
    values: list[Any] = records["value"].to_pylist()
    return [
        _reject(tp, offset, value, found[tp].get(offset), one)
        for (tp, offset), value, one in zip(origins, values, why, strict=True)
    ]


def _reject(
    tp: TopicPartition, offset: int, value: bytes | None, record: KafkaRecord | None, why: Rejection
) -> Reject:
    if record is None:  # deleted by retention in the meantime
        return Reject(tp, offset, None, None, value, (), why.stage, why.reason)
    kept = (record.timestamp_ms, record.key, value)
    return Reject(tp, offset, *kept, record.headers, why.stage, why.reason)


# -- the records of a range -----------------------------------------------------------------


@dataclass(frozen=True)
class RangeReader:
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
    bounds: ChunkBounds = field(default_factory=ChunkBounds)
    headers: bool = False

    @classmethod
    def of(
        cls,
        context: CommitContext[Sink],
        transform: RowTransform,
        bounds: ChunkBounds | None = None,
    ) -> RangeReader:
        """The reading of a run."""
        headers = "headers" in context.sink.needs
        return cls(
            context.source,
            context.decoder,
            transform,
            context.needs,
            bounds or ChunkBounds(),
            headers,
        )

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


# -- commits in a thread --------------------------------------------------------------------

_SWITCH = 0.0005  # seconds; Python's default is ten times as long


class PipelinedCommit:
    """Commits one chunk in a thread while the caller reads and decodes the next one.

    One at a time and in order: a chunk's commit begins when the preceding one has ended. So the
    ledger has the same states as without the thread, and the task does not wait for the database.
    The ranges of a chunk were read before it is handed over; the end of the input in the meantime
    adds nothing to them.

    The committing thread waits for the interpreter's lock after each answer of the store, hundreds
    of times a chunk, and each time for as long as the decoding one may keep it.

    Args:
        budget: the reject budget of all chunks together.
        overlap: False: a chunk is committed at once, in the caller's thread.
        patience: seconds for which a store may be unavailable in a commit, up to a minute; none if
            nobody waits for it any more.
    """

    def __init__(self, budget: Budget, *, overlap: bool, patience: float = 60.0) -> None:
        self._budget, self._patience = budget, min(patience, 60.0)
        self._records = self._rejects = 0
        self._thread = ThreadPoolExecutor(1, "oncely-commit") if overlap else None
        self._asking = ThreadPoolExecutor(1, "oncely-ask") if overlap else None
        self._running: Future[list[Outcome]] | None = None
        self._by_key: ByKey | None = None
        self._given_up = threading.Event()
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> Self:
        if self._thread is not None:
            sys.setswitchinterval(min(_SWITCH, self._interval))
        return self

    def __exit__(self, *_: object) -> None:
        """Also when the task is cancelled: the running commit ends before the task does."""
        self._give_up()
        for pool in filter(None, (self._thread, self._asking)):
            pool.shutdown(wait=True)
        sys.setswitchinterval(self._interval)

    @property
    def busy(self) -> bool:
        """True from the begin of a commit until :meth:`finish`."""
        return self._running is not None

    @property
    def ended(self) -> bool:
        """True if :meth:`finish` would not wait."""
        return self._running is None or self._running.done()

    def ask(self, question: Callable[[], T]) -> Callable[[], T]:
        """Ask a server while the caller goes on; returns a function that waits for the answer, and
        raises the question's error. Without a thread the server is asked when it is called."""
        return question if self._asking is None else self._asking.submit(question).result

    def begin(
        self,
        delivery: Delivery[CommitsChunks],
        fence: Fence,
        chunk: Chunk,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to commit; :meth:`finish` must have been called since the last commit began.

        Args:
            delivery: sink, ledger and order.
            fence: the run that writes.
            chunk: the chunk.
            before: called in the thread before the commit.
        """
        self._records += chunk.records
        limit = self._budget.left(self._records, self._rejects)

        self._given_up = threading.Event()
        chunk = chunk.until(self._given_up.wait)
        if chunk.keys is not None:
            self._by_key = ByKey(delivery, chunk, fence, limit, patience=self._backoff)  # type: ignore[arg-type]
        by_key = self._by_key

        def work() -> list[Outcome]:
            before()
            if by_key is not None:
                return by_key.run()
            return list(commit(delivery, chunk, fence, limit, self._backoff()))

        self.begin_work(work)

    def _backoff(self) -> Backoff:
        return Backoff(total=self._patience, wait=self._given_up.wait)

    def begin_work(self, work: Callable[[], list[Outcome]]) -> None:
        """Begin work of another kind in the place of a commit."""
        check(self._running is None, "two chunks of a task would be committed at once")
        if self._thread is not None:
            self._running = self._thread.submit(copy_context().run, work)
        else:
            self._running = Future()
            self._running.set_result(work())

    def pause(self, seconds: float) -> None:
        """Wait for the end of the running work, but not long."""
        if self._running is not None:
            wait([self._running], seconds)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the running work; False if it has not ended in time.

        Then threads that have divided it by key begin nothing more of it, and an isolation of rows
        ends, and so do calls and retries of handlers.
        """
        if self._running is not None:
            with suppress(Exception):  # finish raises it
                self._running.exception(seconds)
        if not self.ended:
            self._give_up()
        return self.ended

    def _give_up(self) -> None:
        self._given_up.set()
        if self._by_key is not None:
            self._by_key.give_up()

    def finish(self) -> list[Outcome]:
        """Wait for the running commit, if there is one, and return its outcomes.

        Raises:
            OncelyError: see :func:`oncely.commit.path.commit`.
        """
        if self._running is None:
            return []
        running, self._running, self._by_key = self._running, None, None
        outcomes = running.result()
        self._rejects += sum(one.counts.rejects for one in outcomes)
        return outcomes
