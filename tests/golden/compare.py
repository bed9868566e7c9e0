"""Compares what was built with the golden files."""

from __future__ import annotations

from tests.golden.writers import HERE, Golden

FILES = HERE / "files"
WAY_OUT = (
    "what is stored is a promise: later code must read what earlier code wrote. If the change is"
    " meant, `python -m tests.golden.update` writes the golden files anew"
)


def assert_golden(built: Golden) -> None:
    """Byte for byte."""
    for name, text in built.items():
        assert text == (FILES / name).read_text(), f"{name}: {WAY_OUT}"
