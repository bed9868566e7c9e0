"""A reader of Prometheus' text format."""

from __future__ import annotations

import re

_SAMPLE = re.compile(
    r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+)\} (-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)'
)
_PART = re.compile(r"_(bucket|sum|count)$")


def samples(text: str) -> dict[tuple[str, str], float]:
    """The samples by name and labels; fails on a line that is not in the text format."""
    assert text.endswith("\n")
    found: dict[tuple[str, str], float] = {}
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
        if line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, line
        name = _PART.sub("", match[1])
        assert match[1] in types or types.get(name) == "histogram"
        found[match[1], match[2]] = float(match[3])
    return found
