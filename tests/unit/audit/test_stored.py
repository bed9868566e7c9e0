"""The audit's own readers of what is stored: they and the pipeline's read the same."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from oncely.audit import topic_snapshot
from oncely.audit.stored import delta_document, manifest, topic_ledger
from oncely.core.ranges import TopicPartition
from oncely.errors import OlderFormat
from oncely.stores.topic.records import LedgerKeys, View, read_stamp
from tests.golden.compare import FILES
from tests.storedtools import Message, golden

T0 = TopicPartition("t", 0)


def _within(own: Any, of: Any) -> bool:
    """The audit's reader may know fewer fields than the pipeline."""
    known, whole = msgspec.to_builtins(own), msgspec.to_builtins(of)
    return known.items() <= {name: whole.get(name, known[name]) for name in known}.items()


@pytest.mark.parametrize(
    ("name", "pipeline"), [("kafka_ledger", "golden"), ("files_ledger", "golden-files")]
)
def test_a_ledger_topic_says_the_same_to_the_audit_and_to_the_pipeline(
    name: str, pipeline: str
) -> None:
    view, keys = View(), LedgerKeys(pipeline)
    for one in golden(name):
        keys.take(view, one.key(), one.value())
    found = topic_ledger.parsed(golden(name), pipeline)
    assert found.problems == []
    assert found.pipeline is not None
    assert _within(found.pipeline, view.pipeline)
    assert found.positions.keys() == view.positions.keys() != set()
    assert all(_within(one, view.positions[tp]) for tp, one in found.positions.items())
    assert found.resets == view.resets
    assert found.replayed.keys() == view.replayed.keys()
    assert {tp: one.position for tp, one in found.replayed.items()} == {
        tp: one.position for tp, one in view.replayed.items()
    }


def test_the_history_of_a_partition_is_in_the_order_of_the_log() -> None:
    history = topic_ledger.parsed(golden("kafka_ledger"), "golden").history(T0)
    assert [one.offset for one in history] == sorted(one.offset for one in history)
    entries = [one.entry for one in history]
    assert all(isinstance(one, topic_ledger.PositionEntry) for one in entries)
    assert len({one.kind for one in entries}) > 1  # type: ignore[union-attr]


def test_an_invalid_ledger_message_is_a_problem_of_its_pipeline_only() -> None:
    wrong = [
        Message(7, b'["position","p","t",0]', b'{"position":"x"}'),
        Message(8, b'["position","p","t"]', b"{}"),
        Message(9, b'["odd","p"]', b"{}"),
        Message(10, b'["position","q","t",0]', b"no JSON"),
        Message(11, b"no ledger", b"1"),
        Message(12, None, b"1"),
    ]
    found = topic_ledger.parsed(wrong, "p")
    assert [offset for offset, _ in found.problems] == [7, 8, 9]
    assert (found.messages, found.foreign, found.pipeline) == ([], 2, None)


def test_messages_of_early_versions_are_refused() -> None:
    for key, value in (
        (b'["position","p","t",0]', {"position": 0, "epoch": 1, "cluster": "c", "topic_id": "i",
                                     "start": 0, "end": 0, "kind": "taken"}),
        (b'["pipeline","p"]', {"epoch": 1, "run": "r", "cluster": "c", "topic_ids": {},
                               "target": "out", "pending": {}, "settled": {}}),
    ):  # fmt: skip
        log = [Message(0, key, json.dumps(value).encode())]
        with pytest.raises(OlderFormat, match=r"before 0\.1\.0"):
            topic_ledger.parsed(log, "p")
        assert topic_ledger.parsed(log, "q").problems == []


def test_every_golden_stamp_is_read() -> None:
    for text in (FILES / "offset_metadata.txt").read_text().splitlines():
        assert read_stamp(4, text) is not None


def test_totals_tell_the_digest_of_a_range() -> None:
    def moved(start: int, end: int, *totals: Any, kind: str = "data") -> Message:
        known = {"position": end, "epoch": 1, "cluster": "c", "topic_id": "i", "start": start,
                 "end": end, "kind": kind, "records": 0, "rows": 0, "rejects": 0, "filtered": 0,
                 "mode": "partition", "totals": totals or None}  # fmt: skip
        return Message(0, b'["position","p","t",0]', json.dumps(known).encode())

    top = (1 << 64) - 1
    log = [
        moved(0, 0, kind="taken"),
        moved(0, 5, 0, 1, 5, 5, 0, 0, top, "r"),
        moved(5, 7, 0, 1, 7, 7, 0, 0, 3, "r"),
        moved(7, 7, 0, 1, 7, 7, 0, 0, 3, "r", kind="taken"),
        moved(7, 9, 7, 2, 2, 2, 0, 0, 8, "s"),
        moved(9, 12, 7, 2, 5, 5, 0, 0, None, ""),
        moved(12, 13, 7, 2, 6, 6, 0, 0, 5, "s"),
    ]
    found = topic_snapshot.in_force(topic_ledger.parsed(log, "p"), T0)
    assert [(one.span.range.start, one.counts.digest, one.counts.recipe) for one in found] == [
        (0, top, "r"), (5, 4, "r"), (7, 8, "s"), (9, None, ""), (12, None, "")]  # fmt: skip


def _manifest(messages: list[Message]) -> manifest.Manifest:
    return manifest.parsed((m.offset(), 0, m.key(), m.value()) for m in messages)


