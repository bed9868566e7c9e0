"""The driver publishes a micro-batch: what tasks staged, and all positions, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oncely.core.ledger import Ahead, Append, Entry, Skip, decide
from oncely.core.offsets import TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.errors import InvariantViolation, LedgerWentBack, Unavailable
from oncely.runtimes.backoff import Backoff
from oncely.runtimes.commit import behind
from oncely.sinks.base import Fence, PositionMoved, Publication, Sink, StagedRowsGone

Entries = Callable[[Sink], Mapping[TopicPartition, Entry]]


def publish(sink: Sink, what: Publication, fence: Fence, entries: Entries) -> bool:
    """Publish, settling a lost answer by the ledger; True when it had taken effect before.

    Args:
        sink: in whose store rows, rejects and positions take effect.
        what: the micro-batch.
        fence: our epoch.
        entries: reads the ledger, and raises Fenced when a newer run holds it.

    Raises:
        LedgerWentBack: the ledger stands before the batch.
        InvariantViolation: the ledger holds some ranges of the batch and not others.
        StagedRowsGone: nothing was published; the batch can be repeated.
    """
    patience = Backoff()
    while True:
        try:
            known = entries(sink)
            if _all_done(sink, what.ranges, known, fence):
                return True
            sink.publish(what, known, fence)
        except PositionMoved:
            continue
        except StagedRowsGone:
            if _all_done(sink, what.ranges, entries(sink), fence):
                return True  # our own publication took them, and its answer was lost
            raise
        except LedgerWentBack:
            raise
        except Unavailable:
            patience.wait_or_raise()
            continue
        return False


def _all_done(
    sink: Sink,
    ranges: Mapping[TopicPartition, OffsetRange],
    entries: Mapping[TopicPartition, Entry],
    fence: Fence,
) -> bool:
    """Append for all, or Skip for all: one transaction has them all or none."""
    decisions = [decide(entries[tp], one, fence.epoch) for tp, one in ranges.items()]
    if all(isinstance(one, Append) for one in decisions):
        return False
    if all(isinstance(one, Skip) for one in decisions):
        return True
    ahead = [one for one in decisions if isinstance(one, Ahead)]
    if ahead:
        raise behind(sink, fence, f"offsets {ahead[0].missing} were not committed before")
    raise InvariantViolation(f"a batch commit met a ledger that holds half of it: {decisions}")
