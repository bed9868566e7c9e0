"""Spark's workers forget their import path between two tasks; archives that have not changed
stay known, those that have are read again."""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import zipfile
import zipimport
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncely.runtimes.spark import jobs


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An archive on the import path, with a package that was imported."""
    path = tmp_path / "modules.zip"
    write(path, "first")
    monkeypatch.syspath_prepend(str(path))
    importlib.import_module("oncely_zipped.first")
    yield path
    for name in [name for name in sys.modules if name.startswith("oncely_zipped")]:
        del sys.modules[name]
    for name in [name for name in sys.path_importer_cache if name.startswith(str(path))]:
        del sys.path_importer_cache[name]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, archive: Path) -> list[str]:
    """The archives of this test whose directory is read."""
    seen: list[str] = []
    inner = zipimport._read_directory  # type: ignore[attr-defined]

    def counted(path: str) -> Any:
        if path == str(archive):
            seen.append(path)
        return inner(path)

    monkeypatch.setattr(zipimport, "_read_directory", counted)
    return seen


def write(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name in ("__init__", *names):
            file.writestr(f"oncely_zipped/{name}.py", "")


def test_an_archive_is_not_read_for_every_task(archive: Path, read: list[str]) -> None:
    jobs.settle()
    importlib.invalidate_caches()
    read.clear()
    for _ in range(3):
        jobs.settle()
        importlib.invalidate_caches()
    assert read == []


def test_what_was_added_to_an_archive_is_found(archive: Path) -> None:
    jobs.settle()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("oncely_zipped.second")
    write(archive, "first", "second")
    importlib.invalidate_caches()
    importlib.import_module("oncely_zipped.second")


def test_an_archive_that_went_is_no_error(archive: Path) -> None:
    jobs.settle()
    archive.unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("oncely_zipped.second")


def test_objects_of_modules_are_set_aside_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[None] = []
    monkeypatch.setattr(jobs, "_tasks", itertools.count(1))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(None))
    jobs.settle()
    assert not frozen
    for _ in range(3):
        jobs.settle()
    assert len(frozen) == 1
