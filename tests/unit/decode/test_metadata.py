"""Parts of the record as columns: topic, partition, offset, timestamp, key and headers."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.decode.base import Decoded
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.decode.json import JsonDecoder
from oncely.decode.metadata import RawDecoder, TextDecoder, WithKey, WithMetadata
from oncely.decode.schema import METADATA_COLUMNS, MetadataColumn
from oncely.errors import ConfigError
from oncely.pipeline import Pipeline
from oncely.runtimes.chunks import RECORDS

PARTS = (
    *(MetadataColumn(one, f"r_{one}") for one in METADATA_COLUMNS if one != "headers"),
    MetadataColumn("headers", "trace_id", "trace"),
    MetadataColumn("headers", "kind", "ce.type"),
)
DECODER = WithMetadata(JsonDecoder(pa.schema({"id": pa.int64()})), PARTS)
AT = datetime(2026, 5, 31, 18, tzinfo=UTC)


def record(
    offset: int, value: bytes | None, key: bytes | None = b"k", headers: Any = (), at: Any = AT
) -> dict[str, Any]:
    named = None if headers is None else [{"key": n, "value": v} for n, v in headers]
    return {"topic": "t", "partition": 3, "offset": offset, "timestamp": at, "key": key,
            "value": value, "headers": named}  # fmt: skip


def decode(*records: dict[str, Any], decoder: Any = DECODER) -> Decoded:
    return decoder.decode(pa.Table.from_pylist(list(records), RECORDS))  # type: ignore[no-any-return]


def test_they_follow_the_columns_of_value_and_key() -> None:
    assert DECODER.schema.names == ["id", "r_topic", "r_partition", "r_offset", "r_timestamp",
                                    "r_key", "trace_id", "kind"]  # fmt: skip
    found = decode(record(7, b'{"id": 1}', headers=[("trace", b"a"), ("ce.type", b"x")]))
    assert found.rows.schema == DECODER.schema
    assert found.rows.to_pylist() == [
        {"id": 1, "r_topic": "t", "r_partition": 3, "r_offset": 7, "r_timestamp": AT, "r_key": "k",
         "trace_id": "a", "kind": "x"}
    ]  # fmt: skip
    assert decode().rows.schema == DECODER.schema
    assert DECODER.needs == {"value", "timestamp", "key", "headers"}
    assert WithMetadata(DECODER.decoder, PARTS[:3]).needs == {"value"}, "these are always read"


def test_what_a_record_lacks_is_null_and_of_repeated_headers_the_last_counts() -> None:
    found = decode(
        record(0, b"{}", key=None, headers=None, at=None),
        record(1, b"{}", headers=[]),
        record(2, b"{}", key=b"", headers=[("trace", None), ("other", b"\xff")]),
        record(3, b"{}", headers=[("trace", b"a"), ("x", b"x"), ("trace", b"b"), ("Trace", b"c")]),
        record(4, b"{}", headers=[("trace", b"a"), ("trace", None)]),
    ).rows
    assert found["trace_id"].to_pylist() == [None, None, None, "b", None]
    assert found["r_key"].to_pylist() == [None, "k", "", "k", "k"]
    assert found["r_timestamp"].to_pylist() == [None, AT, AT, AT, AT]


def test_a_key_or_header_that_is_no_text_is_a_rejection() -> None:
    found = decode(
        record(0, b'{"id": 0}'),
        record(1, b'{"id": 1}', key=b"\xff"),
        record(2, b"{", key=b"\xff"),
        record(3, b'{"id": 3}', headers=[("trace", b"a\xe9"), ("trace", b"b")]),
        record(4, b'{"id": 4}', headers=[("trace", b"a\xe9")]),
        record(5, b'{"id": 5}', headers=[("ce.type", "ö".encode())]),
    )
    assert found.rows["id"].to_pylist() == [0, 3, 5]
    assert found.row_record.to_pylist() == [0, 3, 5]
    assert found.rows["kind"].to_pylist() == [None, None, "ö"]
    assert found.rows["r_offset"].to_pylist() == [0, 3, 5]
    assert [one.record for one in found.rejections] == [1, 2, 4]
    assert [one.reason for one in found.rejections if "not JSON" not in one.reason] == [
        "the key is not UTF-8: byte 0xff at 0",
        "the header 'trace' is not UTF-8: byte 0xe9 at 1",
    ]


def test_tombstones_have_them_and_chunks_are_cut_anywhere() -> None:
    key = TextDecoder(pa.schema({"k": pa.string()}), "key")
    decoder = WithMetadata(WithKey(JsonDecoder(pa.schema({"id": pa.int64()})), key), PARTS)
    some = [
        record(i, None if i % 3 == 0 else b"{" if i % 7 == 0 else b'{"id": %d}' % i,
               headers=[("trace", b"%d" % n) for n in range(i % 4)])
        for i in range(40)
    ]  # fmt: skip
    table = pa.Table.from_pylist(some, RECORDS)
    whole = decoder.decode(table)
    assert whole.tombstones is not None
    assert whole.tombstones.column_names == ["k", *(part.column for part in PARTS)]
    assert whole.tombstones["r_offset"].to_pylist() == list(range(0, 40, 3))
    cut = pa.concat_tables([table.slice(0, 0), table.slice(0, 5), table.slice(5, 18),
                            table.slice(23)])  # fmt: skip
    again = pickle.loads(pickle.dumps(decoder))
    for found in (again.decode(cut), isolate_crashes(decoder, cut)):
        assert found.rows.equals(whole.rows)
        assert found.tombstones.equals(whole.tombstones)
        assert found.rejections == whole.rejections
    last = [None if i % 4 == 0 else str(i % 4 - 1) for i in whole.rows["r_offset"].to_pylist()]
    assert whole.rows["trace_id"].to_pylist() == last
    rows = decoder.decode(table.take(pa.array(np.arange(39, -1, -1)))).rows
    assert rows["trace_id"].to_pylist() == last[::-1]


def test_the_topic_of_workers_and_of_spark() -> None:
    table = pa.Table.from_pylist([record(0, b"x")] * 2, RECORDS)
    encoded = table.set_column(0, "topic", table["topic"].dictionary_encode())
    decoder = WithMetadata(RawDecoder(("value",)), PARTS[:1])
    assert decoder.decode(encoded).rows["r_topic"].to_pylist() == ["t", "t"]


# -- the pipeline file ---------------------------------------------------------------------------


def pipeline(metadata: Any, **decode: Any) -> Pipeline:
    decode = decode or {"format": "json", "schema": "id BIGINT, Name STRING"}
    return Pipeline(
        parse(
            {
                "name": "p",
                "source": {"brokers": "none:9092", "topics": ["t"]},
                "decode": {**decode, "metadata": metadata},
                "sink": {"kind": "sql", "url": "sqlite:////tmp/x.db", "table": "rows"}
                if decode.get("schema") != "infer"
                else {"kind": "files", "url": "file:///lake", "manifest_topic": "m"},
            }
        )
    )


def test_the_columns_of_a_pipeline_file() -> None:
    given = {"timestamp": "sent_at", "headers": {"trace": "trace_id", "ce": {"type": "kind"}}}
    made = pipeline(given).decoder.schema
    assert made.names == ["id", "Name", "sent_at", "trace_id", "kind"]
    assert made.field("sent_at").type == pa.timestamp("us", "UTC")
    raw = pipeline({"key": "customer"}, format="raw", columns=["value"]).decoder
    assert (raw.schema.names, raw.needs) == (["value", "customer"], {"value", "key"})


@pytest.mark.parametrize(
    ("metadata", "key", "said"),
    [
        ({}, "decode.metadata", "names no column"),
        ({"timestamp": ""}, "decode.metadata.timestamp", ""),
        ({"time": "at"}, "decode.metadata.time", "timestamp"),
        ({"headers": {}}, "decode.metadata", "names no column"),
        ({"headers": "all"}, "decode.metadata.headers", "a table"),
        ({"headers": {"trace": 1}}, "decode.metadata.headers.trace", "the name of a column"),
        ({"topic": "x", "key": "X"}, "decode.metadata.key", "want the column"),
        (
            {"topic": "x", "headers": {"h": "x"}},
            "decode.metadata.headers.h",
            "want the column",
        ),
    ],
)
def test_a_wrong_table_is_refused(metadata: Any, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pipeline(metadata)
    assert f"{key}: " in str(refused.value)
    assert said in str(refused.value)


def test_a_column_of_value_or_key_is_refused_and_so_are_inferred_columns() -> None:
    for name in ("id", "ID", "name"):
        with pytest.raises(ConfigError, match=r"decode\.metadata\.headers\.h: value or key has"):
            _ = pipeline({"headers": {"h": name}}).decoder
    with pytest.raises(ConfigError, match=r"decode\.metadata: has no meaning with"):
        pipeline({"topic": "t"}, format="json", schema="infer")
