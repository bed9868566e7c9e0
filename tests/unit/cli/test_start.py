"""A command imports no packages that it does not need: its start is most of its time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
oncely.cli.status.opened(Path({file!r})).destination.bare_sink
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import oncely.cli", ["pyarrow", "numpy", "pydantic", "oncely.config", *OF_OTHER_KINDS]),
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
