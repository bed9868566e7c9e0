"""A worker of Spark's keeps a run's clients from task to task."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from oncely.local.ports import free_port
from oncely.sinks.kafka import ledger
from oncely.sinks.kafka.cluster import Cluster, Place
from oncely.sinks.kafka.ledger import LedgerInTopic


class Sink(LedgerInTopic):
    """Nothing but the half with the ledger; nobody answers."""

    def __init__(self, run: str) -> None:
        self.place = Place(f"127.0.0.1:{free_port()}", "p", "g", "ledger")
        self.create, self.run, self._cluster = True, run, None


def task_of(sink: Sink) -> Sink:
    """What a task has: a copy."""
    copy: Sink = pickle.loads(pickle.dumps(sink))
    return copy


@pytest.fixture(autouse=True)
def closed() -> Iterator[list[Cluster]]:
    """The clusters that were closed."""
    found: list[Cluster] = []
    ledger._worker.close()  # of what a test before this one has left

    def close(self: Cluster) -> None:
        found.append(self)

    with mock.patch.object(Cluster, "close", close):
        yield found
        ledger._worker.close()


def test_tasks_of_a_run_share_them(closed: list[Any]) -> None:
    driver = Sink("one")
    first, second = task_of(driver), task_of(driver)
    assert first.cluster is first.cluster is second.cluster
    assert task_of(first).cluster is first.cluster
    assert driver.cluster is driver.cluster is not first.cluster
    assert closed == []


def test_another_run_begins_with_its_own(closed: list[Any]) -> None:
    before = task_of(Sink("one")).cluster
    after = task_of(Sink("two")).cluster
    assert after is not before
    assert closed == [before]


def test_a_closed_one_is_not_taken_up(closed: list[Any]) -> None:
    task = task_of(Sink("one"))
    before = task.cluster
    task.close()
    assert closed == [before]
    assert task.cluster is not before


def test_a_child_process_has_its_own_and_leaves_ours_alone(
    closed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(Sink("one"))
    ours = task.cluster
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert task.cluster is not ours
    assert closed == []
