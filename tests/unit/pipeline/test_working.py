"""The start of a worker."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

from oncely.errors import Unavailable
from oncely.kinds.kafka.sink import KafkaSink
from oncely.pipeline import working
from oncely.threads import StopSignal


class Run:
    """A ledger whose end is hidden by somebody's transaction."""

    sink = Mock(KafkaSink, hidden_seconds=60.0)
    ledger = SimpleNamespace(context=SimpleNamespace(sink=sink))

    def __init__(self, stop: StopSignal) -> None:
        self.stop = stop

    def begin(self) -> None:
        self.stop.ask()
        raise Unavailable("a transaction hides the end of the ledger topic")


def test_who_waits_for_the_ledger_can_be_stopped() -> None:
    """Asked to stop, it ends as after any other request, not with an error."""
    stop = StopSignal()
    assert working._begun(Run(stop), stop) is False  # type: ignore[arg-type]
