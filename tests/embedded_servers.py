"""Tests of the embedded servers (``pytest.mark.embedded``) need not be repeated as long as nothing
that they test has changed.

``python -m tests.embedded_servers`` prints the part of pytest's expression for marks by which `make
proof` leaves them out, nothing if they have to run. With ``--record`` it records that they have
passed with these sources.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = (
    "src/oncely/testing/servers/*.py",
    "src/oncely/cli/local*.py",
    "src/oncely/artifacts.py",  # the releases of the servers
    "tests/scenarios/test_local_*.py",
    "tests/scenarios/test_cli_local.py",
)
_RECORDED = Path(__file__).with_suffix(".json")


def hashes(root: Path = _ROOT) -> dict[str, str]:
    """SHA-256 of each source, by its path below the root."""
    files = sorted(file for one in _SOURCES for file in root.glob(one))
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def main(arguments: list[str], root: Path = _ROOT, recorded: Path = _RECORDED) -> str:
    """What to print."""
    now = hashes(root)
    if arguments == ["--record"]:
        recorded.write_text(json.dumps(now, indent=1) + "\n")
        return ""
    passed = json.loads(recorded.read_text()) if recorded.exists() else {}
    return "and not embedded" if now == passed else ""


if __name__ == "__main__":
    print(main(sys.argv[1:]))
