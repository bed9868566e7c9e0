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
from oncely.core.ranges import TopicPartition
from oncely.decode.schema import is_json
from oncely.errors import ConfigError
from oncely.pipeline import Pipeline, init
from oncely.pipeline.init import ProposalRequest, _settings, _without_password
from oncely.pipeline.proposal import Proposal, Records, propose, sink_of, toml, written
from oncely.runtimes.chunks import Processing, records_of
from tests import registrytools

ORDERS: list[dict[str, Any]] = [
    {"id": f"o{i}", "at": f"2026-01-0{i}T10:00:00Z", "day": "2026-01-01", "paid": True, "n": i,
     "price": [1, 2.5][i % 2], "tags": ["a"], "by": {"name": "x", "age": 3}, "none": None}
    for i in range(1, 9)
]  # fmt: skip


def bytes_of(values: Sequence[Any]) -> list[bytes | None]:
    return [None if one is None else json.dumps(one).encode() for one in values]


def proposed(keys: Sequence[bytes | None], values: Sequence[bytes | None], to: str | None = None,
             compacted: bool = False) -> tuple[Proposal, Pipeline, str]:  # fmt: skip
    raw = _settings(ProposalRequest("h:9092", "orders", to))
    made = propose(raw, Records(keys, values, compacted), None)
    text = written(made.raw, ["head"], made.above, made.behind)
    return made, Pipeline(parse(tomllib.loads(text))), text


def decoded(
    pipeline: Pipeline, keys: Sequence[bytes | None], values: Sequence[bytes | None]
) -> Any:
    tp = TopicPartition("orders", 0)
    found = [Reject(tp, i, 0, k, v, (), "", "")
             for i, (k, v) in enumerate(zip(keys, values, strict=True))]  # fmt: skip
    again = Processing(pipeline.decoder.decode, pipeline.row_transform)
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


def wrapped(*payloads: Any) -> list[bytes | None]:
    """JSON with schemas of Kafka Connect."""
    return bytes_of([{"schema": {"type": "struct"}, "payload": one} for one in payloads])


