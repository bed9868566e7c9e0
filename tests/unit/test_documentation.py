"""What the documentation says can be done: links lead somewhere, and code blocks are accepted."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from docs import api_reference
from oncely.cli.verbs import app
from oncely.config import parse
from oncely.config.pipeline import tables
from oncely.config.reference import markdown
from oncely.errors import ConfigError
from oncely.pipeline.pipeline import Pipeline
from oncely.runtimes.chunks import Processing
from tests.conftest import repository

TOP = repository()
GENERATED = {"pipeline-file.md": markdown, "api.md": api_reference.markdown}
PAGES = [TOP / "README.md", TOP / "CONTRIBUTING.md", TOP / "SECURITY.md", TOP / "models/README.md",
         *sorted((TOP / "docs").rglob("*.md"))]  # fmt: skip
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda one: str(one.relative_to(TOP)))
_FENCE = re.compile(r"(?ms)^( *)```([^\n]*)\n(.*?)^\1```$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"(?m)^#+ (.+?)(?: \{ #(\S+) \})?$")


class Block(NamedTuple):
    """A code block, and the number of its first line."""

    language: str
    text: str
    line: int


def text_of(page: Path) -> str:
    return page.read_text() + GENERATED.get(page.name, str)()


def blocks(text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        indent, language, code = found.groups()
        code = re.sub(f"(?m)^{indent}", "", code)
        yield Block(language.strip(), code, text[: found.start(3)].count("\n") + 1)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: those that are written, and those that sites make of headings."""
    text = _FENCE.sub("", text_of(page))
    found = {given or slug(title) for title, given in _HEADING.findall(text)}
    return frozenset(found | {f"{one}_1" for one in found})


def slug(title: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", title.lower()).strip()
    return re.sub(r"[-\s]+", "-", kept)


def broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(re.sub("`[^`\n]*`", "", _FENCE.sub("", text_of(page)))):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken_links(page))


def test_the_file_map_has_every_module() -> None:
    source, kinds = TOP / "src/oncely", "kinds/*"
    rows = re.findall(r"(?m)^\| `([\w/*]+)` \| (.*) \|$", text_of(TOP / "docs/ARCHITECTURE.md"))
    named = {folder: set(re.findall(r"`(\w+)`", text)) for folder, text in rows}
    for module in source.rglob("*.py"):
        folder = str(module.parent.relative_to(source.parent)).removeprefix("oncely/")
        own = {"oncely": "src/oncely"}.get(folder, folder)
        known = named.get(own, set()) | (named[kinds] if own.startswith("kinds/") else set())
        assert module.stem in known | {"__init__", "__main__"}, f"{own}/{module.name}"


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# Some words: `x`\n[a](b.md) [b](#some-words-x) [c](#other) [d](https://h/)")
    assert list(broken_links(page)) == ["b.md", "#other"]


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (TOP / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in (TOP / "docs").glob("*.md")}


