"""What a delay and a throttle let through, as time goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oncely.core.ranges import TopicPartition
from oncely.runtimes.worker.assignment import Admitted, Delay, Throttle

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def test_a_record_waits_until_it_is_old_enough() -> None:
    gates = Throttle(Delay(delay_ms=100))
    assert gates.admit(P0, [900, 850, None], 1_000) == Admitted(3)
    assert gates.admit(P0, [900, 901, 1], 1_000) == Admitted(1, 1)  # in order, the last one, too


def test_a_record_from_the_future_waits_for_the_delay_and_holds_up_nothing_longer() -> None:
    gates, far = Throttle(Delay(delay_ms=100)), 10**15
    assert gates.admit(P0, [900, far, 1], 1_000) == Admitted(1, 100, far - 1_000)
    assert gates.admit(P0, [far, 1], 1_040) == Admitted(0, 60)  # told once
    assert gates.admit(P0, [far, 1, far, 1_090], 1_100) == Admitted(3, 90)
    assert gates.admit(P1, [1_150], 1_100) == Admitted(0, 100, 50)  # of each partition
    assert gates.admit(P1, [1_150], 1_200) == Admitted(1)  # in the past by now
    assert gates.admit(P0, [far], 1_199) == Admitted(1)
    assert gates.admit(P0, [far], 1_200) == Admitted(0, 100, far - 1_200)
    assert gates.admit(P0, [far], 900) == Admitted(0, 100, far - 900)  # the clock was set back


def test_so_many_records_in_so_much_time() -> None:
    gates = Throttle(Delay(rate=(3, 100)))
    assert gates.admit(P0, [None] * 2, 1_000) == Admitted(2)
    assert gates.admit(P1, [None] * 3, 1_000) == Admitted(3)  # of each partition
    assert gates.admit(P0, [None] * 2, 1_090) == Admitted(1, 10)
    assert gates.admit(P0, [None], 1_099) == Admitted(0, 1)
    assert gates.admit(P0, [None] * 4, 1_100) == Admitted(3, 100)
    assert gates.admit(P0, [None] * 4, 500) == Admitted(3, 100)  # the clock was set back


def test_what_waits_for_the_delay_does_not_use_up_the_throttle() -> None:
    gates = Throttle(Delay(delay_ms=100, rate=(2, 1_000)))
    assert gates.admit(P0, [950, 0], 1_000) == Admitted(0, 50)
    assert gates.admit(P0, [950, 0, 0], 1_050) == Admitted(2, 1_000)


def test_without_filters_everything_passes() -> None:
    assert not Delay()
    assert Throttle().admit(P0, [None, 5], 0) == Admitted(2)


@given(
    st.integers(1, 5),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30))),
)
def test_no_window_of_a_throttle_lets_more_through(
    most: int, length: int, polls: list[tuple[int, int]]
) -> None:
    """Nor does a wait end in vain: after it at least one record passes."""
    gates, now, windows = Throttle(Delay(rate=(most, length))), 0, dict[int, int]()
    began = 0
    for count, pause in polls:
        now += pause
        admitted, wait, _ = gates.admit(P0, [None] * count, now)
        if not windows or now >= began + length:
            began = now
        windows[began] = windows.get(began, 0) + admitted
        assert admitted == count or 0 < wait <= length
        if wait:
            assert Throttle.admit(gates, P0, [None], now + wait).number == 1
            began = now = now + wait
            windows[began] = 1
    assert all(used <= most for used in windows.values())
