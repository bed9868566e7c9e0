"""What a task's chunks contain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from oncely.commit.run import CommitContext
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.base import Decoded
from oncely.runtimes.chunks import RangeReader
from oncely.runtimes.row_transform import Unchanged
from tests.jobtools import GivenRecords, records

T0 = TopicPartition("t", 0)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class ByHeaders:
    """A decoder that reads the headers, as ``decode.metadata`` does."""

    needs = frozenset({"headers"})
    schema = pa.schema([("value", pa.binary())])

    def decode(self, records: pa.Table) -> Decoded:
        return Decoded(records.select(["value"]), pa.array(range(records.num_rows), pa.int64()), [])


@pytest.mark.parametrize("needs", [frozenset[str](), frozenset({"headers"})])
def test_headers_that_only_the_decoder_reads_do_not_go_to_the_sink(needs: frozenset[str]) -> None:
    """A Kafka sink would copy them into its messages, though that was not asked for."""
    given = [{"key": "a", "value": b"1"}]
    table = records(T0, [b"x"]).append_column("headers", pa.array([given], HEADERS))
    sink: Any = SimpleNamespace(needs=needs)
    decoder: Any = ByHeaders()
    source: Any = GivenRecords([table])
    reading = RangeReader.of(CommitContext(sink, source, decoder), Unchanged())
    (chunk,) = reading.chunks({T0: OffsetRange(0, 1)}, again=False)
    assert (chunk.headers is not None) == bool(needs)
