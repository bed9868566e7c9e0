"""Jobs and a source without servers, for tests of what tasks and the driver do."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.runtimes import jobs
from oncely.runtimes.jobs import Attempt, Found, Given, Send, Share, Stage, Task
from oncely.threads import StopSignal


@dataclass
class Message:
    """A record of partition 0, with its ``time`` in milliseconds; or the end of the partition."""

    at: int
    time: int = 0
    end: bool = False
    of: str = "t"

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError._PARTITION_EOF) if self.end else None

    def offset(self) -> int:
        return self.at

    def topic(self) -> str:
        return self.of

    def partition(self) -> int:
        return 0

    def timestamp(self) -> tuple[int, int]:
        return 1, self.time

    def key(self) -> None:
        return None

    leader_epoch = headers = key

    def __len__(self) -> int:
        return 1


@dataclass
class InlineJobs:
    """Runs the tasks of a job one after the other, in this thread.

    Attributes:
        sent: what a task gets and answers passes through pickle, as between processes.
    """

    sent: bool = False
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def enter(self, described: str) -> None:
        """Nothing to do."""

    def run(self, task: Task[Share, Given], shares: Sequence[Share]) -> list[Found[Given]]:
        """The answers of all tasks."""
        through = _pickled if self.sent else lambda one: one
        return [
            through(answer)
            for share in shares
            for answer in jobs.answers(through(task), through(share), Attempt(next(self.numbers)))
        ]

    def shuffled(
        self, send: Send[Share, Given], shares: Sequence[Share], stage: Stage[Given], buckets: int
    ) -> list[Found[Given]]:
        """Packets are sorted by bucket."""
        passed, packets = jobs.by_bucket(self.run(send, shares), buckets)
        return [*passed, *self.run(stage, packets)]

    def require(self) -> None:
        """Jobs can run."""

    def cancel(self) -> None:
        """Nothing runs."""

    def meaning(self, error: Exception) -> Exception:
        """The error itself."""
        return error

    def close(self) -> None:
        """Nothing to do."""


def _pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


@dataclass
class GivenRecords:
    """A source that has these tables, whatever it is asked for.

    Attributes:
        tables: records, or what makes them.
        fetched: the number of records that were read again for dead letters.
    """

    tables: Iterable[pa.Table] | Callable[[], Iterable[pa.Table]] = ()
    fetched: int = 0

    def read(
        self, ranges: Mapping[TopicPartition, OffsetRange], needs: frozenset[str]
    ) -> Iterator[pa.Table]:
        """The tables."""
        yield from self.tables() if callable(self.tables) else self.tables

    def fetch(self, partition: TopicPartition, offsets: Sequence[int]) -> Mapping[int, Any]:
        """Nothing is there any more."""
        self.fetched += len(offsets)
        return {}

    def close(self) -> None:
        """Nothing to do."""


def records(tp: TopicPartition, values: Sequence[bytes], first: int = 0) -> pa.Table:
    """Records of a partition, as a source gives them."""
    count = len(values)
    return pa.table(
        {
            "topic": pa.array([tp.topic] * count, pa.string()).dictionary_encode(),
            "partition": pa.array([tp.partition] * count, pa.int32()),
            "offset": pa.array(range(first, first + count), pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
    )


class HurriedStop(StopSignal):
    """Waits for nothing."""

    def wait(self, seconds: float) -> bool:
        return False
