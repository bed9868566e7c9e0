"""The outcomes as files: ``report.json`` for programs, ``report.html`` for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from oncely.testing.semantics.cells import Outcome, problems
from oncely.testing.semantics.page import page


def write(outcomes: Sequence[Outcome], folder: Path) -> tuple[Path, Path]:
    """Write both files, and return their paths.

    ``report.json`` is a list of ``{"sink", "delivery", "kill_point", "records", "lost",
    "duplicated"}``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_html = folder / "report.json", folder / "report.html"
    as_json.write_text(json.dumps([one.as_json() for one in outcomes], indent=2) + "\n")
    as_html.write_text(page(outcomes, problems(outcomes)))
    return as_json, as_html
