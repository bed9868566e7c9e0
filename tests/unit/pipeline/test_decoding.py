"""What a pipeline file says under ``decode`` becomes a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from oncely.config import DecodeSettings, parse
from oncely.decode.base import Decoder
from oncely.decode.json import JsonDecoder
from oncely.errors import ConfigError, Unavailable
from oncely.pipeline import Pipeline
from oncely.pipeline.parts import decoder_of
from oncely.testing.servers.certificates import make_certificates
from tests.registrytools import running

SINK = {"kind": "sql", "url": "postgresql://127.0.0.1/shop", "table": "t"}


def made(**decode: Any) -> Decoder:
    return decoder_of(TypeAdapter(DecodeSettings).validate_python(decode), ["flights"])


def schema_file(folder: Path, schema: Any) -> str:
    file = folder / "schema.avsc"
    file.write_text(schema if isinstance(schema, str) else json.dumps(schema))
    return str(file)


AVRO = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}


def test_each_format_has_its_columns(tmp_path: Path) -> None:
    file = schema_file(tmp_path, AVRO)
    text = made(format="raw", columns=["value"], key={"format": "string", "column": "id"})
    assert text.schema == pa.schema({"value": pa.binary(), "id": pa.string()})
    json_key = made(format="json", schema="n INT", key={"format": "json", "schema": "id BIGINT"})
    assert json_key.schema == pa.schema({"n": pa.int32(), "id": pa.int64()})
    avro = made(format="json", schema="n INT", key={"format": "avro", "schema_file": file})
    assert avro.needs == {"key", "value"}
    assert made(format="avro", schema_file=file).schema.names == ["id"]
    assert made(format="json", schema="infer").schema.names == ["value"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "no Avro schema"), ('"long"', "it is no record but long"), ("\udcff", "can't read")],
)
@pytest.mark.parametrize("where", ["decode", "decode.key"])
def test_a_schema_file_without_columns_is_named_by_its_key(
    tmp_path: Path, text: str, problem: str, where: str
) -> None:
    file = tmp_path / "schema.avsc"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    avro = {"format": "avro", "schema_file": str(file)}
    with pytest.raises(ConfigError, match=problem) as caught:
        made(**(avro if where == "decode" else {"format": "raw", "key": avro}))
    assert caught.value.key == f"{where}.schema"


@pytest.mark.parametrize("where", ["decode", "decode.key"])
def test_a_registry_is_asked_over_tls_of_a_private_authority(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.decode.avro._RETRIES", 0)

    def asked(**more: str) -> Decoder:
        avro = {"format": "avro", "schema_registry": registry.url, **more}
        given = avro if where == "decode" else {"format": "raw", "key": avro}
        sections = {"source": {"brokers": "h:1", "topics": ["flights"]}, "sink": SINK}
        settings = parse({"name": "p", "decode": given, **sections}, base=tmp_path)
        return decoder_of(settings.decode, settings.source.topics)

    with running() as registry:
        authority = registry.use_tls(tmp_path / "tls")
        registry.add(AVRO, "flights-value", "flights-key")
        assert "id" in asked(schema_registry_ca="tls/ca.pem").schema.names
        assert authority.samefile(tmp_path / "tls" / "ca.pem")
        other = make_certificates(tmp_path / "other").ca
        for wrong in ({}, {"schema_registry_ca": str(other)}):
            with pytest.raises(Unavailable, match=r"(?i)certificate"):
                asked(**wrong)


def test_a_key_that_is_a_text_has_a_type() -> None:
    key = {"format": "string", "column": "id", "type": "BIGINT"}
    assert made(format="json", schema="id BIGINT", key=key).schema == pa.schema({"id": pa.int64()})


@pytest.mark.parametrize("kind", ["ARRAY<INT>", "JSON", "INT, y INT", "INT NOT NULL", "CLOB", ""])
def test_a_key_of_another_type_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="key"):
        made(format="raw", key={"format": "string", "column": "id", "type": kind})


@pytest.mark.parametrize(
    ("strict", "rows"), [({}, 2), ({"strict": False}, 2), ({"strict": True}, 1)]
)
def test_a_string_takes_any_scalar_unless_it_is_strict(strict: Any, rows: int) -> None:
    records = pa.table({"value": pa.array([b'{"s": 1}', b'{"s": "x"}'], pa.binary())})
    assert made(format="json", schema="s STRING", **strict).decode(records).rows.num_rows == rows


@pytest.mark.parametrize("key", [None, {"format": "string", "column": "k", "type": "TIMESTAMP"}])
def test_digits_that_a_timestamp_does_not_keep_are_refused_unless_rounding_allows(
    key: Any,
) -> None:
    """In values and keys."""
    fine = b"2026-05-31T18:00:00.123456789Z"
    value = b'{"at": "%s"}' % (b"2026-05-31" if key else fine)
    records = pa.table({"value": [value], "key": [fine if key else b""]})
    decode = TypeAdapter(DecodeSettings).validate_python(
        {"format": "json", "schema": "at TIMESTAMP"} | ({"key": key} if key else {})
    )
    (refused,) = decoder_of(decode, ["t"]).decode(records).rejections
    assert refused.reason.endswith(
        'has more digits than microseconds, which TIMESTAMP keeps; sink.rounding = "allow" cuts'
        " them off"
    )
    rows = decoder_of(decode, ["t"], rounding=True).decode(records).rows
    assert rows["k" if key else "at"].to_pylist()[0].microsecond == 123_456


SINKS = {
    "sql": {"url": "sqlite:////tmp/x.db", "table": "rows"},
    "kafka": {"topic": "out"},
    "files": {"url": "file:///lake", "manifest_topic": "m"},
    "delta": {"url": "file:///lake"},
    "handlers": {"url": "postgresql://u@h/d"},
}


@pytest.mark.parametrize("kind", SINKS)
def test_each_sink_has_the_setting(kind: str) -> None:
    for rounding in ({}, {"rounding": "refuse"}, {"rounding": "allow"}):
        pipeline = Pipeline(
            parse(
                {
                    "name": "p",
                    "source": {"brokers": "none:9092", "topics": ["t"]},
                    "decode": {"format": "json", "schema": "at TIMESTAMP"},
                    "sink": {"kind": kind, **SINKS[kind], **rounding},
                }
            )
        )
        assert isinstance(pipeline.decoder, JsonDecoder)
        assert pipeline.decoder.rounding is (rounding.get("rounding") == "allow")


def test_keys_are_unwrapped_and_an_inferred_schema_is_not() -> None:
    key = {"format": "string", "column": "id", "type": "BIGINT", "unwrap": "payload"}
    decoder = made(format="json", schema="s STRING", unwrap="payload", key=key)
    keys = [b'{"schema": null, "payload": 7}', b'{"schema": null, "payload": "8"}', b"{}", b"9",
            b'{"payload": "x"}']  # fmt: skip
    values = [b'{"payload": {"s": "a"}}', None, *[b'{"payload": {}}'] * 3]
    found = decoder.decode(pa.table({"key": keys, "value": pa.array(values, pa.binary())}))
    assert found.rows.to_pylist() == [{"s": "a", "id": 7}]
    assert found.tombstones is not None
    assert found.tombstones.to_pylist() == [{"id": 8}]
    assert [one.reason for one in found.rejections] == [
        "the key has no member 'payload'",
        "the key is not a JSON object but 9",
        'id: expected BIGINT, found the text "x"',
    ]
    decoder = made(format="json", schema="s STRING", key=key | {"unwrap": None, "json": True})
    keys = [b"7", b'"8"', b'"x"', b"x"]
    found = decoder.decode(pa.table({"key": keys, "value": pa.array([b"{}"] * 4, pa.binary())}))
    assert found.rows["id"].to_pylist() == [7, 8]
    assert "not JSON" in found.rejections[1].reason
    with pytest.raises(ValueError, match="is a JSON value"):
        made(format="json", schema="s STRING", key=key | {"json": True})
    with pytest.raises(ValueError, match="does not unwrap"):
        made(format="json", schema="infer", unwrap="payload")
