"""``oncely files``: what the commands print, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from oncely.cli import files
from oncely.cli.verbs import app
from oncely.errors import ConfigError, WrongInput
from oncely.kinds.files.maintenance import vacuum
from oncely.testing.servers.kafka import Broker
from tests.laketools import Lake, events, lake

ANN = "user=ann"


@pytest.fixture
def own(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    made = lake(broker, tmp_path / "lake")
    made.batch_of(events("ann", 0, 3), events("bob", 3, 2))
    made.batch_of(events("ann", 5, 1), events(None, 6, 1))
    made.topics.reader().settled()
    monkeypatch.setattr(files, "opened", lambda file: file)
    monkeypatch.setattr(files, "table_of", lambda _: made.table)
    return made


def oncely(*words: str) -> Result:
    return CliRunner().invoke(app, ["files", words[0], "pipeline.toml", *words[1:]])


def as_json(*words: str) -> dict[str, object]:
    done = oncely(*words, "--json")
    assert done.exit_code == 0, done.exception
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_list(own: Lake) -> None:
    found = as_json("list", "--where", ANN)
    assert (found["listed"], found["total"], found["rows"]) == (2, 4, 4)
    text = oncely("list").stdout
    assert text.splitlines()[-1].startswith("4 files, 7 rows, ")
    assert all(path in text for path in own.paths())
    nobody = oncely("list", "--where", "user").stdout
    assert nobody.splitlines()[-1].startswith("1 of 4 files, 1 row,")


def test_read(own: Lake) -> None:
    lines = [json.loads(line) for line in oncely("read", "--where", ANN).stdout.splitlines()]
    assert lines == [row for row in own.rows if row["user"] == "ann"]
    assert len(oncely("read", "--limit", "4").stdout.splitlines()) == 4
    found = as_json("read", "--column", "id", "--where", "user=bob")
    assert found == {"columns": {"id": "int64"}, "rows": [{"id": 3}, {"id": 4}]}


def test_read_into_a_file(own: Lake, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    assert as_json("read", "--out", str(out)) == {"rows": 7, "out": str(out)}
    assert sorted(pq.read_table(out)["id"].to_pylist()) == list(range(7))
    before = out.read_bytes()
    (path,) = [p for p in own.paths() if "user=bob" in p]
    (own.root / path).unlink()
    assert oncely("read", "--out", str(out)).exit_code != 0
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lake", "rows.parquet"]
    nowhere = oncely("read", "--where", ANN, "--out", str(tmp_path / "no" / "x"))
    assert isinstance(nowhere.exception, WrongInput)


def test_values_that_json_has_no_word_for() -> None:
    given = {"a": float("nan"), "b": [float("inf")], "c": {"d": -float("inf")}, "e": 1.5}
    assert files._plain(given) == {"a": "NaN", "b": ["Infinity"], "c": {"d": "-Infinity"}, "e": 1.5}


def test_verify(own: Lake) -> None:
    assert as_json("verify")["ok"] is True
    assert "4 files, 7 rows" in oncely("verify").stdout
    (path,) = [p for p in own.paths() if "user=bob" in p]
    (own.root / path).unlink()
    done = oncely("verify")
    assert done.exit_code == 1
    assert "it is not in the store" in done.stdout
    found = json.loads(oncely("verify", "--json").stdout)
    assert found["problems"] == [{"path": path, "text": "it is not in the store"}]


def test_compact_then_vacuum(own: Lake) -> None:
    assert (
        "2 files with 4 rows would become 1; the table has 3"
        in oncely("compact", "--dry-run").stdout
    )
    assert as_json("compact")["outputs"] == 1
    assert as_json("compact", "--dry-run")["inputs"] == 0
    orphan = own.file(events("ann", 50, 1))
    own.age(orphan.path, 10_000)
    assert orphan.path in oncely("vacuum", "--dry-run").stdout
    found = as_json("vacuum")
    assert (found["removed"], found["for_readers"], found["live"]) == (1, 2, 3)
    done = oncely("vacuum")
    assert "removed: 0 files, 0 bytes; part of the table: 3 files" in done.stdout
    assert "uploads" not in done.output
    assert orphan.path not in own.paths()


def test_a_vacuum_on_s3_names_the_rule_for_uploads(
    own: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(vacuum(own.table), uploads=None)
    monkeypatch.setattr("oncely.cli.files.vacuum", lambda *_, **__: found)
    assert "AbortIncompleteMultipartUpload" in oncely("vacuum").output
    assert as_json("vacuum")["uploads"] is None


@pytest.mark.parametrize(("given", "said"), [("=x", "has no column name"), ("a", "repeated")])
def test_a_where_that_says_nothing(own: Lake, given: str, said: str) -> None:
    done = oncely("list", "--where", "a=1", "--where", given)
    assert isinstance(done.exception, WrongInput)
    assert said in str(done.exception)


def test_a_pipeline_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(
        'name = "p"\n[source]\nbrokers = "127.0.0.1:1"\ntopics = ["t"]\n'
        '[decode]\nformat = "json"\nschema = "id BIGINT"\n'
        '[sink]\nkind = "sql"\nurl = "sqlite:////tmp/none.db"\ntable = "t"\n'
    )
    for command in ("list", "read", "verify", "compact", "vacuum"):
        done = CliRunner().invoke(app, ["files", command, str(file)])
        assert isinstance(done.exception, ConfigError), done.exception
        assert "sink.kind: pipeline 'p' writes to 'sql', not to files" in str(done.exception)


def test_schema_show(own: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "opened", lambda file: file)
    monkeypatch.setattr(files, "table_of", lambda _: own.table)

    def show(*words: str) -> Result:
        return CliRunner().invoke(app, ["files", "schema", "show", "pipeline.toml", *words])

    (found,) = json.loads(show("--json").stdout)["schemas"]
    assert (found["scope"], found["files"]) == ([], 4)
    assert [one["name"] for one in found["avro"]["fields"]] == ["id", "user", "ts"]
    assert "BIGINT" in show().stdout
    refused = show("--scope", "id=7")
    assert isinstance(refused.exception, WrongInput)
    assert "scopes have user" in str(refused.exception)
