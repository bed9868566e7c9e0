"""The command line as a user has it: a child process, its exit code, and what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.conftest import repository


def run(
    *arguments: object, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "oncely.cli", *map(str, arguments)],
        cwd=repository(),
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def oncely(*arguments: object, expect: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and check its exit code; nothing that it prints is a traceback."""
    done = run(*arguments, **more)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stderr}\n{done.stdout}"
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def oncely_json(*arguments: object, expect: int = 0, **more: Any) -> Any:
    """Run a command with ``--json``; stdout is exactly one JSON document."""
    return json.loads(oncely(*arguments, "--json", expect=expect, **more).stdout)