SHAPES: dict[str, tuple[Sequence[bytes | None], Sequence[bytes | None]]] = {
    "json": ([one["id"].encode() for one in ORDERS], bytes_of(ORDERS)),
    "json keys": ([b'{"k": 1}'] * 8, bytes_of(ORDERS)),
    "the key is in the value": ([b'{"n": 1}', b'{"n": 2}'], bytes_of(ORDERS[:2])),
    "the key's type is another": ([b'{"n": "1"}', b'{"n": "2"}'], bytes_of(ORDERS[:2])),
    "the key in capitals": ([b'{"N": 1}', b'{"N": 2}'], bytes_of(ORDERS[:2])),
    "nested keys": ([b'{"k": {"a": 1}, "j": 1}'] * 2, bytes_of(ORDERS[:2])),
    "keys that vary": ([b'{"k": {"a": 1}}', b'{"k": 1}'], bytes_of(ORDERS[:2])),
    "keys of impossible names": ([b'{"ctid": 1}', b'{"ctid": 2}'], bytes_of(ORDERS[:2])),
    "names of keys": ([b"a", b"b"], bytes_of([{"key": 1, "record_key": 2, "Kafka_Key": 3}] * 2)),
    "bytes": ([b"\xff", None], [b"\x00\xff", b"\x01"]),
    "text": ([b"k", None], [b"plain text", b"more"]),
    "names": (
        [b"k", b"j"],
        bytes_of([{"key": 1, "strange `name`": "${x} $$", "A": 1, "a": 2}, {}]),
    ),
    "long names": ([None], bytes_of([{"x" * 64 + end: 1 for end in "ab"}])),
    "names of the system": ([None], bytes_of([{"ctid": 1, "xmin": 2, "user": 3, "oid": 4}])),
    "strange names": ([None], bytes_of([{"a\0b": 1, 'q"': 2, "a b": 3, "ä,;": 4, "%s": 5}])),
    "names of the origin": ([b"k"], bytes_of([{"Kafka_Offset": 1, "kafka_topic": "t"}])),
    "nothing known": ([None, None], bytes_of([{"": 1, "x": []}, {"x": {}}])),
    "tombstone": ([b"k"], [None]),
    "numbers": (
        [None],
        bytes_of([{"x": 1 << 70, "y": 1 << 300, "z": {"a": [{"b": 1}, {"b": "t"}]}}]),
    ),
    "no DOUBLE holds the numbers": ([None, None], bytes_of([{"x": (1 << 60) + 1}, {"x": 2.5}])),
    "dates and times": ([None, None], bytes_of([{"x": "2026-01-01"}, {"x": "2026-01-01T10:00"}])),
    "an empty name inside": ([None], bytes_of([{"x": {"": 1}, "y": [["2026-01-01"], [None]]}])),
    "nanoseconds": ([b"k"], bytes_of([{"at": "2026-05-31T18:00:00.123456789Z"}])),
    "wrapped": (wrapped({"id": 1}, {"id": 2}), wrapped(*ORDERS[:2])),
    "wrapped, the key in the value": (wrapped({"n": 1}, {"n": 2}), wrapped(*ORDERS[:2])),
    "wrapped texts as keys": (wrapped("o1", "o2"), wrapped(*ORDERS[:2])),
    "wrapped numbers as keys": (wrapped(1, 2), wrapped(*ORDERS[:2])),
    "wrapped keys without a value": (wrapped(1, 2), [wrapped(ORDERS[0])[0], None]),
    "wrapped keys of another kind": (wrapped(1, "x", None), wrapped(*ORDERS[:3])),
    "wrapped lists": (wrapped([1], [2]), wrapped([1], [2])),
    "wrapped values, plain keys": ([b"o1", b"o2"], wrapped(*ORDERS[:2])),
    "Debezium": ([None], wrapped({"before": None, "after": {"id": 1}, "op": "c"})),
}
DESTINATIONS = [None, "postgresql://u@h/db", "./out", "topic:orders.clean", "delta:./table"]


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("to", DESTINATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_proposal_is_accepted(
    to: str | None, shape: str, compacted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the checks of `plan`, of sinks without a server; and a compacted topic is upserted."""
    monkeypatch.chdir(tmp_path)
    keys, values = SHAPES[shape]
    made, pipeline, _ = proposed(keys, values, to, compacted)
    without_server = to is None or to.startswith("delta")
    schema = pipeline.row_schema() if without_server else pipeline.transformed_schema()
    assert schema.names
    if without_server:
        pipeline.destination.check(schema)
    sink = made.raw["sink"]
    if sink.get("mode") == "upsert":
        of_key = [schema.field(name) for name in sink["keys"]]
        assert not any(pa.types.is_nested(one.type) or is_json(one) for one in of_key)
    chunk = decoded(pipeline, keys, values)
    assert chunk.records == len(keys)
    assert not chunk.rejections
    replaces = (compacted or None in values) and None not in keys
    assert (sink.get("mode") == "upsert") == (sink["kind"] in ("sql", "delta") and replaces)


def test_connects_envelopes_are_unwrapped() -> None:
    made, _, text = proposed(*SHAPES["wrapped numbers as keys"], None, True)
    assert made.raw["decode"]["unwrap"] == "payload"
    key = {"format": "string", "column": "n", "type": "BIGINT", "unwrap": "payload"}
    assert made.raw["decode"]["key"] == key
    assert made.raw["sink"]["keys"] == ("n",)
    assert "id STRING" in made.raw["decode"]["schema"]
    assert "Kafka Connect" in text
    keys, values = wrapped({"id": 1}), wrapped(ORDERS[0])
    made, _, _ = proposed(keys, values, None, True)
    assert made.raw["decode"]["key"] == {"format": "string", "column": "key"}, "two types of id"


def test_numbers_whose_schema_is_a_time_become_times() -> None:
    """As converters of Kafka Connect and Debezium write them; a decimal is told."""
    connect = "org.apache.kafka.connect.data"
    kinds = {"d": f"{connect}.Date", "at": f"{connect}.Timestamp", "n": f"{connect}.Decimal",
             "micro": "io.debezium.time.MicroTimestamp"}  # fmt: skip
    schema = {"fields": [{"field": one, "name": kind} for one, kind in kinds.items()]}
    value = {"d": 20_000, "at": 1_700_000_000_123, "n": "AeJA", "micro": 1_700_000_000_123_456}
    values = bytes_of([{"schema": schema, "payload": value}])
    made, pipeline, _ = proposed([b'"k"'], values, None, True)
    assert made.raw["decode"]["key"] == {"format": "string", "column": "key", "json": True}
    assert any("decimal.format" in one for one in made.above["decode.schema"])
    (row,) = decoded(pipeline, [b'"k"'], values).rows.drop(["n"]).to_pylist()
    assert {name: str(one)[:10] for name, one in row.items()} == {
        "d": "2024-10-04", "at": "2023-11-14", "micro": "2023-11-14", "key": "k",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "money"),
    [
        ("1.25 3 -0.5", True),
        ("9999999999999999.99", True),
        ("1.2 3.4", False),  # nothing tells them from measurements
        ("1.25 1.375", False),
        ("1.25 1e3", False),
        ("99999999999999999.99", False),
    ],
)
def test_numbers_with_two_decimals_are_kept_exactly(numbers: str, money: bool) -> None:
    values = [f'{{"total": {one}}}'.encode() for one in numbers.split()]
    nothing = [None] * len(values)
    _, pipeline, text = proposed(nothing, values)
    (column,) = pipeline.decoder.schema
    assert column.type == (pa.decimal128(18, 2) if money else pa.float64())
    assert ("as money has: 'total'. DECIMAL(18, 2)" in text) is money
    assert not decoded(pipeline, nothing, values).rejections
    more = decoded(pipeline, [None], [b'{"total": 1.375}'])
    assert bool(more.rejections) is money, "a reject, not a rounded row"


def test_milliseconds_are_told_and_become_a_timestamp_as_the_remark_says() -> None:
    values = bytes_of([{"id": 7, "at": 1_700_000_000_123, "gone": 1}, {"at": 1_700_000_000_456}])
    made, pipeline, _ = proposed([None] * 2, values)
    told = [one for one in made.above["decode.schema"] if "milliseconds" in one]
    assert [one.partition(" ")[0] for one in told] == ["'at'"]
    assert pipeline.decoder.schema.field("at").type == pa.int64()
    sql = told[0].partition("sql = '")[2].rstrip("'")
    changed = Pipeline(parse(made.raw | {"transform": {"sql": sql}}))
    rows = decoded(changed, [None] * 2, values).rows
    assert rows.schema.field("at").type == pa.timestamp("us", "UTC")
    assert rows["at"][0].as_py().isoformat() == "2023-11-14T22:13:20.123000+00:00"


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
    raw = _settings(ProposalRequest("h:9092", "orders"))
    assert propose(raw, Records([None] * 3, framed), "http://r").raw["decode"]["format"] == "avro"


def test_a_password_is_not_written() -> None:
    made = Proposal({"sink": sink_of("postgresql://u:canary@h/db", "t")})
    assert _without_password(made)["url"] == "postgresql://u:${PASSWORD}@h/db"
    made = Proposal({"sink": sink_of("postgresql://u:${MINE}@h/db", "t")})
    assert _without_password(made)["url"] == "postgresql://u:${MINE}@h/db"
    with pytest.raises(ConfigError, match="secret") as refused:
        _settings(ProposalRequest("h:1", "t", kafka={"sasl.password": "canary"}))
    assert "canary" not in str(refused.value)
    assert "${SASL_PASSWORD}" in refused.value.way_out


def test_brokers_become_a_variable_unless_they_are_one() -> None:
    assert init.exports(ProposalRequest("a:1, b:2", "orders")) == "export BROKERS='a:1, b:2'"
    assert init.exports(ProposalRequest("${HERE}", "orders")) == ""


def test_a_variable_of_a_destination_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", "postgresql://u:canary@h/db")
    made, _, text = proposed([None] * 8, bytes_of(ORDERS), "${SHOP}")
    assert (made.raw["sink"]["kind"], made.raw["sink"]["url"]) == ("sql", "${SHOP}")
    assert _without_password(made)["url"] == "${SHOP}"
    assert "canary" not in text
    monkeypatch.setenv("SHOP", "topic:clean")
    assert _settings(ProposalRequest("h:9092", "orders", "${SHOP}"))["sink"]["topic"] == "clean"
    monkeypatch.delenv("SHOP")
    with pytest.raises(ConfigError, match="no variable SHOP"):
        _settings(ProposalRequest("h:9092", "orders", "${SHOP}"))


def test_a_destination_of_no_kind_is_refused() -> None:
    for to in ("warehouse", "delta:warehouse"):
        with pytest.raises(ConfigError, match="allowed"):
            sink_of(to, "t")
    assert sink_of("sub/folder", "t")["url"] == Path("sub/folder").resolve().as_uri()


@pytest.mark.parametrize("text", ['"', "\\", "a\nb\n", 'x"""y\n', "ü\x7f\x01\n", "\t"])
def test_texts_come_back_from_toml(text: str) -> None:
    assert tomllib.loads(f"x = {toml(text)}")["x"] == text


def test_an_avro_key_that_gives_no_columns_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the format of the values."""
    with registrytools.running() as registry:
        number = registry.add("string", "orders-key")
        keys = [registrytools.wire(number, "string", one["id"]) for one in ORDERS]
        monkeypatch.setattr(init, "_records", lambda *_: Records(keys, bytes_of(ORDERS)))
        monkeypatch.setenv("BROKERS", "h:9092")
        wanted = ProposalRequest("h:9092", "orders", registry=registry.url)
        text = init.pipeline_file(wanted, init.given_pipeline(wanted), "orders.toml")
        assert "The key is left out" in text
        made = tomllib.loads(text)
        assert "key" not in made["decode"]
        assert Pipeline(parse(made)).decoder.schema.names[0] == "id"
