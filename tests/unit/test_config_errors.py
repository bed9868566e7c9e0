"""A pipeline file that is wrong: one clear message with every key and the way out."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from oncely.config import load, parse
from oncely.config.problems import GONE, known_keys
from oncely.decode import merging
from oncely.errors import ConfigError

CAPS = {name: getattr(merging.CAPS, name) for name in ("fields", "depth", "name")}

RIGHT = """
name = "orders"
[source]
brokers = "127.0.0.1:9092"
topics = ["orders"]
[source.kafka]
[decode]
format = "json"
schema = "id BIGINT, total DOUBLE"
[decode.key]
format = "json"
schema = "id BIGINT"
[sink]
kind = "sql"
url = "postgresql://127.0.0.1/shop"
table = "orders"
mode = "upsert"
keys = ["id"]
[spark]
[spark.conf]
"""

FILES = """
name = "events"
source = { brokers = "127.0.0.1:9092", topics = ["events"] }
decode = { format = "json", schema = "infer" }
[sink]
kind = "files"
url = "s3://lake/events"
manifest_topic = "events.manifest"
"""


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(tomllib.loads(text))
    assert caught.value.exit_code == 2
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def test_the_file_that_the_others_are_made_of_is_right() -> None:
    parse(tomllib.loads(RIGHT))
    parse(tomllib.loads(FILES))


# One edit of the file: what is replaced, by what, the key that is named, and a word of the text.
WRONG = [
    # unknown and missing keys
    ("[source]", "[source]\ntopic = 1", "source.topic", "did you mean topics?"),
    ("[source]", "[source]\nfoo = 1", "source.foo", "allowed here: brokers"),
    ('name = "orders"', 'name = "orders"\ntable = "x"', "table", "sink.table"),
    ('name = "orders"', 'name = "orders"\n[snik]', "snik", "did you mean sink?"),
    ('schema = "id BIGINT, total', 'columns = ["key"]\nschema = "id BIGINT, total',
     "decode.columns", 'it belongs to format = "raw"'),
    ('schema = "id BIGINT"', 'column = "id"\nschema = "id BIGINT"',
     "decode.key.column", 'it belongs to format = "string"'),
    ('name = "orders"', 'name = "orders"\n"a.b" = 1', "a.b", "unknown key; allowed here: commit"),
    ('name = "orders"', "", "name", "is missing"),
    ('brokers = "127.0.0.1:9092"', "", "source.brokers", 'add brokers = "127'),
    ('topics = ["orders"]', "", "source.topics", "is missing"),
    ('format = "json"\nschema = "id BIGINT, ', 'schema = "id BIGINT, ', "decode.format", "missing"),
    ('schema = "id BIGINT, total DOUBLE"', "", "decode.schema", "is missing"),
    ('kind = "sql"', "", "sink.kind", "is missing"),
    ('url = "postgresql://127.0.0.1/shop"', "", "sink.url", "is missing"),
    ('table = "orders"', "", "sink.table", "is missing"),
    # wrong types
    ('"orders"', "5", "name", "found 5; allowed: a text"),
    ('["orders"]', '5', "source.topics", "allowed: a list of texts"),
    ('["orders"]', '["orders", 5]', "source.topics[1]", "allowed: a text"),
    ("[spark]", '[spark]\nmax_records_per_batch = "5"', "spark.max_records_per_batch",
     "found the text '5'; allowed: a whole number"),
    ("[spark]", "[spark]\nmax_records_per_batch = 1.5", "spark.max_records_per_batch", "whole"),
    ('kind = "sql"', 'kind = "sql"\ncreate = 1', "sink.create", "allowed: true or false"),
    ('keys = ["id"]', 'keys = "id"', "sink.keys", "allowed: a list of texts"),
    ('"postgresql://127.0.0.1/shop"', "5", "sink.url", "found a number; allowed: a text"),
    ("[spark]\n[spark.conf]", "spark = 5", "sink.spark", "unknown"),
    # wrong values
    ('"orders"', '"my orders"', "name", "allowed: 1 to 100 letters"),
    ('"orders"', f'"{"x" * 101}"', "name", "allowed: 1 to 100 letters"),
    ('"orders"', '"orders"\ndelivery = "twice"', "delivery", "allowed: none, at_most_once"),
    ('"orders"', '"orders"\ndelivery = 1', "delivery", "allowed: none"),
    ("9092", "9092,other", "source.brokers", "found 'other'; allowed: host:port"),
    ("127.0.0.1:9092", "SSL://h:9092", "source.brokers", "security.protocol"),
    ("9092", "99999", "source.brokers", "host:port"),
    ('["orders"]', "[]", "source.topics", "is empty"),
    ('["orders"]', '["a", "b", "a"]', "source.topics", "names a more than once"),
    ('["orders"]', '["a.*"]', "source.topics", "found 'a.*'"),
    ('["orders"]', '["a,b"]', "source.topics", "found 'a,b'"),
    ("[source]", '[source]\nstart = "newest"', "source.start", "earliest, latest"),
    ("[source]", "[source]\nstart = 12:00:00", "source.start", "ISO 8601"),
    ("[source]", '[source]\nstart = "9999-12-31T23:59:59-23:59"', "source.start", "ISO 8601"),
    ("[source]", '[source]\nstart = "0001-01-01T00:00+01:00"', "source.start", "ISO 8601"),
    ("[source]", '[source]\non_gap = "skip"', "source.on_gap", "allowed: fail, record"),
    ("[source]", "[source]\ngroup = true", "source.group", "or false"),
    ('format = "json"\nschema = "id BIGINT, ', 'format = "jsn"\nschema = "id BIGINT, ',
     "decode.format", "allowed: json, avro, raw"),
    ("id BIGINT, total DOUBLE", "id BIGIN", "decode.schema", "BIGIN"),
    ('format = "json"\nschema = "id BIGINT"', 'format = "raw"', "decode.key.format",
     "found 'raw'; allowed: json, avro, string"),
    ('"sql"', '"redis"', "sink.kind", "found 'redis'; allowed: sql, kafka"),
    ("postgresql://", "mysql://", "sink.url", "postgresql://, sqlite:///"),
    ("postgresql://127.0.0.1/shop", "sqlite:///:memory:", "sink.url", "in memory"),
    ("postgresql://127.0.0.1/shop", "sqlite://x.db", "sink.url", "three slashes"),
    ("//127.0.0.1", "//u:a@b@127.0.0.1", "sink.url", "%40"),
    ("//127.0.0.1", "//u:a/b@127.0.0.1", "sink.url", "%2F"),
    ("//127.0.0.1", "//u:a?b@127.0.0.1", "sink.url", "%3F"),
    ("//127.0.0.1", "//u:a%b@127.0.0.1", "sink.url", "%25"),
    ("127.0.0.1/shop", "h:99999/shop", "sink.url", "'99999' is no port"),
    ("127.0.0.1/shop", "h:5432,i:0/shop", "sink.url", "'0' is no port"),
    ("127.0.0.1/shop", "u@localhost:9092/shop", "sink.url", "leads to 127.0.0.1:9092"),
    ('table = "orders"', 'table = "a.b.c"', "sink.table", "schema.table"),
    ('table = "orders"', 'table = ""', "sink.table", "schema.table"),
    ('table = "orders"', "table = '\"\"'", "sink.table", "schema.table"),
    ('table = "orders"', 'table = "public.Orders"', "sink.table", "reads Orders as orders"),
    ('table = "orders"', 'table = "public.oncely_positions"', "sink.table", "Oncely's ledger"),
    ('table = "orders"', f'table = "{"x" * 64}"', "sink.table", "63 bytes"),
    ('"upsert"', '"merge"', "sink.mode", "found 'merge'; allowed: append, upsert"),
    ('"upsert"', '"upsrt"', "sink.mode", "did you mean upsert?"),
    ('"upsert"', '"append"', "sink.keys", 'no meaning with mode = "append"'),
    ('keys = ["id"]', "", "sink.keys", "is missing"),
    ('keys = ["id"]', 'keys = ["id", "id"]', "sink.keys", "more than once"),
    ('keys = ["id"]', 'keys = ["id", "day"]', "sink.keys", "decode.key gives id"),
    ('keys = ["id"]', 'keys = ["id"]\nversion = "id"', "sink.version", "one of the keys"),
    ('[decode.key]\nformat = "json"\nschema = "id BIGINT"', "", "decode.key", "deletes by its key"),
    ('kind = "sql"', 'kind = "sql"\nmax_rejects = "101%"', "sink.max_rejects", "0% to 100%"),
    ('kind = "sql"', "kind = 'sql'\nmax_rejects = -1", "sink.max_rejects", "a share"),
    ('kind = "sql"', "kind = 'sql'\nmax_rejects = 0.5", "sink.max_rejects", "a share"),
    ('kind = "sql"', "kind = 'sql'\nconnect_timeout = 5", "sink.connect_timeout", "500 ms"),
    ("[sink]", "[transform]\n[sink]", "transform", "has nothing"),
    ("[sink]", '[transform]\nsql = "x"\nspark = "a:b"\n[sink]', "transform", "has sql and spark"),
    ("[sink]", '[transform]\nsql = " "\n[sink]', "transform.sql", "is empty"),
    ("[sink]", '[transform]\npython = "a.b"\n[sink]', "transform.python", "package.module:func"),
    ("[sink]", '[transform]\nspark = "a-b:c"\n[sink]', "transform.spark", "package.module:func"),
    ("[spark]", '[spark]\nmaster = "lcoal"', "spark.master", 'write "local[*,4]"'),
    ("[spark]", '[spark]\ntrigger = "1 week"', "spark.trigger", "found '1 week'"),
    ("[spark]", "[spark]\nmax_records_per_batch = 0", "spark.max_records_per_batch", "1 or more"),
    ("[spark.conf]", '[spark.conf]\nfs.x = "1"', "spark.conf.fs.x", "spark.hadoop.fs.x"),
    ("[spark.conf]", "[spark.conf]\nspark.x = [1]", "spark.conf.spark.x", "found a list"),
    ("[source.kafka]", "[source.kafka]\nminPartitions = 8", "source.kafka.minPartitions", "is un"),
    ("[source.kafka]", '[source.kafka]\nisolation.level = "read_uncommitted"',
     "source.kafka.isolation.level", "read_committed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "key", "word"), WRONG, ids=[f"{w[2]}:{w[1]}" for w in WRONG]
)
def test_one_mistake(old: str, new: str, key: str, word: str) -> None:
    assert old in RIGHT
    error = refused(RIGHT.replace(old, new, 1))
    assert error.key == key
    assert word in str(error)


@pytest.mark.parametrize(
    "key",
    [
        "spark.master",
        "spark.app.name",
        "spark.submit.deployMode",
        "spark.remote",
        "spark.stage.maxConsecutiveAttempts",
    ],
)
def test_spark_settings_that_break_the_guarantee(key: str) -> None:
    error = refused(RIGHT + f'"{key}" = "x"')
    assert error.key == f"spark.conf.{key}"
    assert "refused: " in str(error)
    assert error.way_out


def test_spark_settings_that_do_not() -> None:
    fine = ["task.maxFailures", "speculation", "python.worker.reuse", "sql.shuffle.partitions"]
    fine += ["sql.streaming.minBatchesToRetain", "sql.streaming.checkpointLocation"]
    parse(tomllib.loads(RIGHT + "".join(f"spark.{key} = 4\n" for key in fine)))


def test_sqlite_needs_a_local_master() -> None:
    text = RIGHT.replace("postgresql://127.0.0.1/shop", "sqlite:///shop.db")
    parse(tomllib.loads(text))
    error = refused(text.replace("[spark]", '[spark]\nmaster = "spark://h:7077"'))
    assert error.key == "sink.url"
    assert "one file on one machine" in str(error)


def test_avro_needs_one_schema() -> None:
    avro = RIGHT.replace('format = "json"\nschema = "id BIGINT, total DOUBLE"', 'format = "avro"')
    assert "exactly one of schema_file" in str(refused(avro))
    for line, key, word in (
        ('schema_file = "/no/such.avsc"', "decode.schema_file", "no file '/no/such.avsc'"),
        ('schema_registry = "https://u:opensesame@r"', "decode.schema_registry", "user_info"),
        ('schema_registry = "r:8081"', "decode.schema_registry", "http://"),
        (
            'schema_registry = "http://r"\nschema_registry_user_info = "opensesame"',
            "decode.schema_registry_user_info",
            "user:password",
        ),
    ):
        error = refused(avro.replace('"avro"', f'"avro"\n{line}'))
        assert error.key == key
        assert word in str(error)
        assert "opensesame" not in str(error)


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_refused_with_the_way_out(key: str) -> None:
    table, _, name = key.partition(".")
    base = FILES if key.startswith("sink.s3.") else RIGHT
    error = refused(base.replace(f"[{table}]", f"[{table}]\n{name} = 5", 1))
    assert error.key == key
    assert str(error).startswith(f"{key}: is gone")
    assert error.way_out.startswith("remove the line: ")
    assert "did you mean" not in str(error)


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_no_key(key: str) -> None:
    table, _, name = key.rpartition(".")
    assert (known := known_keys(table))
    assert name not in known


def test_the_ways_out_of_the_caps_name_the_caps() -> None:
    for name, most in CAPS.items():
        assert f"{most:,} " in GONE[f"decode.max_{name}"]


def test_the_example_of_a_missing_key_is_that_of_the_kind() -> None:
    error = refused(FILES.replace('url = "s3://lake/events"\n', ""))
    assert (error.key, error.way_out) == ("sink.url", 'add url = "s3://lake/events"')


def test_several_mistakes_are_told_together() -> None:
    text = RIGHT.replace('"upsert"', '"merge"').replace("[source]", "[source]\nfoo = 1")
    text = text.replace("[spark]", "[spark]\ntrigger = 1")
    text = text.replace("[source.kafka]", "[source.kafka]\ngroup.id = 'x'\nacks = 1")
    error = str(refused(text))
    assert "5 problems" in error
    for key in ("source.foo:", "source.kafka.group.id:", "source.kafka.acks:", "sink.mode:",
                "spark.trigger:"):  # fmt: skip
        assert key in error


@pytest.mark.parametrize("name", ["sqlite_master", "SQLite_x", "Oncely_Rejects"])
def test_names_that_are_not_free_in_sqlite(name: str) -> None:
    text = RIGHT.replace("postgresql://127.0.0.1/shop", "sqlite:///shop.db")
    assert refused(text.replace('"orders"\nmode', f'"{name}"\nmode')).key == "sink.table"


def test_tables_where_values_belong_and_the_other_way_round() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"source": 5}, "source"),
        ({"decode": "json"}, "decode"),
        ({"sink": []}, "sink"),
        ({"name": {}}, "name"),
        ({"source": {"brokers": "h:1", "topics": ["t"], "kafka": "x"}}, "source.kafka"),
        ({"spark": {"conf": 5}}, "spark.conf"),
    ]
    for change, key in cases:
        error = None
        with pytest.raises(ConfigError) as caught:
            parse(tomllib.loads(RIGHT) | change)
        error = caught.value
        assert error.key == key, str(error)
        assert "found " in str(error)


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    """Editors of Windows write it."""
    file = tmp_path / "pipeline.toml"
    file.write_text(RIGHT, encoding="utf-8-sig")
    assert load(file).name == "orders"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "can't read the pipeline file: No such file"),
        (b"name = ", "not TOML"),
        (b"name = " + b"9" * 5_000, "not TOML"),
        (b"name = " + b"[" * 5_000, "not TOML"),
        (b'name = "\xff"', "not UTF-8"),
        (b"[spark.conf]\nspark.speculation = true\nspark.speculation.interval = 1", "are quoted"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes | None, word: str) -> None:
    file = tmp_path / "pipeline.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"pipeline\.toml") as caught:
        load(file)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("sink", "key", "text"),
    [
        ({"kind": "delta", "url": "file:///t", "versoin": "v"}, "versoin", "did you mean version?"),
        ({"kind": "handlers", "url": "postgresql://h/d", "retry": 1}, "retry", "connect_timeout"),
        ({"kind": "lake"}, "kind", "allowed: sql, kafka, files, delta, handlers"),
    ],
)
def test_keys_of_each_kind_of_sink_are_known(sink: dict[str, Any], key: str, text: str) -> None:
    raw = tomllib.loads(RIGHT)
    with pytest.raises(ConfigError) as caught:
        parse({**raw, "sink": sink})
    assert caught.value.key == f"sink.{key}"
    assert text in f"{caught.value.message} {caught.value.way_out}"
