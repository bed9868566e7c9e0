"""The package's names are a promise, all are in the reference, and importing it is cheap."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import oncely
from docs import api_reference
from oncely import Pipeline, parse
from tests.extras import PIPELINE

NAMES = [
    "AuditReport", "Batch", "ConfigError", "DataLost", "Discarded", "Drops", "Event", "Fenced",
    "Finding", "Handler", "Http", "InvariantViolation", "Judgement", "Listener", "OffsetRange",
    "OnFenced", "OncelyError", "PartitionOffsets", "Pipeline", "PipelineSettings", "Plan",
    "Record", "RejectFilter", "Rejects", "Repaired", "Reset", "RunResult", "SourceMismatch",
    "Status", "StopSignal", "Stopped", "TableMismatch", "TooManyRejects", "TopicPartition",
    "Unavailable", "Verb", "VerifyReport", "Worker", "WrongInput", "events", "load", "parse",
    "write_stream",
]  # fmt: skip
THEIRS = {"SparkSession", "DataFrame", "StreamingQuery", "Table", "BaseModel"}
"""Types of Spark, Arrow and pydantic."""
ALIASES = {"Verdict", "Context", "AnyHandler", "State", "Level"}
"""Names of literal texts, of a mapping, and of any function."""


def test_the_names() -> None:
    assert oncely.__all__ == NAMES
    assert dir(oncely) == NAMES
    for name in NAMES:
        assert getattr(oncely, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        oncely.nothing  # noqa: B018
    assert oncely.__version__ == version("oncely")


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, methods and properties."""
    for name in NAMES:
        value = getattr(oncely, name)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            yield from ((f"{name}.{one}", it) for one, it in api_reference.members(value))
        elif inspect.isfunction(value):
            yield name, value


def used(function: Callable[..., Any]) -> set[str]:
    """The names of types in a signature."""
    signature = api_reference.signature(function)
    given = [one.annotation for one in signature.parameters.values()]
    texts = [one for one in (*given, signature.return_annotation) if isinstance(one, str)]
    found = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text, mode="eval"))):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def is_of_python(name: str) -> bool:
    places = (builtins, typing, sys.modules["collections.abc"], sys.modules["datetime"])
    return any(hasattr(one, name) for one in places) or name in ("Path", "pa")


def test_every_type_in_a_signature_is_exported() -> None:
    lacking = {
        (where, name)
        for where, function in functions()
        for name in used(function) - {*NAMES} - THEIRS - ALIASES
        if not is_of_python(name)
    }
    assert lacking == set()


def test_every_name_is_in_the_reference() -> None:
    there = set(re.findall(r"(?m)^#+ oncely\.([\w.]+)$", api_reference.markdown()))
    assert set(NAMES) <= there
    own = {where for where, _ in functions() if not re.search(r"\._|\.model_", where)}
    assert own <= there


def test_no_client_is_a_public_parameter() -> None:
    """Tests inject faults by `Parts.replaced`."""
    assert [*inspect.signature(Pipeline).parameters] == ["settings"]
    assert "connect" not in inspect.signature(oncely.write_stream).parameters


def test_the_help_begins_with_an_example() -> None:
    lines = (inspect.getdoc(Pipeline) or "").splitlines()
    (first,) = [at for at, line in enumerate(lines) if "Pipeline.from_file" in line]
    assert first < 6


def test_a_pipeline_is_shown_in_two_lines_without_secrets() -> None:
    topics = [f"a-long-name-of-a-topic-{n}" for n in range(40)]
    source = PIPELINE["source"] | {
        "topics": topics,
        "kafka": {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "u",
            "sasl.password": "s3cret",
        },
    }
    sink = {"kind": "sql", "url": "postgresql://u:s3cret@127.0.0.1:8/x", "table": "t"}
    shown = repr(Pipeline(parse(PIPELINE | {"source": source, "sink": sink})))
    assert shown.startswith("<Pipeline 'p': a-long-name-of-a-topic-0, ")
    assert shown.endswith(" … into sql>")
    assert len(shown) < 160
    assert "\n" not in shown
    assert "s3cret" not in shown


def test_other_parts_are_those_of_a_copy() -> None:
    pipeline = Pipeline(parse(PIPELINE | {"sink": {"kind": "kafka", "topic": "out"}}))
    other = pipeline.replaced(threads={"t": 2})
    assert type(other) is Pipeline
    assert (pipeline.threads, other.threads) == ({}, {"t": 2})
    assert other.settings is pipeline.settings
    assert other.source is not pipeline.source


def test_a_worker_that_imports_the_package_does_not_import_the_rest() -> None:
    heavy = "('pydantic', 'duckdb', 'pyspark', 'importlib.metadata')"
    code = f"import oncely, sys; print([m for m in {heavy} if m in sys.modules])"
    where = Path(oncely.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({str(where)!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
