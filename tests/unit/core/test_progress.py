"""For how long records have waited without a commit."""

from __future__ import annotations

import pytest

from oncely.core.progress import waited
from oncely.core.ranges import TopicPartition

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.mark.parametrize(
    ("ages", "since", "moved", "together", "each"),
    [
        ({}, 900.0, {P0: 900.0}, 0.0, {}),                                  # nothing to read
        ({P0: 5.0}, 900.0, {P0: 900.0}, 5.0, {P0: 5.0}),                    # after an idle time
        ({P0: 900.0}, 900.0, {}, 900.0, {P0: 900.0}),                       # no commit, ever
        ({P0: 900.0}, 7.0, {P0: 7.0}, 7.0, {P0: 7.0}),                      # a backlog
        ({P0: 900.0, P1: 3.0}, 7.0, {P1: 7.0}, 7.0, {P0: 900.0, P1: 3.0}),  # one is stuck
        ({P0: 400.0, P1: 500.0}, 450.0, {P0: 450.0, P1: 600.0}, 450.0, {P0: 400.0, P1: 500.0}),
    ],
)  # fmt: skip
def test_records_wait(
    ages: dict[TopicPartition, float],
    since: float,
    moved: dict[TopicPartition, float],
    together: float,
    each: dict[TopicPartition, float],
) -> None:
    assert waited(ages, since, moved) == (together, each)