def _a_file(path: str, **more: Any) -> Message:
    known = {
        "kind": "file", "version": 1, "path": path, "format": "avro", "rows": 1, "bytes": 1,
        "sha256": "0", "partition": {}, "event_time": None, "ranges": [["t", 0, 0, 1]],
        "scope": [], "schema": "s", "pipeline": "p", "epoch": 1, "batch": 1,
    }  # fmt: skip
    return Message(0, path.encode(), json.dumps({**known, **more}).encode())


def _numbered(messages: list[Message]) -> list[Message]:
    return [replace(one, _offset=at) for at, one in enumerate(messages)]


def test_a_manifest_of_the_golden_files_is_read_whole() -> None:
    lines = [one for one in golden("files_manifest") if b"<bytes>" in (one.value() or b"")]
    sized = [replace(one, _value=(one.value() or b"").replace(b"<bytes>", b"1")) for one in lines]
    found = _manifest(sized)
    assert (found.problems, found.again) == ([], [])
    assert (len(lines), len(found.files), len(found.removed)) == (15, 3, 12)  # compacted
    written = [one.file for one in found.messages if one.file and not one.file.replaces]
    assert sum(one.rows for one in found.files.values()) == sum(one.rows for one in written) > 0
    assert _manifest(golden("manifest")).owners[0].root == "s3://lake/orders"


def test_a_file_leaves_the_table_by_its_tombstone_or_by_what_replaces_it() -> None:
    found = _manifest(
        _numbered([
            _a_file("a"), _a_file("b"), _a_file("c"), _a_file("ab", replaces=["a", "b"]),
            Message(0, b"c", None), Message(0, b"a", None), Message(0, b"[1]", b"other"),
        ])
    )  # fmt: skip
    assert (list(found.files), found.removed) == (["ab"], {"a": 3, "b": 3, "c": 4})
    assert (found.problems, found.again) == ([], [])


def test_a_path_that_is_named_twice_is_told() -> None:
    named = [_a_file("a"), _a_file("a"), _a_file("b"), Message(0, b"b", None), _a_file("b")]
    assert _manifest(_numbered(named)).again == ["a", "b"]


def test_an_invalid_manifest_message_is_a_problem() -> None:
    wrong = [
        _a_file("a", version=2),
        replace(_a_file("a"), _key=b"b"),
        Message(0, b"c", b"no JSON"),
        Message(0, b"\xff", b"{}"),
        Message(0, b'["owner","p"]', b"{}"),
    ]
    found = _manifest(_numbered(wrong))
    assert [offset for offset, _ in found.problems] == [0, 1, 2, 3, 4]
    assert not found.files


def test_a_dead_letter_is_known_by_its_last_headers() -> None:
    ledger = topic_ledger.TopicLedger()
    first, *_ = golden("kafka_dead_letters")
    foreign = replace(first, _headers=[("oncely.pipeline", b"golden"), *first.headers()])  # type: ignore[misc]
    for one in (first, foreign):
        found = topic_ledger.letter(one, "golden", {}, ledger)
        assert found is not None
        assert (found.of, found.offset, found.epoch) == (T0, 2, 1)
        assert (found.stage, found.reason, found.waits) == ("decode", "no JSON", True)
    assert topic_ledger.letter(first, "another", {}, ledger) is None
    assert topic_ledger.letter(Message(0, b"k", b"v"), "golden", {}, ledger) is None


def test_a_dead_letter_waits_until_it_is_replayed_or_its_record_is_read_again() -> None:
    ledger = topic_ledger.parsed(
        [Message(0, b'["reset","golden","t",0,2]', b'{"position":5}')], "golden"
    )
    here = TopicPartition("topic", 0)
    letters = [topic_ledger.letter(m, "golden", {here: 1}, ledger)
               for m in golden("kafka_dead_letters")]  # fmt: skip
    # offset 2 was replayed; offset 5 of epoch 1 is read again; offset 10 was rejected after that.
    assert [(one.offset, one.waits) for one in letters if one] == [
        (2, False), (5, False), (5, False), (10, True)]  # fmt: skip


def test_a_commit_of_a_delta_table_is_read_as_it_is_stored() -> None:
    told = json.loads((FILES / "delta_commits.jsonl").read_text().splitlines()[0])
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": 5, "operation": "WRITE", "oncely": told}},
        {"txn": {"appId": "oncely/golden", "version": 1 << 32}},
        {"add": {"path": "a%20b.parquet", "size": 9, "dataChange": True,
                 "stats": '{"numRecords": 3}'}},
        {"remove": {"path": "c.parquet", "dataChange": False}},
        {"metaData": {}},
    ]  # fmt: skip
    found = delta_document.parsed_commit(4, "\n".join(map(json.dumps, actions)).encode())
    assert (found.version, found.at_ms, found.operation) == (4, 5, "WRITE")
    assert [(one.path, one.rows, one.bytes) for one in found.added] == [("a b.parquet", 3, 9)]
    assert [(one.path, one.changes_data) for one in found.removed] == [("c.parquet", False)]
    assert found.told_by("golden") == told
    assert found.told_by("another") is None


def test_a_document_of_a_delta_table_is_the_one_that_the_pipeline_wrote() -> None:
    *_, last = (FILES / "delta_ledgers.txt").read_text().splitlines()
    found = msgspec.json.decode(last.partition(".json ")[2], type=delta_document.DeltaDocument)
    assert delta_document.positions_of(found) == {T0: 30, TopicPartition("t", 1): 30}
    assert (found.counted, found.leader_epochs) == (("1/100", 60, 1), {"t": {0: 3}})
