"""The wheel: a clean environment that it is installed into has every file, and the command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import repository
from tests.extras import IN_THE_BASE, OPTIONAL, PIPELINE, validated

FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("src", "docs", "examples", "ops", "packaging")


def done(*command: str | Path) -> str:
    shown = subprocess.run([str(one) for one in command], capture_output=True, text=True,
                           check=False)  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.mark.long
def test_it_is_complete_and_its_command_runs(tmp_path: Path) -> None:
    source, wheels, venv = (tmp_path / name for name in ("source", "wheels", "venv"))
    source.mkdir()
    for name in FILES:
        shutil.copy(repository() / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(repository() / name, source / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, source)
    (wheel,) = wheels.glob("oncely-*.whl")
    there = {str(one.relative_to(source / "src")) for one in (source / "src").rglob("*.*")
             if one.is_file() and "egg-info" not in str(one)}  # fmt: skip
    packed = {one for one in zipfile.ZipFile(wheel).namelist() if one.startswith("oncely/")}
    assert packed == there
    assert "oncely/py.typed" in packed
    inside = {name.partition("/")[2]: name for name in zipfile.ZipFile(wheel).namelist()}
    assert "licenses/LICENSE" in inside
    about = zipfile.ZipFile(wheel).read(inside["METADATA"]).decode().splitlines()
    assert {"License-Expression: Apache-2.0", "Classifier: Typing :: Typed"} <= {*about}
    named = re.findall(r"`(docs/[\w./-]+\.md)`", (repository() / "README.md").read_text())
    assert named
    assert [page for page in named if f"data/share/doc/oncely/{page}" not in inside] == []

    done(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    done(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # The dependencies are those of this environment; its own editable Oncely is not among them.
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    assert str(venv) in done(python, "-c", "import oncely; print(oncely.__file__)")
    assert done(venv / "bin" / "oncely", "--version").startswith("oncely ")
    assert '"$schema"' in done(venv / "bin" / "oncely", "schema")
    given = [{**PIPELINE, "sink": one} for one in IN_THE_BASE]
    assert validated(OPTIONAL, given, python) == [None] * len(given)
