"""A worker of Spark's keeps a run's clients from task to task."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from oncely.stores.topic import ledger
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.ledger import TopicLedger
from oncely.testing.servers.process import free_port


def ledger_of(run: str) -> TopicLedger:
    """A ledger; nobody answers."""
    return TopicLedger(PipelineTopics(f"127.0.0.1:{free_port()}", "p", "g", "ledger"), run=run)


def task_of(sink: TopicLedger) -> TopicLedger:
    """What a task has: a copy."""
    copy: TopicLedger = pickle.loads(pickle.dumps(sink))
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
    driver = ledger_of("one")
    first, second = task_of(driver), task_of(driver)
    assert first.cluster is first.cluster is second.cluster
    assert task_of(first).cluster is first.cluster
    assert driver.cluster is driver.cluster is not first.cluster
    assert closed == []


def test_another_run_begins_with_its_own(closed: list[Any]) -> None:
    before = task_of(ledger_of("one")).cluster
    after = task_of(ledger_of("two")).cluster
    assert after is not before
    assert closed == [before]


def test_a_closed_one_is_not_taken_up(closed: list[Any]) -> None:
    task = task_of(ledger_of("one"))
    before = task.cluster
    task.close()
    assert closed == [before]
    assert task.cluster is not before


def test_a_child_process_has_its_own_and_leaves_ours_alone(closed: list[Any]) -> None:
    task = task_of(ledger_of("one"))
    ours = task.cluster
    child = os.fork()
    if child == 0:
        os._exit(0 if task.cluster is not ours and not closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert task.cluster is ours


def test_a_child_process_destroys_no_client_that_is_garbage() -> None:
    class Client:
        def __init__(self) -> None:
            self.me, self.process = self, os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.process:
                os.abort()

    for left in range(1, 17):  # until a collection, which may be due in hooks of other modules
        gc.collect()
        Client()
        kept: list[object] = []
        while gc.get_count()[0] < gc.get_threshold()[0] - left:
            kept.append([])
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert gc.isenabled()
    gc.collect()
