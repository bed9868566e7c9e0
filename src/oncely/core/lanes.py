"""Virtual partitions: which thread has which records of a chunk. Pure: no I/O, no threads.

A partition is divided into as many lanes as its topic has threads. A key has one lane, and a lane
has one thread, so that the records of a key are worked on in their order, and never by two threads
at once. Records without a key go round the lanes. A lane is handed out in pieces, each of which is
one transaction; the next one after the piece before it has taken effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from zlib import crc32

import numpy as np

from oncely.core.batch import Chunk, IntArray
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import check

Parts = Mapping[TopicPartition, tuple[OffsetRange, ...]]


class KeyShards:
    """The lanes of a chunk.

    Args:
        chunk: the chunk, with the keys of its records.
        threads: the number of lanes of each topic's partitions.
        most: the number of records of a piece.
    """

    def __init__(self, chunk: Chunk, threads: Mapping[str, int], most: int) -> None:
        check(chunk.keys is not None, "records are divided by key, and their keys are not known")
        lane = np.zeros(chunk.records, dtype=np.int64)
        start = np.zeros(chunk.records, dtype=np.int64)
        for index, tp in enumerate(chunk.partitions):
            own = np.flatnonzero(chunk.partition == index)
            lane[own] = _lanes(chunk, own, threads.get(tp.topic, 1))
            # A record's range begins at the end of the record before it: holes are in it.
            start[own[:1]] = chunk.ranges[tp].start
            start[own[1:]] = chunk.offset[own[:-1]] + 1
        self._chunk, self._start = chunk, start
        self._pieces: list[deque[IntArray]] = []
        for number in range(int(lane.max(initial=-1)) + 1):
            own = np.flatnonzero(lane == number)
            self._pieces.append(deque(own[at : at + most] for at in range(0, len(own), most)))
        self._given_up = False

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def left(self) -> bool:
        """True if pieces were not handed out."""
        return any(self._pieces)

    def give_up(self) -> None:
        """Hand out nothing more: a piece has failed, or the partitions change hands."""
        self._given_up = True

    def next(self, lane: int) -> Parts | None:
        """The ranges of the next piece of a lane; None if there is none.

        The piece before it must have taken effect.
        """
        if self._given_up or not self._pieces[lane]:
            return None
        return self._parts(self._pieces[lane].popleft())

    def _parts(self, records: IntArray) -> Parts:
        """The ranges of some records, as few as possible."""
        chunk, found = self._chunk, {}
        for index, tp in enumerate(chunk.partitions):
            own = records[chunk.partition[records] == index]
            if not len(own):
                continue
            starts, ends = self._start[own], chunk.offset[own] + 1
            first = np.concatenate([[True], starts[1:] != ends[:-1]])
            last = np.concatenate([first[1:], [True]])
            pairs = zip(starts[first].tolist(), ends[last].tolist(), strict=True)
            found[tp] = tuple(OffsetRange(start, end) for start, end in pairs)
        return found


def _lanes(chunk: Chunk, records: IntArray, lanes: int) -> IntArray:
    """The lane of each of a partition's records."""
    if lanes == 1 or chunk.keys is None:
        return np.zeros(len(records), dtype=np.int64)
    found, without = np.zeros(len(records), dtype=np.int64), 0
    for at, key in enumerate(chunk.keys.take(records).to_pylist()):
        if key is None:
            found[at], without = without % lanes, without + 1
        else:
            found[at] = lane_of(key, lanes)
    return found


def lane_of(key: bytes, lanes: int) -> int:
    """The lane of a key.

    The keys of a partition have the same CRC modulo the number of partitions, if a producer with
    librdkafka's default has written them. A multiplication makes the upper bits depend on all bits.
    """
    return (crc32(key) * 0x9E3779B1 % (1 << 32) >> 16) % lanes
