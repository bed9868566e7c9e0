"""A reader of Prometheus' text format."""

from __future__ import annotations

import re

_SAMPLE = re.compile(
    r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+)\} (-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)'
)
_LABEL = re.compile(r'([a-z]+)="(?:[^"\\\n]|\\.)*"')
_FIRST = ("consumergroup", "pipeline", "topic", "partition")
_PART = re.compile(r"_(bucket|sum|count)$")


def samples(text: str) -> dict[tuple[str, str], float]:
    """The samples by name and labels; fails on a line that is not in the text format.

    The order of labels in the text has no meaning: they are sorted, see ``_FIRST``; ``le`` is last.
    """
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
        labels = sorted(_LABEL.finditer(match[2]), key=lambda label: _place(label[1]))
        found[match[1], ",".join(label[0] for label in labels)] = float(match[3])
    return found


def _place(label: str) -> tuple[int, bool]:
    return _FIRST.index(label) if label in _FIRST else len(_FIRST), label == "le"
