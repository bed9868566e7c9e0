"""A pipeline file as text: TOML, with remarks as comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WIDTH = 88
_BEHIND = 36  # the column of comments behind a value
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def written(
    raw: Mapping[str, Any],
    head: Sequence[str] = (),
    above: Mapping[str, Sequence[str]] | None = None,
    behind: Mapping[str, str] | None = None,
) -> str:
    """The text of a pipeline file.

    Args:
        raw: its content.
        head: lines of a comment at the top.
        above: comments above a key, by the dotted key.
        behind: comments behind a value, by the dotted key.
    """
    lines = [f"# {one}" for one in head]
    lines += ["", *_table(raw, "", above or {}, behind or {})]
    return "\n".join(lines) + "\n"


def _table(
    table: Mapping[str, Any],
    path: str,
    above: Mapping[str, Sequence[str]],
    behind: Mapping[str, str],
) -> Iterator[str]:
    for name, value in table.items():
        if not isinstance(value, Mapping):
            key = f"{path}{name}"
            for one in above.get(key, ()):
                yield from _comment(one)
            yield _behind(f"{_key(name)} = {toml(value)}", behind.get(key))
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from ("", f"[{path}{name}]")
            yield from _table(value, f"{path}{name}.", above, behind)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ") or ["#"]


def _behind(setting: str, remark: str | None) -> str:
    return setting if remark is None else f"{setting:<{_BEHIND - 1}} # {remark}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def toml(value: object) -> str:
    """A value as TOML writes it; a text with line breaks over several lines."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
    text = str(value)
    if "\n" not in text:
        return _quoted(text)
    return '"""\n' + "\n".join(_quoted(line)[1:-1] for line in text.split("\n")) + '"""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
