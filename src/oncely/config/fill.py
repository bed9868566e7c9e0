"""``${NAME}``, ``${NAME:-default}`` and ``${file:/path}`` inside the strings of a pipeline file.

:mod:`oncely.config.secrecy` decides which of the values are secret, by the fields that contain
them. ``$$`` is a plain dollar; a dollar before any other character than a brace is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncely.config.runtimes import is_secret
from oncely.config.secrecy import Filled, hidden
from oncely.errors import ConfigError

_TOKEN = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Filling:
    """Fills in the values of one pipeline file.

    Attributes:
        base: the base of relative paths of secret files.
        environment: the environment variables.
        problems: values that could not be filled in.
        secrets: values that were filled in and must not be shown.
    """

    base: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    problems: list[ConfigError] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set, repr=False)

    def fill(self, value: Any, key: str = "") -> Any:
        """A copy of ``value`` with every string filled in; ``key`` is its dotted name."""
        match value:
            case str():
                return self._text(value, key)
            case Mapping():
                return {
                    name: self.fill(inner, f"{key}.{name}" if key else str(name))
                    for name, inner in value.items()
                }
            case list() | tuple():
                return [self.fill(inner, f"{key}[{at}]") for at, inner in enumerate(value)]
            case _:
                return value

    def _text(self, text: str, key: str) -> str:
        filled: list[Filled] = []

        def one(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            try:
                value = self._value(match[1], key)
            except ConfigError as error:
                self.problems.append(error)
                return match[0]
            name, _, default = match[1].partition(":-")
            if value != default or is_secret(name):  # the file shows its default to all
                filled.append(Filled(match[0], name, value))
            return value

        done = _TOKEN.sub(one, text)
        self.secrets.update(hidden(key, text, done, filled))
        return done

    def _value(self, name: str | None, key: str) -> str:
        if name is not None and name.startswith("file:"):
            return self._file(name.removeprefix("file:").strip(), key)
        name, given, default = (name or "").partition(":-")
        if not _NAME.fullmatch(name):
            raise ConfigError(
                key,
                "${ without a variable's name and a closing brace",
                way_out="write ${NAME}, ${NAME:-default} or ${file:/path}; a plain dollar before a"
                " brace is $$",
            )
        if given:
            return self.environment.get(name) or default
        if name not in self.environment:
            raise ConfigError(
                key,
                f"the environment has no variable {name}",
                way_out=f"export {name}=..., or write $${{{name}}} if it is no variable",
            )
        return self.environment[name]

    def _file(self, name: str, key: str) -> str:
        try:
            text = (self.base / name).read_text("utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(
                key,
                f"can't read the secret file {name!r}: {reason}",
                way_out="name a text file that this user may read",
            ) from None
        # Editors and `echo` end a file with a line break that does not belong to the secret.
        return text.removesuffix("\n").removesuffix("\r")
