"""The events of what was committed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from oncely.commit.path import Outcome
from oncely.core import events
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import Position, TopicPartition


def tell_ranges(listener: events.Listener, outcomes: Iterable[Outcome], epoch: int = 0) -> None:
    """Tell each range that has taken effect; ``epoch`` as in the event."""
    for one in outcomes:
        done = one.counts
        listener(
            events.RangeCommitted(
                one.partition, one.range, done.records, done.rows, done.rejects, done.filtered,
                one.replayed, one.kind, epoch,
            )
        )  # fmt: skip


def tell_batch(
    listener: events.Listener,
    number: int,
    outcomes: Collection[Outcome],
    ends: Mapping[TopicPartition, Position],
    seconds: float,
    phases: Mapping[str, float],
    epoch: int = 0,
) -> None:
    """Tell a batch of which every range has taken effect, and the ranges before it.

    Args:
        listener: called with the events.
        number: of the batch.
        outcomes: its ranges.
        ends: the positions after it.
        seconds, phases, epoch: as in the event.
    """
    tell_ranges(listener, outcomes, epoch)
    done = sum((one.counts for one in outcomes), NO_RECORDS)
    listener(
        events.BatchCommitted(
            number, done.records, done.rows, done.rejects, seconds, ends, epoch, done.filtered,
            phases,
        )
    )  # fmt: skip
