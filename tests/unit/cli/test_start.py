"""A command imports no packages that it does not need: its start is most of its time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from oncely.cli.opened import opened
from oncely.errors import WrongInput

PIPELINE = """
name = "orders"
source = { brokers = "127.0.0.1:1", topics = ["orders"] }
decode = { format = "json", schema = "id BIGINT" }
sink = { kind = "sql", url = "postgresql://nobody@127.0.0.1:2/nothing", table = "orders" }
"""
OF_OTHER_KINDS = ["duckdb", "fastavro", "polars", "deltalake", "pyspark", "opentelemetry.sdk"]
STATUS = """
from pathlib import Path
import oncely.cli.status, oncely.pipeline.status
oncely.cli.status.opened(Path({file!r})).destination.sink()
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import oncely.cli.verbs",
            ["pyarrow", "numpy", "pydantic", "oncely.config", *OF_OTHER_KINDS],
        ),
        (STATUS, ["oncely.runtimes.batches.run", "oncely.runtimes.row_transform", *OF_OTHER_KINDS]),
    ],
    ids=["help", "status"],
)
def test_a_command_imports_what_it_needs(code: str, heavy: list[str], tmp_path: Path) -> None:
    file = tmp_path / "orders.toml"
    file.write_text(PIPELINE)
    found = f"\nimport sys; print([one for one in {heavy} if one in sys.modules])"
    code = code.replace("{file!r}", repr(str(file))) + found
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_duckdb_reports_no_leaks_at_the_end_of_a_command(tmp_path: Path) -> None:
    file = tmp_path / "orders.toml"
    file.write_text(PIPELINE + '[transform]\nsql = "SELECT id FROM input"\n')
    code = (
        "import sys; from pathlib import Path; from oncely.cli import main, opened;"
        f"opened.opened(Path({str(file)!r})).transformed_schema();"
        "sys.argv[1:] = ['--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("oncely ")
    assert done.stderr == ""


@pytest.mark.parametrize("transform", ['python = "beside:f"', 'sql = "SELECT id FROM input"'])
def test_modules_beside_the_pipeline_file_are_found_last_and_only_if_it_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform: str
) -> None:
    monkeypatch.setattr(sys, "path", [*(before := sys.path)])
    (file := tmp_path / "p.toml").write_text(f"{PIPELINE}\n[transform]\n{transform}\n")
    opened(file, imports=True)
    added = [str(tmp_path)] if "python" in transform else []
    assert sys.path == before + added


@pytest.mark.parametrize("writable", ["", "rules.py", ".."])
def test_code_that_others_may_write_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: str
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (folder := tmp_path / "pipelines").mkdir(mode=0o755)
    (folder / "rules.py").write_text("")
    (file := folder / "p.toml").write_text(f'{PIPELINE}\n[transform]\npython = "rules:f"\n')
    path = (folder / writable).resolve()
    opened(file, imports=True)
    for mode, refused in ((0o757, True), (0o1777, writable != ".."), (0o755, False)):
        path.chmod(mode)
        with pytest.raises(WrongInput, match="chmod go-w") if refused else nullcontext():
            opened(file, imports=True)
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    else:
        os.chown(path, 4711, 0)
    with pytest.raises(WrongInput, match="other users may write"):
        opened(file, imports=True)
