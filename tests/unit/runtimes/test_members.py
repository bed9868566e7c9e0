"""Members as tasks of Spark: what a task tells its driver, and how it ends. Without Spark."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oncely.clients.driver_link import Driver
from oncely.core import events
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError, Fenced, InstanceTaken, OncelyError, Unavailable
from oncely.runtimes.spark.members import Work, _heard, run_task
from oncely.runtimes.stop import StopSignal
from oncely.secrets import Secrets, scope

T0 = TopicPartition("t", 0)
SOON = 10.0
ALL: list[events.Event] = [
    events.PipelineOpened("p", 3, {T0: 5}, first_start=True, every=False),
    events.Polled(),
    events.PartitionsChanged("assigned", frozenset({T0})),
    events.BatchPlanned(0, {T0: OffsetRange(5, 9)}, 3),
    events.RangeCommitted(T0, OffsetRange(5, 9), 4, 3, 1, 0, epoch=3),
    events.BatchCommitted(0, 4, 3, 1, 0.25, {T0: 9}, 3),
    events.FencedOut(3, 4, frozenset({T0})),
    events.Draining(),
    events.RunClosed(complete=True),
]


class Seen:
    """A driver, and what it has heard."""

    def __init__(self) -> None:
        self.events: queue.Queue[events.Event] = queue.Queue()
        self.failed = threading.Event()

    @contextmanager
    def opened(self) -> Iterator[events.Listener]:
        yield self.events.put

    def all(self) -> list[events.Event]:
        return [self.events.get() for _ in range(self.events.qsize())]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def driver(seen: Seen) -> Iterator[Driver]:
    with Driver("127.0.0.1", "127.0.0.1", lambda: _heard(seen.opened, seen.failed)) as one:
        yield one


def ended(driver: Driver, work: Work) -> Any:
    """The answer of a task."""
    (answer,) = run_task(driver.address, work, 2, iter(()))
    return answer


def raising(error: Exception) -> Work:
    def work(*_: object) -> bool:
        raise error

    return work


def test_all_events_reach_the_driver(driver: Driver, seen: Seen) -> None:
    def work(number: int, _: StopSignal, listener: events.Listener) -> bool:
        for one in ALL:
            listener(one)
        return number == 2

    assert ended(driver, work) is True
    assert seen.all() == ALL


def test_a_plan_is_with_the_driver_before_its_commit_begins(driver: Driver, seen: Seen) -> None:
    there: list[int] = []

    def work(_: int, __: StopSignal, listener: events.Listener) -> bool:
        for one in ALL[:4]:
            listener(one)
        there.append(seen.events.qsize())
        return True

    ended(driver, work)
    assert there == [4]


def test_no_secret_is_in_what_the_driver_is_told(driver: Driver, seen: Seen) -> None:
    def work(_: int, __: StopSignal, listener: events.Listener) -> bool:
        with scope(Secrets.of(["s3cret-word"])):
            listener(events.BatchFailed("refused: s3cret-word", 1, 0.5))
            listener(events.RunClosed(complete=False, error="s3cret-word"))
        return True

    ended(driver, work)
    assert "s3cret" not in str(seen.all())


def test_a_task_is_asked_to_stop(driver: Driver) -> None:
    def work(_: int, stop: StopSignal, listener: events.Listener) -> bool:
        listener(events.Polled())
        driver.stop()
        stop.wait(SOON)
        assert stop.draining
        assert not stop.now
        return False

    assert ended(driver, work) is False


@pytest.mark.parametrize("error", [Fenced("p", 1, 2), ConfigError("sink", "is wrong")])
def test_an_error_that_a_new_start_does_not_correct_is_an_answer(
    driver: Driver, seen: Seen, error: OncelyError
) -> None:
    """Spark would start the task again; and the others are to end, too."""
    found = ended(driver, raising(error))
    assert (type(found), found.message) == (type(error), error.message)
    assert seen.failed.is_set()


@pytest.mark.parametrize("error", [Unavailable("no answer"), InstanceTaken("g", "i")])
def test_after_other_errors_spark_starts_the_task_again(
    driver: Driver, seen: Seen, error: OncelyError
) -> None:
    with pytest.raises(Unavailable, match=error.message) as caught:
        ended(driver, raising(error))
    assert caught.value.__suppress_context__  # Spark logs the texts of causes
    assert not seen.failed.is_set()


def test_a_task_without_its_driver_fails(seen: Seen) -> None:
    """Or its place in the job would count as done."""

    def closed(take: Callable[[bytes], object]) -> bool:
        raise OSError

    @contextmanager
    def broken() -> Iterator[Any]:
        yield closed

    def work(_: int, stop: StopSignal, listener: events.Listener) -> bool:
        listener(events.Polled())
        stop.wait(SOON)
        return False

    with (
        Driver("127.0.0.1", "127.0.0.1", broken) as driver,
        pytest.raises(Unavailable, match="the driver is gone"),
    ):
        ended(driver, work)
