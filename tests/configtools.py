"""What tests of pipeline files share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

SQL = {"kind": "sql", "url": "postgresql://h/d", "table": "t"}


def edited_file(right: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The file with keys added to its sections; None takes one away."""
    raw = copy.deepcopy(dict(right))
    for section, more in sections.items():
        if not isinstance(more, dict):
            raw[section] = more
            continue
        kept = {} if more.get("kind") == "sql" else raw.get(section, {})
        raw[section] = {k: v for k, v in {**kept, **more}.items() if v is not None}
    return raw
