"""Which failures a run tries again, and what it answers at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.errors import OncelyError, TopicMissing, Unavailable
from oncely.runtimes.batches.run import BatchRun
from oncely.runtimes.takeover import Takeovers
from tests.jobtools import HurriedStop


@dataclass
class Scripted(BatchRun):
    """A run whose attempts fail as told, then succeed."""

    failures: Sequence[tuple[str, OncelyError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left = list(self.failures)

    def _meet(self, where: str) -> None:
        if self.left and self.left[0][0] == where:
            raise self.left.pop(0)[1]

    def _open(self) -> dict[Any, int]:
        self._meet("open")
        return {}

    def _follow(self, positions: Any, *, until_latest: bool) -> bool:
        self._meet("follow")
        return True


def scripted(*failures: tuple[str, OncelyError]) -> Scripted:
    ledger: Any = SimpleNamespace(finish=lambda: None)
    nothing: Any = None
    takeovers = Takeovers(ledger, nothing, "p", "earliest", "fail", lambda _: None)
    return Scripted(
        nothing, nothing, takeovers, nothing, 0, 1_000, HurriedStop(), 7, failures=failures
    )


def missing() -> TopicMissing:
    return TopicMissing("source.topics", "no such topic")


def away() -> Unavailable:
    return Unavailable("away")


def test_what_may_pass_is_tried_again() -> None:
    assert scripted(("open", away()), ("follow", away())).run(until_latest=True)


def test_but_not_for_ever() -> None:
    with pytest.raises(Unavailable):
        scripted(*[("follow", away())] * 8).run(until_latest=True)


def test_a_topic_that_was_never_there_is_wrong_input_at_once() -> None:
    run = scripted(("open", missing()))
    with pytest.raises(TopicMissing):
        run.run(until_latest=True)
    assert not run.left


def test_a_topic_that_is_unknown_for_a_moment_is_asked_for_again() -> None:
    """A broker that has just come back learns of the topics a little later."""
    assert scripted(("follow", missing()), ("open", missing())).run(until_latest=True)


def test_it_is_asked_for_again_also_after_a_longer_outage() -> None:
    outage = [("follow", away()), *[("open", away())] * 4]
    assert scripted(*outage, ("open", missing()), ("open", missing())).run(until_latest=True)


def test_a_topic_that_stays_away_ends_the_run() -> None:
    run = scripted(*[("follow", missing())] * 5)
    with pytest.raises(TopicMissing):
        run.run(until_latest=True)
    assert not run.left


def test_a_run_that_is_asked_to_stop_says_that_it_is_not_done() -> None:
    run = scripted()
    run.stop.ask()
    assert run.run(until_latest=True) is False
