"""The wheel: a clean environment that it is installed into has every file, and the command; with
each extra alone, it runs what the extra is for.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oncely import artifacts
from oncely.pipeline.proposal import written
from oncely.testing.servers.kafka import Broker
from tests.conftest import MakeTopic, repository
from tests.extras import IN_THE_BASE, OPTIONAL, PIPELINE, validated

FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("src", "docs", "examples", "ops", "packaging")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
pytestmark = pytest.mark.long


def done(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    shown = subprocess.run([str(one) for one in command], capture_output=True, text=True,
                           check=False, env=env)  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is built from, with the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(repository() / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(repository() / name, source / name, ignore=ignored)
    done(*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", source, source)
    return source


def installed(source: Path, venv: Path) -> tuple[Path, Path]:
    """An environment with the wheel and nothing else: its programs, and its packages."""
    done(sys.executable, "-m", "venv", "--without-pip", venv)
    python, (wheel,) = venv / "bin" / "python", source.glob("oncely-*.whl")
    done(*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    return venv / "bin", packages


def test_it_is_complete_and_its_command_runs(source: Path, tmp_path: Path) -> None:
    (wheel,) = source.glob("oncely-*.whl")
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

    programs, packages = installed(source, tmp_path / "venv")
    # The dependencies are those of this environment; its own editable Oncely is not among them.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = programs / "python"
    assert str(tmp_path) in done(python, "-c", "import oncely; print(oncely.__file__)")
    assert done(programs / "oncely", "--version").startswith("oncely ")
    assert '"$schema"' in done(programs / "oncely", "schema")
    given = [{**PIPELINE, "sink": one} for one in IN_THE_BASE]
    assert validated(OPTIONAL, given, python) == [None] * len(given)


def needed(wanted: Requirement, oncely: Distribution, found: set[tuple[str, str]]) -> Iterator[str]:
    """Distributions that a requirement needs, with those that they need."""
    for extra in ("", *wanted.extras):
        if (wanted.name, extra) in found:
            continue
        found.add((wanted.name, extra))
        yield wanted.name
        of = oncely if wanted.name == "oncely" else distribution(wanted.name)
        for text in of.requires or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                yield from needed(one, oncely, found)


def link(names: set[str], packages: Path) -> None:
    """Packages of this environment, as if they were installed in another one."""
    for name in names:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith(".pth"):
                there = packages / top
                if not there.exists():
                    there.symlink_to(Path(str(distribution(name).locate_file(top))))


SINKS: dict[str, dict[str, str]] = {
    "": {"kind": "sql", "url": "sqlite:///{folder}/rows.db", "table": "rows"},
    "spark": {"kind": "kafka", "topic": "{topic}.out"},
    "sql": {"kind": "sql", "url": "{database}", "table": "rows"},
    "files": {"kind": "files", "url": "file://{folder}/lake", "manifest_topic": "{topic}.m"},
    "delta": {"kind": "delta", "url": "file://{folder}/table"},
}


@pytest.mark.deep  # an extra that is missing is named: tests/unit/test_extras.py
@pytest.mark.parametrize("extra", SINKS)
def test_with_an_extra_alone(
    source: Path, tmp_path: Path, extra: str, broker: Broker, make_topic: MakeTopic, database: str
) -> None:
    """A run and its audit, on processes where there is no Java."""
    topic = make_topic(records=[(0, b"k", b'{"id": %d}' % n) for n in range(20)])
    broker.create_topic(f"{topic}.out")
    programs, packages = installed(source, tmp_path / "venv")
    wanted = Requirement(f"oncely[{extra}]" if extra else "oncely")
    (wheel,) = distributions(name="oncely", path=[str(packages)])
    there = {*needed(wanted, wheel, set())} - {"oncely"}
    assert ("pyspark" in there) == (extra == "spark")
    link(there, packages)
    names = {"folder": str(tmp_path), "database": database, "topic": topic}
    given = PIPELINE | {
        "name": topic,
        "runtime": "spark" if extra == "spark" else "processes",
        "source": PIPELINE["source"] | {"brokers": broker.bootstrap, "topics": topic},
        "sink": {key: one.format(**names) for key, one in SINKS[extra].items()},
    }
    file = tmp_path / "pipeline.toml"
    file.write_text(written(given))
    java = f":{Path(artifacts.java()).parent}:/usr/bin:/bin" if extra == "spark" else ""
    oncely = partial(done, programs / "oncely", env={"PATH": f"{programs}{java}"})
    oncely("run", file, "--until", "latest")
    audit = json.loads(oncely("audit", file, "--json"))
    assert (audit["verdict"], audit["records"]) == ("clean", 20)
