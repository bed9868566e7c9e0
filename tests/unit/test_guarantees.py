"""Every promise in docs/GUARANTEES.md names a proof, and every proof is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import repository

TESTS = repository() / "tests"
WITHOUT_PROOF = {"`GROUP BY` is per batch"}  # a limit that is told, not a promise
OTHER_PROOFS = {"`world.assert_exactly_once` in every scenario": "tests/scenarios/world.py"}
_NAMED = re.compile(r"`(?:tests/)?((?:\w+/)*)(test_\w+\.py)(?:::(\w+))?`")
_FOLDER = re.compile(r"`tests/(\w+)`")


@dataclass(frozen=True)
class Proof:
    """A test file as the document names it; ``folder`` and ``function`` may be empty."""

    folder: str
    file: str
    function: str = ""

    def paths(self) -> list[Path]:
        """The files that the name may mean: a bare name means any folder below ``tests``."""
        found = [one for one in files() if one.name == self.file]
        return [one for one in found if f"{one.parent.relative_to(TESTS)}/".startswith(self.folder)]


@cache
def files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def rows() -> Iterator[tuple[str, str]]:
    """Promise and proof of each line of the document's tables."""
    for line in (repository() / "docs" / "GUARANTEES.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" |")]
        if line.startswith("|") and not line.startswith(("|---", "| promise |")):
            assert len(cells) == 4, line
            yield cells[0], cells[2]


def proofs(text: str) -> list[Proof]:
    return [Proof(*found) for found in _NAMED.findall(text)]


def named() -> list[Proof]:
    text = (repository() / "docs" / "GUARANTEES.md").read_text()
    return sorted(set(proofs(text)), key=repr)


def functions_of(file: Path) -> set[str]:
    """The test functions and methods of a file."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("proof", named(), ids=lambda one: f"{one.folder}{one.file}{one.function}")
def test_a_named_proof_exists(proof: Proof) -> None:
    (file,) = proof.paths()  # one, or the name does not tell which
    assert functions_of(file)
    if proof.function:
        assert proof.function in functions_of(file)


def test_every_promise_names_its_proof() -> None:
    found = dict(rows())
    for promise, proof in found.items():
        if proof in OTHER_PROOFS:
            assert (repository() / OTHER_PROOFS[proof]).exists()
        elif promise not in WITHOUT_PROOF:
            folders = _FOLDER.findall(proof)
            assert proofs(proof) or folders, promise
            assert all((TESTS / one).is_dir() for one in folders), promise
    assert found.keys() >= WITHOUT_PROOF
    assert set(found.values()) >= OTHER_PROOFS.keys()


def test_a_proof_that_is_gone_is_noticed() -> None:
    gone, there = proofs("`test_gone.py`, `tests/unit/test_guarantees.py::test_gone`")
    assert gone.paths() == []
    with pytest.raises(AssertionError):
        test_a_named_proof_exists(there)
    assert proofs("`tests/scenarios/test_guarantees.py`")[0].paths() == []
