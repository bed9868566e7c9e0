"""Unexpected errors of threads are raised by their owners, or logged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from oncely.cli.progress import EndsWatch
from oncely.commit.run import Interval, PositionTimer
from oncely.core.ranges import TopicPartition
from oncely.kafka.source import KafkaSource
from oncely.runtimes.batches.run import GroupOffsetPublisher
from oncely.testing.processes import await_that
from oncely.threads import Thread, repeat

P0 = TopicPartition("t", 0)


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("unexpected")


def mirror(patched: pytest.MonkeyPatch) -> Callable[[], object]:
    made = GroupOffsetPublisher(KafkaSource("", ()), "g")
    patched.setattr(made, "_send", broken)
    made.start({P0: 1})
    return lambda: made.put({P0: 2})


def timer(patched: pytest.MonkeyPatch) -> Callable[[], object]:
    made: Any = PositionTimer(Interval(0.01))
    patched.setattr(made, "_save", broken)
    made.begin(None, None)
    return lambda: made.hand_out({})


@pytest.mark.parametrize("begin", [mirror, timer])
def test_its_owner_raises_it(
    begin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask = begin(monkeypatch)
    await_that(lambda: "has ended: RuntimeError: unexpected" in caplog.text, "a line")
    with pytest.raises(RuntimeError, match="unexpected"):
        ask()


def test_what_looks_again_and_again_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    over, calls = threading.Event(), []

    def look() -> None:
        calls.append(1)
        broken()

    Thread(lambda: repeat(over, 0.001, look), "looks").start()
    await_that(lambda: len(calls) > 3, "more looks")
    over.set()
    assert caplog.text.count("unexpected, and tried again every 0.001 s: RuntimeError") == 1


def test_the_ends_that_are_not_known_any_more_are_not_shown() -> None:
    watch = EndsWatch(broken, 0.001)
    watch.ends = {P0: 5}
    watch.start()
    await_that(lambda: watch.lag({P0: 1}) is None, "no lag")
    watch.stop()
