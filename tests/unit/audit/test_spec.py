"""Two datasets by their plain form or from a file; secrets never on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncely.audit.datasets import spark_conf
from oncely.audit.spec import Pair, is_pair, parse_pair, plain
from oncely.errors import ConfigError, OncelyError, WrongInput

BY_ID = {"id": "id"}
KAFKA = "kafka:orders?brokers=a:9092,b:9092"
TABLE = "jdbc:postgresql://db:5432/shop?dbtable=public.orders&user=bob&sslmode=require"


def pair(left: str | Path = KAFKA, right: str | Path = TABLE, **given: object) -> Pair:
    return parse_pair(left, right, given or BY_ID)


def test_plain_forms() -> None:
    one = pair(
        f"{KAFKA}&schema=id INT, ts TIMESTAMP&security.protocol=ssl&kafka.ssl.ca.location=/ca"
    )
    assert one.left.topics == ("orders",)
    assert one.left.brokers == "a:9092,b:9092"
    assert one.left.schema == "id INT, ts TIMESTAMP"
    assert one.left.kafka == {"security.protocol": "ssl", "ssl.ca.location": "/ca"}
    assert one.right.format == "jdbc"
    assert one.right.options == {
        "url": "jdbc:postgresql://db:5432/shop?sslmode=require",
        "dbtable": "public.orders",
        "user": "bob",
    }
    assert one.name == "kafka:orders and jdbc:public.orders"
    files = pair("parquet:/data/a%3Fb", "csv:s3a://lake/x?header=true&schema=id INT")
    assert (files.left.format, files.left.path, dict(files.left.options)) == (
        "parquet", "/data/a?b", {},
    )  # fmt: skip
    assert (files.right.path, dict(files.right.options), files.right.schema) == (
        "s3a://lake/x", {"header": "true"}, "id INT",
    )  # fmt: skip


def test_values_are_decoded_but_not_those_of_a_url() -> None:
    made = plain("right", "jdbc:postgresql://h/d?options=-c%20a%3Db&query=SELECT 1 %26 2 AS id")
    assert made["options"] == {
        "url": "jdbc:postgresql://h/d?options=-c%20a%3Db",
        "query": "SELECT 1 & 2 AS id",
    }


def test_expressions() -> None:
    one = pair(id="id", id_right="order_id", by="hour(ts)").match
    assert (one.id_left, one.id_right, one.by) == ("id", "order_id", "hour(ts)")
    assert pair(source_columns="t, p,o").match.source_columns == ("t", "p", "o")


@pytest.mark.parametrize(
    "left",
    [
        f"{KAFKA}&sasl.password=hunter2",
        f"{KAFKA}&sasl.username=bob&kafka.ssl.key.pem=hunter2",
        "jdbc:postgresql://db/shop?dbtable=t&password=hunter2",
        "jdbc:mysql://bob:hunter2@db/shop?dbtable=t",
        "parquet:/x?fs.s3a.secret.key=hunter2",
        "jdbc:postgresql://db/shop?dbtable=t&password=${PW}hunter2",
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(left: str) -> None:
    with pytest.raises(ConfigError, match="every user of this machine") as refused:
        pair(left)
    assert "hunter2" not in str(refused.value)


def test_a_reference_to_a_secret_is_filled_in_and_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PW", "s3cret-1")
    (tmp_path / "pw").write_text("s3cret-2\n")
    one = pair(
        f"{KAFKA}&sasl.mechanism=PLAIN&security.protocol=sasl_plaintext&sasl.username=u"
        f"&sasl.password=${{file:{tmp_path / 'pw'}}}",
        "jdbc:postgresql://db/shop?dbtable=t&password=${PW}",
    )
    assert one.right.options["password"] == "s3cret-1"
    assert one.left.kafka["sasl.password"] == "s3cret-2"
    assert "s3cret" not in repr(one)
    assert one.secrets.redact("x s3cret-1 s3cret-2") == "x *** ***"


def test_a_file_with_both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PW", "s3cret-1")
    file = tmp_path / "pair.toml"
    file.write_text(
        """
        id = "id"
        by = "hour(ts)"
        [left]
        format = "kafka"
        topic = "orders"
        brokers = "a:9092"
        schema = "id INT, ts TIMESTAMP"
        [left.kafka]
        security.protocol = "sasl_plaintext"
        sasl.mechanism = "PLAIN"
        sasl.username = "u"
        sasl.password = "${PW}"
        [right]
        format = "jdbc"
        options = { url = "jdbc:postgresql://h", dbtable = "t", password = "${PW}", fetchSize = 5 }
        [spark]
        master = "local[1]"
        [spark.conf]
        "spark.executor.memory" = "1g"
        """
    )
    assert is_pair(file)
    one = parse_pair(file, file, {"by": "kind"}, ["spark.ui.enabled=false"])
    assert one.left.kafka["sasl.password"] == one.right.options["password"] == "s3cret-1"
    assert one.right.options["fetchSize"] == "5"
    assert (one.match.id_left, one.match.by) == ("id", "kind")
    assert one.spark.spark_conf() == {
        "spark.executor.memory": "1g", "spark.ui.enabled": "false",
    }  # fmt: skip
    assert one.secrets.redact("s3cret-1") == "***"
    mixed = parse_pair(str(file), "parquet:/x", {})
    assert mixed.right.format == "parquet"


@pytest.mark.parametrize(
    ("left", "given", "told"),
    [
        ("orders", BY_ID, "names no format"),
        ("kafka:orders", BY_ID, "left.brokers: is missing"),
        ("kafka:?brokers=a:1", BY_ID, "left.topic: is missing"),
        ("kafka:bad name?brokers=a:1", BY_ID, "left.topic"),
        ("kafka:t?brokers=nohost", BY_ID, "left.brokers"),
        ("kafka:t?brokers=a:1&isolation.level=read_uncommitted", BY_ID, "left.kafka.isolation"),
        ("kafka:t?brokers=a:1&value=xml", BY_ID, "allowed: json, text"),
        ("parquet:/x?nothing", BY_ID, "has no value"),
        ("jdbc:postgresql://h/d", BY_ID, "left.options.dbtable"),
        ("nowhere.toml", BY_ID, "can't read"),
        (KAFKA, {}, "an id, or columns with offsets"),
        (KAFKA, {"id_left": "a"}, "an id, or columns with offsets"),
        (KAFKA, {"id": "a", "source_columns": "a,b,c"}, "two ways"),
        (KAFKA, {"source_columns": "a,b"}, "three columns"),
        ("parquet:${NOWHERE}", BY_ID, "no variable NOWHERE"),
    ],
)
def test_wrong_input_is_told(left: str, given: dict[str, object], told: str) -> None:
    with pytest.raises(WrongInput) as wrong:
        parse_pair(left, TABLE, given)
    assert told in str(wrong.value)


def test_wrong_files_are_told(tmp_path: Path) -> None:
    for text, told in (
        ("[left]\nformat = 'csv'\npath = '/x'", "no such table"),
        ("a = 1", "unknown key"),
        ("[left]\nformat='csv'\npath='/x'\nbrokers='a:1'\n[right]\nformat='csv'", "left.brokers"),
        ("[left]\nformat='csv'\nfolder='/x'\n[right]\nformat='csv'\npath='/x'", "left.folder"),
        ("[left]\nformat='csv'\n[right]\nformat='csv'\npath='/x'", "left.path: is missing"),
        ("not toml", "not TOML"),
    ):
        file = tmp_path / "pair.toml"
        file.write_text(text)
        with pytest.raises(OncelyError) as wrong:
            parse_pair(file, file, BY_ID)
        assert told in str(wrong.value), text


def test_a_conf_with_a_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="every user"):
        parse_pair(KAFKA, TABLE, BY_ID, ["spark.hadoop.fs.s3a.secret.key=x"])


def test_a_session_gets_what_the_datasets_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncely.audit.datasets.resolve", lambda name: [Path(f"/jars/{name}.jar")])
    one = pair()
    assert spark_conf(one.left) == {}
    assert spark_conf(one.left, one.right, one.right)["spark.jars"].startswith("/jars/org.postgres")
    files = pair("parquet:/x", "csv:/y")
    assert spark_conf(files.left, files.right) == {}
    monkeypatch.setattr(
        "oncely.audit.datasets.resolve", lambda _: [Path("/delta-spark.jar"), Path("/other.jar")]
    )
    conf = spark_conf(pair("parquet:/x", "delta:/y").right)
    assert conf["spark.jars"] == "/delta-spark.jar"
    assert "DeltaSparkSessionExtension" in conf["spark.sql.extensions"]
