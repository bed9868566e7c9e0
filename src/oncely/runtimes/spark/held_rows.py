"""Rows of a Spark transform that Spark holds while the driver publishes them.

Tasks convert the rows to packets, which a local checkpoint keeps. So all of the transform's work is
done before a transaction begins, and a transaction that is repeated writes the same rows. The
driver reads the packets in parts; neither it nor its JVM holds all of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.core.batch import Batch, Packet, Staged, StagedRowsGone
from oncely.core.claim import NO_RECORDS, Counts
from oncely.runtimes.jobs.base import all_of
from oncely.runtimes.spark.determinism import refuse_non_deterministic
from oncely.runtimes.spark.frames import PacketSize, pack_rows
from oncely.runtimes.spark.jobs import answered, collected
from oncely.sinks.base import PacksRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PARTITION = 16_000_000
"""Bytes of packets that the driver reads at once. Its JVM holds two such parts: the one that is
written, and the next one."""


@dataclass(frozen=True)
class HeldRows:
    """The rows of one batch.

    Attributes:
        frame: the checkpoint: a row for each packet.
        sizes: the packets' descriptions, by the tasks that have made them.
    """

    frame: DataFrame
    sizes: Sequence[PacketSize]

    @classmethod
    def of(cls, sink: PacksRows, frame: DataFrame) -> HeldRows:
        """Run the transform's plan.

        Raises:
            ConfigError: the plan is not deterministic before a shuffle.
            Stopped: a row cannot be written.
        """
        refuse_non_deterministic(frame)
        # Lazy: the job that collects the answers fills the checkpoint.
        kept = answered(frame, partial(pack_rows, sink)).localCheckpoint(eager=False)
        return cls(kept, all_of(collected(kept), PacketSize))

    def into(self, batch: Batch) -> Batch:
        """The batch with these rows."""
        return replace(batch, staged=[one.staged for one in self.sizes], packets=self.read)

    def read(self) -> Iterator[Packet]:
        """All packets, in any order.

        Raises:
            StagedRowsGone: they are not those of :attr:`sizes`. Of a task that was run twice, the
                answer may be of one attempt and the packets of the other.
        """
        parts = -(-sum(one.size for one in self.sizes) // _PARTITION)
        told = _sum([one.staged for one in self.sizes])
        found: list[Staged] = []
        kept = self.frame.where(self.frame["packet"].isNotNull()).select("answer", "packet")
        packets = kept.repartition(max(1, parts))
        for answer, content in packets.toLocalIterator(prefetchPartitions=True):
            staged = pickle.loads(bytes(answer)).staged  # noqa: S301 - our own tasks' answers
            found.append(staged)
            with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
                rows = reader.read_all()
            yield Packet(staged, rows)
        held = _sum(found)
        if (held.rows, held.digest) != (told.rows, told.digest):
            raise StagedRowsGone(
                f"tasks have reported {told.rows} rows, and Spark holds {held.rows}, or other ones;"
                " the batch is repeated"
            )


def _sum(staged: Sequence[Staged]) -> Counts:
    return sum((Counts(0, one.rows, 0, 0, one.digest, one.recipe) for one in staged), NO_RECORDS)
