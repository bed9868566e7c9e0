"""Is what a ``read_committed`` reader sees the right result: each record once, a key's in order?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from bench.kafka.workload import Job, key, outputs
from bench.workload import PARTITIONS, flight, record
from oncely.testing.readers import held_back

Records = Sequence[tuple[bytes | None, bytes | None]]
"""Keys and values of one partition, in its order."""


class _Flight(msgspec.Struct):
    id: int
    carrier: str
    flight: int
    time_hour: str
    dep_delay: float


_decode = msgspec.json.Decoder(_Flight).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Expected:
    """What a job's output must hold.

    Attributes:
        hashes: of each record's key and value, sorted.
        ids: of the records, in the order of ``hashes``.
        keys: the key of each, in the same order.
        job: how values are compared: as bytes, or as the flight that their JSON describes.
    """

    hashes: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    job: Job

    @classmethod
    def of(cls, job: Job, records: int) -> Expected:
        """The result of a job over records 0 to ``records``."""
        ids = outputs(job, records)
        hashes = _hashes(job, ((key(i), record(i)) for i in ids), len(ids))
        order = np.argsort(hashes)
        keys = np.fromiter((flight(i) for i in ids), np.int64, len(ids))
        return cls(hashes[order], np.asarray(ids, np.int64)[order], keys[order], job)

    def wrong(self, partitions: Mapping[int, Records]) -> str | None:
        """What is wrong with an output, or None."""
        counts = np.zeros(len(self.ids), np.int64)
        for number, records in partitions.items():
            try:
                hashes = _hashes(self.job, records, len(records))
            except msgspec.MsgspecError as error:
                return f"partition {number}: a value is no flight: {error}"
            at = np.searchsorted(self.hashes, hashes).clip(max=len(self.ids) - 1)
            foreign = np.flatnonzero(self.hashes[at] != hashes)
            if len(foreign):
                return f"{len(foreign)} records that nobody expects; one: {records[foreign[0]]}"
            if not _in_order(self.ids[at], self.keys[at]):
                return f"partition {number}: a key's records are not in order"
            counts += np.bincount(at, minlength=len(counts))
        missing, doubled = int((counts == 0).sum()), int((counts > 1).sum())
        return f"{missing} records are missing, {doubled} doubled" if missing or doubled else None


def _hashes(
    job: Job, records: Iterable[tuple[bytes | None, bytes | None]], n: int
) -> npt.NDArray[np.int64]:
    """Python's 64-bit hash of each record's key and value; JSON in one spelling for all."""
    if job == "bytes":
        return np.fromiter((hash(one) for one in records), np.int64, n)
    return np.fromiter((hash((k, _encode(_decode(v or b"null")))) for k, v in records), np.int64, n)


def _in_order(ids: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> bool:
    """Whether ids grow within each key; an id that comes twice is counted elsewhere."""
    by_key = np.argsort(keys, kind="stable")
    same = keys[by_key][1:] == keys[by_key][:-1]
    return not bool((ids[by_key][1:] < ids[by_key][:-1])[same].any())


def settle(brokers: str, topic: str, seconds: float = 30.0) -> None:
    """Wait until no transaction is open in a topic; give up after ``seconds``.

    A commit is answered when it is decided, and its markers are written a moment later (KIP-98).
    Whatever is open after that time hides records, which are then missing.
    """
    deadline = time.monotonic() + seconds
    while held_back(brokers, topic) and time.monotonic() < deadline:
        pass


def committed(brokers: str, topic: str) -> dict[int, Records]:
    """Everything in a topic that a ``read_committed`` reader sees, up to the last stable offset.

    Raises:
        KafkaException: a partition can't be read.
    """
    reader = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "bench-check",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.queue.backoff.ms": 5,
            "fetch.wait.max.ms": 10,  # the ends of the partitions are told at once
        }
    )
    found: dict[int, list[tuple[bytes | None, bytes | None]]] = {p: [] for p in range(PARTITIONS)}
    reader.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in found])
    left = set(found)
    try:
        while left:
            for message in reader.consume(50_000, timeout=0.2):
                error = message.error()
                if error is None:
                    found[message.partition()].append((message.key(), message.value()))
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise KafkaException(error)
    finally:
        reader.close()
    return dict(found)
