"""What the targets of the Makefile leave out, nothing else leaves out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conftest import repository


def is_long(file: Path) -> bool:
    """True if the code of a file, not a text in it, has the mark of long tests."""
    source = file.read_text()
    return "mark.long" in source and any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.long"
        for node in ast.walk(ast.parse(source))
    )


def test_proof_collects_every_long_test() -> None:
    top = repository()
    (folders,) = re.findall(r"^LONG := (.+)$", (top / "Makefile").read_text(), re.MULTILINE)
    marked = [one for one in (top / "tests").rglob("test_*.py") if is_long(one)]
    known = [top / one for one in folders.split()]
    assert not [one for one in marked if not any(one.is_relative_to(each) for each in known)]
    assert not [one for one in known if not any(each.is_relative_to(one) for each in marked)]
    assert top / "tests" / "scenarios" in known, "those with the fixture `runtime`"
