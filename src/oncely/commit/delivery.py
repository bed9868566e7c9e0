"""Delivery semantics: in which order records and positions take effect.

| semantics | order | a crash between the two |
|---|---|---|
| exactly_once | together, in the sink's own transaction | has no effect |
| at_least_once | records, then the position | writes records again |
| at_most_once | the position, then the records | loses records |
| none | the position on a timer, independent of the records | does either |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

from oncely.core.batch import Batch, Chunk, CommitBudget
from oncely.core.claim import NOT_COUNTED, Claim, Counts
from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable
from oncely.kinds.base import CommitsChunks, PublishesBatches, Sink
from oncely.phases import phase
from oncely.stores.document import MovesPositions

log = logging.getLogger(__name__)

Order = Literal["together", "records_first", "position_first"]
T = TypeVar("T")
AnySink_co = TypeVar("AnySink_co", bound=Sink, covariant=True)


@dataclass(frozen=True)
class Delivery(Generic[AnySink_co]):
    """A sink, the ledger of its positions, and the order in which the two take effect. Picklable.

    Attributes:
        sink: writes rows and dead letters.
        ledger: the ledger of the positions; the sink's own when they take effect together.
        order: the order of records and positions.
    """

    sink: AnySink_co
    ledger: MovesPositions
    order: Order = "together"

    @property
    def one_store(self) -> bool:
        """See ``Ledger.one_store``; records that are written before or after positions are not in
        one store."""
        return self.order == "together" and self.ledger.one_store


@phase("write")
def commit_chunk(
    delivery: Delivery[CommitsChunks], chunk: Chunk, claim: Claim, max_rejects: int | None
) -> Mapping[TopicPartition, Counts]:
    """Make a chunk and its positions take effect.

    Raises:
        PositionMoved: nothing was written; read the ledger and decide again.
        BudgetSpent: nothing was written.
        Unavailable: the outcome is unknown; read the ledger and decide again.
    """
    sink, nothing = delivery.sink, dict.fromkeys(claim.ranges, NOT_COUNTED)
    if delivery.order == "together":
        return sink.commit(chunk, claim.fence, claim, max_rejects)
    if delivery.order == "records_first":
        counts = sink.commit(chunk, claim.fence, None, max_rejects)
        with phase("commit"):
            delivery.ledger.move(claim, counts)
        return counts
    # Decode before the position moves: an error in decode should lose no records.
    CommitBudget(max_rejects, "decode or transform").spend(chunk.rejections)
    write = partial(sink.commit, chunk, claim.fence, None, max_rejects)
    written = _position_first(delivery.ledger, claim, nothing, write)
    return nothing if written is None else written


@phase("write")
def publish_batch(delivery: Delivery[PublishesBatches], batch: Batch, claim: Claim) -> None:
    """Make a batch and its positions take effect. Raises the errors of the sink's ``publish``."""
    sink = delivery.sink
    if delivery.order == "together":
        sink.publish(batch, claim.fence, claim)
    elif delivery.order == "records_first":
        sink.publish(batch, claim.fence, None)
        with phase("commit"):
            delivery.ledger.move(claim.data, batch.counts)
    else:
        write = partial(sink.publish, batch, claim.fence, None)
        _position_first(delivery.ledger, claim.data, batch.counts, write)


def _position_first(
    ledger: MovesPositions,
    claim: Claim,
    counts: Mapping[TopicPartition, Counts],
    write: Callable[[], T],
) -> T | None:
    """Move positions, then write. Records that could not be written are lost, and logged as lost;
    None then.

    Raises:
        Unavailable: it is unknown whether positions were moved. A retry that reads moved positions
            treats the records as written, so a warning is logged here.
    """
    named = ", ".join(f"{tp} {range_}" for tp, range_ in sorted(claim.ranges.items()))
    try:
        with phase("commit"):
            ledger.move(claim, counts)
    except Unavailable as error:
        log.warning(
            "at most once: the records of %s are lost if their position was moved, which"
            " is unknown: %s",
            named,
            error.message,
        )
        raise
    try:
        return write()
    except Unavailable as error:
        log.warning("at most once: some or all records of %s are lost: %s", named, error.message)
        return None
