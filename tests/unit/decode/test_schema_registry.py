"""Confluent's wire format against a registry that speaks HTTP on this machine."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from oncely.decode.avro import AvroDecoder, Registry, avro_decoder, latest_avro_decoder
from oncely.decode.avro_schema import Definition
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.decode.json import JsonDecoder
from oncely.decode.metadata import WithKey
from oncely.errors import ConfigError, SchemaChanged, Unavailable
from oncely.secrets import MASK
from tests.registrytools import FakeRegistry, running, wire

OLD = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": "carrier", "type": "string"}, {"name": "gone", "type": "long"}],
}
NEW = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "carrier", "type": "string"},
        {"name": "flight", "type": ["null", "int"], "default": None},
    ],
}


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with running() as server:
        yield server


def decode(decoder: Decoder, *values: bytes | None) -> Decoded:
    return decoder.decode(pa.table({"value": pa.array(values, pa.binary())}))


def latest(settings: str | dict[str, Any], *topics: str) -> AvroDecoder:
    return latest_avro_decoder(made(settings), topics or ["flights"])


def reading(schema: Any, settings: str | dict[str, Any]) -> AvroDecoder:
    return avro_decoder(Definition(json.dumps(schema)), registry=made(settings))


def made(settings: str | dict[str, Any]) -> Registry:
    return Registry({"url": settings} if isinstance(settings, str) else settings)


def reasons(decoded: Decoded) -> list[str]:
    return [rejection.reason for rejection in decoded.rejections]


def test_each_record_is_read_by_its_writers_schema(registry: FakeRegistry) -> None:
    old, new = registry.add(OLD, "flights-value"), registry.add(NEW, "flights-value")
    decoder = latest(registry.url)
    assert decoder.schema == pa.schema(
        [pa.field("carrier", pa.string(), nullable=False), ("flight", pa.int32())]
    )
    registry.asked.clear()
    decoded = decode(
        decoder,
        wire(new, NEW, {"carrier": "UA", "flight": 1}),
        wire(old, OLD, {"carrier": "AA", "gone": 5}),
        wire(new, NEW, {"carrier": "B6", "flight": None}),
    )
    assert decoded.rows.to_pylist() == [
        {"carrier": "UA", "flight": 1},
        {"carrier": "AA", "flight": None},
        {"carrier": "B6", "flight": None},
    ]
    assert len(registry.asked) == 3, "two ids, and for the older one the newest schema"

    again = pickle.loads(pickle.dumps(decoder))  # the next task in the same process asks nothing
    assert decode(again, wire(old, OLD, {"carrier": "X", "gone": 1})).rows.num_rows == 1
    assert len(registry.asked) == 3


def test_a_schema_that_is_newer_than_the_columns_is_no_row_without_its_fields(
    registry: FakeRegistry,
) -> None:
    """Also if it could be resolved to the columns, or could not."""
    old = registry.add(OLD, "flights-value")
    decoder = latest(registry.url)
    written = [wire(old, OLD, {"carrier": "AA", "gone": 5})]
    assert decode(decoder, *written).rows.num_rows == 1
    more = OLD | {"fields": [*OLD["fields"], *NEW["fields"][1:]]}
    for newer, datum in ((more, {"flight": 7}), (NEW, {"flight": 7})):
        assert decode(decoder, *written).rows.num_rows == 1
        new = registry.add(newer, "flights-value")
        value = wire(new, newer, {"carrier": "UA", "gone": 1, **datum})
        assert decode(decoder, *written).rows.num_rows == 1, "an id that was seen before"
        with pytest.raises(SchemaChanged, match=f"schema id {new} .* flights-value has another"):
            decode(pickle.loads(pickle.dumps(decoder)), *written, value)
        decoder = latest(registry.url)
        assert decode(decoder, value).rows["flight"].to_pylist() == [7]
    assert decode(decoder, *written).rows["flight"].to_pylist() == [None]
    registry.subjects.clear()
    with pytest.raises(SchemaChanged):
        decode(decoder, wire(registry.add(OLD), OLD, {"carrier": "AA", "gone": 5}))


def test_a_schema_of_another_subject_is_resolved_to_the_columns(registry: FakeRegistry) -> None:
    registry.add(OLD, "flights-value")
    decoder = latest(registry.url)
    other = registry.add(NEW, "others-value")
    ours = registry.add(OLD | {"fields": [*OLD["fields"], *NEW["fields"][1:]]}, "others-value")
    value = wire(ours, json.loads(registry.ids[ours]["schema"]),
                 {"carrier": "UA", "gone": 1, "flight": 7})  # fmt: skip
    assert decode(decoder, value).rows.to_pylist() == [{"carrier": "UA", "gone": 1}]
    assert "can't be read" in reasons(decode(decoder, wire(other, NEW, {"carrier": "UA"})))[0]


def test_a_schema_may_be_the_readers_own(registry: FakeRegistry) -> None:
    old = registry.add(OLD)
    decoder = reading(NEW, registry.url)
    assert registry.asked == []
    assert decode(decoder, wire(old, OLD, {"carrier": "UA", "gone": 1})).rows.to_pylist() == [
        {"carrier": "UA", "flight": None}
    ]


def test_an_unknown_id_is_a_rejection_and_asked_for_every_ten_seconds(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by other decoders of the process; a pause follows each such answer."""
    now, pauses = [100.0], list[float]()
    monkeypatch.setattr("oncely.decode.avro.monotonic", lambda: now[0])
    monkeypatch.setattr("oncely.decode.avro.sleep", pauses.append)
    registry.add(NEW, "flights-value")
    proto = registry.add({}, schemaType="PROTOBUF")
    decoder = latest(registry.url)
    late = [wire(at, NEW, {"carrier": "UA", "flight": 1}) for at in (607, proto, *range(900, 948))]
    registry.asked.clear()
    for _ in range(2):
        found = reasons(decode(pickle.loads(pickle.dumps(decoder)), *late, *late))
        assert found == reasons(decode(decoder, *late)) * 2
        assert found[0] == "the schema registry has no schema id 607"
        assert len(registry.asked) == len(pauses) == 50
        now[0] += 4.9
    assert registry.add(NEW) == 607
    assert decode(decoder, late[0]).rows.num_rows == 0
    now[0] += 0.3
    assert decode(decoder, late[0]).rows.num_rows == 1
    assert sum(pauses) == pytest.approx(0.5)


