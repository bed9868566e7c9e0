"""A proposed pipeline file is accepted, and decodes the records that it was proposed from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.core.batch import Reject
from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError
from oncely.pipeline import Pipeline
from oncely.pipeline.init import Wanted, _settings, _without_password
from oncely.pipeline.proposal import Proposal, Records, propose, sink_of
from oncely.pipeline.proposed_file import toml, written
from oncely.runtimes.reprocess import Reprocessing, records_of

ORDERS: list[dict[str, Any]] = [
    {"id": f"o{i}", "at": f"2026-01-0{i}T10:00:00Z", "day": "2026-01-01", "paid": True, "n": i,
     "price": [1, 2.5][i % 2], "tags": ["a"], "by": {"name": "x", "age": 3}, "none": None}
    for i in range(1, 9)
]  # fmt: skip


def bytes_of(values: Sequence[Any]) -> list[bytes | None]:
    return [None if one is None else json.dumps(one).encode() for one in values]


def proposed(keys: Sequence[bytes | None], values: Sequence[bytes | None], to: str | None = None,
             compacted: bool = False) -> tuple[Proposal, Pipeline, str]:  # fmt: skip
    raw = _settings(Wanted("h:9092", "orders", to))
    made = propose(raw, Records(keys, values, compacted), None)
    text = written(made.raw, ["head"], made.above, made.behind)
    return made, Pipeline(parse(tomllib.loads(text))), text


def decoded(
    pipeline: Pipeline, keys: Sequence[bytes | None], values: Sequence[bytes | None]
) -> Any:
    tp = TopicPartition("orders", 0)
    found = [Reject(tp, i, 0, k, v, (), "", "")
             for i, (k, v) in enumerate(zip(keys, values, strict=True))]  # fmt: skip
    again = Reprocessing(pipeline.decoder.decode, pipeline.row_transform)
    return again.chunk(records_of(found))


def test_the_types_are_those_of_the_values() -> None:
    values = bytes_of(ORDERS)
    made, pipeline, _ = proposed([None] * 8, values)
    types = {one.name: one.type for one in pipeline.decoder.schema}
    assert types == {
        "id": pa.string(),
        "at": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "paid": pa.bool_(),
        "n": pa.int64(),
        "price": pa.float64(),
        "tags": pa.list_(pa.string()),
        "by": pa.struct({"name": pa.string(), "age": pa.int64()}),
    }
    assert all(one.nullable for one in pipeline.decoder.schema)
    assert "'none'" in " ".join(made.above["decode.schema"])
    assert "key" not in made.raw["decode"]
    assert decoded(pipeline, [None] * 8, values).rows.num_rows == 8


@pytest.mark.parametrize(
    "to", [None, "postgresql://u@h/db", "./out", "topic:orders.clean", "delta:./table"]
)
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ([one["id"].encode() for one in ORDERS], bytes_of(ORDERS)),
        ([b'{"k": 1}'] * 8, bytes_of(ORDERS)),
        ([b"\xff", None], [b"\x00\xff", b"\x01"]),
        ([b"k", None], [b"plain text", b"more"]),
        ([b"k", b"j"], bytes_of([{"key": 1, "strange `name`": "${x} $$", "A": 1, "a": 2}, {}])),
        ([None, None], bytes_of([{"": 1, "x": []}, {"x": {}}])),
        ([b"k"], [None]),
        ([None], bytes_of([{"x": 1 << 70, "y": 1 << 300, "z": {"a": [{"b": 1}, {"b": "t"}]}}])),
    ],
    ids=["json", "json keys", "bytes", "text", "names", "nothing known", "tombstone", "numbers"],
)
def test_every_proposal_is_accepted(to: str | None, keys: Any, values: Any) -> None:
    _, pipeline, _ = proposed(keys, values, to)
    assert pipeline.transformed_schema().names
    chunk = decoded(pipeline, keys, values)
    assert chunk.records == len(keys)


def test_a_delta_table_is_partitioned_by_a_date_and_has_modes() -> None:
    made, _, _ = proposed([None] * 8, bytes_of(ORDERS), "delta:s3://bucket/orders")
    sink = {"kind": "delta", "url": "s3://bucket/orders", "mode": "append"}
    assert made.raw["sink"] == sink | {"partition_by": ["day"]}
    compacted, _, text = proposed([b"a", b"b"], bytes_of([{"x": 1}] * 2), "delta:./t", True)
    assert compacted.raw["sink"]["mode"] == "upsert"
    assert 'keys = ["key"]' in text


def test_a_column_that_equals_the_key_is_the_key() -> None:
    keys: list[bytes | None] = [str(one["id"]).encode() for one in ORDERS]
    made, pipeline, _ = proposed(keys, bytes_of(ORDERS))
    assert made.raw["decode"]["key"] == {"format": "string", "column": "id"}
    assert made.raw["sink"]["mode"] == "append"
    assert not decoded(pipeline, keys, bytes_of(ORDERS)).rejections


def test_a_number_may_be_the_key() -> None:
    keys: list[bytes | None] = [b"1", b"2"]
    values = bytes_of([{"id": 1, "x": 2}, {"id": 2, "x": 2}])
    made, pipeline, _ = proposed(keys, values)
    assert made.raw["decode"]["key"] == {"format": "string", "column": "id", "type": "BIGINT"}
    assert not decoded(pipeline, keys, values).rejections


def test_what_varies_is_json_and_scalars_are_texts() -> None:
    values = bytes_of([
        {"a": 1, "b": 1, "c": {"d": 1, "e": []}, "f": [{"g": 1}], "h": [], "i": {"j": None}},
        {"a": "x", "b": {}, "c": {"d": [1], "e": []}, "f": [{"g": 1, "k": []}], "h": [], "i": {}},
    ])  # fmt: skip
    made, pipeline, _ = proposed([None, None], values)
    lines = [one.strip(",") for one in made.raw["decode"]["schema"].splitlines()]
    assert lines == ["a STRING", "b JSON", "c JSON", "f ARRAY<STRUCT<g: BIGINT>>", "h JSON",
                     "i JSON"]  # fmt: skip
    rows = decoded(pipeline, [None, None], values).rows.to_pylist()
    assert [one["a"] for one in rows] == ["1", "x"]
    assert [one["b"] for one in rows] == ["1", "{}"]


def test_keys_of_a_compacted_topic_and_of_tombstones_are_upserted() -> None:
    keys = [b"a", b"a", b"b"]
    for values, compacted in ((bytes_of(ORDERS[:3]), True), ([*bytes_of(ORDERS[:2]), None], False)):
        made, _, text = proposed(keys, values, compacted=compacted)
        assert (made.raw["sink"]["mode"], made.raw["sink"]["keys"]) == ("upsert", ("key",))
        assert 'keys = ["key"]' in text


def test_keys_that_only_repeat_are_a_question_to_the_user() -> None:
    made, _, text = proposed([b"a", b"a", b"b"], bytes_of(ORDERS[:3]))
    assert made.raw["sink"]["mode"] == "append"
    assert '# mode = "upsert"\n# keys = ["key"]\nmode = "append"' in text


def test_files_are_partitioned_by_the_first_time() -> None:
    made, _, _ = proposed([None] * 8, bytes_of(ORDERS), "./out")
    assert made.raw["sink"]["partition_by"] == ["date(at)"]
    assert made.raw["sink"]["url"].startswith("file:///")


def test_some_broken_values_are_rejects_of_json() -> None:
    values = [*bytes_of(ORDERS), b"{", b"\xff"]
    made, pipeline, _ = proposed([None] * 10, values)
    assert made.behind["decode.format"].startswith("8 of 10 values are JSON objects")
    assert [one.record for one in decoded(pipeline, [None] * 10, values).rejections] == [8, 9]


def test_framed_values_need_a_registry() -> None:
    framed = [b"\x00\x00\x00\x00\x07abc"] * 3
    made, _, text = proposed([None] * 3, framed)
    assert made.raw["decode"] == {"format": "raw"}
    assert "--registry" in text
    raw = _settings(Wanted("h:9092", "orders"))
    assert propose(raw, Records([None] * 3, framed), "http://r").raw["decode"]["format"] == "avro"


def test_a_password_is_not_written() -> None:
    made = Proposal({"sink": sink_of("postgresql://u:canary@h/db", "t")})
    assert _without_password(made)["url"] == "postgresql://u:${PASSWORD}@h/db"
    made = Proposal({"sink": sink_of("postgresql://u:${MINE}@h/db", "t")})
    assert _without_password(made)["url"] == "postgresql://u:${MINE}@h/db"
    with pytest.raises(ConfigError, match="secret") as refused:
        _settings(Wanted("h:1", "t", kafka={"sasl.password": "canary"}))
    assert "canary" not in str(refused.value)
    assert "${SASL_PASSWORD}" in refused.value.way_out


def test_a_variable_of_a_destination_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", "postgresql://u:canary@h/db")
    made, _, text = proposed([None] * 8, bytes_of(ORDERS), "${SHOP}")
    assert (made.raw["sink"]["kind"], made.raw["sink"]["url"]) == ("sql", "${SHOP}")
    assert _without_password(made)["url"] == "${SHOP}"
    assert "canary" not in text
    monkeypatch.setenv("SHOP", "topic:clean")
    assert _settings(Wanted("h:9092", "orders", "${SHOP}"))["sink"]["topic"] == "clean"
    monkeypatch.delenv("SHOP")
    with pytest.raises(ConfigError, match="no variable SHOP"):
        _settings(Wanted("h:9092", "orders", "${SHOP}"))


def test_a_destination_of_no_kind_is_refused() -> None:
    for to in ("warehouse", "delta:warehouse"):
        with pytest.raises(ConfigError, match="allowed"):
            sink_of(to, "t")
    assert sink_of("sub/folder", "t")["url"] == Path("sub/folder").resolve().as_uri()


@pytest.mark.parametrize("text", ['"', "\\", "a\nb\n", 'x"""y\n', "ü\x7f\x01\n", "\t"])
def test_texts_come_back_from_toml(text: str) -> None:
    assert tomllib.loads(f"x = {toml(text)}")["x"] == text
