"""A pipeline file that is right: what comes out of it."""

from __future__ import annotations

import json
import pickle
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from oncely.config import RejectBudget, load, parse
from oncely.config.decode import AvroDecode, JsonDecode, RawDecode, TextKey
from oncely.errors import ConfigError
from oncely.kafka.start import StartTime
from oncely.stores.sql.connection import TableName

SHORTEST = """
name = "orders"
[source]
brokers = "127.0.0.1:9092"
topics = ["orders"]
[decode]
format = "json"
schema = "id BIGINT, total DOUBLE"
[sink]
kind = "sql"
url = "postgresql://127.0.0.1/shop"
table = "orders"
"""

FULL = """
name = "orders.eu-1"
delivery = "exactly_once"
[source]
brokers = "k1:9092, [::1]:9093"
topics = ["orders", "returns"]
start = "2024-05-31T18:00:00+02:00"
on_gap = "record"
group = "shop"
[source.kafka]
security.protocol = "SASL_SSL"
sasl.mechanism = "SCRAM-SHA-512"
sasl.username = "pat"
sasl.password = "full-sasl-canary"
"fetch.min.bytes" = 5
check.crcs = true
[decode]
format = "avro"
schema_registry = "https://registry:8081"
schema_registry_user_info = "pat:full-registry-canary"
[decode.key]
format = "string"
column = "id"
[transform]
sql = "SELECT *, '$$1' AS price FROM input"
[sink]
kind = "sql"
url = "postgresql://pat:full-url-canary@db1:5432,db2/shop?sslmode=require"
table = '"my shop"."we""ird"'
mode = "upsert"
keys = ["id"]
version = "changed"
create = false
keep_source = true
max_rejects = 100
connect_timeout = "3 seconds"
[spark]
master = "spark://127.0.0.1:7077"
trigger = "500 ms"
max_records_per_batch = 1
[spark.conf]
spark.sql.shuffle.partitions = 4
spark.speculation = true
"spark.hadoop.fs.s3a.secret.key" = "full-s3-canary"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pipeline.toml"


def test_defaults(file: Path) -> None:
    file.write_text(SHORTEST)
    settings = load(file)
    assert settings.delivery == "exactly_once"
    assert (settings.source.start, settings.source.on_gap) == ("earliest", "fail")
    assert settings.source.kafka == {}
    assert settings.mirror_group == "oncely-orders"
    assert isinstance(settings.decode, JsonDecode)
    assert settings.decode.schema_ddl == "id BIGINT, total DOUBLE"
    assert (settings.decode.key, settings.transform) == (None, None)
    sink = settings.sink
    assert (sink.table, sink.dialect) == (TableName(None, "orders"), "postgresql")
    assert (sink.mode, sink.keys, sink.version) == ("append", (), None)
    assert (sink.create, sink.keep_source, sink.connect_timeout) == (True, None, 10.0)
    assert sink.max_rejects == RejectBudget(share=Fraction(1, 100))
    spark = settings.spark
    assert (spark.master, spark.trigger, spark.max_records_per_batch) == (
        "local[*,4]",
        1.0,
        500_000,
    )
    assert spark.is_local
    assert spark.conf == {}


def test_everything(file: Path) -> None:
    file.write_text(FULL)
    settings = load(str(file))
    source, sink = settings.source, settings.sink
    assert source.brokers == "k1:9092,[::1]:9093"
    assert source.topics == ("orders", "returns")
    assert source.start == StartTime(1_717_171_200_000)
    assert settings.mirror_group == "shop"
    assert source.kafka_properties() == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "pat",
        "sasl.password": "full-sasl-canary",
        "fetch.min.bytes": "5",
        "check.crcs": "true",
    }
    assert isinstance(source.kafka["sasl.password"], SecretStr)
    assert isinstance(settings.decode, AvroDecode)
    assert settings.decode.schema_registry_user_info == SecretStr("pat:full-registry-canary")
    assert settings.decode.key == TextKey(format="string", column="id")
    assert settings.transform is not None
    assert settings.transform.kind == "sql"
    assert settings.transform.sql == "SELECT *, '$1' AS price FROM input"
    assert sink.table == TableName("my shop", 'we"ird')
    assert sink.url.get_secret_value().startswith("postgresql://pat:full-url-canary@db1")
    url = settings.describe()["sink"]["url"]
    assert url == "postgresql://pat:***@db1:5432,db2/shop?sslmode=require"
    assert (sink.keys, sink.version) == (("id",), "changed")
    assert sink.max_rejects == RejectBudget(count=100)
    assert sink.connect_timeout == 3.0
    assert settings.spark.trigger == 0.5
    assert not settings.spark.is_local
    assert settings.spark.spark_conf() == {
        "spark.sql.shuffle.partitions": "4",
        "spark.speculation": "true",
        "spark.hadoop.fs.s3a.secret.key": "full-s3-canary",
    }


def test_settings_are_frozen_comparable_and_travel(file: Path) -> None:
    file.write_text(FULL)
    settings = load(file)
    assert pickle.loads(pickle.dumps(settings)) == settings == load(file)
    with pytest.raises(ValidationError):
        settings.name = "other"  # type: ignore[misc]


def test_a_description_is_json_and_reads_like_the_file(file: Path) -> None:
    file.write_text(FULL)
    said = json.loads(json.dumps(load(file).describe()))
    assert said["source"]["start"] == "2024-05-31T16:00:00.000Z"
    assert said["source"]["group"] == "shop"
    assert said["sink"]["table"] == '"my shop"."we""ird"'
    assert said["sink"]["url"] == "postgresql://pat:***@db1:5432,db2/shop?sslmode=require"
    assert said["sink"]["max_rejects"] == "100"
    assert said["spark"]["trigger"] == 0.5
    key = {"format": "string", "column": "id", "type": "STRING", "unwrap": None, "json": False}
    assert said["decode"]["key"] == key
    file.write_text(SHORTEST)
    said = load(file).describe()
    assert said["decode"]["schema"] == "id BIGINT, total DOUBLE"
    assert said["sink"]["max_rejects"] == "1%"
    assert said["source"]["group"] == "oncely-orders"


@pytest.mark.parametrize("off", ["false", '""'])
def test_the_mirror_can_be_switched_off(file: Path, off: str) -> None:
    file.write_text(SHORTEST.replace("[source]", f"[source]\ngroup = {off}"))
    assert load(file).mirror_group is None
    assert load(file).describe()["source"]["group"] is None


def test_paths_begin_at_the_pipeline_file(file: Path) -> None:
    (file.parent / "order.avsc").write_text("{}")
    (file.parent / "password.txt").write_text("file-canary-1\n")
    text = SHORTEST.replace('format = "json"', 'format = "avro"\nschema_file = "order.avsc"')
    text = text.replace('schema = "id BIGINT, total DOUBLE"\n', "")
    text = text.replace("//127", "//pat:${file:password.txt}@127")
    file.write_text(text)
    settings = load(file)
    assert isinstance(settings.decode, AvroDecode)
    assert settings.decode.schema_file == file.parent / "order.avsc"
    assert settings.sink.url.get_secret_value() == "postgresql://pat:file-canary-1@127.0.0.1/shop"


def test_a_mapping_does_as_well_as_a_file() -> None:
    settings = parse(
        {
            "name": "raw",
            "source": {"brokers": "h:1", "topics": ("a",), "kafka": {"client.id": "me"}},
            "decode": {"format": "raw"},
            "sink": {"kind": "sql", "url": "sqlite:///my.db", "table": "main.Raw"},
        }
    )
    assert isinstance(settings.decode, RawDecode)
    assert settings.decode.columns == ("key", "value", "timestamp")
    assert settings.sink.dialect == "sqlite"
    assert settings.sink.table == TableName("main", "Raw")
    assert settings.source.kafka == {"client.id": "me"}


def test_native_times_of_toml(file: Path) -> None:
    for written, moment in (
        ("2024-05-31T18:00:00+02:00", 1_717_171_200_000),
        ("2024-05-31T16:00:00", 1_717_171_200_000),
        ("2024-05-31", 1_717_113_600_000),
    ):
        file.write_text(SHORTEST.replace("[source]", f"[source]\nstart = {written}"))
        assert load(file).source.start == StartTime(moment)


def test_one_topic_needs_no_list() -> None:
    raw = tomllib.loads(SHORTEST)
    raw["source"]["topics"] = "orders"
    assert parse(raw).source.topics == ("orders",)
    raw["source"]["topics"] = ""
    with pytest.raises(ConfigError, match=r"source\.topics"):
        parse(raw)
