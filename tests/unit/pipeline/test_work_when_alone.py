"""A worker that stands by while a run on Spark is there, beside a group that is scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.errors import ConfigError, Fenced, InstanceTaken, Unavailable
from oncely.kafka.source import KafkaSource
from oncely.pipeline import Pipeline, standby
from oncely.threads import StopSignal
from tests.unit.pipeline.test_run_when_elected import MINIMAL, outcomes

PIPELINE = Pipeline(parse(MINIMAL))


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> list[int | Exception]:
    """The answers of the group, one after the other; the last one for ever."""
    answers: list[int | Exception] = []

    def members(_: KafkaSource, group: str) -> list[None]:
        assert group == "oncely-p.standby"
        one = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(one, Exception):
            raise one
        return [None] * one

    monkeypatch.setattr(KafkaSource, "members", members)
    monkeypatch.setattr(standby, "_LOOK_SECONDS", 0.0)
    return answers


def worked(
    run: Callable[[], bool], stop: StopSignal | None = None
) -> tuple[bool, list[events.Event]]:
    heard: list[events.Event] = []
    done = standby.work_when_alone(PIPELINE, run, stop or StopSignal(), heard.append)
    return done, heard


def test_it_begins_at_once_if_there_is_no_run_on_spark(members: list[Any]) -> None:
    members[:] = [0]
    assert worked(outcomes(True)) == (True, [])


def test_it_begins_when_the_run_on_spark_has_gone(members: list[Any]) -> None:
    """As long as the group does not answer, it may be there."""
    members[:] = [2, 1, Unavailable("no answer"), 1, 0]
    polled = events.Polled()
    assert worked(outcomes(True)) == (True, [events.StandingBy(), polled, polled, polled])


def test_when_a_run_on_spark_takes_over_it_stands_by_and_begins_again(members: list[Any]) -> None:
    members[:] = [0, 1, 0]
    done, heard = worked(outcomes(Fenced("p", 3, 4), True))
    assert done
    assert heard == [events.FencedOut(3, 4), events.StandingBy()]


def test_after_a_reset_it_begins_again_at_once(members: list[Any]) -> None:
    members[:] = [0]
    done, heard = worked(outcomes(Fenced("p", 3, 4), True))
    assert done
    assert heard == [events.FencedOut(3, 4)]


def test_a_static_member_whose_name_was_taken_ends(members: list[Any]) -> None:
    members[:] = [0]
    with pytest.raises(InstanceTaken):
        worked(outcomes(InstanceTaken("g", "one"), True))


def test_one_that_stands_by_can_be_stopped(members: list[Any]) -> None:
    members[:] = [1]
    stop = StopSignal()

    def told(_: events.Event) -> None:
        stop.ask()

    assert standby.work_when_alone(PIPELINE, outcomes(), stop, told) is False


def test_a_missing_right_is_told_by_the_name_of_the_option(members: list[Any]) -> None:
    members[:] = [ConfigError("worker.group", "no right")]
    with pytest.raises(ConfigError, match=r"--on-fenced=wait: .*'oncely-p.standby'"):
        worked(outcomes())
    members[:] = [ConfigError("source.kafka", "no login")]
    with pytest.raises(ConfigError, match="no login"):
        worked(outcomes())
