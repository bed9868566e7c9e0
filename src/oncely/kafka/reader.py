"""The engine's reader of Kafka: exact offset ranges as Arrow tables, each proved to be read.

Partitions are assigned to the consumer manually: no group, no commits, no rebalances. A range is
complete when a record at or behind its last offset has arrived, or an end-of-partition event whose
own offset is at or behind the range's end. An event at a smaller offset proves nothing: a follower,
or a new leader, may lag behind the last stable offset that the range was planned with. The position
of librdkafka is no proof either.

With ``auto.offset.reset=error`` an offset that the log does not contain is an error instead of a
silent jump (KIP-320 for a leader epoch that does not fit). A consumer that has reported an error is
closed: librdkafka delivers nothing more to it.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from operator import methodcaller
from typing import Any, Literal, NamedTuple

import confluent_kafka as ck
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException

from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import DataLost, OncelyError, Unavailable
from oncely.kafka.client import SILENCE, ErrorState, classify_error, make, unanswered, unreadable
from oncely.kafka.inbox import PASSING, PollResult, inbox_of
from oncely.kafka.records import EVERY_COLUMN, KafkaRecord, each, table_of
from oncely.threads import tries

_OWN: Mapping[str, object] = {
    "group.id": "oncely-reads-ranges",  # required by librdkafka, not used
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.queue.backoff.ms": 5,
    "queued.max.messages.kbytes": 16_384,  # of all partitions together, and a response beyond it
}
_SPARSE: Mapping[str, object] = {
    # Fetch little ahead: single records arrive ten times sooner than with the default of 1 MiB, and
    # long runs no later. A larger record is returned all the same (KIP-74).
    "max.partition.fetch.bytes": 65_536,
    "queued.max.messages.kbytes": 8192,
}
_DEFAULTS: Mapping[str, object] = {
    "fetch.max.bytes": 16 << 20,  # unless a record is larger
    # The wait for the end of a partition behind a transaction's marker or a compacted record.
    "fetch.wait.max.ms": 10,
}
_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_MANY = 10_000  # messages that are taken at once
_TAKEN = 16 << 20  # their bytes in memory
_NEAR = 250  # offsets: reading over so many records is faster than a seek
ELECTION = 120.0
""":data:`oncely.kafka.client.SILENCE` where a process that serves nobody may wait for a
leader's election."""

Lost = Literal["refuse", "skip"]
"""What a reader does about records below the log's start: raise, or begin at the log's start."""
_Refused = Literal["refuse", "skip", "first", "tell"]
"""Also: a position beyond the log's end is an end, or refused positions are returned."""


class Piece(NamedTuple):
    """Consecutive records of a partition.

    Attributes:
        partition: the topic-partition.
        records: the records, ascending; see :func:`oncely.kafka.records.table_of`. Empty if
            the rest of a range has none.
        next: all offsets of the range below it were read; the end of the range, if it is complete.
        leader_epoch: that of the last record; -1 if it is unknown.
    """

    partition: TopicPartition
    records: pa.Table
    next: Position
    leader_epoch: int


class _Part(NamedTuple):
    """A partition's part of a table: the number of its records, and as in :class:`Piece`."""

    tp: TopicPartition
    rows: int
    next: Position
    leader_epoch: int


