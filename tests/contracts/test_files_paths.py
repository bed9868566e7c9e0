"""``oncely files paths``: other programs read just the table, by the lines of the documentation."""

from __future__ import annotations

import json
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from oncely.cli import files
from oncely.cli.verbs import app
from oncely.kinds.files.compact import compact
from oncely.stores.objects.store import Store
from oncely.testing.servers.kafka import Broker
from tests.conftest import repository
from tests.laketools import COLUMNS, Lake, events, lake, lake_in_memory

WIDER = pa.schema([("id", pa.float64()), *list(COLUMNS)[1:], ("note", pa.string())])
USERS = (
    "bob",
    "",
    None,
    "é😀",
    "..",
    "~empty",
    "__HIVE_DEFAULT_PARTITION__",
    "x=1",
    "a\nb",
    "*?[c]",
)
PAGE = (repository() / "docs" / "reading-files.md").read_text()


@pytest.fixture
def own(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """Odd users and a schema that has grown; a compaction, and orphans of both formats."""
    made = lake(broker, tmp_path / "lake  of 'events'", format="parquet")
    for start in (0, 2):
        made.batch_of(events("a/b %", start, 2), form="parquet")
    compact(made.table)
    made.publish([made.file(rows, WIDER, form="parquet") for rows in later()], [WIDER])
    made.rows += [row for rows in later() for row in rows]
    for form in ("parquet", "avro"):
        made.file(events("bob", 90, 2), form=form)
    made.topics.reader().settled()
    monkeypatch.setattr(files, "opened", lambda file: file)
    monkeypatch.setattr(files, "table_of", lambda _: made.table)
    monkeypatch.chdir(tmp_path)
    return made


def later() -> list[list[dict[str, Any]]]:
    """Rows of each user in the wider schema."""
    return [
        [row | {"id": row["id"] + 0.5, "note": "x"} for row in events(user, 4 + 3 * at, 3)]
        for at, user in enumerate(USERS)
    ]


def paths(*options: str) -> str:
    done = CliRunner().invoke(app, ["files", "paths", "events.toml", *options])
    assert done.exit_code == 0, done.exception
    return done.stdout


def documented(language: str, number: int = 0) -> str:
    found = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)
    return str(found[number])


def test_paths_are_those_of_the_manifest(own: Lake) -> None:
    given = [json.loads(line) for line in paths().splitlines()]
    live = own.table.look().files
    assert {one["path"] for one in given} == {str(own.root / path) for path in live}
    assert len(live) < len(own.paths()) - 2, "replaced files and orphans are stored, too"
    for one in given:
        file = live[Path(one["path"]).relative_to(own.root).as_posix()]
        assert one == {
            "path": str(own.root / file.path),
            "format": "parquet",
            "rows": file.rows,
            "bytes": (own.root / file.path).stat().st_size,
            "partition": file.partition,
        }
    users = [one["partition"]["user"] for one in given]
    assert sorted(users, key=str) == sorted(("a/b %", *USERS), key=str)
    assert paths("--plain").splitlines() == [one["path"] for one in given]
    for one in given:
        user = one["partition"]["user"]
        if user is not None:
            (path,) = paths("--where", f"user={user}", "--plain").splitlines()
            assert path == one["path"]


def test_a_table_without_directories_has_no_partition_values(
    broker: Broker, tmp_path: Path
) -> None:
    made = lake(broker, tmp_path, partition_by=())
    made.batch_of(events("ann", 0, 1))
    assert [one.keys() for one in files.addresses(made.table)] == [
        {"path", "format", "rows", "bytes"}
    ]


def test_duckdb_reads_the_documented_way(own: Lake, tmp_path: Path) -> None:
    (tmp_path / "files.jsonl").write_text(paths())
    with duckdb.connect() as db:
        for statement in documented("sql").split(";"):
            if statement.strip():
                db.execute(statement)
        assert db.fetchall() == [(len(own.rows),)]
        same = documented("sql").replace("count(*)", "id, user, note")
        found = db.execute(same).fetchall()
    assert sorted(found, key=str) == sorted(known(own), key=str)


