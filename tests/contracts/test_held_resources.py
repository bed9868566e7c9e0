"""What holds a client or a session is closed where it ends: threads and open files stay as many as
they are, over any number of takeovers, without Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncely.core.claim import Fence
from oncely.errors import Fenced, Unavailable
from oncely.kafka.client import KafkaAdmin
from oncely.kinds.handlers.sink import HandlersSink
from tests.contracts.sinks import adapter
from tests.contracts.test_partial_takeovers import take, write
from tests.sinktools import T0, T1, postgres_place, sink_to

_BEFORE = 4  # takeovers; after these all that is kept on purpose is there
_SLACK = 8  # threads and files of instances that are being initialised or are ending
_KINDS = ("sqlite", "postgresql", "kafka-member")


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> int:
    """The threads and the open files of this process."""
    return len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=[*_KINDS, pytest.param("handlers", marks=pytest.mark.servers)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Sinks of one pipeline, each as a process of its own makes it."""
    if request.param in _KINDS:
        with contextlib.contextmanager(adapter)(
            request.param, request.getfixturevalue, tmp_path
        ) as to:
            yield to.sink
    else:
        place = postgres_place(request.getfixturevalue("shared_database"))
        yield lambda: HandlersSink(sink_to(place).ledger, {"t": lambda *_: None})


@pytest.mark.parametrize(
    "takeovers",
    [
        8,
        pytest.param(40, marks=pytest.mark.long),
        pytest.param(100, marks=[pytest.mark.long, pytest.mark.deep]),
    ],
)
def test_takeovers_leave_nothing_open(
    make: Callable[[], Any], takeovers: int, uncollected: None
) -> None:
    """Two processes take partitions from each other, and the fenced one tries to commit."""
    sinks, seen = [make(), make()], list[int]()
    fences: list[Fence] = [take(one, T0, T1) for one in sinks]
    for at in range(_BEFORE + takeovers):
        own, other = at % 2, (at + 1) % 2
        fences[own] = take(sinks[own], T0, T1)
        for tp in (T0, T1):
            write(sinks[own], fences[own], tp, 2 * at, 2 * at + 1)
            write(sinks[own], fences[own], tp, 2 * at + 1, 2 * at + 2)
        with contextlib.suppress(Fenced, Unavailable):
            write(sinks[other], fences[other], T0, 2 * at + 2, 2 * at + 3)
        seen.append(held())
    for one in sinks:
        one.close()
    assert max(seen[_BEFORE:]) <= max(seen[:_BEFORE]) + _SLACK


def test_an_error_that_is_kept_keeps_no_admin_client(uncollected: None) -> None:
    kept, before = list[Unavailable](), held()
    for _ in range(3):
        admin = KafkaAdmin("127.0.0.1:1", {}, 0.1)
        with pytest.raises(Unavailable) as found:
            admin.ask("look", lambda client, _: client.list_topics())
        kept.append(found.value)
        admin.close()
    assert len(kept) == 3
    assert held() <= before + 1
