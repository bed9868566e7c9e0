"""The records that a handler gets: those of one partition, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.context import TRACE, Context, Header, Record, following, of_headers
from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.ranges import TopicPartition
from oncely.telemetry import MessageRange


class Batch:
    """Records of one partition, in order, for one call of a handler.

    Iterating gives a :class:`Record` for each row. A record that was filtered has none, and one
    that a transform has split has several.

    Attributes:
        topic, partition: where the records were read.
    """

    topic: str
    partition: int
    _chunk: Chunk
    _numbers: IntArray
    _names: Collection[str]
    _rejected: dict[int, Rejection]

    @cached_property
    def table(self) -> pa.Table:
        """The rows as an Arrow table, without tombstones."""
        return self._chunk.rows.filter(pa.array(np.isin(self._chunk.row_record, self._numbers)))

    @cached_property
    def records(self) -> Sequence[Record]:
        """The records, in order."""
        chunk, found = self._chunk, []
        for table, record, deleted in (
            (chunk.rows, chunk.row_record, False),
            (chunk.deletes, chunk.delete_record, True),
        ):
            mine = np.isin(record, self._numbers)
            if table is not None and mine.any():
                rows = table.filter(pa.array(mine)).to_pylist()
                found += [
                    self._record(int(number), row, deleted=deleted)
                    for number, row in zip(record[mine], rows, strict=True)
                ]
        return sorted(found, key=lambda one: one.number)

    def _record(self, number: int, row: Mapping[str, Any], *, deleted: bool) -> Record:
        pairs = self._headers(number)
        offset, values = int(self._chunk.offset[number]), of_headers(pairs, self._names)
        return Record(self.topic, self.partition, offset, row, pairs, deleted, number, values)

    def _headers(self, number: int) -> list[Header]:
        headers = None if self._chunk.headers is None else self._chunk.headers[number].as_py()
        return [(one["key"], one["value"]) for one in headers or ()]

    def __iter__(self) -> Iterator[Record]:
        """The records; while a loop is at one of them, its context is the current one."""
        return following(self.records, lambda record: record.context)

    @cached_property
    def context(self) -> Context:
        """The values that travel with all of the records: those that they have in common."""
        common: set[tuple[str, str]] | None = None
        for number in self._numbers.tolist():
            own = set(of_headers(self._headers(number), self._names).items())
            common = own if common is None else common & own
            if not common:
                break
        return dict(common or ())

    def __len__(self) -> int:
        return len(self.records)

    @property
    def offsets(self) -> tuple[int, int]:
        """The offsets of the first and the last record."""
        first, last = self._chunk.offset[self._numbers[[0, -1]]]
        return int(first), int(last)

    def reject(self, record: Record, reason: str) -> None:
        """Make a record a dead letter.

        The handler is called again for the batch without it, in a new transaction, which contains
        the dead letter.
        """
        if record.number not in self._numbers or record.offset != self._chunk.offset[record.number]:
            raise ValueError(f"offset {record.offset} is not a record of this batch")
        self._rejected.setdefault(record.number, Rejection(record.number, "handle", str(reason)))


class Portion(Batch):
    """A batch, as the sink that calls handlers has it."""

    def __init__(
        self,
        chunk: Chunk,
        partition: TopicPartition,
        numbers: IntArray,
        names: Collection[str] = TRACE,
    ) -> None:
        self.topic, self.partition = partition
        self._chunk, self._numbers, self._names = chunk, numbers, names
        self._rejected = {}

    @classmethod
    def of(
        cls, chunk: Chunk, without: Collection[int], names: Collection[str] = TRACE
    ) -> Iterator[Portion]:
        """A batch for each partition of a chunk that has records, without some of them.

        ``names``: of the headers that are the records' context.
        """
        numbers = np.union1d(chunk.row_record, chunk.delete_record)
        numbers = numbers[~np.isin(numbers, sorted(without))]
        for index, tp in enumerate(chunk.partitions):
            own = numbers[chunk.partition[numbers] == index]
            if len(own):
                yield cls(chunk, tp, own, names)

    def halves(self) -> tuple[Portion, Portion]:
        """The first records, and the rest."""
        tp, middle = TopicPartition(self.topic, self.partition), len(self._numbers) // 2
        parts = self._numbers[:middle], self._numbers[middle:]
        first, rest = (type(self)(self._chunk, tp, one, self._names) for one in parts)
        return first, rest

    def one_by_one(self) -> Iterator[Portion]:
        """A batch for each record."""
        tp = TopicPartition(self.topic, self.partition)
        for index in range(len(self._numbers)):
            yield type(self)(self._chunk, tp, self._numbers[index : index + 1], self._names)

    def messages(self) -> MessageRange:
        """The records as messages of a span, with the trace of the first one."""
        first, last = self.offsets
        trace = of_headers(self._headers(int(self._numbers[0])), TRACE)
        return MessageRange(self.topic, self.partition, first, last + 1, len(self._numbers), trace)

    @property
    def only(self) -> int | None:
        """The index of the record, if there is only one."""
        return int(self._numbers[0]) if len(self._numbers) == 1 else None

    @property
    def rejections(self) -> list[Rejection]:
        """The rejected records, in order."""
        return [self._rejected[number] for number in sorted(self._rejected)]

    def forget_rejections(self) -> None:
        """Before another call of the handler."""
        self._rejected.clear()
