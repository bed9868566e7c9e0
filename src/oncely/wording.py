"""Texts on a screen and in files: numbers and times in words, and texts of unknown origin."""

from __future__ import annotations

import json
import re
from typing import Any


def plural(number: int, noun: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def counted(**numbers: int) -> str:
    """``2 records, 1 row``, in the order of the arguments, which are nouns."""
    return ", ".join(plural(number, noun) for noun, number in numbers.items())


def duration(seconds: float) -> str:
    """A time in a readable form."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def printable(text: str, longest: int | None = None) -> str:
    """A text of unknown origin on one line, in the order of its characters, and cut if it is long.

    Control characters, line ends, marks that reverse the direction of the text, and lone surrogates
    become escapes such as ``\\u202e``.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"


def paragraph(text: str) -> str:
    """A text of unknown origin whose line breaks stay: what :func:`printable` escapes otherwise is
    escaped, and the lines after the first are indented, so that none looks like a line of Oncely's.
    """
    return BREAK.sub(r"\g<0>  ", "\n".join(map(printable, text.split("\n"))))


BREAK = re.compile(r"(?<=[^\n])\n+(?=[^\n ])")
"""Line breaks within a text that begin a line without indentation."""


def json_line(value: Any, *, narrow: bool = False) -> str:
    """A value as JSON on one line; what :func:`printable` escapes is an escape of JSON.

    Args:
        value: may contain texts of unknown origin.
        narrow: ASCII only.
    """
    return json_escaped(json.dumps(value, ensure_ascii=narrow, default=str))


def json_escaped(line: str) -> str:
    """A line of JSON with the escapes of :func:`json_line`; its value is the same."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