def test_polars_reads_the_documented_way(
    own: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "files.jsonl").write_text(paths())
    scope: dict[str, Any] = {}
    exec(documented("python"), scope)
    assert capsys.readouterr().out == f"{len(own.rows)}\n"
    found = scope["rows"].select("id", "user", "note").collect().rows()
    assert sorted(found, key=str) == sorted(known(own), key=str)


@pytest.mark.long
def test_spark_reads_the_documented_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: Any
) -> None:
    """A column that only newer files have, and not the first one, and values that are no names of
    directories."""
    made = lake_in_memory(tmp_path / "lake of 'events'", format="parquet")
    made.batch_of(events("\na/b %", 0, 2), form="parquet")
    made.batch_of(events("資" * 100, 2, 2), form="parquet")
    wider = pa.schema([*COLUMNS, ("note", pa.string())])
    users = enumerate(("1", *USERS))
    newer = [[r | {"note": "x"} for r in events(user, 4 + 3 * at, 3)] for at, user in users]
    made.publish([made.file(rows, wider, form="parquet") for rows in newer], [wider])
    rows = [*made.rows, *(row for rows in newer for row in rows)]
    monkeypatch.chdir(tmp_path)
    addresses = [one["path"] for one in files.addresses(made.table)]
    (tmp_path / "paths.txt").write_text("".join(f"{one}\n" for one in addresses))
    scope: dict[str, Any] = {"spark": spark}
    exec(documented("python", 1), scope)
    found = [(row.id, row.user, row.note) for row in scope["rows"].collect()]
    wanted = [(row["id"], row["user"], row.get("note")) for row in rows]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_a_shell_reads_the_documented_way(own: Lake, tmp_path: Path) -> None:
    """JSON lines, and one Parquet file."""
    done = CliRunner().invoke(app, ["files", "read", "events.toml"])
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(found, key=itemgetter("id")) == sorted(
        ({"note": None, **row} for row in own.rows), key=itemgetter("id")
    )
    CliRunner().invoke(app, ["files", "read", "events.toml", "--out", "all.parquet"])
    rows = pl.read_parquet(tmp_path / "all.parquet").select("id", "user", "note").rows()
    assert sorted(rows, key=str) == sorted(known(own), key=str)


def known(own: Lake) -> list[tuple[float, str, str | None]]:
    return [(float(row["id"]), row["user"], row.get("note")) for row in own.rows]


def test_polars_reads_avro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lake_in_memory(tmp_path / "lake", format="avro")
    made.batch_of(events("a/b %", 0, 2))
    made.publish([made.file(rows, WIDER) for rows in later()], [WIDER])
    made.rows += [row for rows in later() for row in rows]
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"path": one["path"]}) for one in files.addresses(made.table))
    (tmp_path / "files.jsonl").write_text("\n".join(lines))
    scope: dict[str, Any] = {}
    exec(documented("python").replace("scan_parquet", "read_avro").replace(".collect()", ""), scope)
    found = scope["rows"].select("id", "user", "note").rows()
    assert sorted(found, key=str) == sorted(known(made), key=str)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("file:///a%20b/c", "/a b/c/u=x%2Fy/f"),
        ("s3://bucket", "s3://bucket/u=x%2Fy/f"),
        ("s3://bucket/a%20b/", "s3://bucket/a b/u=x%2Fy/f"),
        ("gs://bucket/a?project_id=p", "gs://bucket/a/u=x%2Fy/f"),
        ("abfs://c@account.dfs.core.windows.net/a", "abfs://c@account.dfs.core.windows.net/a/u=x%2Fy/f"),
    ],
)  # fmt: skip
def test_addresses(url: str, address: str) -> None:
    assert Store(url).address("u=x%2Fy/f") == address
