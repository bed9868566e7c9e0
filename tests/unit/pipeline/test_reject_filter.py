"""Dead letters chosen by reason, partition and age."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.cli.repair import reject_filter
from oncely.cli.verbs import WhichRejects
from oncely.config import parse
from oncely.core.batch import Reject
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, WrongInput
from oncely.pipeline import Pipeline
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
        (RejectFilter(before=NOON), False),
        (RejectFilter(before=NOON + 1), True),
        (RejectFilter("json", ("t",), NOON), True),
        (RejectFilter("json", ("u",), NOON), False),
    ],
)
def test_a_filter_chooses_what_has_all_of_its_properties(which: RejectFilter, chosen: bool) -> None:
    assert which(letter()) is chosen


def test_a_record_without_a_time_is_of_no_age() -> None:
    assert not RejectFilter(since=0)(letter(at=None))
    assert not RejectFilter(before=NOON)(letter(at=None))


def test_options_become_a_filter() -> None:
    found = reject_filter(
        WhichRejects(reason="x", partition=["t:0"], since="2026-01-01T13:00:00+01:00")
    )
    assert found == RejectFilter("x", ("t:0",), NOON)
    found = reject_filter(WhichRejects(since="2026-01-01T12:00:00"))
    assert found == RejectFilter(since=NOON)
    assert reject_filter(WhichRejects()) == RejectFilter()
    found = reject_filter(WhichRejects(before="2026-01-01T12:00:00"))
    assert found == RejectFilter(before=NOON)
    with pytest.raises(WrongInput, match="--since: 'yesterday' is no time"):
        reject_filter(WhichRejects(since="yesterday"))
    with pytest.raises(WrongInput, match="--before: '90x' is no time"):
        reject_filter(WhichRejects(before="90x"))


@pytest.mark.parametrize("text", ["t:", "t:x", "t:0-3", "t:0,", "t[0]", "t:0:1", "", ":0", "t:-1"])
def test_partitions_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(WrongInput, match=r"--partition: .* names no partitions"):
        reject_filter(WhichRejects(partition=["t:0", text]))
    which = reject_filter(WhichRejects(partition=["t", "a.b_c-d: 0, 12"]))
    assert which.partitions == ("t", "a.b_c-d: 0, 12")


def test_an_age_is_before_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncely.pipeline.rejects.time.time", lambda: NOON / 1000)
    day = 86_400_000
    assert reject_filter(WhichRejects(since="12 hours", before="90d")) == RejectFilter(
        since=NOON - day // 2, before=NOON - 90 * day
    )


@pytest.mark.parametrize(
    ("sink", "key"),
    [
        ({"kind": "kafka", "topic": "o", "rejects_topic": "o.rejects"}, "sink.rejects_topic"),
        ({"kind": "files", "url": "file:///lake", "manifest_topic": "o"}, "sink.rejects_topic"),
    ],
    ids=["kafka", "files"],
)
def test_dead_letters_that_cannot_be_changed(sink: dict[str, Any], key: str) -> None:
    settings = {
        "name": "p",
        "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": sink,
    }
    pipeline = Pipeline(parse(settings))
    with pytest.raises(ConfigError, match=key) as refused:
        pipeline.discard(RejectFilter())
    assert "docs/dead-letters.md" in str(refused.value)
    with pytest.raises(ConfigError, match=key):
        pipeline.rejects(discarded=True)
