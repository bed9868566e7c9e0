"""Rejects of tasks that stage ranges: how many travel to the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, cast

import pyarrow as pa
import pytest

from oncely.commit.run import CommitContext, OpenLedger
from oncely.core.batch import Chunk, Rejection, Staged
from oncely.core.claim import Budget, Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.base import Decoded
from oncely.errors import SAMPLE, TooManyRejects
from oncely.runtimes.batches.commit import RangeCommit
from oncely.runtimes.chunks import ChunkBounds
from oncely.runtimes.row_transform import Unchanged
from tests.deliverytools import put
from tests.jobtools import GivenRecords, InlineJobs, records

T0 = TopicPartition("t", 0)
RECORDS, A_CHUNK, ALLOWED = 1_000, 100, 250
LAYOUTS = pytest.mark.parametrize("layout", ["per_partition", "clustered"])


class Broken:
    """A decoder with a defect."""

    schema = pa.schema([("id", pa.int64())])
    needs = frozenset[str]()

    def decode(self, records: pa.Table) -> Decoded:
        raise MemoryError


class AllBad:
    """A decoder that rejects every record."""

    schema = pa.schema([("id", pa.int64())])
    needs = frozenset[str]()

    def decode(self, records: pa.Table) -> Decoded:
        refused = [Rejection(at, "decode", "not JSON") for at in range(records.num_rows)]
        return Decoded(self.schema.empty_table(), pa.array([], pa.int64()), refused)


class NoRows:
    """The sink and its tasks: nothing arrives there."""

    needs = frozenset[str]()
    abandoned = 0

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> NoRows:
        return self

    def add(self, chunk: Chunk) -> list[Rejection]:
        return []

    def pack(self, chunk: Chunk, buckets: int) -> tuple[list[Any], list[Rejection]]:
        return [], []

    def finish(self) -> Staged:
        return Staged(None, 0)

    def abandon(self) -> None:
        self.abandoned += 1

    def agree(self, staged: Staged) -> bool:
        return True


def bad_records() -> Iterator[pa.Table]:
    for start in range(0, RECORDS, A_CHUNK):
        yield records(T0, [b"bad"] * A_CHUNK, start)


def opened(reread: GivenRecords, layout: str, **budget: Any) -> RangeCommit:
    nothing: Any = NoRows()
    context = CommitContext(nothing, cast(Any, reread), AllBad(), Budget(**budget))
    ledger = OpenLedger(context)
    ledger.fence = Fence("p", 1)
    bounds = ChunkBounds(records=A_CHUNK)
    return RangeCommit(ledger, Unchanged(), InlineJobs(), bounds, cast(Any, layout))


def answers(commit: RangeCommit, planned: int = RECORDS) -> list[Any]:
    return commit._agreed(0, {T0: OffsetRange(0, planned)})


@LAYOUTS
def test_a_task_beyond_the_budget_of_the_batch_sends_a_sample(layout: str) -> None:
    reread = GivenRecords(bad_records)
    with pytest.raises(TooManyRejects, match="300 or more records") as caught:
        answers(opened(reread, layout, count=ALLOWED))
    assert reread.fetched <= ALLOWED + SAMPLE
    refused = caught.value.refused
    assert refused is not None
    assert refused.reasons == (("not JSON", 300),)
    assert [one.offset for one in refused.records] == list(range(SAMPLE))


@LAYOUTS
def test_a_task_that_answers_with_an_error_leaves_nothing_staged(layout: str) -> None:
    commit = opened(GivenRecords(bad_records), layout, count=ALLOWED)
    with pytest.raises(TooManyRejects):
        answers(commit)
    assert cast(Any, commit.ledger.context.sink).abandoned == 1


@LAYOUTS
def test_a_task_that_fails_leaves_nothing_staged(layout: str) -> None:
    commit = opened(GivenRecords(bad_records), layout)
    put(commit.ledger, decoder=Broken())
    with pytest.raises(MemoryError):
        answers(commit)
    assert cast(Any, commit.ledger.context.sink).abandoned == 1


@LAYOUTS
@pytest.mark.parametrize(
    ("planned", "budget"),
    [
        (RECORDS, {}),
        (RECORDS, {"count": RECORDS}),
        # A share is of the whole batch, of which other tasks may have read the rest.
        (10 * RECORDS, {"share": Fraction(1, 10)}),
    ],
    ids=["unlimited", "count", "share"],
)
def test_rejects_that_the_budget_may_hold_all_travel(
    layout: str, planned: int, budget: Mapping[str, Any]
) -> None:
    reread = GivenRecords(bad_records)
    found = answers(opened(reread, layout, **budget), planned)
    assert sum(len(one.rejects) for one in found) == reread.fetched == RECORDS
