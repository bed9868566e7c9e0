"""What the documents say of models is true: the module, its property and its mistakes exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.catalogue import MODELS

TOP = Path(__file__).parents[3]
DECISIONS = sorted((TOP / "docs" / "decisions").glob("*.md"))
CHECKED: dict[str, set[str]] = {one.module: set() for one in MODELS}
MISTAKES: dict[str, set[str]] = {one.module: set() for one in MODELS}
for _model in MODELS:  # a module may be checked for some properties at sizes of their own
    CHECKED[_model.module] |= {*_model.invariants, *_model.properties}
    MISTAKES[_model.module] |= {mistake.name for mistake in _model.mistakes}
_PROPERTY = re.compile(r"`(\w+)`: ((?:`\w+`(?:, )?)+)")


def promises() -> dict[str, str]:
    """The column ``model`` of each promise."""
    found = {}
    for line in (TOP / "docs" / "GUARANTEES.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| promise"):
            cells = [cell.strip() for cell in line.strip("|").split(" |")]
            assert len(cells) == 4, line
            found[cells[0]] = cells[3]
    return found


def test_each_promise_names_its_model_or_none() -> None:
    named = {module for cell in promises().values() for module, _ in _PROPERTY.findall(cell)}
    assert named == CHECKED.keys()
    for promise, cell in promises().items():
        parts = _PROPERTY.findall(cell)
        assert parts or cell == "-", promise
        for module, properties in parts:
            assert set(re.findall(r"`(\w+)`", properties)) <= CHECKED[module], promise


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda one: one.stem[:4])
def test_the_model_that_a_decision_names_names_the_decision(decision: Path) -> None:
    for module in re.findall(r"`models/(\w+)\.tla`", decision.read_text()):
        assert decision.name[:4] in (TOP / "models" / f"{module}.tla").read_text()


@pytest.mark.parametrize("module", MISTAKES)
def test_every_mistake_is_one_that_the_module_knows(module: str) -> None:
    """A misspelt mistake would be an ordinary run."""
    known = set(re.findall(r'"([^"\n]+)"', (TOP / "models" / f"{module}.tla").read_text()))
    assert MISTAKES[module] <= known


def test_the_readme_lists_every_mistake() -> None:
    table = (TOP / "models" / "README.md").read_text()
    for module, mistakes in MISTAKES.items():
        assert module in table
        for mistake in mistakes:
            assert mistake in table, f"{module}: {mistake}"
