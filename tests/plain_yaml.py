"""A reader of the part of YAML that the files of this repository use; anything else is an error.

Blocks of mappings and lists, one-line scalars, literal blocks, and flow lists in JSON's notation. A
plain scalar is a text, a whole number or a boolean.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any, NamedTuple

_KEY = re.compile(r"([A-Za-z_][\w./-]*):(?: (.*))?")
_UNSAFE = re.compile(r"[\[\]{}&*!|>%@`'\"#,?-]|.*(?:: | #|:$)|(?:true|false|yes|no|on|off|null|~)$",
                     re.IGNORECASE)  # fmt: skip


_LITERAL = re.compile(r"(?m)^( *)([\w.-]+): \|\n((?:\1 +.*\n|\n)+)")


class _Line(NamedTuple):
    number: int
    indent: int
    text: str


def documents(text: str) -> list[Any]:
    """The documents of a file; raises the errors of :func:`read`."""
    return [read(one) for one in re.split(r"(?m)^---$", text)]


def read(text: str) -> Any:
    """The document.

    Raises:
        ValueError: names the line that is not understood.
    """
    text = _LITERAL.sub(_quoted, text)
    lines = [
        _Line(number, len(line) - len(line.lstrip(" ")), line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    value, left = _block(lines, 0)
    if left:
        raise ValueError(f"line {left[0].number}: {left[0].text}")
    return value


def _quoted(literal: re.Match[str]) -> str:
    """A literal block as a text in JSON's notation, and as many lines as it had."""
    indent, key, block = literal.groups()
    text = textwrap.dedent(block).rstrip("\n") + "\n"
    return f"{indent}{key}: {json.dumps(text)}\n" + "\n" * block.count("\n")


def _block(lines: list[_Line], indent: int) -> tuple[Any, list[_Line]]:
    if lines and lines[0].text.startswith("- "):
        return _list(lines, indent)
    return _mapping(lines, indent)


def _list(lines: list[_Line], indent: int) -> tuple[list[Any], list[_Line]]:
    found = []
    while lines and lines[0].indent == indent and lines[0].text.startswith("- "):
        first = lines[0]
        inner = _Line(first.number, indent + 2, first.text[2:].strip())
        if _KEY.fullmatch(inner.text):
            value, lines = _mapping([inner, *lines[1:]], indent + 2)
        else:
            value, lines = _scalar(inner), lines[1:]
        found.append(value)
    return found, lines


def _mapping(lines: list[_Line], indent: int) -> tuple[dict[str, Any], list[_Line]]:
    found: dict[str, Any] = {}
    while lines and lines[0].indent == indent and not lines[0].text.startswith("- "):
        line, lines = lines[0], lines[1:]
        match = _KEY.fullmatch(line.text)
        if match is None or match[1] in found:
            raise ValueError(f"line {line.number}: {line.text}")
        if match[2] is not None:
            found[match[1]] = _scalar(line._replace(text=match[2]))
        elif lines and lines[0].indent > indent:
            found[match[1]], lines = _block(lines, lines[0].indent)
        else:
            raise ValueError(f"line {line.number}: {line.text} has no value")
    return found, lines


def _scalar(line: _Line) -> Any:
    text = line.text
    if text[0] in '"[':
        return json.loads(text)
    if re.fullmatch(r"-?(0|[1-9]\d*)", text):
        return int(text)
    if text in ("true", "false"):
        return text == "true"
    if _UNSAFE.match(text):
        raise ValueError(f"line {line.number}: {text}")
    return text
