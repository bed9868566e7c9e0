"""The garbage collector's thresholds while a member works."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from oncely.per_process import rare_collections


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ((700, 10, 10), (50_000, 20, 100)),
        ((90_000, 5, 500), (90_000, 20, 500)),
        ((0, 10, 10), (0, 10, 10)),
    ],
)
def test_thresholds_are_raised_and_restored(
    before: tuple[int, int, int], within: tuple[int, int, int]
) -> None:
    gc.set_threshold(*before)
    with rare_collections():
        assert gc.get_threshold() == within
    assert gc.get_threshold() == before
