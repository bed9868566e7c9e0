"""The JSON Schema and the reference of the pipeline file have every key, and say what is true."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from oncely.cli.verbs import app
from oncely.config import parse
from oncely.config.base import Section
from oncely.config.pipeline import keys, tables
from oncely.config.reference import json_schema, markdown
from oncely.config.secrecy import Filling
from oncely.errors import OncelyError
from oncely.kafka.properties import ACCEPTED
from oncely.secrets import Secrets
from tests.conftest import repository
from tests.json_schema import problems

SCHEMA = json_schema()
FORMS = [
    pytest.param(name, tag, section, id=f"{name or 'top'} {tag}".strip())
    for name, table in tables().items()
    for tag, section in table.sections.items()
]
KEYS = [pytest.param(*one.values, key, id=f"{one.id} {key}")
        for one in FORMS for key in keys(one.values[2])]  # fmt: skip


def refused(file: Any) -> list[str]:
    return list(problems(file, SCHEMA, SCHEMA))


def properties(section: type[Section]) -> dict[str, Any]:
    at = SCHEMA["$defs"].get(section.__name__, SCHEMA)
    assert at["additionalProperties"] is False
    found: dict[str, Any] = at["properties"]
    return found


def parts(page: str) -> dict[str, str]:
    """The text below each heading of the page, by anchor."""
    found = re.split(r"(?m)^##+ .* \{ #(\S+) \}$", page)
    return dict(zip(found[1::2], found[2::2], strict=True))


PAGE = parts(markdown())


def anchor(name: str, tag: str) -> str:
    return "-".join(filter(None, (name.replace(".", "-") or "top", tag)))


def all_sections(of: type[Section] = Section) -> Iterator[type[Section]]:
    for one in of.__subclasses__():
        yield one
        yield from all_sections(one)


def test_the_walk_finds_every_section_of_the_settings() -> None:
    written = {one for one in all_sections() if one.__module__.startswith("oncely.")}
    bases = {base for one in written for base in one.__bases__}
    assert {one.values[2] for one in FORMS} == written - bases


@pytest.mark.parametrize(("name", "tag", "section"), FORMS)
def test_every_key_is_in_the_schema_and_in_the_page(
    name: str, tag: str, section: type[Section]
) -> None:
    assert properties(section).keys() == keys(section).keys()
    for key, one in properties(section).items():
        meaning = one["description"]
        assert len(meaning) > 8, f"the docstring of {section.__name__} says nothing about {key}"
        assert not re.search(r"None|``|:\w+:`", meaning), f"{key} is told in the words of the code"
        assert meaning in PAGE[f"{anchor(name, tag)}-{key}"]
    assert "None" not in PAGE[anchor(name, tag)]


@pytest.mark.parametrize(("name", "tag", "section", "key"), KEYS)
def test_every_key_has_an_example_that_is_accepted(
    name: str, tag: str, section: type[Section], key: str, tmp_path: Path
) -> None:
    one = properties(section)[key]
    if f"{name}.{key}".lstrip(".") in tables():
        return
    (example,) = one["examples"]
    assert f"{key} = " in PAGE[f"{anchor(name, tag)}-{key}"]
    for file in ("order.avsc", "ca.pem"):
        (tmp_path / file).write_text("{}")
    environment = dict.fromkeys(re.findall(r"\$\{(\w+)\}", str(example)), "x")
    field = keys(section)[key]
    given = Annotated[field.annotation, "", *field.metadata]  # type: ignore[name-defined]
    filling = Filling(tmp_path, environment)
    TypeAdapter(given, config=None).validate_python(
        filling.fill(example), context={"base": tmp_path, "secrets": Secrets()}
    )
    assert not filling.problems
    for value in (example, one.get("default", example)):
        assert not list(problems(value, one, SCHEMA))


def test_the_names_of_the_properties_of_kafka() -> None:
    text = PAGE["source-kafka"]
    assert set(re.findall(r"`([a-z.]+)`", text.split("Names:")[1].split("\n")[0])) == ACCEPTED


def pipeline_files() -> Iterator[tuple[str, str]]:
    """The pipeline files of the examples, and those in the code of tests, demo and measurements."""
    for file in sorted((repository() / "examples").glob("*.toml")):
        yield file.name, file.read_text()
    for folder in ("examples", "tests", "demo", "bench", "storm"):
        for file in sorted((repository() / folder).rglob("*.py")):
            if "[sink]" in (text := file.read_text()):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield file.name, node.value


def loaded(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """A pipeline file that is accepted; None for another text."""
    text = re.sub(r"(?<!\$)\{(\w+)\}", lambda one: VALUES.get(one[1], "x"), text)
    for name in re.findall(r"\$\{(\w+)\}", text):
        monkeypatch.setenv(name, VALUES.get(name, "x"))
    try:
        raw = tomllib.loads(text)
        parse(raw)
    except (tomllib.TOMLDecodeError, OncelyError):
        return None
    return raw


VALUES = {
    "brokers": "h:9092",
    "url": "postgresql://h/d",
    "FLIGHTS_BROKERS": "h:9092",
    "EVENTS_BROKERS": "h:9092",
    "EVENTS_S3": "http://h:1",
    "FLIGHTS_POSTGRES_URL": "postgresql://h/d",
    "LAKE_START": "earliest",
    "LAKE_URL": "file:///lake",
}


def test_pipeline_files_of_the_repository_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [(name, raw) for name, text in pipeline_files() if (raw := loaded(text, monkeypatch))]
    wanted = {"flights.toml", "events.toml", "lake.toml", "delayed.toml", "test_config_errors.py"}
    assert wanted <= {name for name, _ in files}
    assert [(name, found) for name, raw in files if (found := refused(raw))] == []


MINIMAL: dict[str, Any] = {
    "name": "orders",
    "source": {"brokers": "h:9092", "topics": ["orders"]},
    "decode": {"format": "json", "schema": "id BIGINT"},
    "sink": {"kind": "sql", "url": "postgresql://h/d", "table": "orders"},
}


def test_the_smallest_file_is_valid() -> None:
    assert refused(MINIMAL) == []


@pytest.mark.parametrize(("name", "tag", "section"), FORMS)
def test_an_unknown_key_is_not_valid(name: str, tag: str, section: type[Section]) -> None:
    right = {
        key: one["examples"][0] for key, one in properties(section).items() if "examples" in one
    }
    if not name:
        right = dict(MINIMAL)
    at = SCHEMA["$defs"].get(section.__name__, SCHEMA)
    assert list(problems(right, at, SCHEMA)) == []
    assert list(problems({**right, "unknown": 1}, at, SCHEMA)) == ["unknown is unknown"]


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ("sink", {"mode": "replace"}),
        ("sink", {"keep_source": "yes"}),
        ("sink", {"connect_timeout": 10}),
        ("sink", {"max_rejects": "some"}),
        ("sink", {"kind": "oracle"}),
        ("source", {"topics": [1]}),
        ("source", {"start": "soon"}),
        ("offsets", {}),
        ("spark", {"max_records_per_batch": 0}),
    ],
)
def test_a_wrong_value_is_not_valid(table: str, wrong: dict[str, Any]) -> None:
    file = {**MINIMAL, table: {**MINIMAL.get(table, {}), **wrong}}
    with pytest.raises(OncelyError):
        parse(file)
    assert refused(file)


def test_the_command_prints_both() -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert json.loads(printed.stdout) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert CliRunner().invoke(app, ["schema", "--markdown"]).stdout == markdown()