def test_what_is_no_avro_or_does_not_fit_is_a_rejection(registry: FakeRegistry) -> None:
    new = registry.add(NEW, "flights-value")
    proto = registry.add({}, schemaType="PROTOBUF")
    broken = registry.add({"type": "record"})
    other = registry.add(OLD | {"fields": [{"name": "carrier", "type": "int"}]})
    decoder = latest(registry.url)
    head = [b"\0" + number.to_bytes(4, "big") for number in (new, proto, broken, other)]
    values = [
        b'{"carrier": "UA"}',
        b"\0\0\0",
        None,
        head[0],
        head[1] + b"x",
        head[2],
        head[3],
        wire(new, NEW, {"carrier": "UA", "flight": 1}) + b"!",
    ]
    found = reasons(decode(decoder, *values))
    assert found.pop(5).startswith(f"schema id {broken} is no Avro schema: ")
    assert found == [
        "the value does not begin with a zero byte and a schema id, but with 0x7b22636172",
        "the value does not begin with a zero byte and a schema id, but with 0x000000",
        "the value is null",
        "the value is no Avro datum: carrier: it ends too early",
        f"schema id {proto} is PROTOBUF, not AVRO",
        f"schema id {other} can't be read as the columns' schema: carrier: int is no string",
        "the value has 1 bytes after its datum",
    ]


def test_nesting_without_end_is_a_rejection(registry: FakeRegistry) -> None:
    node = {
        "type": "record",
        "name": "Node",
        "fields": [{"name": "next", "type": ["null", "Node"]}],
    }
    fields = [{"name": "list", "type": node}, *NEW["fields"]]
    deep = registry.add(NEW | {"fields": fields})
    decoder = reading(NEW, registry.url)
    head = b"\0" + deep.to_bytes(4, "big")
    good = head + b"\x02\x00\x02U\x00"
    nested: Any = "int"
    for _ in range(520):
        nested = {"type": "array", "items": nested}
    levels = registry.add(NEW | {"fields": [*NEW["fields"], {"name": "n", "type": nested}]})
    refers = [{"name": "a", "subject": subject, "version": 1} for subject in ("b", "a")]
    for subject, reference in zip(("a", "b"), refers, strict=True):
        cyclic = registry.add(NEW, subject, references=[reference])
    values = [head + b"\x02" * 100_000 + b"\x00\x02U\x00", good]
    values += [b"\0" + number.to_bytes(4, "big") + b"\x02U\x00" for number in (levels, cyclic)]
    decoded = decode(decoder, good, *values)
    assert reasons(decoded) == [
        "the value is nested too deeply",
        f"schema id {levels} can't be read as the columns' schema: its types are nested too deeply",
        f"schema id {cyclic} refers to itself or to too many schemas: a",
    ]
    assert decoded.row_record.to_pylist() == [0, 2]


