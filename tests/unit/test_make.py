"""What the targets of the Makefile leave out, nothing else leaves out."""

from __future__ import annotations

import re

from tests.conftest import repository


def test_proof_collects_every_long_test() -> None:
    top, mark = repository(), "mark." + "long"
    (folders,) = re.findall(r"^LONG := (.+)$", (top / "Makefile").read_text(), re.MULTILINE)
    files = (top / "tests").rglob("test_*.py")
    marked = [one for one in files if mark in one.read_text()]
    known = [top / one for one in folders.split()]
    assert not [one for one in marked if not any(one.is_relative_to(each) for each in known)]
    assert not [one for one in known if not any(each.is_relative_to(one) for each in marked)]
    assert top / "tests" / "scenarios" in known, "those with the fixture `runtime`"
