"""What every offset store must do, on real servers."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Stopped
from oncely.stores.offsets.base import OffsetStore
from tests.saver import Saver
from tests.storetools import Numbered, Shelf, at, save_and_load

T0, T1, T2, T3 = (TopicPartition("t", n) for n in range(4))
U0 = TopicPartition("u.v-w_x", 0)


def test_a_pipeline_that_never_saved_has_no_positions(shelf: Shelf) -> None:
    store = shelf.make("p")
    assert store.load() == {}
    assert store.load() == {}, "and looking has changed nothing"
    store.close()


def test_what_was_saved_is_loaded(shelf: Shelf) -> None:
    positions = {
        T0: at(0, epoch=0),
        T3: at(2**62, epoch=2**40),
        U0: at(17, topic_id="LEqZ-_x4Q3a-9w"),
    }
    store = shelf.make("p")
    store.save(positions)
    assert store.load() == positions
    store.close()
    assert shelf.make("p").load() == positions


def test_a_save_leaves_other_partitions_alone(shelf: Shelf) -> None:
    store = shelf.make("p")
    store.save({T0: at(5), T1: at(7)})
    store.save({T1: at(9, epoch=2), T2: at(1)})
    assert store.load() == {T0: at(5), T1: at(9, epoch=2), T2: at(1)}
    store.save({})
    assert store.load() == {T0: at(5), T1: at(9, epoch=2), T2: at(1)}


def test_a_position_may_go_back(shelf: Shelf) -> None:
    """After a reset."""
    store = shelf.make("p")
    store.save({T0: at(100)})
    store.save({T0: at(3, epoch=2)})
    assert store.load() == {T0: at(3, epoch=2)}


def test_pipelines_stand_side_by_side(shelf: Shelf) -> None:
    names = ("p", "p.q", "P-1", "p_1")
    stores = {name: shelf.make(name) for name in names}
    for number, store in enumerate(stores.values()):
        store.save({T0: at(number)})
    assert [store.load() for store in stores.values()] == [{T0: at(n)} for n in range(4)]


def test_saves_of_several_processes_lose_nothing(shelf: Shelf) -> None:
    """Each task saves a partition of its own, all at the same time."""
    times = 25
    tasks = {tp: Saver(shelf.make("p"), tp, times=times) for tp in (T0, T1, T2, T3)}
    for task in tasks.values():
        task.ready()
    for task in tasks.values():
        task.go()
    for task in tasks.values():
        assert task.finish() == list(range(1, times + 1))
        assert task.process.returncode == 0
    assert shelf.make("p").load() == dict.fromkeys(tasks, at(times))


def test_several_threads_share_a_store(shelf: Shelf) -> None:
    store = shelf.make("p")
    partitions = (T0, T1, T2, T3)

    def work(tp: TopicPartition) -> None:
        for position in range(1, 11):
            store.save({tp: at(position)})
            assert store.load()[tp] == at(position)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, partitions))
    assert store.load() == dict.fromkeys(partitions, at(10))


def test_several_tasks_may_save_the_same_partition_at_once(shelf: Shelf) -> None:
    """A task and its second attempt, the first time that anybody saves it."""
    stores = [shelf.make("p") for _ in range(4)]
    together = threading.Barrier(len(stores))
    partitions = Numbered()()

    def work(store: OffsetStore) -> None:
        for position, tp in enumerate(partitions):
            together.wait(180)
            store.save({tp: at(position)})

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(work, stores))
    assert stores[0].load() == {tp: at(n) for n, tp in enumerate(partitions)}
    for store in stores:
        store.close()


def test_a_store_travels_to_other_processes(shelf: Shelf) -> None:
    """Pickled, though it is connected."""
    store = shelf.make("p")
    store.save({T0: at(5)})
    again = pickle.loads(pickle.dumps(store))
    again.save({T1: at(6)})
    assert again.load() == store.load() == {T0: at(5), T1: at(6)}


def test_a_store_goes_on_in_a_forked_process_and_in_its_parent(shelf: Shelf) -> None:
    """As Spark's workers are made; a client does not survive it."""
    store = shelf.make("p")
    store.save({T0: at(5)})
    context: Any = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    for position in (6, 7):
        child = context.Process(target=save_and_load, args=(store, {T1: at(position)}, there))
        child.start()
        try:
            assert here.poll(30), "the child hangs"
            assert here.recv() == {T0: at(5), T1: at(position)}
            child.join(180)
            assert child.exitcode == 0
        finally:
            child.kill()
        assert store.load() == {T0: at(5), T1: at(position)}, "the parent's client is unharmed"
        store.save({T0: at(5)})
    here.close()
    there.close()


def test_what_somebody_else_wrote_is_refused(shelf: Shelf) -> None:
    shelf.spoil("p")
    store = shelf.make("p")
    with pytest.raises((Stopped, ConfigError)) as refused:
        store.load()
    assert refused.value.way_out
    assert refused.value.exit_code in (1, 2)
    assert not refused.value.retryable


def test_a_store_says_what_and_where_it_is(shelf: Shelf) -> None:
    store = shelf.make("p")
    assert store.where
    assert store.warning() == ""
    assert repr(store).startswith(f"{type(store).__name__}(")
