"""Every ledger keeps the source's leader epochs, until a reset takes the log as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from oncely.core.claim import Fence, Notes, Takeover
from oncely.core.topics import TopicPartition
from oncely.errors import Fenced
from tests import kafkatools
from tests.sinktools import KINDS, SOURCE, T0, T1, at_t0, commit_all, numbered, sink_to

Make = Callable[[], Any]
_START = {T0: 0, T1: 0}


@pytest.fixture(params=[*KINDS, "kafka"])
def make(request: pytest.FixtureRequest) -> Make:
    """Sinks of one pipeline, each as a process of its own makes it."""
    if request.param == "kafka":
        return kafkatools.make_topics(request.getfixturevalue("broker")).sink
    place = request.getfixturevalue("on_sqlite" if request.param == "sqlite" else "on_postgres")
    return lambda: sink_to(place)


def opened(make: Make) -> tuple[Any, Fence]:
    sink = make()
    fence = sink.open(Takeover(SOURCE, lambda: _START, _START)).fence
    return sink.bind(), fence


def noted(make: Make) -> dict[TopicPartition, int]:
    """What the ledger tells the next run."""
    return dict(make().open(Takeover(SOURCE, lambda: _START, _START)).leader_epochs)


def test_leader_epochs_outlive_commits_and_runs(make: Make) -> None:
    sink, fence = opened(make)
    assert noted(make) == {}
    sink, fence = opened(make)
    sink.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 5}))
    sink.ledger.note(fence, Notes(leader_epochs={T0: 4}))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert noted(make) == {T0: 4, T1: 5}
    assert noted(make) == {T0: 4, T1: 5}


def test_a_fenced_run_notes_nothing(make: Make) -> None:
    old, fence = opened(make)
    old.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 5}))
    new, newer = opened(make)
    new.ledger.note(newer, Notes(leader_epochs={T0: 9}))
    with contextlib.suppress(Fenced):  # a SQL ledger leaves it to the next commit
        old.ledger.note(fence, Notes(leader_epochs={T0: 1, T1: 1}))
    assert noted(make) == {T0: 9, T1: 5}


def test_a_reset_forgets_those_that_it_moves(make: Make) -> None:
    sink, fence = opened(make)
    sink.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 5}))
    make().open(Takeover(SOURCE, lambda: _START, _START, reset=lambda _: {T0: 0}))
    assert noted(make) == {T1: 5}
