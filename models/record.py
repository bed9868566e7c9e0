"""``models/checked.json``: what TLC has said of each check, a line for each.

TLC says the same of the same module, constants and properties. An entry is kept under the hash of
all that TLC is told; what stands in it besides the verdict and the number of states is for readers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.check import Check, Result, as_expected, digest, sizes
from oncely.errors import WrongInput


class Record:
    """The file in ``home``, with entries of these checks and no others."""

    def __init__(self, checks: Sequence[Check], home: Path) -> None:
        self._home, self._path = home, home / "checked.json"
        self._checks = {self._digest(one): one for one in checks}
        self._before = self._path.read_text() if self._path.exists() else "{}"
        try:
            self._entries = json.loads(self._before)
        except ValueError as error:
            raise WrongInput(
                f"{self._path} is not JSON: {error}",
                way_out="remove the file: `make models` runs all checks, and writes it anew",
            ) from error

    def of(self, check: Check) -> Result | None:
        """What is recorded."""
        entry = self._entries.get(self._digest(check))
        return None if entry is None else Result(entry["violated"], entry["states"], 0.0)

    def holds(self, check: Check) -> bool:
        """It is recorded that this check is as expected."""
        known = self.of(check)
        return known is not None and as_expected(check, known)

    def keep(self, check: Check, result: Result) -> None:
        """Record a verdict. With a view the number of states differs from run to run: it stays."""
        known = self.of(check)
        if result.failure or (known is not None and known.violated == result.violated):
            return
        self._entries[self._digest(check)] = {"states": result.states, "violated": result.violated}
        self.write()

    def write(self) -> bool:
        """Write the file; whether it has changed since it was read."""
        lines = [
            f'"{key}": {_line(check, self._entries[key])}'
            for key, check in self._checks.items()
            if key in self._entries
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        self._path.write_text(text)
        return text != self._before

    def _digest(self, check: Check) -> str:
        return digest(check, home=self._home)


def _line(check: Check, entry: dict[str, Any]) -> str:
    label = f"{check.model.module}: {check.mistake or 'no mistake'}{sizes(check)}"
    return json.dumps({**entry, "check": label.replace('"', "")}, sort_keys=True)
