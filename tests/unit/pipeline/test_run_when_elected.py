"""A replica that runs when it is elected, beside a group of a broker that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Fenced, Stopped
from oncely.pipeline import Pipeline, standby
from oncely.threads import StopSignal

MINIMAL = {
    "name": "p",
    "source": {"brokers": "h:1", "topics": ["b", "a"]},
    "decode": {"format": "raw"},
    "sink": {"kind": "sql", "url": "postgresql://h/d", "table": "t"},
}


class Alone:
    """The group of a replica that has no others."""

    joined: list[tuple[str | None, str]]

    def __init__(self, _brokers: str, _kafka: Any, topics: Any, given: Any, group: Any) -> None:
        assert topics == ["a"]
        self.joined.append((given.client, given.group))
        self._group = group

    def poll(self, _: float) -> None:
        self._group.assigned(frozenset({TopicPartition("a", 0)}))

    def close(self) -> None:
        """Nothing to leave."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> type[Alone]:
    Alone.joined = []
    monkeypatch.setattr(standby, "GroupConsumer", Alone)
    return Alone


def outcomes(*given: BaseException | bool) -> Callable[[], bool]:
    left = iter(given)

    def run() -> bool:
        one = next(left)
        if isinstance(one, BaseException):
            raise one
        return one

    return run


def test_a_run_that_is_fenced_joins_again_and_runs_again(alone: type[Alone]) -> None:
    heard: list[events.Event] = []
    run = outcomes(Fenced("p", 3, 4), True)
    assert standby.run_when_elected(Pipeline(parse(MINIMAL)), run, StopSignal(), heard.append)
    told = [one for one in heard if one != events.Polled()]
    assert told == [events.StandingBy(), events.FencedOut(3, 4), events.StandingBy()]
    (first, group), (second, _) = alone.joined
    assert group == "oncely-p.standby"
    assert str(first) < str(second)


def test_other_errors_end_it(alone: type[Alone]) -> None:
    run = outcomes(Stopped("lost"))
    with pytest.raises(Stopped):
        standby.run_when_elected(Pipeline(parse(MINIMAL)), run, StopSignal(), lambda _: None)
    assert len(alone.joined) == 1


def test_an_unexpected_error_of_the_groups_thread_ends_it(
    alone: type[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(alone, "poll", broken)
    with pytest.raises(RuntimeError, match="unexpected"):
        standby.run_when_elected(Pipeline(parse(MINIMAL)), bool, StopSignal(), lambda _: None)


def test_a_missing_right_is_told_by_the_name_of_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("worker.group", "no right")

    monkeypatch.setattr(standby, "GroupConsumer", refused)
    with pytest.raises(ConfigError, match=r"--on-fenced=wait: .*'oncely-p.standby'"):
        standby.run_when_elected(Pipeline(parse(MINIMAL)), outcomes(), StopSignal(), lambda _: None)
