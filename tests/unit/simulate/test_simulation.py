"""The simulation itself: seeds hold and can be repeated, mistakes are found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from simulate.mistakes import MISTAKES
from simulate.search import first_found
from simulate.world import run


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_seeds_hold() -> None:
    for seed in range(30):
        run(f"test {seed}")


def test_a_seed_is_repeated() -> None:
    told: list[list[str]] = [[], []]
    for one in told:
        run(11, one.append)
    assert told[0] == told[1]
    assert len(told[0]) > 200


def test_every_fault_happens() -> None:
    told: list[str] = []
    for seed in range(30):
        run(seed, told.append)
    for what in ("run_on_spark", "kill", "leave", "expire", "FencedOut", "BatchFailed", "'lost'"):
        assert any(what in line for line in told), what


@pytest.mark.parametrize("mistake", ["offset before data", "end of the log claimed"])
def test_a_mistake_is_found(mistake: str) -> None:
    """All of them: ``make simulate``."""
    assert first_found(mistake)[1] is not None


def test_a_mistake_goes_when_it_is_switched_off() -> None:
    for mistake in MISTAKES.values():
        with mistake():
            pass
    run(1)
