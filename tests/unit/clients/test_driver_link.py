"""The connection of a driver and its tasks, on this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from oncely.clients import driver_link
from oncely.clients.driver_link import Driver, Take, Task
from oncely.errors import Unavailable

SOON = 10.0


class Heard:
    """The messages of all tasks, in the order of their arrival, and the ends of connections."""

    def __init__(self) -> None:
        self.all: queue.Queue[bytes] = queue.Queue()
        self.blocked = threading.Event()
        self.blocked.set()

    @contextmanager
    def opened(self) -> Iterator[Take]:
        def take(message: bytes) -> None:
            assert self.blocked.wait(SOON)
            self.all.put(message)

        yield take
        self.all.put(b"(ended)")

    def next(self) -> bytes:
        return self.all.get(timeout=SOON)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def driver(heard: Heard) -> Iterator[Driver]:
    with Driver("127.0.0.1", "127.0.0.1", heard.opened) as one:
        yield one


class Stops:
    """Counts requests to stop."""

    def __init__(self) -> None:
        self._all: queue.Queue[None] = queue.Queue()

    def __call__(self) -> None:
        self._all.put(None)

    def wait(self) -> None:
        self._all.get(timeout=SOON)

    @property
    def none_left(self) -> bool:
        return self._all.empty()


def test_messages_arrive_in_order(driver: Driver, heard: Heard) -> None:
    task = Task(driver.address, Stops())
    for number in range(100):
        task.tell(b"%d" % number, asking=number % 7 == 0)
    assert [heard.next() for _ in range(100)] == [b"%d" % number for number in range(100)]
    task.close()


def test_who_asks_goes_on_when_the_message_was_taken(driver: Driver, heard: Heard) -> None:
    task = Task(driver.address, Stops())
    heard.blocked.clear()
    task.tell(b"not awaited")
    asking = threading.Thread(target=lambda: task.tell(b"awaited", asking=True))
    asking.start()
    asking.join(0.1)
    assert asking.is_alive()
    heard.blocked.set()
    asking.join(SOON)
    assert not asking.is_alive()
    assert heard.all.qsize() == 2
    task.close()


def test_all_tasks_are_asked_to_stop_also_later_ones(driver: Driver, heard: Heard) -> None:
    first, later = Stops(), Stops()
    task = Task(driver.address, first)
    task.tell(b"is there", asking=True)
    driver.stop()
    first.wait()
    other = Task(driver.address, later)
    later.wait()
    driver.stop()
    first.wait()
    later.wait()
    task.close()
    other.close()
    assert first.none_left


def test_a_task_whose_driver_is_gone_is_stopped_and_commits_nothing_more(heard: Heard) -> None:
    @contextmanager
    def gone() -> Iterator[Take]:
        def take(_: bytes) -> None:
            raise OSError

        yield take

    with Driver("127.0.0.1", "127.0.0.1", gone) as driver:
        stops = Stops()
        task = Task(driver.address, stops)
        with pytest.raises(Unavailable, match="the driver at 127"):
            task.tell(b"a plan", asking=True)
        stops.wait()
        assert task.broken
        task.tell(b"an event")  # is lost
        task.close()


def test_the_driver_notices_the_end_of_a_task(driver: Driver, heard: Heard) -> None:
    task = Task(driver.address, Stops())
    task.tell(b"is there", asking=True)
    task.close()
    assert [heard.next(), heard.next()] == [b"is there", b"(ended)"]


def test_who_does_not_know_the_key_is_refused(driver: Driver, heard: Heard) -> None:
    with pytest.raises(Unavailable, match="did not answer"):
        Task(replace(driver.address, key=b"another"), Stops())
    assert heard.all.empty()
    assert "key" not in repr(driver.address)


def test_who_does_not_prove_the_key_in_time_is_refused(
    driver: Driver, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_link, "_PROOF", 1)
    import socket

    with socket.create_connection((driver.address.host, driver.address.port)) as silent:
        silent.settimeout(SOON)
        while silent.recv(1024):  # the challenge, and then the end
            pass
    assert heard.all.empty()


def test_a_driver_that_has_ended_does_not_answer(heard: Heard) -> None:
    with Driver("127.0.0.1", "127.0.0.1", heard.opened) as driver:
        address = driver.address
    with pytest.raises(Unavailable, match="did not answer"):
        Task(address, Stops())


def test_an_address_of_another_machine_is_an_error(heard: Heard) -> None:
    with pytest.raises(Unavailable, match="can't listen at 192"):
        Driver("192.0.2.1", "192.0.2.1", heard.opened)