def whole(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """A pipeline file, or some of its tables and the rest of a file; None for other files."""
    own = {"name", "delivery", "commit_interval", "runtime", "processes"}
    names = {one.partition(".")[0] for one in tables()} | own
    if not raw.keys() <= names:
        return None
    decode = {"format": "json", "schema": "id BIGINT, carrier STRING"}
    rest: dict[str, Any] = {
        "name": "flights",
        "source": {"brokers": "h:9092", "topics": ["flights"]},
        "decode": decode,
        "sink": {"kind": "sql", "url": "postgresql://h/d", "table": "t"},
    }
    done = {**rest, **raw}
    if done["sink"].get("mode") == "upsert" and "key" not in done["decode"]:
        column = done["sink"]["keys"][0]
        done["decode"] = {**done["decode"], "key": {"format": "string", "column": column}}
    for name in ("decode", "sink", "source"):
        if not {"format", "kind", "brokers"} & done[name].keys():
            done[name] = {**rest[name], **done[name]}
    return done


VALUES = {"POSTGRES": "postgresql://h/d", "BROKERS": "h:9092"}


def accepted(text: str, folder: Path) -> bool:
    """True if a block is (a part of) a pipeline file that the loader accepts.

    False for other files; raises ConfigError for a wrong one.
    """
    raw = tomllib.loads(text)
    if (file := whole(raw)) is None:
        return False
    for name in re.findall(
        r'"(?:\$\{file:)?([\w./-]+\.(?:avsc|pem|p12|txt)|/run/[\w/-]+)\}?"', text
    ):
        if not name.startswith("/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
    parse(file, base=folder)
    return True


@EVERY_PAGE
def test_pipeline_files_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(page.read_text()):
        if block.language == "toml":
            for name in re.findall(r"\$\{(\w+)\}", block.text):
                monkeypatch.setenv(name, VALUES.get(name, "x"))
            text = re.sub(r"\$\{file:[^}]*\}", "x", block.text)
            assert accepted(text, tmp_path) or "[left]" in block.text, f"line {block.line}"


def test_the_recipe_for_debezium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of its envelope: c, u, d and the tombstone after it."""
    monkeypatch.setenv("PASSWORD", "x")
    page = (TOP / "docs" / "upserts.md").read_text()
    (text,) = (one.text for one in blocks(page) if "customers-cdc" in one.text)
    pipeline = Pipeline(parse(tomllib.loads(text), base=TOP))
    rows = [("c", {"name": "Ann", "city": "Oslo"}), ("u", {"name": "Ann"}), ("d", None), None]
    values = [
        one and json.dumps({"payload": {"op": one[0], "ts_ms": 1, "after": one[1]}}).encode()
        for one in rows
    ]
    key = b'{"payload": {"id": 7}}'
    origin = {"topic": ["t"] * 4, "partition": pa.array([0] * 4, pa.int32()), "offset": range(4)}
    records = pa.table({**origin, "key": [key] * 4, "value": pa.array(values, pa.binary())})
    assert pipeline.transformed_schema().names == ["id", "name", "city", "ts_ms"]
    chunk = Processing(pipeline.decoder.decode, pipeline.row_transform).chunk(records)
    assert chunk.rows["city"].to_pylist() == ["Oslo", None]
    assert chunk.rows["id"].to_pylist() == [7, 7]
    assert chunk.delete_record.tolist() == [3]
    assert not chunk.rejections


@EVERY_PAGE
def test_python_compiles(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "python":
            ast.parse(block.text, f"{page.name}, line {block.line}")


@EVERY_PAGE
def test_json_and_commands_of_a_shell_can_be_parsed(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "json":
            json.loads(block.text)
        if block.language in ("bash", "console"):
            lines = re.findall(r"(?m)^\$ (.*)$", block.text)
            text = block.text if block.language == "bash" else "\n".join(lines)
            done = subprocess.run(
                ["bash", "-n"], input=text, capture_output=True, text=True, check=False
            )
            assert not done.stderr, f"line {block.line}: {done.stderr}"


@EVERY_PAGE
def test_a_prompt_is_in_a_block_of_a_console(page: Path) -> None:
    for block in blocks(page.read_text()):
        if re.search(r"(?m)^(?:\$|>>>) ", block.text):
            assert block.language == "console", f"line {block.line}"


def test_the_button_of_the_site_copies_no_prompt() -> None:
    """Seen in a browser: it copies what is shown while the block has this attribute."""
    css = (TOP / "docs" / "site.css").read_text()
    assert "[data-md-copying] .gp, [data-md-copying] .go { display: none; }" in css


def test_what_people_search_for_is_named() -> None:
    page = (TOP / "docs" / "platforms.md").read_text()
    names = [
        "Windows", "macOS", "MySQL", "Snowflake", "BigQuery", "Redshift", "Databricks", "Redpanda",
        "Debezium", "MSK", "Protobuf", "Iceberg", "Kubernetes", "Airflow", "Confluent Cloud",
        "Exactly-once",
    ]  # fmt: skip
    assert [one for one in names if one not in page] == []


def command_lines(page: str) -> Iterator[list[str]]:
    """The words of each `oncely …` in a block of commands."""
    for block in blocks(page):
        if block.language in ("", "bash", "console", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s*(?:&&|\||;|\$\()\s*", line.removeprefix("$ ")):
                    if not part.startswith("oncely "):
                        continue
                    text = part.split(" #")[0].rstrip()
                    if text.count('"') % 2:  # of `eval "$(…)"`
                        text = text.removesuffix('"')
                    words = shlex.split(text.rstrip(")"))
                    words = words[: next((n for n, w in enumerate(words) if w[0] in "<>&"), None)]
                    yield words[1:]


def refusal(words: list[str]) -> str:
    """The error if there is no such command or option."""
    asked = [word for word in words if word not in ("…", "...")]
    done = CliRunner().invoke(app, [*asked, "--help"])  # nothing is done
    return "" if done.exit_code == 0 else done.output


@EVERY_PAGE
def test_commands_can_be_parsed(page: Path) -> None:
    assert not [found for words in command_lines(page.read_text()) if (found := refusal(words))]


def test_commands_that_do_not_exist_are_noticed() -> None:
    page = "```\noncely runn a.toml\noncely run a.toml --fast # x\noncely status a.toml | head\n"
    page += 'eval "$(oncely local up --exprt)"  # x\n```'
    lines = list(command_lines(page))
    assert lines == [
        ["runn", "a.toml"],
        ["run", "a.toml", "--fast"],
        ["status", "a.toml"],
        ["local", "up", "--exprt"],
    ]
    assert [bool(refusal(words)) for words in lines] == [True, True, False, True]


def test_pipeline_files_that_are_wrong_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sink\.tabel"):
        accepted('[sink]\nkind = "sql"\nurl = "postgresql://h/d"\ntabel = "t"', tmp_path)
