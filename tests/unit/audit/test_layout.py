"""Ranges by partition: the history is read once, for any number of partitions."""

from __future__ import annotations

from collections.abc import Iterator

from oncely.audit.evidence import Committed, Span
from oncely.audit.layout import parts
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, TopicPartition


class Read(list[Committed]):
    """A history that counts the entries that are read of it."""

    read = 0

    def __iter__(self) -> Iterator[Committed]:
        for one in super().__iter__():
            self.read += 1
            yield one


def test_the_history_is_read_once() -> None:
    whole = {TopicPartition("t", n): OffsetRange(0, 10) for n in range(100)}
    entry = Counts(10, 10, 0, 0)
    history = Read([Committed(Span(tp, one), "data", entry) for tp, one in whole.items()])
    divided = parts(history, whole)
    assert [(one.span.partition, one.whole) for one in divided] == [(tp, True) for tp in whole]
    assert history.read == len(history)
