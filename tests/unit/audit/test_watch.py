"""When a watch ends, and what it reads again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import numpy as np
import pytest

from oncely.audit.evidence import Bounds, Readable, Span
from oncely.audit.report import CompleteUntil, Report
from oncely.audit.watch import Condition, RememberingLog, watch
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.errors import OncelyError, Unavailable, WrongInput
from tests.unit.audit import reports

T = reports.AT


def clean(until: datetime | None = None) -> Report:
    return replace(reports.clean(), complete_until=CompleteUntil(None, until))


def damaged(**found: int) -> Report:
    return replace(reports.clean(), found=Counter(found))  # type: ignore[arg-type]


@dataclass
class Heard:
    reports: list[Report] = field(default_factory=list)
    errors: list[OncelyError] = field(default_factory=list)

    def audited(self, report: Report) -> None:
        self.reports.append(report)

    def failed(self, error: OncelyError) -> None:
        self.errors.append(error)


def watched(
    outcomes: Sequence[Report | OncelyError], condition: Condition, **more: float
) -> tuple[int, Heard]:
    """Watch until the outcomes are used up, which sets the stop signal."""
    heard, stop, left = Heard(), threading.Event(), list(outcomes)

    def audit() -> Report:
        one = left.pop(0)
        if not left:
            stop.set()
        if isinstance(one, OncelyError):
            raise one
        return one

    return watch(audit, heard, condition, every=more.get("every", 0.0), stop=stop), heard


def test_until_a_time_is_proved() -> None:
    early, late = clean(T - timedelta(seconds=1)), clean(T)
    code, heard = watched([early, clean(), reports.unknown(), late, early], Condition(T))
    assert (code, len(heard.reports)) == (0, 4)


def test_damage_ends_it() -> None:
    code, heard = watched([clean(), damaged(duplicated=1), clean(T)], Condition(T))
    assert (code, len(heard.reports)) == (1, 2)
    code, heard = watched([damaged(lost=1), clean(T)], Condition(T))
    assert (code, len(heard.reports)) == (1, 1)


def test_where_nothing_tells_the_position_lost_records_may_be_late() -> None:
    condition = Condition(T, late=True)
    code, heard = watched([damaged(lost=3), clean(T), clean()], condition)
    assert (code, len(heard.reports)) == (0, 2)
    assert watched([damaged(lost=1, duplicated=1), clean(T)], condition)[0] == 1
    assert watched([damaged(lost=3)], replace(condition, timeout=0.0))[0] == 1


def test_a_timeout_is_unknown() -> None:
    outcomes = [clean(T - timedelta(1))] * 3
    code, heard = watched(outcomes, Condition(T, timeout=0.0))
    assert (code, len(heard.reports)) == (4, 1)
    assert watched([Unavailable("x")] * 3, Condition(T, timeout=0.0))[0] == 4


def test_without_a_time_only_a_signal_ends_it() -> None:
    code, heard = watched([clean(), damaged(lost=1), clean(), clean()], Condition())
    assert (code, len(heard.reports)) == (0, 4)
    assert watched([clean(), damaged(lost=1)], Condition())[0] == 1
    assert watched([clean(), clean()], Condition(T))[0] == 4


def test_no_answer_is_tried_again_and_wrong_input_is_not() -> None:
    code, heard = watched([Unavailable("x"), clean(T), clean()], Condition(T))
    assert (code, len(heard.errors), len(heard.reports)) == (0, 1, 1)
    with pytest.raises(WrongInput):
        watched([clean(), WrongInput("x"), clean(T)], Condition(T))


TP = TopicPartition("t", 0)


@dataclass
class CountingLog:
    reads: list[Span] = field(default_factory=list)
    compact: frozenset[str] = frozenset()
    id: str = "1"
    first: int = 0

    def identity(self) -> SourceIdentity:
        return SourceIdentity("c", {"t": self.id})

    def bounds(self) -> dict[TopicPartition, Bounds]:
        return {TP: Bounds(self.first, 100)}

    def compacted(self) -> frozenset[str]:
        return self.compact

    def readable(self, spans: Sequence[Span]):
        for span in spans:
            self.reads.append(span)
            yield Readable(span, np.array([[span.range.start, span.range.end - 1]]), 0)


def span(start: int) -> Span:
    return Span(TP, OffsetRange(start, start + 10))


def test_a_span_is_read_once() -> None:
    inner = CountingLog()
    log = RememberingLog(inner)  # type: ignore[arg-type]
    for _ in range(2):
        log.identity()
        found = list(log.readable([span(0), span(10)]))
        assert [one.span for one in found] == [span(0), span(10)]
        assert found[1].runs.tolist() == [[10, 19]]
    assert inner.reads == [span(0), span(10)]
    inner.first = 12
    mixed = list(log.readable([span(0), span(20), span(10)]))
    assert [one.span for one in mixed] == [span(0), span(20), span(10)]
    assert [one.first for one in mixed] == [12, 0, 12]
    assert inner.reads == [span(0), span(10), span(20)]


def test_another_topic_and_a_compacted_one_are_read_again() -> None:
    inner = CountingLog()
    log = RememberingLog(inner)  # type: ignore[arg-type]
    log.identity()
    list(log.readable([span(0)]))
    inner.id = "2"
    log.identity()
    list(log.readable([span(0)]))
    assert len(inner.reads) == 2
    inner.compact = frozenset({"t"})
    list(log.readable([span(0)]))
    assert len(inner.reads) == 3
