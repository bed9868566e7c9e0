"""Ledger records and stamps of group offsets: ours, of others, and of other versions."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.core.ranges import TopicPartition
from oncely.errors import NewerFormat, OlderFormat, Stopped
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.records import LedgerKeys, OffsetMetadata, View, read_stamp, stamp

T0 = TopicPartition("t", 0)
PIPELINE = {
    "epoch": 3, "run": "r", "cluster": "c", "topic_ids": {"t": "id"}, "target": "out",
    "pending": {}, "settled": {"t": [0]}, "outputs": {}, "resetting": {}, "leaders": {},
    "counted": {"setting": "", "records": 0, "rejects": 0},
}  # fmt: skip
POSITION = {
    "position": 7, "epoch": 3, "cluster": "c", "topic_id": "id", "start": 5, "end": 7,
    "kind": "data", "records": 2, "rows": 2, "rejects": 0, "filtered": 0, "mode": "batch",
    "totals": None,
}  # fmt: skip
WORDS = LedgerKeys("p")
FOREIGN = [None, b"", b"no JSON", b"[1,2]", b"{}", b'["position"]', b'["pipeline",["p"]]', b"\xff"]


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize("value", [None, b"", b"no JSON", b"{}"])
def test_messages_that_are_no_ledger_records_change_nothing(
    key: bytes | None, value: bytes | None
) -> None:
    view = View()
    assert not WORDS.take(view, key, value)
    assert view == View()


def test_records_of_another_pipeline_and_of_kinds_to_come_are_passed_over() -> None:
    view = View()
    for key in (["position", "other", "t", 0], ["pipeline", "other"], ["to come", "p", 7]):
        assert WORDS.take(view, json.dumps(key).encode(), b"no JSON" if "other" in key else None)
    assert view == View()


@pytest.mark.parametrize(
    "key",
    [WORDS.pipeline_key(), WORDS.position_key(T0), WORDS.reset_key(T0, 1), WORDS.replayed_key(T0)],
)
def test_a_record_of_ours_that_cant_be_read_names_its_key(key: bytes) -> None:
    for value in (b"no JSON", b"{}"):
        with pytest.raises(Stopped, match="that Oncely has not written") as refused:
            WORDS.take(View(), key, value)
        assert refused.value.way_out


@pytest.mark.parametrize("key", [WORDS.pipeline_key(), WORDS.position_key(T0)])
def test_a_record_of_a_newer_format_is_refused(key: bytes) -> None:
    """Before its fields are parsed: they may have other types."""
    view = View()
    with pytest.raises(NewerFormat, match=r"has format 2, .*formats up to 1") as refused:
        WORDS.take(view, key, b'{"format":2,"epoch":"in a form of its own"}')
    assert "upgrade Oncely" in refused.value.way_out
    assert view == View()
    other = LedgerKeys("other")
    assert WORDS.take(view, other.pipeline_key(), b'{"format":2}'), "of another pipeline"


def test_a_record_without_a_format_has_the_first_one() -> None:
    stored = json.dumps(PIPELINE).encode()
    assert b"format" not in stored
    for value in (stored, stored[:-1] + b',"format":1}'):
        view = View()
        assert WORDS.take(view, WORDS.pipeline_key(), value)
        assert view.pipeline is not None


def test_foreign_messages_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(PipelineTopics("127.0.0.1:1", "p", "g", "ledger"))
    with caplog.at_level(logging.WARNING, "oncely.stores.topic.cluster"):
        for offset in (3, 4, 5):
            message: Any = SimpleNamespace(
                key=lambda: b"no JSON", value=lambda: b"x", offset=lambda at=offset: at
            )
            cluster._take(message)
    cluster.close()
    (told,) = caplog.messages
    assert "ledger" in told
    assert "offset 3" in told


def test_a_stamp_says_whose_it_is() -> None:
    for mode in ("partition", "batch"):
        known = OffsetMetadata(7, 3, "c", "id", mode)  # type: ignore[arg-type]
        text = stamp(known, "p")
        assert len(text) < 4096
        found = read_stamp(7, text)
        assert found == OffsetMetadata(7, 3, "c", "id", mode, "p")  # type: ignore[arg-type]
        assert found is not None


@pytest.mark.parametrize("text", ['["oncely",3,"c","id"]', '["oncely",3,"c","id","batch"]'])
def test_a_stamp_without_a_pipeline_is_refused(text: str) -> None:
    with pytest.raises(OlderFormat, match=r"offset 7 \(epoch 3\) has the format .* before 0\.1\.0"):
        read_stamp(7, text)


@pytest.mark.parametrize(
    ("key", "today", "added"),
    [
        (WORDS.pipeline_key(), PIPELINE, ["outputs", "resetting", "leaders", "counted"]),
        (WORDS.position_key(T0), POSITION, ["records", "rows", "rejects", "mode", "totals"]),
    ],
)
def test_a_record_without_a_field_that_early_versions_lacked_is_refused(
    key: bytes, today: dict[str, Any], added: list[str]
) -> None:
    whole = json.dumps(today).encode()
    assert WORDS.take(View(), key, whole)
    for name in added:
        lacking = {field: one for field, one in today.items() if field != name}
        view = View()
        with pytest.raises(OlderFormat, match=r"record of pipeline 'p' has the format .* 0\.1\.0"):
            WORDS.take(view, key, json.dumps(lacking).encode())
        assert view == View()


@pytest.mark.parametrize(
    "metadata",
    [None, "", "x", "{}", "[]", '["oncely"]', '["oncely",1,"c"]', '["oncely",1,"c","t","other"]',
     '["oncely",1,"c","t","other","p"]', '["oncely",1,"c","t","batch",7]', '["other",1,"c","t"]'],
)  # fmt: skip
def test_other_metadata_is_no_stamp(metadata: str | None) -> None:
    assert read_stamp(7, metadata) is None
