"""The optional package oncely-native: used in one version only, and its absence is told."""

from __future__ import annotations

import sys
import tomllib
from types import ModuleType

import pytest

from oncely.extras import NEEDED, SWITCH, absence, native
from tests.conftest import repository


@pytest.fixture(autouse=True)
def _not_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> ModuleType:
    module = ModuleType("oncely_native")
    if version is not None:
        module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "oncely_native", module)
    return module


def test_the_needed_version_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (install(monkeypatch, NEEDED), None) == (native(), absence())
    monkeypatch.setenv(SWITCH, "off")
    assert (native(), absence()) == (None, None)


@pytest.mark.parametrize(("version", "named"), [("0.0.9", "0.0.9"), (None, "of another version")])
def test_another_version_is_not_used(
    version: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    assert native() is None
    assert (absence() or "").startswith(f"oncely-native {named} is not used:")
    told = absence() or ""
    assert f"install oncely-native {NEEDED} (make native;" in told
    assert "--find-links FOLDER 'oncely[native]')" in told


def test_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oncely_native", None)
    assert native() is None
    assert (absence() or "").startswith("oncely-native is not installed:")


def test_the_repository_s_package_is_the_needed_one() -> None:
    folder = repository() / "native"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    crate = tomllib.loads((folder / "Cargo.toml").read_text())["package"]
    assert {project["version"], crate["version"]} == {NEEDED}
    assert (
        'module.add("__version__", env!("CARGO_PKG_VERSION"))'
        in (folder / "src" / "lib.rs").read_text()
    )
