"""README: what it tells to type works, and its text can be read outside of the repository."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import repository
from tests.scenarios.commands import run
from tests.unit.test_documentation import blocks, command_lines

README = (repository() / "README.md").read_text()
LONGEST = 130  # lines: three screens


def first_day() -> list[list[str]]:
    """The commands behind the start of servers and the records."""
    return [words for words in command_lines(README) if words[0] != "local"]


def test_the_commands_of_the_first_day(
    broker: Any, database: str, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are written, but for the topic: others use the same broker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROKERS", broker.bootstrap)
    monkeypatch.setenv("POSTGRES", database)
    made = next(line for line in README.splitlines() if line.startswith("seq 1000 | sed"))
    records, _, produce = made.partition(" | oncely ")
    lines = subprocess.run(["sh", "-c", records], capture_output=True, check=True).stdout
    here = {"$BROKERS": broker.bootstrap, "orders": topic_name}

    def done(words: list[str]) -> str:
        found = run(*(here.get(word, word) for word in words))
        assert found.returncode == 0, (words, found.stderr)
        return str(found.stdout)

    monkeypatch.setattr("sys.stdin", _stdin(lines, tmp_path))
    done([*shlex.split(produce), "--brokers", broker.bootstrap, "--partitions", "1"])
    (file,) = [block.text for block in blocks(README) if block.language == "toml"]
    (tmp_path / "orders.toml").write_text(file.replace('["orders"]', f'["{topic_name}"]'))
    assert [words[0] for words in first_day()] == [
        "init", "plan", "work", "status", "rejects", "audit",
    ]  # fmt: skip
    outputs = {words[0]: done(words) for words in first_day()}
    assert "${POSTGRES}" in (tmp_path / "proposal.toml").read_text()
    assert "it can run" in outputs["plan"]
    assert "1,000" in outputs["status"]
    assert "clean" in outputs["audit"]
    broker.delete_topic(topic_name)


def _stdin(content: bytes, folder: Path) -> Any:
    (folder / "records").write_bytes(content)
    return (folder / "records").open()


def test_what_make_is_told_to_make_is_there() -> None:
    wanted = re.findall(r"(?m)^make (\w+) ", README)
    assert wanted == ["demo", "test"]
    for name in wanted:
        # A recipe that calls make is executed in a dry run, too, and the setup's would call itself.
        done = ["--old-file", ".venv/.ready"]
        plan = ["make", "--dry-run", *done, "--directory", str(repository()), name]
        shown = subprocess.run(plan, capture_output=True, text=True, check=True).stdout
        assert f"python -m {'demo' if name == 'demo' else 'pytest'}" in shown


def test_it_is_short_and_leads_nowhere_that_an_index_of_packages_does_not_have() -> None:
    assert len(README.splitlines()) <= LONGEST
    assert not re.search(r"\]\((?!https?://)", README), "a relative link or image"
    named = set(re.findall(r"`((?:docs|models)/[\w./-]+\.md)`", README))
    assert "docs/GUARANTEES.md" in named
    assert all((repository() / page).exists() for page in named)