class RecordReader:
    """Reads committed records over one connection. Not thread-safe; no use of it crosses a fork.

    Of all partitions together 16 MiB are fetched ahead, beside one response of each broker of
    16 MiB or a larger record, and at most 10,000 records or about 16 MiB are returned at once.

    Args:
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties.
        committed: leave out records of aborted transactions, and end at the last stable offset.
        sparse: fetch little ahead, for single records.
    """

    def __init__(
        self,
        brokers: str,
        kafka: Mapping[str, object],
        *,
        committed: bool = True,
        sparse: bool = False,
    ) -> None:
        self._brokers, self._kafka = brokers, kafka
        level = "read_committed" if committed else "read_uncommitted"
        self._own = {**_OWN, **(_SPARSE if sparse else {}), "isolation.level": level}
        self._error_state = ErrorState(brokers)
        self._inbox: Any = None

    def check(self) -> None:
        """Refuse properties that librdkafka does not accept; no answer is waited for.

        Raises:
            ConfigError: the error names the property.
        """
        self._opened()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()

    def read(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        needs: frozenset[str] = EVERY_COLUMN,
        *,
        epochs: Mapping[TopicPartition, int] | None = None,
        lost: Lost = "refuse",
        silence: float = ELECTION,
    ) -> Generator[Piece]:
        """The records of ranges, of all partitions together; the pieces of a partition ascend. A
        normal end of the iteration proves that every range was read to its end.

        Args:
            ranges: they end at or below the last stable offset.
            needs: names of :data:`oncely.kafka.records.RECORDS`.
            epochs: the leader epoch of the record before each range, for the broker to compare.
            lost: what is done about records that were deleted.
            silence: seconds.

        Raises:
            ConfigError: the broker refuses the client.
            DataLost: records of a range were deleted, or the log was cut.
            Unavailable: no record and no end of a partition for ``silence`` seconds.
        """
        with closing(self._arriving(ranges, needs, silence, lost, epochs)) as arriving:
            for records, parts in arriving:
                row = 0
                for tp, rows, position, epoch in parts:
                    if rows or position == ranges[tp].end:
                        yield Piece(tp, records.slice(row, rows), position, epoch)
                    row += rows

    def tables(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        needs: frozenset[str] = EVERY_COLUMN,
        *,
        lost: Lost = "refuse",
        silence: float = ELECTION,
    ) -> Generator[pa.Table]:
        """Like :meth:`read`, but what has arrived of all partitions is one table, which ascends in
        each: many small ranges cost as much as one of their size."""
        with closing(self._arriving(ranges, needs, silence, lost, None)) as arriving:
            yield from (records for records, _ in arriving if records.num_rows)

    def _arriving(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        needs: frozenset[str],
        silence: float,
        lost: Lost,
        epochs: Mapping[TopicPartition, int] | None,
    ) -> Generator[tuple[pa.Table, list[_Part]]]:
        """Tables of what has arrived, and their parts in order."""
        at = {tp: one.start for tp, one in ranges.items() if not one.is_empty}
        with closing(self._polls(at, needs, "read ranges", silence, lost, epochs)) as polls:
            for polled in polls:
                found = {
                    tp: _below(ranges[tp].end, polled.messages.pop(tp, []))
                    for tp in sorted(polled.messages.keys() | polled.ends.keys())
                }
                records = table_of(found.items(), needs)
                parts = [
                    _Part(tp, len(own), min(at[tp], ranges[tp].end), _epoch(own))
                    for tp, own in found.items()
                ]
                found.clear()  # the table is a copy
                self._leave(at, [one.tp for one in parts if one.next == ranges[one.tp].end])
                yield records, parts

    def at(
        self, tp: TopicPartition, offsets: Sequence[int], silence: float = SILENCE
    ) -> dict[int, KafkaRecord]:
        """The records at single offsets; absent if the topic does not have them now.

        Raises:
            ConfigError: the broker refuses the client.
            Unavailable: no answer for ``silence`` seconds.
        """
        if not offsets:
            return {}
        low, end = self._bounds(tp, silence)
        found: dict[int, KafkaRecord] = {}
        for run in _runs(sorted({one for one in offsets if low <= one < end})):
            wanted, range_ = pa.array(run), OffsetRange(run[0], run[-1] + 1)
            for records in self.tables({tp: range_}, lost="skip", silence=silence):
                asked = records.filter(pc.is_in(records["offset"], wanted))
                found |= {offset: record for _, offset, record in each(asked)}
        return found

    def first(
        self,
        starts: Mapping[TopicPartition, Position],
        needs: frozenset[str],
        silence: float = SILENCE,
    ) -> dict[TopicPartition, pa.Table | None]:
        """The first record at or after each offset, a table of one row; None at the end.

        Raises the errors of :meth:`at`.
        """
        found: dict[TopicPartition, pa.Table | None] = dict.fromkeys(starts)
        at = dict(starts)
        with closing(self._polls(at, needs, "read first records", silence, "first")) as polls:
            for polled in polls:
                for tp, messages in polled.messages.items():
                    found[tp] = table_of([(tp, messages[:1])], needs)
                self._leave(at, polled.messages.keys() | polled.ends.keys())
        return found

    def follow(
        self, starts: Mapping[TopicPartition, Position], needs: frozenset[str] = EVERY_COLUMN
    ) -> Generator[pa.Table]:
        """The records of all partitions from these offsets on, as they are committed; endless.

        Raises:
            ConfigError: the broker refuses the client.
        """
        with closing(self._polls(dict(starts), needs, "follow", math.inf, "skip")) as polls:
            for polled in polls:
                if polled.messages:
                    yield table_of(polled.messages.items(), needs)

    def refused(
        self, positions: Mapping[TopicPartition, tuple[Position, int]], silence: float
    ) -> dict[TopicPartition, str]:
        """The partitions whose log does not continue at a position, and the broker's message.

        Args:
            positions: an offset and the leader epoch of the record before it (KIP-320).
            silence: seconds.

        Raises the errors of :meth:`at`.
        """
        found: dict[TopicPartition, str] = {}
        at = {tp: position for tp, (position, _) in positions.items()}
        epochs = {tp: epoch for tp, (_, epoch) in positions.items()}
        doing = "look for a truncation of the log"
        with closing(self._polls(at, frozenset(), doing, silence, "tell", epochs)) as polls:
            for polled in polls:
                found |= {tp: str(error.str()) for tp, error in polled.failed.items()}
                self._leave(at, polled.messages.keys() | polled.ends.keys() | polled.failed.keys())
        return found

    # -- the consumer ----------------------------------------------------------------------

    def _polls(
        self,
        at: dict[TopicPartition, Position],
        needs: frozenset[str],
        doing: str,
        silence: float,
        refused: _Refused,
        epochs: Mapping[TopicPartition, int] | None = None,
    ) -> Generator[PollResult]:
        """What has arrived of these partitions, until the caller has left all of them.

        Args:
            at: the next offset of each partition, kept up to date; see :meth:`_leave`.
        """
        if not at:
            return
        try:
            self._assign(at, needs, epochs or {})
            deadline = time.monotonic() + silence
            while at:
                polled = self._take(at)
                if polled.failed and refused != "tell":
                    self._move_on(polled, at, needs, refused, doing)
                if polled.messages or polled.ends or polled.failed:
                    yield polled
                    deadline = time.monotonic() + silence
                if self._error_state.final:
                    raise self._error_state.final
                if time.monotonic() > deadline:
                    raise unanswered(_waiting(doing, at), self._brokers, self._error_state.newest)
        except KafkaException as error:
            self.close()
            raise classify_error(error.args[0], doing, self._brokers) from error
        except OncelyError:
            self.close()
            raise
        finally:
            if self._inbox is not None:
                self._inbox.unassign()

    def _assign(
        self,
        at: Mapping[TopicPartition, Position],
        needs: frozenset[str],
        epochs: Mapping[TopicPartition, int],
    ) -> None:
        self._opened()
        self._inbox.assign(
            [ck.TopicPartition(*tp, one, "", epochs.get(tp, -1)) for tp, one in at.items()], needs
        )

    def _opened(self) -> Any:
        if self._inbox is None:
            given = {**_DEFAULTS, **self._kafka}
            consumer = make(ck.Consumer, self._brokers, given, self._error_state, **self._own)
            self._inbox = inbox_of(consumer, _MANY, _TAKEN)
        self._error_state.newest, self._error_state.final = "", None
        return self._inbox.consumer

    def _leave(
        self, at: dict[TopicPartition, Position], partitions: Collection[TopicPartition]
    ) -> None:
        """Fetch no more of some partitions."""
        left = [ck.TopicPartition(*tp) for tp in partitions if at.pop(tp, None) is not None]
        if left and at and self._inbox is not None:
            self._inbox.leave(left)

    def _take(self, at: dict[TopicPartition, Position]) -> PollResult:
        """Take what has arrived; what is below the next offset of a partition was taken before."""
        polled: PollResult = self._inbox.poll(_STEP)
        for error in polled.errors:
            raise KafkaException(error)
        found = {tp: _from(at[tp], own) for tp, own in polled.messages.items() if tp in at}
        polled.messages = {tp: own for tp, own in found.items() if own}
        polled.ends = {tp: end for tp, end in polled.ends.items() if tp in at}
        polled.failed = {tp: error for tp, error in polled.failed.items() if tp in at}
        for tp, offset in polled.unreadable.items():
            if tp in at and tp not in polled.messages and at[tp] >= offset:
                raise unreadable(tp, offset, self._kafka)
            if tp in at:  # librdkafka repeats the error; all below the offset was read
                polled.ends.setdefault(tp, offset)
        for tp, own in polled.messages.items():
            at[tp] = own[-1].offset() + 1
        for tp, end in polled.ends.items():
            at[tp] = max(at[tp], end)
        return polled

    def _move_on(
        self,
        polled: PollResult,
        at: dict[TopicPartition, Position],
        needs: frozenset[str],
        refused: _Refused,
        doing: str,
    ) -> None:
        """Begin at the log's start where records were deleted, by a new consumer.

        Raises:
            DataLost: records are lost, and that is to be refused; or the log was cut.
            Unavailable: the log has the offset.
        """
        self.close()
        for tp, error in polled.failed.items():
            low, end = self._bounds(tp, SILENCE)
            there = low <= at[tp] <= end
            if there and error.code() != KafkaError._LOG_TRUNCATION:
                raise Unavailable(f"{doing}: {self._brokers}: {tp} at {at[tp]}: {error.str()}")
            if at[tp] > end and refused == "first":
                polled.ends[tp] = at.pop(tp)
                continue
            if there or at[tp] > end or refused == "refuse":
                raise DataLost(
                    f"{doing}: {tp} has the offsets [{low}, {end}), and can't be read from"
                    f" {at[tp]} on: {error.str()}",
                    way_out="retention, a deletion of records or an unclean leader election has"
                    " removed records",
                )
            at[tp] = low
        if at:
            self._assign(at, needs, {})

    def _bounds(self, tp: TopicPartition, seconds: float) -> tuple[Position, Position]:
        """The first offset of a partition, and the end for readers of this isolation level."""
        doing, final = f"read the bounds of {tp}", None
        for _ in tries(seconds, 0):
            try:
                low, end = self._opened().get_watermark_offsets(
                    ck.TopicPartition(*tp), timeout=min(seconds, 2.0), cached=False
                )
                return low, end
            except KafkaException as failure:
                error = failure.args[0]
            self._inbox.consumer.poll(0)  # serves the callback of errors
            final = self._error_state.final
            if final is not None or error.code() not in PASSING:
                break
        self.close()
        if error.code() in PASSING:
            raise final or unanswered(doing, self._brokers, self._error_state.newest)
        raise classify_error(error, doing, self._brokers)


_offset = methodcaller("offset")


def _from(start: Position, messages: Sequence[Any]) -> Sequence[Any]:
    """The messages at and after an offset."""
    if messages[0].offset() >= start:
        return messages
    return messages[bisect.bisect_left(messages, start, key=_offset) :]


def _below(end: Position, messages: Sequence[Any]) -> Sequence[Any]:
    """The messages before an offset."""
    if not messages or messages[-1].offset() < end:
        return messages
    return messages[: bisect.bisect_left(messages, end, key=_offset)]


def _epoch(messages: Sequence[Any]) -> int:
    """The leader epoch of the last message; -1 if it is unknown."""
    epoch = messages[-1].leader_epoch() if messages else None
    return -1 if epoch is None else epoch


def _waiting(doing: str, at: Mapping[TopicPartition, Position]) -> str:
    """Name one of the partitions that have not arrived."""
    (tp, position), others = next(iter(at.items())), len(at) - 1
    return f"{doing}: {tp} from {position} on" + (f" and {others} others" if others else "")


def _runs(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Split ascending offsets where the distance to the next is large."""
    run: list[int] = []
    for offset in offsets:
        if run and offset - run[-1] > _NEAR:
            yield run
            run = []
        run.append(offset)
    if run:
        yield run