def test_schemas_that_name_types_of_other_subjects(registry: FakeRegistry) -> None:
    def record(name: str, field: str, kind: str) -> dict[str, Any]:
        return {"type": "record", "name": name, "fields": [{"name": field, "type": kind}]}

    def refers_to(name: str, subject: str) -> dict[str, Any]:
        return {"references": [{"name": name, "subject": subject, "version": 1}]}

    point, place = record("org.Point", "lat", "double"), record("org.Place", "at", "org.Point")
    visit = record("Visit", "place", "org.Place")
    registry.add(point, "point")
    registry.add(place, "place", **refers_to("org.Point", "point"))
    new = registry.add(visit, "flights-value", **refers_to("org.Place", "place"))
    decoder = latest(registry.url)
    names: dict[str, Any] = {}
    parsed = [fastavro.parse_schema(schema, names) for schema in (point, place, visit)]
    datum = {"place": {"at": {"lat": 1.5}}}
    assert decode(decoder, wire(new, parsed[-1], datum)).rows.to_pylist() == [datum]


def test_no_answer_is_unavailable_and_no_record_is_to_blame(registry: FakeRegistry) -> None:
    new = registry.add(NEW)
    quick = {"max.retries": 0, "timeout": 0.3}
    value = wire(new, NEW, {"carrier": "UA", "flight": 1})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        decoder = reading(NEW, {"url": url, **quick})
        with pytest.raises(Unavailable, match=f"no answer from the schema registry on .* id {new}"):
            decode(decoder, value)
    settings = {"url": registry.url, **quick}
    decoder = reading(NEW, settings)
    registry.status = 503
    with pytest.raises(Unavailable, match="failed on schema id"):
        decode(decoder, value)
    with pytest.raises(Unavailable):
        latest(settings)
    registry.status = 200
    registry.hang.clear()
    with pytest.raises(Unavailable, match="no answer"):
        decode(decoder, value)
    registry.hang.set()
    assert decode(decoder, value).rows.num_rows == 1


def test_a_missing_subject_is_a_configuration_error(registry: FakeRegistry) -> None:
    with pytest.raises(ConfigError, match="has no subject flights-value") as caught:
        latest(registry.url)
    assert (caught.value.key, "schema file" in caught.value.way_out) == ("decode.schema", True)
    registry.add(NEW, "flights-value")
    registry.add(OLD, "more-value")
    with pytest.raises(ConfigError, match="flights-value and more-value have different columns"):
        latest(registry.url, "flights", "more")


def test_keys_have_a_registry_of_their_own(registry: FakeRegistry) -> None:
    schema = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
    key_id = registry.add(schema, "flights-key")
    key = latest_avro_decoder(Registry({"url": registry.url}), ["flights"], column="key")
    decoder = WithKey(JsonDecoder(pa.schema({"carrier": pa.string()})), key)
    records = pa.table(
        {"key": [wire(key_id, schema, {"id": 5}), b"5"], "value": [b'{"carrier": "UA"}', b"{}"]}
    )
    decoded = decoder.decode(records)
    assert decoded.rows.to_pylist() == [{"carrier": "UA", "id": 5}]
    assert "the key does not begin with a zero byte" in reasons(decoded)[0]


@pytest.mark.parametrize("where", ["url", "settings"])
def test_a_password_is_sent_and_never_shown(registry: FakeRegistry, where: str) -> None:
    registry.password = "s3cr3t/@canary" + where
    new = registry.add(NEW, "flights-value")
    value = wire(new, NEW, {"carrier": "UA", "flight": 1})

    def settings(password: str) -> dict[str, Any]:
        host = registry.url.removeprefix("http://")
        if where == "settings":
            return {"url": registry.url, "basic.auth.user.info": f"reader:{password}"}
        quoted = password.replace("/", "%2F").replace("@", "%40")
        return {"url": f"http://reader:{quoted}@{host}"}

    decoder = latest(settings(registry.password))
    assert decode(decoder, value).rows.num_rows == 1
    assert "canary" not in repr(decoder)

    wrong = settings("canary-of-" + where) | {"max.retries": 0}
    with pytest.raises(ConfigError, match="refuses the client") as caught:
        latest(wrong)
    assert caught.value.key == "decode.schema_registry"
    with pytest.raises(ConfigError) as caught:
        latest(wrong | {"nonsense": 1, "canary-of-" + where: 2})
    assert "nonsense" in str(caught.value)
    assert MASK in str(caught.value)
    assert "canary-of" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "ftp://127.0.0.1", "127.0.0.1:8081"])
def test_a_url_that_can_not_work_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        latest(url)
    assert caught.value.key == "decode.schema_registry"


def test_a_forked_child_does_not_break_its_parents_connection(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    authority = registry.use_tls(tmp_path)
    registry.add(NEW, "flights-value")
    settings = {"url": registry.url, "ssl.ca.location": str(authority), "max.retries": 0}
    decoder = latest(settings)
    for n in range(3):  # each time the child asks first, then the parent
        value = wire(registry.add(NEW), NEW, {"carrier": "UA", "flight": n})
        records = pa.table({"value": pa.array([value], pa.binary())})
        assert isolate_crashes(decoder, records).rows["flight"].to_pylist() == [n]
