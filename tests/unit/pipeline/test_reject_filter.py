"""Dead letters chosen by reason, partition and age."""

from __future__ import annotations

import pytest

from oncely.cli.rejects import reject_filter
from oncely.core.batch import Reject
from oncely.core.topics import TopicPartition
from oncely.errors import WrongInput
from oncely.pipeline.rejects import RejectFilter

NOON = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def letter(topic: str = "t", partition: int = 0, at: int | None = NOON) -> Reject:
    return Reject(TopicPartition(topic, partition), 7, at, None, b"{", (), "decode", "Not JSON")


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        (RejectFilter(), True),
        (RejectFilter("not json"), True),
        (RejectFilter("json at"), False),
        (RejectFilter(partitions=("t",)), True),
        (RejectFilter(partitions=("t:0",)), True),
        (RejectFilter(partitions=("t:1, 0", "u")), True),
        (RejectFilter(partitions=("t:1",)), False),
        (RejectFilter(partitions=("u", "tt")), False),
        (RejectFilter(since=NOON), True),
        (RejectFilter(since=NOON + 1), False),
        (RejectFilter("json", ("t",), NOON), True),
        (RejectFilter("json", ("u",), NOON), False),
    ],
)
def test_a_filter_chooses_what_has_all_of_its_properties(which: RejectFilter, chosen: bool) -> None:
    assert which(letter()) is chosen


def test_a_record_without_a_time_is_of_no_age() -> None:
    assert not RejectFilter(since=0)(letter(at=None))


def test_options_become_a_filter() -> None:
    found = reject_filter("x", ["t:0"], "2026-01-01T13:00:00+01:00")
    assert found == RejectFilter("x", ("t:0",), NOON)
    assert reject_filter(None, None, "2026-01-01T12:00:00") == RejectFilter(since=NOON)
    assert reject_filter(None, None, None) == RejectFilter()
    with pytest.raises(WrongInput, match="--since: 'yesterday' is no time"):
        reject_filter("x", None, "yesterday")
