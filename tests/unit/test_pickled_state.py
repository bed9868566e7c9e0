"""``__getstate__`` names attributes as texts, which no type checker follows at a rename."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import oncely

SRC = Path(oncely.__file__).parent


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for file in sorted(SRC.rglob("*.py")):
        source = file.read_text()
        if "def __getstate__" not in source:  # parsing takes long, at each collection of tests
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and method(node) is not None:
                yield f"{file.relative_to(SRC)}::{node.name}", node


def method(of: ast.ClassDef) -> ast.FunctionDef | None:
    named = (one for one in of.body if isinstance(one, ast.FunctionDef))
    return next((one for one in named if one.name == "__getstate__"), None)


def attributes(of: ast.ClassDef) -> set[str]:
    """Fields, properties, and what methods assign to ``self``."""
    found = {one.name for one in of.body if isinstance(one, ast.FunctionDef)}
    for node in ast.walk(of):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def texts(of: ast.FunctionDef) -> set[str]:
    return {
        node.value
        for node in ast.walk(of)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


CLASSES = dict(classes())


@pytest.mark.parametrize("name", CLASSES)
def test_a_pickled_state_names_attributes_that_there_are(name: str) -> None:
    of = CLASSES[name]
    state = method(of)
    assert state is not None
    assert texts(state) <= attributes(of)


def test_the_classes_are_found() -> None:
    """Else this would test nothing."""
    written = sum(file.read_text().count("def __getstate__(") for file in SRC.rglob("*.py"))
    assert len(CLASSES) == written > 0
