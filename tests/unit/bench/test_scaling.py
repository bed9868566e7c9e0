"""The simulation of a load: what arrives is carried, or it is said that it is not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bench.scaling import Costs, Load, batches, simulate

LOAD = Load(10.0, 1_000, 240, 8, 8, 10.0, 20_000_000)
DAY = 86_400.0


def test_the_load_of_a_day() -> None:
    assert LOAD.mean * DAY * 1_000 == pytest.approx(10e12)
    assert LOAD.arrived(DAY) == pytest.approx(LOAD.mean * DAY)
    assert LOAD.rate(DAY / 2) == pytest.approx(2 * LOAD.mean)


def test_batches_carry_what_has_arrived() -> None:
    all_ = list(batches(LOAD, Costs(), DAY))
    assert all(a.ended <= b.began for a, b in itertools.pairwise(all_))
    assert sum(one.records for one in all_) + all_[-1].left == pytest.approx(
        LOAD.arrived(all_[-1].ended)
    )


@pytest.mark.parametrize(
    ("load", "costs"),
    [
        (replace(LOAD, most=1_000_000), Costs()),  # fewer than arrive between two triggers
        (replace(LOAD, cores=1), Costs(byte=9e-8)),
    ],
)
def test_a_load_that_is_too_much(load: Load, costs: Costs) -> None:
    assert simulate(LOAD, Costs())["keeps_up"]
    assert not simulate(load, costs)["keeps_up"]
