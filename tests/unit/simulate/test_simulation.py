"""The simulation itself: seeds hold and can be repeated, mistakes are found."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest

from simulate.batches import run_batches
from simulate.search import ALL, RUNS, first_found
from simulate.world import run

_SECONDS = re.compile(r"phases=\{.*\}")  # of processor time


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_seeds_hold() -> None:
    for seed in range(30):
        run(f"test {seed}")


def test_seeds_of_runs_in_batches_hold() -> None:
    for seed in range(15):
        run_batches(f"test {seed}")


@pytest.mark.parametrize("of", RUNS.values())
def test_a_seed_is_repeated(of: Callable[..., None]) -> None:
    told: list[list[str]] = [[], []]
    for one in told:
        of(11, lambda line, one=one: one.append(_SECONDS.sub("", line)))
    assert told[0] == told[1]
    assert len(told[0]) > 150


def test_every_fault_happens() -> None:
    told: list[str] = []
    for seed in range(30):
        run(seed, told.append)
    for what in ("run_on_spark", "kill", "leave", "expire", "FencedOut", "BatchFailed", "'lost'"):
        assert any(what in line for line in told), what


def test_every_fault_of_runs_in_batches_happens() -> None:
    told: list[str] = []
    for seed in range(25):
        run_batches(seed, told.append)
    wanted = (
        "kill", "Draining", "GapFound", "BatchFailed", "PartitionAdded", "is fenced by",
        "gone back",
        "kind='hole'", "replayed=True", "ends: True", "copy of a task", "attempt dies",
        "left behind",
    )  # fmt: skip
    for what in wanted:
        assert any(what in line for line in told), what


@pytest.mark.parametrize(
    "mistake",
    [
        "offset before data",
        "end of the log claimed",
        "planned end claimed",
        "deleted records taken for a hole",
        "a newer run not looked for while idle",
    ],
)
def test_a_mistake_is_found(mistake: str) -> None:
    """All of them: ``make simulate``."""
    assert first_found(mistake)[1] is not None


def test_a_mistake_goes_when_it_is_switched_off() -> None:
    for _, mistake in ALL.values():
        with mistake():
            pass
    run(1)
    run_batches(1)
