"""A reset and a replay of dead letters at the same time: a record takes effect by one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.core.batch import Reject
from oncely.core.change import Judge, Reprocessed
from oncely.core.claim import Opened, Takeover
from oncely.kafka.client import make
from oncely.kafka.sender import Producer
from oncely.kinds.files.change import replay_into_files
from oncely.testing.servers.kafka import Broker
from tests import filestools
from tests.filestools import BAD, FilesPlace, publish_all, stage, what
from tests.kafkatools import Topics, make_topics, ready
from tests.replaytools import bad, judging, left, replayed
from tests.sinktools import SOURCE, T0, T1, at_t0, commit_all, numbered

_WAIT = 60.0


@pytest.fixture
def topics(broker: Broker) -> Topics:
    """Ten records, of which the last six were rejected."""
    topics = make_topics(broker)
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, [*numbered(0, 4), *bad(*range(4, 10))]), fence)
    return topics


def put_back(topics: Topics, meanwhile: Callable[[], object] = lambda: None) -> Opened:
    """Reset to offset 4; ``meanwhile`` is done in the middle, when the reset is asked where to."""

    def elsewhere(_: Any) -> dict[Any, int]:
        meanwhile()
        return {T0: 4}

    return topics.sink().open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=elsewhere))


def read_again(topics: Topics, opened: Opened) -> None:
    """The records from offset 4 on are good now."""
    commit_all(topics.sink(), at_t0(4, numbered(4, 10)), opened.fence)


def once(when: Callable[[], object], judge: Judge) -> Judge:
    """Do something when the letters have been read, the first time."""
    done: list[bool] = []

    def also(found: Any) -> Reprocessed:
        if not done:
            done.append(True)
            when()
        return judge(found)

    return also


def test_a_reset_after_letters_were_read_voids_them(topics: Topics) -> None:
    judge = once(lambda: read_again(topics, put_back(topics)), judging())
    assert replayed(topics.sink(), judge) == (0, 0)
    assert topics.ids() == list(range(10))
    assert left(topics) == []


class Hooked:
    """Makes producers that do something before calls of a name, when it is armed."""

    def __init__(self, name: str, what: Callable[[], object]) -> None:
        self.name, self.what, self.armed = name, what, False

    def connect(self, kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        return _Hooked(made, self) if issubclass(kind, Producer) else made

    def called(self, name: str) -> None:
        if self.armed and name == self.name:
            self.armed = False
            self.what()


class _Hooked:
    def __init__(self, inner: Any, hooked: Hooked) -> None:
        self._inner, self._hooked = inner, hooked

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any, **own: Any) -> Any:
            self._hooked.called(name)
            return method(*args, **own)

        return call


@pytest.mark.parametrize("when", ["asked", "begin_transaction"])
def test_a_replay_that_has_compared_before_a_reset_commits_before_it_or_not_at_all(
    topics: Topics, when: str
) -> None:
    """It begins in the middle of the reset, has compared, and is slow to commit.

    The reset is asked where positions are to go, or begins the transaction that decides it. While
    that is open, a replay waits for its end.
    """
    arrived, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        arrived.set()
        assert go_on.wait(_WAIT)

    slow = Hooked("commit_transaction", wait)
    slow.armed = True
    outcome: list[tuple[int, int]] = []
    thread = threading.Thread(
        target=lambda: outcome.append(replayed(topics.sink(connect=slow.connect)))
    )

    def begin() -> None:
        thread.start()
        assert arrived.wait(_WAIT)

    hooked = Hooked(when, begin)

    def elsewhere(_: Any) -> dict[Any, int]:
        hooked.armed = True
        hooked.called("asked")
        return {T0: 4}

    sink = topics.sink(connect=hooked.connect)
    opened = sink.open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=elsewhere))
    read_again(topics, opened)
    go_on.set()
    thread.join(_WAIT)
    assert outcome == [(0, 0)]
    assert topics.ids() == list(range(10))


def test_a_replay_that_commits_while_a_reset_begins_comes_before_it(topics: Topics) -> None:
    """As if one had followed the other: what was written before a reset is read again."""
    done: list[tuple[int, int]] = []
    opened = put_back(topics, lambda: done.append(replayed(topics.sink())))
    assert done == [(6, 0)]
    assert topics.ids() == list(range(10))
    assert left(topics) == []
    read_again(topics, opened)
    assert topics.ids() == sorted([*range(10), *range(4, 10)])


# -- files -----------------------------------------------------------------------------------


def replayed_into_files(place: FilesPlace, judge: Judge) -> tuple[int, int]:
    sink = place.sink()
    sink.prepare()
    with closing(replay_into_files(sink)) as letters:
        return replay(letters, judge, Backoff())


def test_a_reset_after_letters_were_read_voids_them_for_files_too(
    broker: Broker, tmp_path: Path
) -> None:
    place = filestools.make_place(broker, tmp_path)
    sink = place.sink()
    fence = filestools.open_sink(sink).fence
    publish_all(sink, what(stage(sink, fence)), fence)

    def put_back() -> None:
        opened = place.sink().open(
            Takeover(SOURCE, lambda: {}, {T0: 0, T1: 0}, reset=lambda _: {T0: 0, T1: 0})
        )
        sink = place.sink()
        sink.prepare()
        publish_all(sink, what(stage(sink, opened.fence)), opened.fence)

    def passes(one: Reject) -> bool:
        assert one.offset == BAD
        return True

    assert replayed_into_files(place, once(put_back, judging(passes))) == (0, 0)
    assert place.ids().count(BAD) == 0
    assert replayed_into_files(place, judging(passes)) == (1, 0)  # the letter of the second reading
    assert place.ids().count(BAD) == 1
