"""The exact ranges of a micro-batch, from Spark's checkpoint.

Spark writes the end offsets of a batch into ``offsets/<batch id>`` before the batch runs. The start
is the end of the batch before; for batch 0 and for a new partition it is the ledger's position.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import InvariantViolation
from oncely.runtimes.spark.options import parse_offset_log


def batch_ends(checkpoint: Path, batch_id: int) -> dict[TopicPartition, Position]:
    """The end of each partition of the batch.

    Raises:
        InvariantViolation: there is no such entry; Spark writes it before it calls
            ``foreachBatch``.
    """
    entry = checkpoint / "offsets" / str(batch_id)
    try:
        text = entry.read_text()
    except FileNotFoundError:
        raise InvariantViolation(f"Spark's offset log has no batch {batch_id}") from None
    ends: dict[TopicPartition, Position] = {}
    for source in parse_offset_log(text):
        ends.update(source)
    return ends


def batch_ranges(
    checkpoint: Path, batch_id: int, ledger: Mapping[TopicPartition, Position]
) -> dict[TopicPartition, OffsetRange]:
    """The ranges of the batch, empty ones left out.

    Args:
        checkpoint: the query's checkpoint directory.
        batch_id: Spark's number of the micro-batch.
        ledger: positions, for batch 0 and for partitions that the batch before did not have.
    """
    starts = dict(ledger)
    if batch_id > 0:
        starts.update(batch_ends(checkpoint, batch_id - 1))
    return {
        tp: OffsetRange(starts[tp], end)
        for tp, end in sorted(batch_ends(checkpoint, batch_id).items())
        if end > starts[tp]
    }
