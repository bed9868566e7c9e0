"""Which thread has which records of a chunk."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from zlib import crc32

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from oncely.core.batch import Chunk, KeyShards, Parts, lane_of
from oncely.core.ranges import OffsetRange, TopicPartition, normalize
from tests.sinktools import T0, T1, Rec, chunk, rec

KEYS = st.one_of(st.none(), st.binary(max_size=2))
RECORDS = st.lists(st.tuples(st.integers(0, 2), KEYS), min_size=1, max_size=60)


def keyed(parts: dict[TopicPartition, list[Rec]], start: int = 0) -> Chunk:
    """A chunk whose records have the keys of their ``Rec``."""
    made = chunk({tp: (start, records) for tp, records in parts.items()})
    keys = [one.key for tp in made.partitions for one in parts[tp]]
    return replace(made, keys=pa.chunked_array([pa.array(keys, pa.binary())]))


def records(start: int, steps: list[tuple[int, bytes | None]]) -> list[Rec]:
    """Records with holes before them."""
    found, at = [], start
    for hole, key in steps:
        at += hole
        found.append(replace(rec(at, id=at, name=""), key=key))
        at += 1
    return found


def handed_out(lanes: KeyShards) -> list[list[Parts]]:
    """The pieces of each lane."""
    found: list[list[Parts]] = []
    for lane in range(len(lanes)):
        found.append([])
        while (parts := lanes.next(lane)) is not None:
            found[-1].append(parts)
    return found


@given(RECORDS, RECORDS, st.integers(1, 5), st.integers(1, 7))
def test_each_offset_has_one_lane_and_each_key_too(
    first: list[tuple[int, bytes | None]],
    second: list[tuple[int, bytes | None]],
    threads: int,
    most: int,
) -> None:
    given_ = {T0: records(10, first), T1: records(10, second)}
    whole = keyed(given_, start=10)
    lanes = handed_out(KeyShards(whole, {"t": threads}, most))
    assert len(lanes) <= threads
    for tp in given_:
        ranges = [one for lane in lanes for parts in lane for one in parts.get(tp, ())]
        assert normalize(ranges) == (whole.ranges[tp],)
        assert sum(one.end - one.start for one in ranges) == ranges_length(whole.ranges[tp])
    lanes_of_key = defaultdict(set)
    for number, lane in enumerate(lanes):
        at = {T0: -1, T1: -1}
        for parts in lane:
            own = [
                (tp, one)
                for tp, ranges in parts.items()
                for one in given_[tp]
                if any(one.offset in range_ for range_ in ranges)
            ]
            assert 1 <= len(own) <= most
            for tp, one in own:
                assert one.offset > at[tp]  # in order, also from piece to piece
                at[tp] = one.offset
                if one.key is not None:
                    lanes_of_key[tp, one.key].add(number)
    assert all(len(found) == 1 for found in lanes_of_key.values())


def ranges_length(one: OffsetRange) -> int:
    return one.end - one.start


def test_records_without_a_key_go_round_the_lanes() -> None:
    whole = keyed({T0: records(0, [(0, None)] * 7)})
    sizes = [sum(r.end - r.start for p in lane for r in p[T0]) for lane in
             handed_out(KeyShards(whole, {"t": 3}, 100))]  # fmt: skip
    assert sizes == [3, 2, 2]


def test_a_topic_with_one_thread_keeps_its_order() -> None:
    whole = keyed({T0: records(0, [(0, bytes([n])) for n in range(9)])})
    assert handed_out(KeyShards(whole, {}, 4)) == [
        [{T0: (OffsetRange(0, 4),)}, {T0: (OffsetRange(4, 8),)}, {T0: (OffsetRange(8, 9),)}]
    ]


def test_a_key_has_the_same_lane_in_every_chunk() -> None:
    keys = [bytes([n]) for n in range(50)]
    found = []
    for start in (0, 1_000):
        lanes = KeyShards(
            keyed({T0: records(start, [(0, key) for key in keys])}, start), {"t": 4}, 99
        )
        found.append(
            [
                sorted(o - start for r in parts[T0] for o in range(r.start, r.end))
                for lane in handed_out(lanes)
                for parts in lane
            ]
        )
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_the_keys_that_a_producer_has_put_into_one_partition_go_into_all_lanes() -> None:
    keys = [b"user-%d" % n for n in range(20_000)]
    of_partition = [key for key in keys if crc32(key) % 8 == 3]
    sizes = Counter(lane_of(key, 8) for key in of_partition)
    assert len(sizes) == 8
    assert max(sizes.values()) < 1.3 * min(sizes.values())


def test_nothing_is_handed_out_after_it_was_given_up() -> None:
    lanes = KeyShards(keyed({T0: records(0, [(0, None)] * 8)}), {"t": 2}, 2)
    assert lanes.next(0) is not None
    lanes.give_up()
    assert [lanes.next(0), lanes.next(1)] == [None, None]
    assert lanes.left


def test_a_range_of_no_lane_is_not_kept() -> None:
    whole = keyed({T0: records(0, [(0, None)] * 4)})
    kept = whole.keep({T0: (OffsetRange(0, 1), OffsetRange(2, 3))})
    assert np.flatnonzero(kept.partition >= 0).tolist() == [0, 2]
    counts = kept.counts_of({T0: (OffsetRange(0, 1), OffsetRange(2, 3))}, np.array([2]), [])
    assert [(one.records, one.rows, one.filtered) for one in counts[T0]] == [(1, 0, 1), (1, 1, 0)]
