"""What a worker tells when others have taken partitions over."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from oncely.cli.progress import sentence
from oncely.core import events
from oncely.core.claim import Fence, Opened
from oncely.core.ranges import SourceIdentity, TopicPartition
from oncely.errors import Fenced
from tests.unit.runtimes.worker.test_watch import OURS, Run

P0 = TopicPartition("t", 0)


class Opening(Run):
    """A ledger that gives epoch 15, until a run has taken all partitions with epoch 16."""

    def __init__(self) -> None:
        super().__init__(OURS, {})
        kafka: Any = self.takeovers.source
        kafka.earliest, kafka.identity = dict, lambda: SourceIdentity("c", {})
        kafka.watermarks = kafka.leader_epochs = dict
        kafka.truncated = lambda *_, **__: {}
        self.fenced_by: Fenced | None = None
        sink: Any = self.ledger.context.sink
        sink.open, sink.bind = self._opened_by, lambda: sink

    def _opened_by(self, takeover: Any) -> Opened:
        if self.fenced_by is not None:
            raise self.fenced_by
        return Opened(Fence("p", 15, "ours", takeover.partitions), {}, False)

    look_for_a_whole_run = Run.__mro__[1].look_for_a_whole_run


def test_a_run_of_all_partitions_is_told_with_the_epoch_that_was_held() -> None:
    run = Opening()
    run.take(frozenset({P0}))
    run.fenced_by = Fenced("p", 0, 16)
    with pytest.raises(Fenced, match="epoch 15 is fenced by epoch 16, a newer run") as found:
        run.look_for_a_whole_run()
    assert "oncely run" not in found.value.way_out
    assert "--on-fenced wait" in found.value.way_out


def test_a_partition_that_another_worker_has_taken_is_named_as_it_is() -> None:
    run = Opening()
    run.fenced_by = lost = Fenced("p", 3, 4, [P0])
    with pytest.raises(Fenced) as found:
        run.take(frozenset({P0}))
    assert found.value is lost


def test_a_rebalance_is_no_error() -> None:
    level, text = sentence(events.FencedOut(2, 4, frozenset({P0})))
    assert level == logging.INFO
    assert "epoch 4 of another process has taken over from epoch 2" in text
    assert "t-0" in text
    assert sentence(events.FencedOut(2, 4))[0] == logging.ERROR


def test_an_error_is_one_entry() -> None:
    """It is logged where it was caught; the event is for the event log and for listeners."""
    assert sentence(events.BatchFailed("no answer", 1, 0.5))[0] == logging.DEBUG
